"""Errors, fields, paths, digests, files and output: what every layer may use."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import fcntl
import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import re
import select
import signal
import sys
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TextIO, TypeVar

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.segment import Segment

# The two ways kvexp says no: before anything ran, and before a number could become wrong.


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was found, what is allowed and what to change."""


class CacheError(RuntimeError):
    """A use of a cache that would give a wrong number, refused instead."""


class NotFinite(CacheError):
    """The model put out NaN or inf: every number after it would be chosen by nothing."""


# What the fields of a dataclass may hold: said at the field, as its type and a constraint; checked here alone.


TOO_LARGE = 1 << 62  # sums of two such numbers do not fit into the 64 bits of a tensor's, nor into a slice


@dataclass(frozen=True)
class Range:
    """The finite numbers from low to high, as in `Annotated[float, Range(0, 1)]`; above: low itself is not allowed."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high and value < math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above else 'at least'} {self.low}"
        return f"in {'(' if self.above else '['}{self.low}, {self.high}]"


class AtLeast(Range):
    """The finite numbers from low on, as in `Annotated[int, AtLeast(0)]`."""


class Odd(Range):
    """The odd numbers from low on."""

    def __contains__(self, value: float) -> bool:
        return super().__contains__(value) and value % 2 == 1

    def __str__(self) -> str:
        return f"odd and {super().__str__()}"


@functools.cache
def field_types(cls: type[Any]) -> dict[str, Any]:
    """Field -> its type, constraints included; none where the class's module does not have the names in them."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:
        return {}


def check_fields(item: Any) -> None:
    """ConfigError where a field of a dataclass's object holds what its type or constraint does not allow."""
    cls: Any = type(item)
    hints = field_types(cls)
    for each in fields(item):
        typed(getattr(item, each.name), hints.get(each.name, Any), each.name)


def typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits `hint`, whole numbers passing for floats and lists for tuples.

    hint: a type, `Annotated` where a constraint such as `Range` goes with it. where: the setting's name, for messages.
    """
    _check_size(value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        made = typed(value, arguments[0], where)
        if any(isinstance(each, Range) and made not in each for each in arguments[1:]):
            raise ConfigError(f"{where} must be {_allowed(hint, value)}, got {value!r}")
        return made
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            with suppress(ConfigError):
                return typed(value, option, where)
        fits = False
    elif origin is typing.Literal:
        fits = value in arguments
    elif hint in (tuple, list) or origin in (tuple, list):
        if isinstance(value, list | tuple):
            inner = arguments[0] if arguments else Any
            return tuple(typed(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
        fits = False
    elif hint in (int, float):
        fits = isinstance(value, int) or (hint is float and isinstance(value, float))
        if fits and not isinstance(value, bool):
            return hint(value)
        fits = False
    else:
        is_class = isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False)
        fits = not is_class or isinstance(value, hint)
    if not fits:
        raise ConfigError(f"{where} must be {_allowed(hint, value)}, got {value!r}")
    return value


def as_python(value: Any) -> Any:
    """Numbers of NumPy and torch, their arrays, paths, dtypes and devices as plain numbers, lists and texts.

    Lists and tuples hold them too; anything else is as it was.
    """
    if isinstance(value, list | tuple):
        return type(value)(as_python(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    return value.tolist() if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist") else value


def _check_size(value: Any, where: str) -> None:
    """ConfigError for a whole number, alone or in a list, that no integer of 64 bits holds."""
    if isinstance(value, int) and abs(value) >= TOO_LARGE:
        digits = int(value.bit_length() * math.log10(2)) + 1  # nearly: Python writes out no number of thousands of them
        raise ConfigError(f"{where} must be below 2**62, got a whole number of {digits} digits")
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_size(item, f"{where}[{i}]")


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    dict: "a group of settings",
}


def _allowed(hint: Any, value: Any) -> str:
    """What `typed` takes, in the words of a configuration file; of a value of the right type: its constraints alone."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin is typing.Annotated:
        limits = " and ".join(str(each) for each in arguments[1:] if isinstance(each, Range))
        try:
            typed(value, arguments[0], "")
        except ConfigError:
            return _allowed(arguments[0], value)
        return limits
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(each) for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(each, value) for each in arguments)
    return "a list" if tuple in (hint, origin) or list in (hint, origin) else f"a {getattr(hint, '__name__', hint)}"


# Names that other programs (transformers, kvpress, vLLM) have, or kvexp once had -> the name here.
OTHER_NAMES = {
    **dict.fromkeys(("ratio", "budget_ratio", "cache_ratio", "keep_ratio", "compression_ratio"), "kv_ratio"),
    **dict.fromkeys(("cache_size", "max_capacity_prompt", "n_tokens", "num_tokens"), "tokens"),
    **dict.fromkeys(("max_length", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("press", "policy", "strategy", "eviction", "eviction_method"), "method"),
    **dict.fromkeys(("model_name", "model_id", "model_path", "checkpoint", "pretrained_model_name_or_path"), "model"),
    **dict.fromkeys(("dataset", "data_file", "benchmark"), "task"),
    **dict.fromkeys(("n_beams", "beams"), "num_beams"),
    "stop": "stop_strings",
    "torch_dtype": "dtype",
    "facts": "babilong",
}
REMARKS = {"compression_ratio": " It is the share that stays: 1 - compression_ratio."}


def folded(name: str) -> str:
    """A name without what people write differently: case, dashes, underscores; "SmolLM2-135M" -> "smollm2135m"."""
    return re.sub(r"[\W_]", "", name).lower()


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Known names that a word was probably meant to be, the nearest first, at most `count`; none where none is near."""
    names = list(known)
    if (other := OTHER_NAMES.get(word)) in names:
        return [other]
    same = [name for name in names if folded(name) == folded(word)][:count]
    close = functools.partial(difflib.get_close_matches, possibilities=names, n=count, cutoff=cutoff)
    return same or close(word) or close(word.lower())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean h2o?", or nothing where no known name is near."""
    near = nearest(word, known)
    return f"; did you mean {near[0]}?{REMARKS.get(word, '')}" if near else ""


# Settings that exclude each other: a table of when, and of what to say.

T = TypeVar("T")
Rule = tuple[Callable[[T], object], str]  # whether it applies; the sentence, in which {c.mode} is the object's mode


def reason_against(item: T, rules: Iterable[Rule[T]]) -> str | None:
    """The sentence of the first rule that applies to the object, filled in; None: no rule does."""
    return next((sentence.format(c=item) for applies, sentence in rules if applies(item)), None)


def refuse(item: T, rules: Iterable[Rule[T]]) -> None:
    """ConfigError with the sentence of the first rule that applies to the object."""
    if (why := reason_against(item, rules)) is not None:
        raise ConfigError(why)


def size(value: float | None) -> str:
    """Bytes in binary units: 1536 -> 1.50 KiB; "-" for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return (
                f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
            )
        value /= 1024
    return f"{value:.3g} TiB"


# Where kvexp's own configurations lie, and a path as somebody typed it.


CONF = Path(__file__).with_name("conf")  # in a checkout a link to conf/, in a wheel the folder
WHEEL = "pypi:"  # begins a model.path that names a wheel of the Python package index


NAME_MAX = 255  # bytes of a file's name, as the usual file systems have it


def path_of(words: str, option: str) -> Path:
    """The path with ~ filled in; ConfigError, naming the option, for one that no file system can hold."""
    try:
        path = Path(words).expanduser()
        if any(len(os.fsencode(part)) > NAME_MAX for part in path.parts):  # also below a folder that is not there
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


# Where kvexp keeps what it can make again: digests of files, fetched and converted models.


def cache_folder() -> Path:
    """KVEXP_CACHE, else the system's cache folder for kvexp (Linux: $XDG_CACHE_HOME/kvexp or ~/.cache/kvexp).

    The folder need not exist.
    """
    own = os.environ.get("KVEXP_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    import platformdirs  # late: a GPU machine with torch and transformers alone reads models without it

    return Path(platformdirs.user_cache_dir("kvexp", appauthor=False))


# SHA-256 of files, every byte of them; of a file that nobody has touched since, remembered on disk.


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
    """Keep a file's digest. Where nothing can be written, every look reads the file again."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace(place, canonical({"stamp": found, "sha256": digest}))


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 without tab and line feed, DEL, C1


def visible(text: str) -> str:
    r"""The text with its control characters as Python writes them: ESC is `\x1b`. Tabs and line feeds stay.

    A terminal takes ESC, BEL, backspace and the C1 codes of a model's answer as commands: to rename the window, to
    write over lines that are there, to send keys. Whatever a command prints goes through `say` or `Console`.
    """
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, of visible text."""
    print(*(visible(str(word)) for word in words), end=end, file=file or sys.stdout, flush=flush)


P = ParamSpec("P")


def tells_errors(*kinds: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorator of a command: errors of these kinds are a line, an OSError by its reason, and the exit code 2."""

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(main)
        def command(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except kinds as error:
                say(f"error: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
                return 2

        return command

    return decorate


def tells_warnings(main: Callable[P, int]) -> Callable[P, int]:
    """Decorator of a command: each warning is a line."""

    @functools.wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", file=sys.stderr)
            warnings.simplefilter("always")
            return main(*args, **kwargs)

    return command


UNREAD = 141  # 128 + SIGPIPE, what a shell shows for other tools


def watch_pipes() -> None:
    """From now on the process ends quietly where its output goes to a pipe whose reader has left, as in
    `kvexp results | head -3`.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, _end_if_unread)
        atexit.register(_flush)  # what is still buffered is written after the last statement


def _end_if_unread(number: int, frame: FrameType | None) -> None:
    """A broken connection to somewhere else (a hub, a worker) raises the same signal and is an exception as before."""
    ours = select.poll()
    for stream in (1, 2):
        ours.register(stream, 0)
    if any(event & select.POLLERR for _, event in ours.poll(0)):
        os._exit(UNREAD)  # rows are on disk when they are written, so there is nothing to wait for


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(UNREAD)


# What one command knows of itself while it runs: the keys typed, its jobs, the runs it made, what failed.
#
# `kvexp.run.main` makes one `Session` and passes it on. Hydra calls the task function, callbacks, launchers and the
# loader of `kvexp.run.guard` with arguments of its own: these alone ask for `current()`.


class Failure(NamedTuple):
    """A job (its overrides) that failed; reported: whether the command has printed why."""

    job: str
    why: str
    reported: bool


@dataclass
class Session:
    """State of one command, or of one worker's piece of a sweep.

    typed_keys: keys of the command line, which a person thereby trusts; None in a worker, whose jobs were checked
    before they came. hashes: runs and baselines to show at the end. filled_ahead: hashes of runs that a shared prefill
    has filled before their turn; complete_ahead: the complete ones among them. overrides_of_jobs: the overrides in
    which jobs of a sweep differ, empty where not known. begun: a job has been composed. job_seconds: of the jobs that
    made rows. unmeasured: reason -> runs without divergence. collected: jobs (`kvexp.run.jobs.HydraJob`) that are
    composed for a launcher or a plan, None while a job is run as soon as it is composed. made: (job, its runs'
    settings) of those that went well. unrecorded: it was said that failures cannot be written to the disk. said: lines
    of `say_once`. disk_error: of a disk that is full, after which no job is begun.
    """

    typed_keys: set[str] | None = None
    hashes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rows_written: int = 0
    texts_measured: int = 0
    filled_ahead: set[str] = field(default_factory=set)
    complete_ahead: set[str] = field(default_factory=set)
    overrides_of_jobs: list[list[str]] = field(default_factory=list)
    begun: bool = False
    jobs_done: int = 0
    job_seconds: list[float] = field(default_factory=list)
    unmeasured: dict[str, list[str]] = field(default_factory=dict)
    collected: list[Any] | None = None
    made: list[tuple[Any, Any]] = field(default_factory=list)
    unrecorded: bool = False
    said: set[str] = field(default_factory=set)
    disk_error: Exception | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.started

    def add_runs(self, *hashes: str | None) -> None:
        """Add runs to what the command shows at its end; None is no run."""
        self.hashes += [each for each in dict.fromkeys(hashes) if each is not None and each not in self.hashes]

    def add_failure(self, job: str, why: str, *, reported: bool) -> None:
        """Let the command fail; a sweep lists its failed jobs at the end, with reasons that were not printed yet."""
        self.failures.append(Failure(job, why, reported))

    def say_once(self, text: str) -> None:
        """Print a line that several runs of the command have reason for."""
        if text not in self.said:
            say(text, flush=True)
        self.said.add(text)

    def add_unmeasured(self, run: str, why: str) -> None:
        """Note that this run has no divergence from the full cache, and why."""
        names = self.unmeasured.setdefault(why, [])
        names += [run] if run not in names else []

    def collect_jobs(self) -> None:
        """Collect jobs from now on instead of running them."""
        self.collected = []

    def collected_jobs(self) -> list[Any]:
        """Return the collected jobs; later ones are run."""
        jobs, self.collected = self.collected or [], None
        return jobs

    @property
    def exit_code(self) -> int:
        """1 if any job failed."""
        return 1 if self.failures else 0


_active: list[Session] = []  # the innermost last: a launcher may run a worker's piece within its own process


def current() -> Session:
    """The innermost active session; an empty one where nobody has made one active."""
    return _active[-1] if _active else Session()


@contextlib.contextmanager
def active(session: Session) -> Iterator[Session]:
    """Make this session `current()` in the block."""
    _active.append(session)
    try:
        yield session
    finally:
        _active.pop()


def keys_of(words: Sequence[str]) -> set[str]:
    """The keys of a command line's overrides."""
    return {word.lstrip("+~").partition("=")[0] for word in words}


EVERY_S = 60.0  # between plain lines
TITLE = 32  # letters in front of a bar
REDRAW_S = 0.2  # between two changes of a bar
KNOWN = 0.02  # of a kind of work, done: from then on it is known how long the rest takes
LARGE = 0.1  # of a kind of work: a first piece of it that tells how long the others take
# Kinds of work of a run: prompts are read, answers written, texts forced to measure their KL from the full cache.
PROMPTS, ANSWERS, TEXTS = "prompts", "answers", "KL passes"


class Console(rich.console.Console):
    """rich.console.Console; control characters of whatever is printed are shown (`visible`), so that only kvexp's own
    colours reach a terminal.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Cells of a table come through here before the table sets their widths, so columns stay straight."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


Listener = Callable[[str, float], None]
_listeners: list[Listener] = []  # to work as it is done, the innermost last


def worked(kind: str, count: float) -> None:
    """Report to the innermost `Progress`, if any, that so many prompts, answers or texts are done: a part of one too.

    Called after every decode step, in timed runs too: a listener has to be quick.
    """
    if _listeners:
        _listeners[-1](kind, count)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let `worked` call this listener in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Progress:
    """Context manager around the examples of a run, or whatever else is counted; `advance` after each.

    work: how many of each kind are to be done, where kinds take times of their own: prompts are read, then answers
    written, then texts forced. The time left is shown once each kind's pace is known by some of it (`worked` reports
    parts of an answer); forced texts count as fast as answers until then.
    """

    def __init__(
        self, title: str, total: int, done: int, what: str = "examples", work: Mapping[str, int] | None = None
    ) -> None:
        self.title, self.total, self.done, self.what = title, total, done, what
        # A kind with nothing to do has no pace: what is said of it (a conversation forces texts) is the last kind's.
        self.work = {kind: count for kind, count in (work or {}).items() if count} or {what: total - done}
        self.made = dict.fromkeys(self.work, 0.0)  # of each kind, parts included
        self.written = dict.fromkeys(self.work, 0)
        self.spent = dict.fromkeys(self.work, 0.0)  # seconds
        self.first: dict[str, tuple[float, float]] = {}  # seconds of the first piece of each kind, and how much it was
        self.last = self.shown = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(listening(self._worked))
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), TaskProgressColumn())
            self.bar = Bar(*columns, TextColumn("{task.fields[words]}", markup=False), console=Console())
            self.bar.start()
            title = self.title if len(self.title) <= TITLE else f"{self.title[: TITLE - 1]}…"
            self.task = self.bar.add_task(title, total=1.0, completed=0, words=self._counts())
        else:
            say(f"{self.title}: {self._counts(done=False)}", flush=True)
        return self

    def advance(self, count: int = 1, kind: str | None = None) -> None:
        """Count so many more as done, whose rows are on disk. kind: of `work`."""
        kind = kind or next(iter(self.work))
        self.done += count
        self.written[kind] += count
        self._worked(kind, max(0.0, self.written[kind] - self.made[kind]))

    def seconds_left(self) -> float | None:
        """Seconds that the rest takes; None until that is known."""
        made, each = self.made, dict[str, float]()
        for kind, (seconds, count) in self.first.items():
            if made[kind] >= max(2 * count, KNOWN * self.work[kind]):
                each[kind] = (self.spent[kind] - seconds) / (made[kind] - count)
            elif count >= LARGE * self.work[kind]:
                each[kind] = self.spent[kind] / made[kind]
        if TEXTS in self.work and TEXTS not in each and ANSWERS in each:
            each[TEXTS] = each[ANSWERS]
        left = {kind: max(0.0, self.work[kind] - made[kind]) for kind in self.work}
        later = [1 - made[kind] / self.work[kind] for kind in (ANSWERS, TEXTS) if self.work.get(kind)]
        if PROMPTS in left and later and min(later) < 1:  # prompts are read before; some kinds of task tell of none
            left[PROMPTS] = min(left[PROMPTS], max(later) * self.work[PROMPTS]) if made[PROMPTS] else 0.0
        if any(left[kind] and kind not in each for kind in left):
            return None
        return sum(count * each[kind] for kind, count in left.items() if count)

    def _worked(self, kind: str, count: float) -> None:
        """Listener of `worked`; the time since the last call was this kind's."""
        if kind not in self.work:
            kind, count = next(reversed(self.work)), 0.0
        now = time.monotonic()
        self.spent[kind] += now - self.last
        self.last = now
        self.made[kind] = min(float(self.work[kind]), self.made[kind] + count)
        if count:
            self.first.setdefault(kind, (self.spent[kind], self.made[kind]))
        if now - self.shown < (EVERY_S if self.bar is None else REDRAW_S):
            return
        self.shown = now
        left = self.seconds_left()
        about = "about" if any(self.written.values()) else "at most"  # answers may end before max_new_tokens
        time_left = "time not known yet" if left is None else f"{about} {duration(left)} left"
        if self.bar is None:
            say(f"{self.title}: {self._counts()}, {time_left}", flush=True)
            return
        spent = sum(self.spent.values())
        share = self.done / max(1, self.total) if left is None else spent / max(spent + left, 1e-9)
        # A narrow terminal cuts the end off: the time left stands first.
        self.bar.update(self.task, completed=share, words=f"{time_left}, {self._counts()}")

    def _counts(self, *, done: bool = True) -> str:
        """ "12/20 prompts, 30/76 answers"; without what is done, "20 prompts, 76 answers"."""
        if list(self.work) == [self.what]:
            return f"{self.done}/{self.total} {self.what}" if done else f"{self.total - self.done} {self.what}"
        each = ((kind, count, f"{int(self.made[kind])}/" if done else "") for kind, count in self.work.items())
        return ", ".join(f"{before}{count} {kind}" for kind, count, before in each)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.bar is not None:
            if kind is None:
                self.bar.update(self.task, completed=1.0, words=self._counts())
            self.bar.stop()


def duration(seconds: float) -> str:
    """80 s, 12 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


# What is to be known of the Hugging Face hub before it is used: whether it answers, and which commit `main` is.


TIMEOUT_S = 5.0
TRUSTED_S = 60.0  # a model is loaded in several requests: an answer holds for all of them


def forbidden() -> bool:
    """Whether HF_HUB_OFFLINE=1 says to use the cache alone."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unreachable() -> str | None:
    """Reason why the hub cannot be asked now; None if it answers.

    One request without retries, so that an error comes at once and not after half a minute of them, through the session
    that huggingface_hub itself uses (proxies, HF_ENDPOINT). Any answer counts: whether a repository is there is for the
    real request to find out.
    """
    from huggingface_hub import constants

    if forbidden():
        return "HF_HUB_OFFLINE=1 forbids asking it"
    return _asked(constants.ENDPOINT, int(time.monotonic() / TRUSTED_S))


@functools.lru_cache(maxsize=1)
def _asked(endpoint: str, period: int) -> str | None:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=TIMEOUT_S)
    except Exception as error:  # httpx's, requests' (older hubs) or a proxy's own: no common base
        return f"{endpoint} does not answer: {error or type(error).__name__}"
    return None


def cached_commit(model: str, revision: str | None) -> str | None:
    """The commit that this revision of a model (None: main) stood for when its config.json was last fetched."""
    folder = cached_snapshot(model, revision)
    return folder.name if folder else None


def cached_snapshot(model: str, revision: str | None) -> Path | None:
    """The folder with that commit's files; None where nothing was fetched, ConfigError for what is no hub id."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError as error:
        raise ConfigError(f"{model!r} is no folder, file or hub id (OWNER/NAME): correct it") from error
    return Path(file).parent if isinstance(file, str) else None


# Free memory of this computer, within the limits set for this process and for the control groups it is in.


PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNKNOWN = 1 << 62  # more than there can be; cgroups v1 write no limit as nearly that
# A group's limit, what of it is taken, and the key in memory.stat of the file pages that go first when it is short.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def available() -> int:
    """Free bytes of memory for this process; a number larger than any memory where the system does not tell."""
    return max(0, min([_of_computer(), _of_process(), *_of_groups()]))


def _of_computer() -> int:
    """Bytes that /proc/meminfo says are available; UNKNOWN where there is no such file."""
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNKNOWN


def _of_process() -> int:
    """Free bytes under the process's address limit (`ulimit -v`)."""
    import resource

    limit, taken = resource.getrlimit(resource.RLIMIT_AS)[0], _lines(PROC / "self/statm")
    if limit == resource.RLIM_INFINITY or not taken:
        return UNKNOWN
    return int(limit) - int(taken[0].split()[0]) * resource.getpagesize()


def _of_groups() -> Iterator[int]:
    """Free bytes under the memory limit of each control group around this process (containers, SLURM)."""
    for folder, unified in _groups("memory"):
        limit, taken, cached = V2 if unified else V1
        with suppress(OSError, ValueError):  # not there, or "max": without a limit
            most, now = (int((folder / name).read_text()) for name in (limit, taken))
            stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
            yield most - now + int(stat.get(cached, 0))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folder of each control group around this process, the innermost first, and whether it is one of version 2.

    Inside a container the path may be the host's: then the root is the group.
    """
    for line in _lines(PROC / "self/cgroup"):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        group = root / os.path.normpath(path).lstrip("/.")
        for folder in (group, *group.parents):
            yield folder, not controllers
            if folder == root:
                break


def _lines(path: Path) -> list[str]:
    """Lines of a text file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# Threads of torch: at most the free cores, waiting so that they take none from others; decided as torch is imported.
#
# OpenMP's threads spin where they wait for each other. Where another process wants one of their cores, they all wait
# until the scheduler gives it back, at every product; threads that sleep instead are slower on an idle machine. No
# setting is good for both (benchmarks/README.md).


BUSY = 0.5  # cores wanted that other processes take; measured: from there on spinning threads are no faster than fewer
SAMPLE_S = 0.1  # seconds between two readings, at least: the system counts hundredths of a second
USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@dataclass(frozen=True)
class Threads:
    """What torch gets. count: threads at most, None as torch has them; variables: of OpenMP, while it is loaded.

    wanted: the threads on an idle machine; load: the cores of them that other processes took, None where not known.
    """

    count: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    wanted: int = 1
    load: float | None = None


def decide_threads(
    cores: int, quota: float, others: float | None, environ: Mapping[str, str], asked: int | None = None
) -> Threads:
    """Threads of a process that may run on so many cores, and only for quota seconds per second (inf: no limit).

    cores: 0 where the system does not tell; others: cores that other processes take, None where it does not tell that.
    asked: `threads=N`. Where the user has set one of `USERS`, nothing but that is decided.
    """
    if not cores:
        return Threads(asked)
    whole = max(1, int(min(cores, quota)))
    given = environ.get("OMP_NUM_THREADS", "")
    wanted = asked or (min(int(given), cores) if given.isdecimal() else 0) or whole
    load = max(0.0, wanted + (others or 0.0) - cores)
    busy, own = load >= BUSY, any(name in environ for name in USERS)
    count = asked
    if count is None and not own and (busy or whole < cores):
        count = max(1, math.ceil(whole - load - 0.5)) if busy else whole
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if busy and not own else {}
    return Threads(count, waiting, wanted, None if others is None else load)


class LoadMeter:
    """Cores that other processes take from its making on."""

    def __init__(self) -> None:
        self.began, self.taken, self.own = time.monotonic(), _seconds_of_cores(), time.process_time()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def others(self) -> float | None:
        """Cores on average so far, of those that this process may run on; None where the system does not tell."""
        taken, own, seconds = _seconds_of_cores(), time.process_time(), self.seconds
        if taken is None or self.taken is None or seconds < SAMPLE_S:
            return None
        return max(0.0, (taken - self.taken - (own - self.own)) / seconds)


def _cores() -> set[int]:
    """Numbers of the cores that this process may run on; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _seconds_of_cores() -> float | None:
    """Seconds that the cores of this process have worked for anybody since the machine started."""
    names, total = {f"cpu{number}" for number in _cores()}, 0
    for line in _lines(PROC / "stat"):
        name, *counts = line.split()
        if name in names:
            names.remove(name)
            user, nice, system, _, _, *more = map(int, counts[:8])  # without idle and waiting for a disk
            total += user + nice + system + sum(more)
    return None if names or not total else total / os.sysconf("SC_CLK_TCK")


def _quota() -> float:
    """Cores' worth of time under the limits of the control groups around this process; inf without a limit."""
    found = [math.inf]
    for folder, unified in _groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # not there, or "max": without a limit
            names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            most, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            found += [most / period] if most > 0 else []
    return min(found)


threads: Threads | None = None  # as decided; None where torch was there before, or is not there yet
_threads_asked: int | None = None  # threads=N
_told = False  # that the machine is busy


class _BeforeTorch(importlib.abc.MetaPathFinder):
    """Import hook that decides when torch is first imported, by whomever: OpenMP reads its variables only then.

    The variables are taken back, so that processes started later decide for themselves.
    """

    def __init__(self) -> None:
        self.meter = LoadMeter()

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is not None and spec.loader is not None:
            load, loader = spec.loader.exec_module, typing.cast("Any", spec.loader)
            loader.exec_module = lambda module: self.load(module, load)
        return spec

    def load(self, torch: Any, execute: Callable[[Any], None]) -> None:
        global threads
        with suppress(ValueError):  # imported once more
            sys.meta_path.remove(self)
        time.sleep(max(0.0, SAMPLE_S - self.meter.seconds))
        cores = len(_cores())
        made = decide_threads(cores, _quota(), self.meter.others(), os.environ, _threads_asked)
        os.environ.update(made.variables)
        try:
            execute(torch)
        finally:
            for name in made.variables:
                del os.environ[name]
        if made.count is not None:
            torch.set_num_threads(_threads_asked or min(made.count, torch.get_num_threads()))
        threads = made


def watch_torch() -> None:
    """From now on the import of torch decides about its threads; nothing where it has been imported already."""
    if "torch" not in sys.modules and not any(isinstance(each, _BeforeTorch) for each in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorch())


def use_threads(count: int) -> None:
    """Let torch have so many threads, whether it has been imported or not. ConfigError for a second number."""
    global _threads_asked
    if _threads_asked not in (None, count):
        raise ConfigError(f"threads={count}, but this command has threads={_threads_asked}: give each a command")
    _threads_asked = count
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def tell_threads() -> None:
    """Say once on stderr that torch has fewer threads than on an idle machine, and why."""
    global _told
    if threads is None or threads.load is None or not threads.variables or _threads_asked or _told:
        return
    _told = True
    few = f"{threads.count} thread{'s' * (threads.count != 1)}"
    words = f"busy machine: other processes take {threads.load:.1f} of {threads.wanted} cores, so torch has {few}"
    say(f"{words} (threads=N: so many)", file=sys.stderr, flush=True)


def machine_load(meter: LoadMeter | None = None) -> float | None:
    """Cores wanted by torch's threads and taken by other processes as it was imported, or by the meter where more.

    None where that is not known.
    """
    if threads is None or threads.load is None:
        return None
    others = (meter and meter.others()) or 0.0
    return round(max(threads.load, threads.wanted + others - len(_cores())), 2)


# What JSON can hold, written in one way only: the same content has the same bytes, and so the same digest.


Json = dict[str, Any]


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_no_constant)


def parse(data: bytes) -> Json:
    """A JSON object in strict JSON, or ValueError."""
    try:
        value = _STRICT.decode(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def load(path: Path) -> Json:
    return parse(path.read_bytes())


def json_object(value: Mapping[str, Any], where: str) -> Json:
    try:
        return dict(plain(value, where))
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


def plain(value: Any, where: str) -> Any:
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
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    allowed = "null, bool, int, float, str, list and dict are allowed"
    raise ValueError(f"{where} is of type {type(value).__name__}; {allowed}: convert it")


def digest(config: Json, numerics: int) -> str:
    return hashlib.sha256(canonical({"config": config, "numerics": numerics})).hexdigest()[:16]


def canonical(value: Any, sort_keys: bool = True) -> bytes:
    """One line of pure ASCII: no text in it, whatever a model wrote, can break the line or fail to encode."""
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False).encode("ascii")


def pretty(value: Json) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")


# Files that several processes change and any moment may cut short: locks, atomic replacement, errors that advise.


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


SHOWN = 4  # names of each kind in a message
