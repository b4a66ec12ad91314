"""Runs on disk: identity, folder, one row per example; a kill at any moment loses at most the example in flight.

    outputs/<hash>/config.json      what was run: hash, numerics, config, labels, baseline   (written first, atomically)
                   env.json         where it was first run
                   examples.jsonl   one row per line, appended
                   divergence.jsonl one line per example and kind of text, appended
                   command.json     the latest configuration, choices and overrides it was asked for with
                   asked.json       the labels it was asked for under, once there are several; the latest come last
                   done.json        how many rows a finished run has
                   failure.json     why the last attempt failed
                   diagnose/        what kvexp.diagnose has added, if asked for: see kvexp.run.evictions
                   .lock .claim     held while a file is changed, while the run is worked on; empty, and never removed
                   .claim.i-of-n    held while that part of its examples is worked on
    outputs/.refused/<key>.json     a job that failed before it had a folder: overrides, labels, error, message, time

Needs a POSIX system and a file system with `flock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kvexp
from kvexp.util.errors import ConfigError
from kvexp.util.files import explained, locked, open_lock, release, replace, sync_folder, trouble, write_all
from kvexp.util.strict_json import Json, canonical, digest, json_object, load, parse, plain, pretty

# -- what the fields of rows, labels and divergences hold: no number is drawn from a damaged file ----------------------

NUMBER, WHOLE, TEXT, TRUTH, GROUP = "a number", "a whole number", "a text", "true or false", "a group of fields"
EACH = "*"  # every field of a group
OWN, REFERENCE = "own", "reference"  # texts that are forced: the full cache's greedy answer; the reference answer
TEXTS = (OWN, REFERENCE)
WORSE_KL = 0.1  # nats per token: a prompt beyond it counts as clearly worse
EPSILON_KL = 0.05  # nats per token; docs/kl_meaning.md: what answers lose there
EPSILON_TOP1 = 0.05  # share of tokens whose likeliest token is another one
NUMBERS = ("kl", "full_logprob", "logprob")  # of a line of divergence.jsonl: lists, one entry per token

Line = dict[str, Any]

LINES = ("held", "window", "state", "latent")  # what bytes of a cache are of, as a row's ledger has them

ROW: dict[str, Any] = {
    **dict.fromkeys(("prompt_tokens", "question_tokens", "new_tokens", "halved"), WHOLE),
    **dict.fromkeys(("skipped", "failed", "output", "revision", "prompt_digest", "finish_reason", "stop_reason"), TEXT),
    **dict.fromkeys(("calibration", "surrogate", "question", "family"), TEXT),
    **{"prompt_cut": TRUTH, "chat_template": TRUTH, "answered": TRUTH, "info": GROUP, "choices": GROUP},
    **{"answer": TEXT, "thinking_tokens": WHOLE, "thinking_cut": TRUTH, "continuation_digest": TEXT},
    "weights": {"gguf_sha256": TEXT, "quantisation": TEXT},
    "context": {"digest": TEXT, "question": WHOLE, "questions": WHOLE},
    "output_tokens": [WHOLE],
    **{"index": WHOLE, "metrics": {EACH: NUMBER}, "seconds": {EACH: NUMBER}},
    "receipt": {
        **dict.fromkeys(("slots", "kv_bytes", "peak_kv_bytes", "kv_bytes_at_16", "attention_kept"), NUMBER),
        "page_slots": NUMBER,
        "ledger": {"evicted_layers": WHOLE, "layers": WHOLE, **{line: [NUMBER] for line in LINES}},
        **{"first_eviction_step": WHOLE, "batch_size": WHOLE, "kept_digest": TEXT, "slots_by_layer": [NUMBER]},
        "retrieval": {
            **dict.fromkeys(("offloaded_bytes", "moved_bytes", "cache_hit_rate", "search_share"), NUMBER),
            **{"kmeans_iterations": NUMBER, "notes": [TEXT]},
        },
    },
}
LABELS = {
    **dict.fromkeys(("model", "task", "method", "setting", "revision", "experiment", "weights"), TEXT),
    **{"kv_ratio": NUMBER, "chat": TRUTH},
}


def wrong_row(row: Mapping[str, Any]) -> str | None:
    """The first field that holds what no run writes: its name, what it must be and what was found; None if all fit.

    A field but the example's id may be missing; null stands for an unknown value.
    """
    if not isinstance(row.get("example"), str):
        return _must("example", TEXT, row.get("example"))
    if "index" in row and row["index"] is None:
        return _must("index", WHOLE, None)
    return None if _plainly_fits(row, ROW) else _wrong(row, ROW, "")


def wrong_labels(labels: Any) -> str | None:
    """As `wrong_row`, of the labels of a run."""
    return _wrong(labels, LABELS, "") if isinstance(labels, Mapping) else _must("labels", GROUP, labels)


def wrong_divergence(line: Mapping[str, Any]) -> str | None:
    """As `wrong_row`, of a line of divergence.jsonl."""
    if not isinstance(line.get("example"), str) or line.get("text") not in TEXTS:
        return f"example must be a text and text one of {', '.join(TEXTS)}"
    count = len(line["tokens"]) if isinstance(line.get("tokens"), list) else 0
    for name in (*NUMBERS, "same_top1"):
        values = line.get(name)
        if not isinstance(values, list) or len(values) != count or not count:
            return f"{name} must be a list as long as tokens"
        plainly = _plainly_fits(values, [NUMBER])
        if not plainly and not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            return f"{name} must hold finite numbers"
    return None


TYPES: dict[str, set[Any]] = {NUMBER: {int, float}, WHOLE: {int}, TEXT: {str}, TRUTH: {bool}, GROUP: {dict}}
LARGE = 1e15  # a number beyond it is looked at by itself


def _plainly_fits(value: Any, kind: Any) -> bool:
    """Whether a value is what runs write, seen quickly: False says nothing. Nearly all that is read comes past here."""
    if value is None:
        return True
    if isinstance(kind, dict):
        if type(value) is not dict:
            return False
        every = kind.get(EACH)
        return all(_plainly_fits(item, every or kind[name]) for name, item in value.items() if every or name in kind)
    items = value if isinstance(kind, list) else [value]
    allowed = TYPES[kind[0] if isinstance(kind, list) else kind]
    if type(items) is not list or not allowed.issuperset(map(type, items)):
        return False
    if int not in allowed or not items:
        return True
    return min(items) > -LARGE and max(items) < LARGE and sum(items) == sum(items)  # NaN is not itself


def _wrong(value: Any, kind: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(kind, dict):
        if not isinstance(value, Mapping):
            return _must(where, GROUP, value)
        kinds = dict.fromkeys(value, kind[EACH]) if EACH in kind else kind
        parts = [(value[name], kinds[name], f"{where}.{name}".strip(".")) for name in kinds if name in value]
    elif isinstance(kind, list):
        if not isinstance(value, list):
            return _must(where, "a list", value)
        parts = [(item, kind[0], f"{where}[{number}]") for number, item in enumerate(value)]
    else:
        return None if _fits(value, kind) else _must(where, kind, value)
    return next((why for value_kind_place in parts if (why := _wrong(*value_kind_place))), None)


def _must(where: str, kind: str, value: Any) -> str:
    return f"{where} must be {kind}, got {value!r:.60}"


def _fits(value: Any, kind: str) -> bool:
    if kind in (TEXT, GROUP, TRUTH):
        return isinstance(value, {TEXT: str, GROUP: Mapping, TRUTH: bool}[kind])
    if isinstance(value, bool) or not isinstance(value, int if kind == WHOLE else int | float):
        return False
    return abs(value) < 1 << (63 if kind == WHOLE else 1000)  # inf is not; larger ones fit no column of a table


# -- examples.jsonl and divergence.jsonl: one JSON object per line, appended wholly or not at all ----------------------

EXAMPLES, DIVERGENCE = "examples.jsonl", "divergence.jsonl"


def _lines(file: Path, wrong: Callable[[Json], str | None]) -> Iterator[Json]:
    """The lines of a file, without a last one that a kill cut off; blank lines do not count, no file has none.

    ConfigError names a damaged line: left out without a word it would change a number. wrong(line): why it is damaged.
    """
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(trouble(error, "read", file)) from error
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = parse(text)
            why = wrong(line)
        except ValueError as error:
            why = str(error)
        if why:
            raise ConfigError(
                f"{file}:{number}: {why}; correct the line, or remove it and run the same command again, which makes "
                "it anew"
            )
        yield line


def _append(file: Path, lines: Iterable[Json]) -> None:
    """Write lines durably, all of them or, after a kill, those that are whole; an OSError says what failed."""
    content = b"".join(canonical(line, sort_keys=False) + b"\n" for line in lines)
    with explained(file), locked(file.parent):
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            end = _cut_truncated(fd)
            try:
                write_all(fd, content)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, end)  # what this cannot cut the next append does
                raise
        finally:
            os.close(fd)
        if not end:
            sync_folder(file.parent)


def _cut_truncated(fd: int) -> int:
    """Cut off a last line without its end, under the lock; returns the size in bytes."""
    end = size = os.lseek(fd, 0, os.SEEK_END)
    if size and os.pread(fd, 1, size - 1) != b"\n":
        end = os.pread(fd, size, 0).rfind(b"\n") + 1
        os.ftruncate(fd, end)
    return end


# -- one run folder: what was run, its rows, how it ended, and who is working on it ------------------------------------


def run_hash(config: Mapping[str, Any]) -> str:
    """16 hex digits for all that can change a number: the configuration, its keys in any order, and kvexp.NUMERICS.

    1 and 1.0 differ, a tuple is a list. What JSON cannot say (NaN, a path, a key that is no string) is a ConfigError.
    """
    return digest(json_object(config, "config"), kvexp.NUMERICS)


def runs(outputs_dir: str | os.PathLike[str], only: Collection[str] | None = None) -> Iterator[Run]:
    """Every readable run in outputs_dir, by hash; none if there is no such folder. An unreadable one is a warning.

    only: the hashes of those to read; None: all.
    """
    try:
        entries = (entry for entry in os.scandir(outputs_dir) if only is None or entry.name in only)
        folders = sorted(Path(entry) for entry in entries if entry.is_dir())
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
    ) -> Run:
        """The run of this configuration, in a folder made if need be. baseline: hash of the run it is measured against.

        labels and env are no part of its identity: of a folder that exists those recorded first stay, and other labels
        are added to `asked`. command: what was composed from the command line, for whoever works on the run later.
        """
        config, numerics = json_object(config, "config"), kvexp.NUMERICS
        labels = json_object(labels, "labels")
        key = digest(config, numerics)
        content = {"hash": key, "numerics": numerics, "config": config, "labels": labels, "baseline": baseline}
        files = {"config.json": content, "env.json": json_object({} if env is None else env, "env")}
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
                run.ask(labels, command)
        except OSError as error:
            raise ConfigError(trouble(error, "write", path)) from error
        if canonical(run.config) != canonical(config):
            raise ConfigError(f"{path} holds another configuration of the same hash; choose another outputs_dir")
        if baseline is not None and run.baseline != baseline:
            problem = f"{path} is measured against the baseline {run.baseline}, not {baseline}"
            raise ConfigError(f"{problem}; remove the folder or choose another outputs_dir")
        return run

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """The run in this folder, of whatever NUMERICS. Its name and hash must fit the configuration inside."""
        path = Path(path)
        file, advice = path / "config.json", "restore or remove the folder"
        try:
            record = load(file)
            _check(record)
            run = cls(path, *(record[key] for key in ("hash", "numerics", "config", "labels", "baseline")))
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

        An asked.json that cannot be read, or holds what no run writes, is a warning; the run's own labels are returned.
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
        """The latest that was composed for this run; None where the file cannot be read."""
        try:
            return load(self.path / "command.json")
        except (OSError, ValueError):
            return None

    def ask(self, labels: Json, command: Mapping[str, Any] | None = None) -> None:
        """Record that the run was asked for under these labels, and with this command."""
        if command is not None and self.command != (plain := json_object(command, "command")):
            _write(self.path / "command.json", plain)
        if self.asked[-1] != labels:
            with locked(self.path):
                known = [*(other for other in self.asked if other != labels), labels]
                replace(self.path / "asked.json", pretty({"labels": known}))

    def rows(self) -> list[Json]:
        """First row of each example that did not fail, else its last one, in the order of writing.

        ConfigError names the first line that is damaged; a last line without its end is left out.
        """
        rows: dict[str, Json] = {}
        for row in _lines(self.path / EXAMPLES, wrong_row):
            before = rows.get(row["example"])
            if before is None or before.get("failed"):
                rows[row["example"]] = row
        return list(rows.values())

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write one row or several at once, durably: all wholly or none, and after a kill those that are whole.

        NaN and the like are a ValueError, a full disk an OSError.
        """
        for row in rows:
            if not isinstance(row.get("example"), str):
                raise ValueError(f"a row needs its example's id as a string, got example={row.get('example')!r}")
        if rows:
            _append(self.path / EXAMPLES, [plain(row, "row") for row in rows])

    def divergence(self) -> dict[tuple[str, str], Line]:
        """(example, kind of text) -> its line of divergence.jsonl, the first of each. Errors as of `rows`."""
        lines: dict[tuple[str, str], Line] = {}
        for line in _lines(self.path / DIVERGENCE, wrong_divergence):
            lines.setdefault((line["example"], line["text"]), line)
        return lines

    def append_divergence(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines as `append` does, numbers to seven digits: about what float32 holds, in half the space."""
        short = [
            {key: [float(f"{v:.7g}") for v in value] if key in NUMBERS else value for key, value in line.items()}
            for line in lines
        ]
        _append(self.path / DIVERGENCE, short)

    def finish(self, total: int) -> None:
        """Say that the run is complete with this many rows."""
        _write(self.path / "done.json", {"examples": total})

    @property
    def finished(self) -> bool:
        """Whether `finish` was called and that many rows are there, no more and no fewer."""
        return self.finished_with(self.rows())

    def finished_with(self, rows: Sequence[Json]) -> bool:
        """`finished`, of rows that were read before."""
        try:
            return bool(load(self.path / "done.json").get("examples") == len(rows))
        except (OSError, ValueError):
            return False

    def fail(self, error: BaseException) -> None:
        """Record that this attempt ended with an error; its rows stay, and it can be taken up again."""
        _write(
            self.path / "failure.json", _error_record(error) | {"traceback": "".join(traceback.format_exception(error))}
        )

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

        part: hold this part alone, while others may hold parts of other names; nobody then holds the whole run.
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
        """Machine and versions with which the run was first opened; {} if that is not known."""
        try:
            return load(self.path / "env.json")
        except (OSError, ValueError):
            return {}


def _write(file: Path, value: Json, *, make_folder: bool = False) -> None:
    """Replace a file at once, whatever other processes do; an OSError says what failed."""
    with explained(file):
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent):
            replace(file, pretty(value))


def _file_name(content: Any) -> str:
    return f"{hashlib.sha256(canonical(content)).hexdigest()[:16]}.json"


def _check(record: Json) -> None:
    """ValueError for a field of config.json that no run writes; KeyError where one is missing."""
    whole = isinstance(record["numerics"], int)
    baseline = record["baseline"] is None or isinstance(record["baseline"], str)
    if not (whole and baseline and isinstance(record["config"], dict)):
        raise ValueError("numerics must be a whole number, config a group, baseline a hash or null")
    if why := wrong_labels(record["labels"]):
        raise ValueError(why)


def _error_record(error: BaseException) -> Json:
    """An error and the time, for a file."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"error": type(error).__name__, "message": str(error), "time": now}


# -- jobs that failed before they had a run folder: what was asked, and why not ----------------------------------------

REFUSED_JOBS_FOLDER = ".refused"


@dataclass(frozen=True)
class Refusal:
    """path: its file, whose name is the digest of the overrides; labels: as far as they can be known."""

    path: Path
    overrides: list[str]
    labels: Json
    error: str
    message: str


def refuse(
    outputs_dir: str | Path, overrides: Iterable[str], labels: Mapping[str, Any], error: BaseException
) -> Refusal:
    """Record that what these overrides ask for could not begin. An OSError says where it could not be written."""
    words = sorted(overrides)
    file = refusal_file(outputs_dir, words)
    content: Json = {"overrides": words, "labels": json_object(labels, "labels")} | _error_record(error)
    _write(file, content, make_folder=True)
    return Refusal(file, words, content["labels"], content["error"], content["message"])


def accept(outputs_dir: str | Path, overrides: Iterable[str]) -> None:
    """What these overrides ask for has a run now: forget that it was refused once."""
    file = refusal_file(outputs_dir, sorted(overrides))
    with explained(file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        file.unlink()


def refusals(outputs_dir: str | Path) -> Iterator[Refusal]:
    """Every readable refusal, by file name."""
    for file in sorted((Path(outputs_dir) / REFUSED_JOBS_FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a notice, not a number: an unreadable one is no loss
            refusal = load(file)
            if wrong_labels(refusal["labels"]):
                continue
            yield Refusal(file, *(refusal[name] for name in ("overrides", "labels", "error", "message")))


def refusal_file(outputs_dir: str | Path, words: list[str]) -> Path:
    """Path of the record of a refusal of these overrides, which are sorted; there may be none."""
    return Path(outputs_dir) / REFUSED_JOBS_FOLDER / _file_name(words)


# -- what a run is called, and which rows can be compared --------------------------------------------------------------


TABLE = ("model", "task")  # labels that runs of one table share
IN_ITS_TABLE = ("method", "kv_ratio", "setting")  # labels that tell a run from others of its model and task


def run_name(labels: Mapping[str, Any], *names: str, between: str = " ") -> str:
    """The values of these labels, by default of IN_ITS_TABLE, as far as there are any: h2o 0.5, h2o budget.tokens=40.

    labels: of a run's folder, or a row of a table, whose missing numbers are NaN.
    """
    words = []
    for name in names or IN_ITS_TABLE:
        value = labels.get(name)
        words.append(value if isinstance(value, str) else "" if value is None or value != value else f"{value:g}")
    return between.join(filter(None, words))


DIGESTS = ("prompt_digest", "continuation_digest")  # fields of a row; one that lacks either is taken as it is


def sent_otherwise(row: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first digest in which two rows differ, of those that both have, with both values; None if they agree."""
    for name in DIGESTS:
        mine, theirs = row.get(name), other.get(name)
        if mine is not None and theirs is not None and mine != theirs:
            return f"{name} {mine} and {theirs}"
    return None


def check_same_prompts(
    run: Path | str, rows: Mapping[str, Mapping[str, Any]], other: Path | str, others: Mapping[str, Mapping[str, Any]]
) -> None:
    """ConfigError where an example of both runs, which are to be compared, was sent with different tokens.

    one, other: folders of the runs; rows, others: their rows by example.
    """
    for name, row in rows.items():
        if name in others and (why := sent_otherwise(row, others[name])):
            raise ConfigError(
                f"example {name} was asked with other tokens in {run} than in {other} ({why}): their answers cannot be "
                "compared. Chat template, tokenizer or a library changed between these runs: remove the folder that is "
                "out of date and run the same command again, or leave it out (--where)"
            )
