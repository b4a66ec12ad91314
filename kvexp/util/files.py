"""Files: kvexp's folders, SHA-256 digests, locks, and writes that several processes do and any moment may cut short."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvexp.util.errors import ConfigError
from kvexp.util.strict_json import canonical

CONF = Path(__file__).parents[1] / "conf"  # in a checkout a link to conf/, in a wheel the folder
WHEEL = "pypi:"  # begins a model.path that names a wheel of the Python package index
NAME_MAX = 255  # bytes of a file's name, as the usual file systems have it


def path_of(words: str, option: str) -> Path:
    """The path with ~ filled in; ConfigError, naming the option, for one that no file system can hold."""
    try:
        path = Path(words).expanduser()
        if any(len(os.fsencode(name)) > NAME_MAX for name in path.parts):  # also below a folder that is not there
            raise OSError(errno.ENAMETOOLONG, "")
        os.lstat(path)
    except RuntimeError as error:
        raise ConfigError(
            f"{option}={words[:60]}: nobody of that name has a home folder; write the path out"
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{option}={words[:60]}... is too long for the name of a file; shorten it") from error
    except ValueError:  # a zero byte: no such file
        pass
    return path


def model_folder(words: str, one_of: Sequence[str]) -> Path | None:
    """The model folder that a path names, None for a hub id.

    ConfigError for a folder that is not there, for a file, and for a folder that holds none of the files `one_of`.
    """
    folder = path_of(words, "model.path")
    if not folder.exists():
        if words.startswith((".", "/", "~")):
            raise ConfigError(f"model folder {words} does not exist")
        return None
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file, and no GGUF file: give one, or the folder that holds config.json and the weights"
        )
    if one_of and not any((folder / name).is_file() for name in one_of):
        raise ConfigError(f"{folder} has no {one_of[0]}: expected config.json, *.safetensors and a tokenizer")
    return folder


def cache_folder() -> Path:
    """KVEXP_CACHE, else the system's cache folder for kvexp (Linux: $XDG_CACHE_HOME/kvexp or ~/.cache/kvexp).

    The folder need not exist.
    """
    folder = os.environ.get("KVEXP_CACHE")
    if folder:
        return Path(os.path.expanduser(folder))
    import platformdirs  # late: a GPU machine with torch and transformers alone reads models without it

    return Path(platformdirs.user_cache_dir("kvexp", appauthor=False))


BLOCK = 1 << 20
REMEMBERED = 1 << 20  # bytes; a smaller file is read as fast as looked up
# Coarser than any file system's clock: a younger file may change without a trace in its times.
SETTLED_NS = 2_000_000_000


class Stamp(NamedTuple):
    """Metadata that differ after every change of a file. ctime, unlike mtime, cannot be set back."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def stamp(path: str | os.PathLike[str] | int) -> Stamp:
    """The stamp of a path, or of an open file's descriptor."""
    status = os.stat(path)
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


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


def _recalled(place: Path, current: Stamp) -> str | None:
    try:
        known = json.loads(place.read_bytes())
        digest = known["sha256"] if known["stamp"] == list(current) else ""
        return digest if len(bytes.fromhex(digest)) == 32 else None
    except (OSError, ValueError, KeyError, TypeError):  # none there, or damaged: read the file itself
        return None


def _remember(place: Path, current: Stamp, digest: str) -> None:
    """Keep a file's digest. Where nothing can be written, every look reads the file again."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace(place, canonical({"stamp": current, "sha256": digest}))


_ADVICE = (
    ((errno.ENOSPC, errno.EDQUOT), "free disk space and run the same command again: rows already written are kept"),
    ((errno.EFBIG,), "raise the limit on the size of files (ulimit -f) and run the same command again: rows are kept"),
    ((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable or choose another outputs_dir"),
    ((errno.ENOTDIR, errno.EEXIST), "a part of this path is a file: choose another outputs_dir"),
    ((errno.ENOLCK, errno.ENOTSUP), "files cannot be locked there: choose an outputs_dir on another file system"),
)
PROBE = 1 << 16  # bytes: more than a command writes before its first run has a folder


def replace(path: Path, data: bytes) -> None:
    """Under the lock: the file has its old content or this one, at any moment and after any crash."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_all(fd: int, data: bytes) -> None:
    """Write to the disk. A full disk, or a limit on sizes, says so only when the rest is tried."""
    rest = memoryview(data)
    while rest:
        written = os.write(fd, rest)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]
    os.fsync(fd)


def sync_folder(path: Path) -> None:
    """Make names durable: a file can be on disk while the folder does not list it yet."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems have nothing to sync there
            raise
    finally:
        os.close(fd)


# Lock files this process has open. A forked child shares them and would hold on to what its parent, if killed, should
# have lost: so it closes them.
_held: set[int] = set()


def _forget() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def open_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(fd)
    return fd


def release(fd: int) -> None:
    if fd in _held:  # else this is a child of the process that holds it
        _held.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: nobody else changes its files. For milliseconds, unlike `Run.claim`; not reentrant."""
    fd = open_lock(folder / ".lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        release(fd)


def trouble(error: OSError, verb: str, path: Path) -> str:
    if isinstance(error.__cause__, OSError):  # it has said so already
        return str(error.strerror)
    advice = next(
        (text for codes, text in _ADVICE if error.errno in codes), "check the path, or choose another outputs_dir"
    )
    return f"cannot {verb} {path}: {error.strerror or error}; {advice}"


@contextlib.contextmanager
def explained(path: Path, verb: str = "write") -> Iterator[None]:
    """Make an OSError of the block say which path and what to do; an inner block's word stands."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, trouble(error, verb, path)) from error


def check_writable(folder: str | os.PathLike[str]) -> None:
    """ConfigError if this folder cannot be made or takes no file: not writable, a full disk, a path through a file."""
    path = Path(folder)
    probe = path / f".probe.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.unlink(probe)  # first, so that a kill leaves none behind
            write_all(fd, bytes(PROBE))
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(trouble(error, "write", path)) from error
