"""GGUF files as folders of safetensors in the cache: converted once, found by the file's digest, never half made.

A folder is written under another name, synced and renamed, so it is whole or not there. Its manifest holds the digest
of every file and is checked whenever the folder is used. A second process waits for the first (a file lock).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import GenerationConfig

from kvexp.cache_folder import cache_folder
from kvexp.digests import Stamp, file_digest, stamp
from kvexp.errors import ConfigError
from kvexp.models.gguf_config import config_of_header, conversion, repetition_penalty
from kvexp.models.gguf_header import GgufHeader, read_header
from kvexp.models.gguf_tokenizer import check_tokenizer, tokenizer_of_header
from kvexp.models.gguf_weights import check_names, rope_factors, write_weights
from kvexp.terminal import say

CONVERSION = 1  # of a file that has been converted alike by every kvexp; `conversion` tells a file's own
MANIFEST = "manifest.json"
LOCK_S = 1.0  # how long another process may hold a lock before the wait is told
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
        header = _checked(path, stamp(path))  # a wrong file is told before a large one is digested
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    sha256 = file_digest(path)
    version = conversion(header)
    found = whole(sha256, version)
    if found is not None:
        return found
    with folder_lock(folder_of_gguf(sha256, version), f"converting {path.name}"):
        return whole(sha256, version) or convert(header, sha256)


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


def whole(sha256: str, version: int = CONVERSION) -> ConvertedModel | None:
    """The converted model if every byte of it is as it was written; None if it is damaged or not there."""
    folder = folder_of_gguf(sha256, version)
    try:
        there = {path.name: stamp(path) for path in folder.iterdir()}
    except OSError:  # not there
        return None
    return _unchanged(folder, sha256, version, frozenset(there.items()))


@functools.lru_cache(maxsize=4)
def _unchanged(folder: Path, sha256: str, version: int, there: frozenset[tuple[str, Stamp]]) -> ConvertedModel | None:
    """As `whole`, remembered for a folder whose files (name, stamp) have not changed since the last call."""
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
    size = header.elements * 4 / 1e6
    say(
        f"converting {header.path.name} ({header.quantisation}) to safetensors, once: {size:.0f} MB in {folder}",
        file=sys.stderr,
        flush=True,
    )

    def make(place: Path) -> None:
        config.save_pretrained(place)
        ends = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        penalty = repetition_penalty(header)
        GenerationConfig(**ends, **({} if penalty == 1 else {"repetition_penalty": penalty})).save_pretrained(place)
        with contextlib.suppress(ConfigError):  # told where a tokenizer is asked for: model.tokenizer names another
            tokenizer_of_header(header).save_pretrained(place)
        with tqdm(total=len(header.tensors), unit=" tensors", desc="converting", disable=None, leave=False) as bar:
            write_weights(header, place, bar.update)
        source = {"file": header.path.name, "sha256": sha256, "quantisation": header.quantisation}
        files = {path.name: file_digest(path) for path in sorted(place.iterdir())}
        (place / MANIFEST).write_text(json.dumps({"source": source, "files": files}, indent=1), "utf-8")

    put_in_place(folder, make)
    return ConvertedModel(folder, header.path.name, sha256, header.quantisation, version)


def put_in_place(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a new folder beside `folder`, sync it to disk and rename it to `folder`.

    To be called inside `folder_lock`. ConfigError where the disk cannot be written.
    """
    for left in folder.parent.glob(f".{folder.name}-*"):  # of processes that were killed: nobody else holds the lock
        shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        place.chmod(0o755)
        make(place)
        for path in place.iterdir():
            path.chmod(0o644)  # safetensors writes for its owner folder_lock
            _sync(path)
        _sync(place)
        if folder.exists():  # damaged: out of the way in one step, for others may be reading
            folder.rename(place.with_name(f"{place.name}-old"))
        place.rename(folder)
        _sync(folder.parent)
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


def _sync(path: Path) -> None:
    """Have the system write a file or folder to disk before anything else happens."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
