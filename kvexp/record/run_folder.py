"""One run folder: what was run, its rows, how it ended, and who is working on it."""

import contextlib
import fcntl
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kvexp
from kvexp.errors import ConfigError
from kvexp.record import jsonl
from kvexp.record.canonical_json import Json, canonical, digest, load, pretty, setting
from kvexp.record.files import explained, locked, open_lock, release, replace, sync_folder, trouble
from kvexp.record.row_schema import wrong_labels


def identity(config: Mapping[str, Any]) -> str:
    """16 hex digits for all that can change a number: the configuration, its keys in any order, and kvexp.NUMERICS.

    1 and 1.0 differ, a tuple is a list. What JSON cannot say (NaN, a path, a key that is no string) is a ConfigError.
    """
    return digest(setting(config, "config"), kvexp.NUMERICS)


def runs(outputs_dir: str | os.PathLike[str]) -> Iterator["Run"]:
    """Every readable run in outputs_dir, by hash; none if there is no such folder. An unreadable one is a warning."""
    try:
        folders = sorted(Path(entry) for entry in os.scandir(outputs_dir) if entry.is_dir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(trouble(error, "read", Path(outputs_dir))) from error
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
        command: Mapping[str, Any] | None = None,
    ) -> "Run":
        """The run of this configuration, in a folder made if need be. baseline: hash of the run it is measured against.

        labels and env are no part of its identity: of a folder that exists those recorded first stay, and other labels
        are added to `asked`. command: what was composed from the command line, for whoever works on the run later.
        """
        config, numerics = setting(config, "config"), kvexp.NUMERICS
        labels = setting(labels, "labels")
        key = digest(config, numerics)
        content = {"hash": key, "numerics": numerics, "config": config, "labels": labels, "baseline": baseline}
        files = {"config.json": content, "env.json": setting({} if env is None else env, "env")}
        path = Path(outputs_dir) / key
        try:
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
            for name, value in files.items():
                if not os.path.lexists(path / name):
                    with locked(path):
                        if not os.path.lexists(path / name):  # or another process was faster
                            replace(path / name, pretty(value))
            run = cls.load(path)
            if canonical(run.config) == canonical(config):
                run._ask(labels)
                if command is not None and run.command != (plain := setting(command, "command")):
                    run._write("command.json", plain)
        except OSError as error:
            raise ConfigError(trouble(error, "write", path)) from error
        if canonical(run.config) != canonical(config):
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
            found = load(file)
            _check(found)
            run = cls(path, *(found[key] for key in ("hash", "numerics", "config", "labels", "baseline")))
        except OSError as error:
            raise ConfigError(trouble(error, "read", file)) from error
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{file} is no record of a run ({type(error).__name__}: {error}); {advice}") from error
        key = digest(run.config, run.numerics)
        if not key == run.hash == path.resolve().name:
            raise ConfigError(
                f"{file}: hash {run.hash}, but {key} by its content, which also names the folder; {advice}"
            )
        return run

    @property
    def asked(self) -> list[Json]:
        """Every set of labels this run was asked for under, the latest last: one run can have several names.

        An asked.json that cannot be read, or holds what no run writes, is a warning; the run goes by its own labels.
        """
        file = self.path / "asked.json"
        try:
            known = load(file)["labels"]
            if not isinstance(known, list) or not known:
                raise ValueError(f"labels must be a list with at least one group, got {known!r:.60}")
            for labels in known:
                if why := wrong_labels(labels):
                    raise ValueError(why)
        except FileNotFoundError:
            return [self.labels]
        except (OSError, ValueError, KeyError) as error:
            warnings.warn(f"{file}: {error}; left out: remove the file or correct it", stacklevel=2)
            return [self.labels]
        return known

    @property
    def command(self) -> Json | None:
        """The latest that was composed for this run; None of runs of before, and where the file cannot be read."""
        try:
            return load(self.path / "command.json")
        except (OSError, ValueError):
            return None

    def _ask(self, labels: Json) -> None:
        if self.asked[-1] != labels:
            with locked(self.path):
                known = [*(other for other in self.asked if other != labels), labels]
                replace(self.path / "asked.json", pretty({"labels": known}))

    def rows(self) -> list[Json]:
        """The rows as written, in that order, the first of each example.

        A row with `failed` set gives way to a later one.

        A last line without its end is left out. Any other line that is no row moves to quarantine.jsonl, with a warning
        that names file and line; it is left out also where it cannot be moved.
        """
        return jsonl.rows(self.path)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write one row or several at once, durably: all wholly or none, and after a kill those that are whole.

        NaN and the like are a ValueError, a full disk an OSError.
        """
        jsonl.append(self.path, *rows)

    def finish(self, total: int) -> None:
        """Say that the run is complete with this many rows."""
        self._write("done.json", {"examples": total})

    @property
    def finished(self) -> bool:
        """Whether `finish` was called and that many rows are there, no more and no fewer."""
        try:
            total = load(self.path / "done.json").get("examples")
        except (OSError, ValueError):
            return False
        return total == len(self.rows())

    def fail(self, error: BaseException) -> None:
        """Record that this attempt ended with an error; its rows stay, and it can be taken up again."""
        self._write("failure.json", told(error) | {"traceback": "".join(traceback.format_exception(error))})

    def failure(self) -> Json | None:
        """What `fail` recorded: error, message, time, traceback; None if nothing."""
        file = self.path / "failure.json"
        try:
            return load(file) if file.exists() else None
        except (OSError, ValueError) as error:
            return {"error": type(error).__name__, "message": f"{file}: {error}", "traceback": "", "time": ""}

    def clear_failure(self) -> None:
        """Forget the recorded failure, if any."""
        with explained(self.path / "failure.json"):
            (self.path / "failure.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(
        self,
        timeout: float | None = None,
        waiting: Callable[[float], None] | None = None,
        poll: float = 0.2,
        *,
        part: str | None = None,
    ) -> Iterator[None]:
        """Hold this run against all other processes and threads; ends with the block or the process, also by kill -9.

        waiting(seconds waited) is called before each pause of `poll` seconds, first with 0.0; after `timeout` seconds,
        TimeoutError. Ask `rows()` and `finished` inside the block, the other process may have gone on until then.
        Claiming twice waits for oneself.

        part: hold this part alone, beside whoever holds parts of other names; nobody then holds the whole run.
        """
        with contextlib.ExitStack() as held:
            held.enter_context(self._hold(".claim", timeout, waiting, poll, shared=part is not None))
            if part is not None:
                held.enter_context(self._hold(f".claim.{part}", timeout, waiting, poll, shared=False))
            yield

    @contextlib.contextmanager
    def _hold(
        self, name: str, timeout: float | None, waiting: Callable[[float], None] | None, poll: float, *, shared: bool
    ) -> Iterator[None]:
        file, start, waited = self.path / name, time.monotonic(), 0.0
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with explained(file):
            fd = open_lock(file)
        try:
            while True:
                with explained(file), contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, kind | fcntl.LOCK_NB)
                    break
                if timeout is not None and waited >= timeout:
                    raise TimeoutError(f"{self.path} is still being worked on by another process after {waited:.0f} s")
                if waiting is not None:
                    waiting(waited)
                time.sleep(poll if timeout is None else max(0.0, min(poll, timeout - waited)))
                waited = time.monotonic() - start
            yield
        finally:
            release(fd)

    @property
    def env(self) -> Json:
        """Where the run was first opened; {} if that is not known."""
        try:
            return load(self.path / "env.json")
        except (OSError, ValueError):
            return {}

    def _write(self, name: str, value: Json) -> None:
        with explained(self.path / name), locked(self.path):
            replace(self.path / name, pretty(value))


def _check(found: Json) -> None:
    """ValueError for a field of config.json that no run writes; KeyError where one is missing."""
    whole = isinstance(found["numerics"], int)
    baseline = found["baseline"] is None or isinstance(found["baseline"], str)
    if not (whole and baseline and isinstance(found["config"], dict)):
        raise ValueError("numerics must be a whole number, config a group, baseline a hash or null")
    if why := wrong_labels(found["labels"]):
        raise ValueError(why)


def told(error: BaseException) -> Json:
    """An error and the time, for a file."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"error": type(error).__name__, "message": str(error), "time": now}
