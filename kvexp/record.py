"""Runs on disk: identity, folder, one row per example; a kill at any moment loses at most the example in flight.

    outputs/<hash>/config.json      what was run: hash, numerics, config, labels, baseline   (written first, atomically)
                   env.json         where it was first run
                   examples.jsonl   one row per line, appended
                   quarantine.jsonl lines of it that were no rows: file, line, why, text
                   done.json        how many rows a finished run has
                   failure.json     why the last attempt failed
                   .lock .claim     held while a file is changed, while the run is worked on; empty, and never removed

Needs a POSIX system and a file system with `flock`.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kvexp
from kvexp.errors import ConfigError

Json = dict[str, Any]

_ADVICE = (
    ((errno.ENOSPC, errno.EDQUOT), "free disk space and run the same command again: rows already written are kept"),
    ((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable or choose another outputs_dir"),
    ((errno.ENOTDIR, errno.EEXIST), "a part of this path is a file: choose another outputs_dir"),
    ((errno.ENOLCK, errno.ENOTSUP), "files cannot be locked there: choose an outputs_dir on another file system"),
)


def identity(config: Mapping[str, Any]) -> str:
    """16 hex digits for all that can change a number: the configuration, its keys in any order, and kvexp.NUMERICS.

    1 and 1.0 differ, a tuple is a list. What JSON cannot say (NaN, a path, a key that is no string) is a ConfigError.
    """
    return _digest(_setting(config, "config"), kvexp.NUMERICS)


def runs(outputs_dir: str | os.PathLike[str]) -> Iterator["Run"]:
    """Every readable run in outputs_dir, by hash; none if there is no such folder. An unreadable one is a warning."""
    try:
        folders = sorted(Path(entry) for entry in os.scandir(outputs_dir) if entry.is_dir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(_trouble(error, "read", Path(outputs_dir))) from error
    for folder in folders:
        if not os.path.lexists(folder / "config.json"):  # somebody else's folder, or a run killed before its first file
            continue
        try:
            run = Run.load(folder)
        except ConfigError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
        else:
            yield run


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder. Make it with `Run.open` (to work on it) or `Run.load` (to read it).

    Every method may be called by several processes at once. Only `claim` keeps them from doing the same work.
    """

    path: Path
    hash: str
    numerics: int
    config: Json
    labels: Json
    baseline: str | None

    @classmethod
    def open(
        cls,
        outputs_dir: str | os.PathLike[str],
        config: Mapping[str, Any],
        labels: Mapping[str, Any],
        env: Mapping[str, Any] | None = None,
        *,
        baseline: str | None = None,
    ) -> "Run":
        """The run of this configuration, in a folder made if need be. baseline: hash of the run it is measured against.

        labels and env are no part of its identity: of a folder that exists, those recorded first stay.
        """
        config, numerics = _setting(config, "config"), kvexp.NUMERICS
        key = _digest(config, numerics)
        content = {"hash": key, "numerics": numerics, "config": config}
        content |= {"labels": _setting(labels, "labels"), "baseline": baseline}
        files = {"config.json": content, "env.json": _setting({} if env is None else env, "env")}
        path = Path(outputs_dir) / key
        try:
            path.mkdir(parents=True, exist_ok=True)
            _sync_folder(path.parent)
            for name, value in files.items():
                if not os.path.lexists(path / name):
                    with _locked(path):
                        if not os.path.lexists(path / name):  # or another process was faster
                            _replace(path / name, _pretty(value))
        except OSError as error:
            raise ConfigError(_trouble(error, "write", path)) from error
        run = cls.load(path)
        if _canonical(run.config) != _canonical(config):
            raise ConfigError(f"{path} holds another configuration of the same hash; choose another outputs_dir")
        if baseline is not None and run.baseline != baseline:
            found = f"{path} is measured against the baseline {run.baseline}, not {baseline}"
            raise ConfigError(f"{found}; remove the folder or choose another outputs_dir")
        return run

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Run":
        """The run in this folder, of whatever NUMERICS. Its name and hash must be those of the configuration inside."""
        path = Path(path)
        file, advice = path / "config.json", "restore or remove the folder"
        try:
            found = _load(file)
            run = cls(path, *(found[key] for key in ("hash", "numerics", "config", "labels", "baseline")))
        except OSError as error:
            raise ConfigError(_trouble(error, "read", file)) from error
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{file} is no record of a run ({type(error).__name__}: {error}); {advice}") from error
        key = _digest(run.config, run.numerics)
        if not key == run.hash == path.resolve().name:
            raise ConfigError(
                f"{file}: hash {run.hash}, but {key} by its content, which also names the folder; {advice}"
            )
        return run

    def rows(self) -> list[Json]:
        """The rows as written, in that order, the first of each example.

        A last line without its end is left out. Any other line that is no row moves to quarantine.jsonl, with a warning
        that names file and line; it is left out also where it cannot be moved.
        """
        with _explained(self._examples, "read"):
            rows, bad = _scan(self._lines())
        if not bad:
            return rows
        what = "moved to quarantine.jsonl"
        try:
            with _locked(self.path):
                lines = self._lines()  # again: another process may have moved them, or appended
                rows, bad = _scan(lines)
                if bad:
                    self._quarantine(lines, bad)
        except OSError as error:
            what = f"left out; {_trouble(error, 'move it to', self.path / 'quarantine.jsonl')}"
        for number, why in bad.items():
            warnings.warn(f"{self._examples}:{number}: not a row ({why}); {what}", stacklevel=2)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, durably, wholly or not at all. NaN and the like are a ValueError, a full disk an OSError."""
        if not isinstance(row.get("example"), str):
            raise ValueError(f"a row needs its example's id as a string, got example={row.get('example')!r}")
        line = _canonical(_plain(row, "row"), sort_keys=False) + b"\n"
        with _explained(self._examples), _locked(self.path):
            fd = os.open(self._examples, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                end = _cut_truncated(fd)
                try:
                    if os.write(fd, line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(fd)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, end)  # what this cannot cut the next append does
                    raise
            finally:
                os.close(fd)
            if not end:
                _sync_folder(self.path)

    def finish(self, total: int) -> None:
        """Say that the run is complete with this many rows."""
        self._write("done.json", {"examples": total})

    @property
    def finished(self) -> bool:
        """Whether `finish` was called and that many rows are there, no more and no fewer."""
        try:
            total = _load(self.path / "done.json").get("examples")
        except (OSError, ValueError):
            return False
        return total == len(self.rows())

    def fail(self, error: BaseException) -> None:
        """Record that this attempt ended with an error; its rows stay, and it can be taken up again."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        trace = "".join(traceback.format_exception(error))
        failure = {"error": type(error).__name__, "message": str(error), "traceback": trace, "time": now}
        self._write("failure.json", failure)

    def failure(self) -> Json | None:
        """What `fail` recorded: error, message, traceback, time; None if nothing."""
        file = self.path / "failure.json"
        try:
            return _load(file) if file.exists() else None
        except (OSError, ValueError) as error:
            return {"error": type(error).__name__, "message": f"{file}: {error}", "traceback": "", "time": ""}

    def clear_failure(self) -> None:
        """Forget the recorded failure, if any."""
        with _explained(self.path / "failure.json"):
            (self.path / "failure.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(
        self, timeout: float | None = None, waiting: Callable[[float], None] | None = None, poll: float = 0.2
    ) -> Iterator[None]:
        """Hold this run against all other processes and threads; ends with the block or the process, also by kill -9.

        waiting(seconds waited) is called before each pause of `poll` seconds, first with 0.0; after `timeout` seconds,
        TimeoutError. Ask `rows()` and `finished` inside the block, the other process may have gone on until then.
        Claiming twice waits for oneself.
        """
        file, start, waited = self.path / ".claim", time.monotonic(), 0.0
        with _explained(file):
            fd = _open_lock(file)
        try:
            while True:
                with _explained(file), contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if timeout is not None and waited >= timeout:
                    raise TimeoutError(f"{self.path} is still being worked on by another process after {waited:.0f} s")
                if waiting is not None:
                    waiting(waited)
                time.sleep(poll if timeout is None else max(0.0, min(poll, timeout - waited)))
                waited = time.monotonic() - start
            yield
        finally:
            _release(fd)

    @property
    def env(self) -> Json:
        """Where the run was first opened; {} if that is not known."""
        try:
            return _load(self.path / "env.json")
        except (OSError, ValueError):
            return {}

    @property
    def _examples(self) -> Path:
        return self.path / "examples.jsonl"

    def _lines(self) -> list[bytes]:
        """The lines of examples.jsonl that have an end."""
        with contextlib.suppress(FileNotFoundError):
            return self._examples.read_bytes().split(b"\n")[:-1]
        return []

    def _write(self, name: str, value: Json) -> None:
        with _explained(self.path / name), _locked(self.path):
            _replace(self.path / name, _pretty(value))

    def _quarantine(self, lines: list[bytes], bad: dict[int, str]) -> None:
        """Move lines, under the lock. Killed half way, a line is in both files and moves again."""
        file, moved = self.path / "quarantine.jsonl", b""
        for number, why in bad.items():
            text = lines[number - 1].decode("utf-8", "surrogateescape")  # encode likewise to get the bytes back
            moved += _canonical({"file": self._examples.name, "line": number, "why": why, "text": text}) + b"\n"
        _replace(file, (file.read_bytes() if file.exists() else b"") + moved)
        _replace(self._examples, b"".join(line + b"\n" for number, line in enumerate(lines, 1) if number not in bad))


