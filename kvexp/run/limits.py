"""Limits of time and memory: work that exceeds one is tried again by halves, and fails as a row that says so."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp.core.budget import Prompts
from kvexp.core.quantized import SlotBytes
from kvexp.run.prompts import TokenizedExample
from kvexp.run.settings import Settings, batch_budget
from kvexp.util import ConfigError

if TYPE_CHECKING:
    from kvexp.hf.load import Model


GRACE_S = 10.0  # for Python code to notice the alarm, before the work counts as stuck inside a library
LONGEST_S = 1e9  # thirty years: clocks take no number much larger
EXIT_HUNG = 124  # exit status of a process that could not be brought back: that of timeout(1)


Items = Sequence[tuple[int, TokenizedExample]]
Rows = dict[int, dict[str, Any]]
MEMORY, TIME = "memory", "time"  # the values of a row's `failed`
SHARE = 0.6  # of the memory that is free: the rest is for what a prefill makes on its way
WRITE_EVERY_S = 55.0  # aimed at between two writes
TRIED_STEPS, WORTH_TRYING = 3, 16  # tokens fed to learn a step's time, where an answer may have more than so many
TRIED_ROWS = 16
WORTH_ROWS = 16  # fewer make steps costly (docs/decisions/speed.md): taken together even where that takes twice as long


class TimeLimitExceeded(BaseException):
    """The time is up. No `Exception`: code that goes on after any error must not go on after this one."""


@contextlib.contextmanager
def time_limit(seconds: float | None, stuck: Callable[[], None]) -> Iterator[None]:
    """TimeLimitExceeded in the block after so many seconds, on a clock that nobody sets; None: no limit.

    Work that does not come back from a library's call cannot be interrupted: then, after GRACE_S more, `stuck` is
    called in another thread, and is to end the process (`restart_process`).
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("timeout_s needs a run to have its process's main thread, which this launcher does not give")
    seconds = min(seconds, LONGEST_S)
    inside = True

    def ring(*_: Any) -> None:
        if inside:
            raise TimeLimitExceeded

    before = signal.signal(signal.SIGALRM, ring)
    watchdog = threading.Timer(seconds + GRACE_S, stuck)
    watchdog.daemon = True
    try:
        watchdog.start()
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again and again: an exception in a callback is lost
        yield
    finally:
        inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watchdog.cancel()


