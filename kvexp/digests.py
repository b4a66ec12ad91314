"""SHA-256 of files, every byte of them; of a file that nobody has touched since, remembered on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kvexp.cache_folder import cache_folder
from kvexp.errors import ConfigError

BLOCK = 1 << 20
REMEMBERED = 1 << 20  # bytes; a smaller file is read as fast as looked up
# Coarser than any file system's clock: a younger file may change without a trace in its times.
SETTLED_NS = 2_000_000_000


class Stamp(NamedTuple):
    """What is different of a file after every change. ctime, unlike mtime, cannot be set back."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def stamp(path: str | os.PathLike[str] | int) -> Stamp:
    """Of a path or an open file's descriptor."""
    found = os.stat(path)
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def file_digest(path: Path) -> str:
    """Hex digits. OSError for a file that cannot be read, ConfigError for one that changes meanwhile."""
    with path.open("rb", buffering=0) as file:
        before, now = stamp(file.fileno()), time.time_ns()
        settled = now - before.ctime_ns > SETTLED_NS
        place = _place(path)
        known = _recalled(place, before) if settled and before.size >= REMEMBERED else None
        if known is not None:
            return known
        total, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
        while count := file.readinto(block):
            total.update(block[:count])
        if stamp(file.fileno()) != before:
            raise ConfigError(f"{path} changed while it was read; start again when nothing writes to it")
    digest = total.hexdigest()
    if settled and before.size >= REMEMBERED:
        _remember(place, before, digest)
    return digest


def _place(path: Path) -> Path:
    """The file that remembers this one's digest: one for each, so that processes do not write over each other's."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return cache_folder() / "digests" / f"{name}.json"


def _recalled(place: Path, found: Stamp) -> str | None:
    try:
        known = json.loads(place.read_bytes())
        digest = known["sha256"] if known["stamp"] == list(found) else ""
        return digest if len(bytes.fromhex(digest)) == 32 else None
    except (OSError, ValueError, KeyError, TypeError):  # none there, or damaged: read the file itself
        return None


def _remember(place: Path, found: Stamp, digest: str) -> None:
    """Whole or not at all. Where nothing can be written, every look reads the file again."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=place.parent, suffix=".tmp")
        try:
            with open(fd, "w", encoding="ascii") as file:
                json.dump({"stamp": found, "sha256": digest}, file)
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise
