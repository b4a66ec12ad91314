"""Limits of time and memory: work that exceeds one is tried again by halves, and fails as a row that says so."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvexp.core.budget import PromptSizes
from kvexp.core.quantized import SlotBytes
from kvexp.run.prompts import Items
from kvexp.run.settings import Settings, batch_budget
from kvexp.util import ConfigError

if TYPE_CHECKING:
    from kvexp.hf.load import Model
    from kvexp.run.answers import PromptBatch


GRACE_S = 10.0  # for Python code to notice the alarm, before the work counts as stuck inside a library
LONGEST_S = 1e9  # thirty years: clocks take no number much larger
EXIT_HUNG = 124  # exit status of a process that could not be brought back: that of timeout(1)
MEMORY, TIME = "memory", "time"  # the values of a row's `failed`
SHARE = 0.6  # of the memory that is free: the rest is for what a prefill makes on its way


class TimeLimitExceeded(BaseException):
    """The time is up. No `Exception`: code that goes on after any error must not go on after this one."""


@dataclasses.dataclass(frozen=True)
class TimeLimit:
    """timeout_s: seconds per example, None without end; stuck: called where a library's call does not come back."""

    timeout_s: float | None
    stuck: Callable[[Items], None]

    @contextlib.contextmanager
    def of(self, items: Items, runs: int = 1) -> Iterator[None]:
        """Raise TimeLimitExceeded in the block after the time of so many examples and runs, on a monotonic clock.

        Work that does not come back from a library's call cannot be interrupted: then, after GRACE_S more, `stuck` is
        called in another thread, and is to end the process.
        """
        if self.timeout_s is None:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "timeout_s needs a run to have its process's main thread, which this launcher does not give"
            )
        seconds, inside = min(self.timeout_s * len(items) * runs, LONGEST_S), True

        def ring(*_: Any) -> None:
            if inside:
                raise TimeLimitExceeded

        before = signal.signal(signal.SIGALRM, ring)
        watchdog = threading.Timer(seconds + GRACE_S, self.stuck, [items])
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


def failure_kind(error: BaseException) -> str | None:
    """MEMORY or TIME where less work may succeed, else None."""
    if isinstance(error, TimeLimitExceeded):
        return TIME
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MEMORY
    # The CPU's allocator and CUDA's libraries have no type of their own for it.
    signs = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
    return MEMORY if isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs) else None


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


def fit_together(batches: Sequence[PromptBatch], model: Model, processes: int = 1) -> bool:
    """Whether the caches of all runs of these batches fit into a process's share of the memory that is free."""
    needed = 0
    for batch in batches:
        prompts, each = kv_bytes_needed(batch.runs, model, batch.prompts)
        needed += prompts + batch.copies * sum(each)
    return needed <= free_bytes(model) * SHARE / processes


def kv_bytes_needed(runs: Sequence[Settings], model: Model, batch: Items) -> tuple[int, list[int]]:
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
    held = budget.resolve(PromptSizes(lengths, max(lengths), new, 1), 0)
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
