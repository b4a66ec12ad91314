"""Time, measured in turns: what drifts in a shared machine hits every variant alike, and ratios are paired by turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

Sample = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
BUSY = "busy machine"


def settle(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def spent(task: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """The task's result, its seconds by the wall's clock, and by the processor's (of all threads)."""
    settle(device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = task()
    settle(device)
    return result, time.perf_counter() - wall, time.process_time() - cpu


def in_turns(tasks: dict[str, Callable[[], Sample]], repeats: int, warm: int = 1) -> dict[str, list[Sample]]:
    """Run every task once per turn; the first `warm` turns are dropped. Each turn starts one task further on.

    A task that runs out of memory has the one sample {"error": ...} and sits out the other turns.
    """
    taken: dict[str, list[Sample]] = {name: [] for name in tasks}
    names = list(tasks)
    for turn in range(warm + repeats):
        _give_back()
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            if any("error" in sample for sample in taken[name]):
                continue
            sample = attempt(tasks[name])
            if "error" in sample:
                taken[name] = [sample]
            elif turn >= warm:
                taken[name].append(sample)
    return taken


def attempt(task: Callable[[], Sample]) -> Sample:
    """The task's sample, or the one that says it ran out of memory, after what it held was given back."""
    try:
        return task()
    except (torch.OutOfMemoryError, MemoryError):
        pass  # what the task held is only let go when this clause ends
    _give_back()
    return {"error": OUT_OF_MEMORY}


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, with the smallest and the largest."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(over: Iterable[float], under: Iterable[float]) -> Ratio:
    """over / under, turn by turn."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def busy(samples: Iterable[Sample]) -> str:
    """A warning where the clock ran well ahead of the processor: others used the machine. Needs wall_s and cpu_s."""
    waits = [sample["wall_s"] / sample["cpu_s"] for sample in samples if "wall_s" in sample and sample.get("cpu_s")]
    typical = statistics.median(waits) if waits else 1.0
    return f"{BUSY}: wall / cpu {typical:.1f}" if typical > 1.2 else ""