def _scan(lines: list[bytes]) -> tuple[list[Json], dict[int, str]]:
    """(rows, the first of each example; line number, from 1 -> why it is no row). Blank lines are neither."""
    rows: dict[str, Json] = {}
    bad: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = _parse(line) if line.strip() else None
        except ValueError as error:
            bad[number] = str(error)
            continue
        if row is not None and not isinstance(row.get("example"), str):
            bad[number] = "no example id"
        elif row is not None:
            rows.setdefault(row["example"], row)
    return list(rows.values()), bad


def _parse(data: bytes) -> Json:
    """A JSON object in strict JSON, or ValueError."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _load(path: Path) -> Json:
    return _parse(path.read_bytes())


def _setting(value: Mapping[str, Any], where: str) -> Json:
    try:
        return dict(_plain(value, where))
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


def _plain(value: Any, where: str) -> Any:
    """The value in dicts, lists and scalars that JSON gives back unchanged; ValueError says where anything else is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ValueError(f"{where} is {value}, which JSON cannot hold; use a finite number or null")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; keys must be strings, write {str(key)!r}")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    allowed = "null, bool, int, float, str, list and dict are allowed"
    raise ValueError(f"{where} is of type {type(value).__name__}; {allowed}: convert it")


def _digest(config: Json, numerics: int) -> str:
    return hashlib.sha256(_canonical({"config": config, "numerics": numerics})).hexdigest()[:16]


