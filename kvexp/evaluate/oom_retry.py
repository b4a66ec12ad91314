"""Work that finds no memory or takes too long is tried again by halves; what fails alone is a row that says so."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

from kvexp.evaluate.timeout import Overdue, deadline
from kvexp.evaluate.tokenized_examples import TokenizedExample

Items = Sequence[tuple[int, TokenizedExample]]
Rows = dict[int, dict[str, Any]]

MEMORY, TIME = "memory", "time"  # the values of a row's `failed`


@dataclasses.dataclass(frozen=True)
class Patience:
    """timeout_s: seconds per example, None without end; stuck: called where a library's call does not come back."""

    timeout_s: float | None
    stuck: Callable[[Items], None]

    def of(self, items: Items, runs: int = 1) -> Any:
        """The context in which so many examples of so many runs are computed."""
        seconds = None if self.timeout_s is None else self.timeout_s * len(items) * runs
        return deadline(seconds, lambda: self.stuck(items))


def in_halves(items: Items, make: Callable[[Items], Rows], failed: Any, patience: Patience, halved: int = 0) -> Rows:
    """Rows by index. failed(index, prompt, why): the row of an example that cannot be computed even alone."""
    try:
        with patience.of(items):
            made = make(items)
        return {index: {**row, "halved": halved} for index, row in made.items()}
    except (Overdue, MemoryError, RuntimeError) as error:
        why = reason(error)
        if why is None:
            raise
    # Outside of the handler, where the traceback no longer holds what the failed attempt had allocated.
    release()
    if len(items) == 1:
        ((index, prompt),) = items
        return {index: {**failed(index, prompt, why), "halved": halved}}
    half = len(items) // 2
    rest = (failed, patience, halved + 1)
    return in_halves(items[:half], make, *rest) | in_halves(items[half:], make, *rest)


def reason(error: BaseException) -> str | None:
    """MEMORY or TIME where less work may succeed, else None."""
    if isinstance(error, Overdue):
        return TIME
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MEMORY
    # The CPU's allocator and CUDA's libraries have no type of their own for it.
    words = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
    return MEMORY if isinstance(error, RuntimeError) and any(word in str(error) for word in words) else None


def release() -> None:
    """Give back what a failed attempt held."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