class Pace:
    """How much of a sweep's work a process takes before it writes, by the time that the last such work took.

    every_s: seconds aimed at between two writes, None for no limit. The first step of each kind of work is measured by
    the caller (`knows`, `measured`). Rows and divergences do not depend on what they are taken together with, so the
    clock decides nothing but when they are written.
    """

    def __init__(self, every_s: float | None) -> None:
        self.every_s = every_s
        self._since, self._row_s, self._longest = time.perf_counter(), dict[str, float](), dict[str, int]()

    def written(self) -> None:
        """Everything made so far is on disk."""
        self._since = time.perf_counter()

    def may_prefill(self, done: int, left: int) -> bool:
        """Whether to prefill another of `left` batches behind `done` that nothing was written of.

        Half the time is theirs, and what it does not hold goes in parts as even as they go.
        """
        if self.every_s is None or not done or not left:
            return bool(left)
        fitting = max(1, int(self.every_s / 2 * done / (time.perf_counter() - self._since)))
        return done < math.ceil((done + left) / math.ceil((done + left) / fitting))

    def knows(self, kind: str, steps: int) -> bool:
        """Whether it is known how long such steps take, or they are too few to matter."""
        return self.every_s is None or steps <= WORTH_TRYING or kind in self._row_s

    def measured(self, kind: str, rows: int, steps: int, seconds: float, *, ended: bool = True) -> None:
        """So many rows took so many steps in this time; ended: with them they were complete."""
        if rows and steps:
            self._row_s[kind] = seconds / (rows * steps)
            self._longest[kind] = max(steps, self._longest.get(kind, 0)) if ended else 0

    def take(self, kind: str, sizes: Sequence[int], steps: int) -> int:
        """How many of the first pieces of work to do together, in parts as even as they go; at least 1.

        sizes: rows of each piece; steps: that a row may take. Expected are as many as the longest row took so far.
        """
        if self.every_s is None or kind not in self._row_s:
            return len(sizes)
        room = max(self.every_s - (time.perf_counter() - self._since), self.every_s / 2)
        rows, each = sum(sizes), min(steps, self._longest.get(kind) or steps) * self._row_s[kind]
        fewest = max(1, min(WORTH_ROWS, int(2 * self.every_s / each)))
        parts = max(1, min(round(rows * each / room), rows // fewest))
        ends = itertools.accumulate(sizes)
        return next((place for place, end in enumerate(ends, 1) if end * parts >= rows), len(sizes))


def restart_process() -> None:
    """End this process, whatever its other threads do; the command line begins again in its place, if it was one."""
    sys.stdout.flush()
    sys.stderr.flush()
    line = [Path(word).name for word in sys.orig_argv[:4]]
    if "run.py" in line[:3] or ("kvexp", "run") in itertools.pairwise(line):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os._exit(EXIT_HUNG)


@dataclasses.dataclass(frozen=True)
class TimeLimit:
    """timeout_s: seconds per example, None without end; stuck: called where a library's call does not come back."""

    timeout_s: float | None
    stuck: Callable[[Items], None]

    def of(self, items: Items, runs: int = 1) -> Any:
        """The context in which so many examples of so many runs are computed."""
        seconds = None if self.timeout_s is None else self.timeout_s * len(items) * runs
        return time_limit(seconds, lambda: self.stuck(items))


def retry_in_halves(
    items: Items, make: Callable[[Items], Rows], failed: Any, limit: TimeLimit, halved: int = 0
) -> Rows:
    """Rows by index. failed(index, prompt, why): the row of an example that cannot be computed even alone."""
    try:
        with limit.of(items):
            made = make(items)
        return {index: {**row, "halved": halved} for index, row in made.items()}
    except (TimeLimitExceeded, MemoryError, RuntimeError) as error:
        why = failure_kind(error)
        if why is None:
            raise
    # Outside of the handler, where the traceback no longer holds what the failed attempt had allocated.
    free_memory()
    if len(items) == 1:
        ((index, prompt),) = items
        return {index: {**failed(index, prompt, why), "halved": halved}}
    half = len(items) // 2
    rest = (failed, limit, halved + 1)
    return retry_in_halves(items[:half], make, *rest) | retry_in_halves(items[half:], make, *rest)


def failure_kind(error: BaseException) -> str | None:
    """MEMORY or TIME where less work may succeed, else None."""
    if isinstance(error, TimeLimitExceeded):
        return TIME
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MEMORY
    # The CPU's allocator and CUDA's libraries have no type of their own for it.
    words = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
    return MEMORY if isinstance(error, RuntimeError) and any(word in str(error) for word in words) else None


def free_memory() -> None:
    """Give back to the system what nothing holds any more: after a failed attempt, and between the runs of a sweep.

    glibc keeps freed blocks below one that is in use, a gigabyte and more after a group of runs, and other libraries
    take new ones instead. Where there is no malloc_trim (macOS, musl), the allocator has its own way.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def partition_by_memory(
    runs: Sequence[Settings],
    model: Model,
    batch: Sequence[tuple[int, TokenizedExample]],
    processes: int = 1,
    *,
    copies: int = 1,
    beside: Sequence[Settings] = (),
) -> list[list[int]]:
    """Places of the runs to take together: neighbours, as many as fit into a process's share; one alone is tried.

    copies: how often each run's cache is held; beside: runs that are held beside those of every part.
    """
    always, each = _bytes_held(runs, model, batch, copies, beside)
    groups: list[list[int]] = [[]]
    left = room = free_bytes(model) * SHARE / processes - always
    for place, need in enumerate(each):
        if groups[-1] and need > left:
            groups.append([])
            left = room
        groups[-1].append(place)
        left -= need
    return groups


def fit_together(
    parts: Sequence[tuple[Sequence[Settings], Sequence[tuple[int, TokenizedExample]], dict[str, Any]]],
    model: Model,
    processes: int = 1,
) -> bool:
    """Whether the runs of several batches fit into a process's share all at once.

    parts: runs, batch, and copies and beside as of `partition_by_memory`.
    """
    needs = [_bytes_held(runs, model, batch, **held) for runs, batch, held in parts]
    return sum(always + sum(each) for always, each in needs) <= free_bytes(model) * SHARE / processes


def _bytes_held(
    runs: Sequence[Settings],
    model: Model,
    batch: Sequence[tuple[int, TokenizedExample]],
    copies: int = 1,
    beside: Sequence[Settings] = (),
) -> tuple[int, list[int]]:
    """Bytes held whatever runs there are, and by each run; copies, beside: as of `partition_by_memory`."""
    prompts, each = kv_bytes_needed(runs, model, batch)
    always = sum(kv_bytes_needed(beside, model, batch)[1]) if beside else 0
    return prompts + copies * always, [copies * need for need in each]


def kv_bytes_needed(
    runs: Sequence[Settings], model: Model, batch: Sequence[tuple[int, TokenizedExample]]
) -> tuple[int, list[int]]:
    """Bytes of the prompts, which the runs share, and of what each run keeps, in as many bits as it stores them."""
    from kvexp.hf.patch import head_dim, num_kv_heads, num_layers

    config, lengths = model.config, [prompt.size for _, prompt in batch]
    heads = num_layers(config) * num_kv_heads(config)

    def kept(settings: Settings) -> int:
        held = head_slot_bytes(settings, head_dim(config), int(model.dtype.itemsize))
        return heads * sum(map(held.of, slots_held(settings, lengths)))

    return token_bytes(model) * sum(lengths), [kept(settings) for settings in runs]


def head_slot_bytes(settings: Settings, width: int, itemsize: int) -> SlotBytes:
    """Bytes of the slots of one kv head of `width` channels; itemsize: bytes of a number that is not quantised."""
    return SlotBytes(width, width, settings.cache.quantization, itemsize)


def slots_held(settings: Settings, lengths: Sequence[int]) -> list[int]:
    """Slots per layer and kv head that each prompt holds at most once it is evicted."""
    new = settings.decoding.max_new_tokens
    budget = batch_budget(settings, lengths)
    cache = settings.cache
    if budget is None or cache.mode == "mask" or cache.method.full_cache or not cache.cadence.at_prefill:
        return [length + new for length in lengths]
    held = budget.resolve(Prompts(lengths, max(lengths), new, 1), 0)
    return [min(slots + 1, length + new) for slots, length in zip(held, lengths, strict=True)]


def token_bytes(model: Model) -> int:
    """Bytes of one token's keys and values in all layers, if all of them were attention of one shape."""
    from kvexp.hf.patch import head_dim, num_kv_heads, num_layers

    config = model.config
    return 2 * num_layers(config) * num_kv_heads(config) * head_dim(config) * int(model.dtype.itemsize)


def free_bytes(model: Model) -> int:
    """Free memory of the devices the model is on: of a spread one, as if each had what the fullest has left."""
    import torch

    from kvexp.util import available

    devices = {parameter.device for parameter in model.parameters()}
    cards = [int(torch.cuda.mem_get_info(device)[0]) for device in devices if device.type == "cuda"]
    if cards:
        return min(cards) * len(cards)
    return available()  # unknown: what does not fit is halved when it fails