def _canonical(value: Any, sort_keys: bool = True) -> bytes:
    """One line of pure ASCII: no text in it, whatever a model wrote, can break the line or fail to encode."""
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False).encode("ascii")


def _pretty(value: Json) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")


def _cut_truncated(fd: int) -> int:
    """Cut off a last line without its end, under the lock; returns the size in bytes."""
    end = size = os.lseek(fd, 0, os.SEEK_END)
    if size and os.pread(fd, 1, size - 1) != b"\n":
        end = os.pread(fd, size, 0).rfind(b"\n") + 1
        os.ftruncate(fd, end)
    return end


def _replace(path: Path, data: bytes) -> None:
    """Under the lock: the file has its old content or this one, at any moment and after any crash."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
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


def _open_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(fd)
    return fd


def _release(fd: int) -> None:
    if fd in _held:  # else this is a child of the process that holds it
        _held.discard(fd)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else changes a file of this folder; for milliseconds, unlike `Run.claim`, and not within itself."""
    fd = _open_lock(folder / ".lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        _release(fd)


def _trouble(error: OSError, verb: str, path: Path) -> str:
    advice = next(
        (text for codes, text in _ADVICE if error.errno in codes), "check the path, or choose another outputs_dir"
    )
    return f"cannot {verb} {path}: {error.strerror or error}; {advice}"


@contextlib.contextmanager
def _explained(path: Path, verb: str = "write") -> Iterator[None]:
    """An OSError inside keeps its kind and says which path and what to do. Not to be nested."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, _trouble(error, verb, path)) from error
