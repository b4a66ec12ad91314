"""Files that several processes change and any moment may cut short: locks, atomic replacement, errors that advise."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvexp.errors import ConfigError

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
    """To the disk. What stops it half way says why only when the rest is tried: a full disk, or a limit on sizes."""
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
    """Nobody else changes a file of this folder; for milliseconds, unlike `Run.claim`, and not within itself."""
    fd = open_lock(folder / ".lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        release(fd)


def trouble(error: OSError, verb: str, path: Path) -> str:
    advice = next(
        (text for codes, text in _ADVICE if error.errno in codes), "check the path, or choose another outputs_dir"
    )
    return f"cannot {verb} {path}: {error.strerror or error}; {advice}"


@contextlib.contextmanager
def explained(path: Path, verb: str = "write") -> Iterator[None]:
    """An OSError inside keeps its kind and says which path and what to do. Not to be nested."""
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
