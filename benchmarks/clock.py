"""Time and memory, measured in turns: what drifts in a shared machine hits all variants alike.

Ratios are paired by turn. Beside them the least a decode step can take: its bytes over the bandwidth that is there.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.store import ROOT

Sample = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
BUSY = "busy machine"


def settle(device: str) -> None:
    """Wait until the device has finished its queued work."""
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


def over(samples: Iterable[Sample], against: Iterable[Sample], field: str) -> Ratio:
    """The ratio of one field of two variants' samples."""
    return ratio([sample[field] for sample in samples], [max(sample[field], 1e-12) for sample in against])


def busy(samples: Iterable[Sample]) -> str:
    """A warning where the clock ran well ahead of the processor: others used the machine. Needs wall_s and cpu_s."""
    waits = [sample["wall_s"] / sample["cpu_s"] for sample in samples if "wall_s" in sample and sample.get("cpu_s")]
    typical = statistics.median(waits) if waits else 1.0
    return f"{BUSY}: wall / cpu {typical:.1f}" if typical > 1.2 else ""


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(task: Callable[[], Any], device: str) -> tuple[Any, int, str]:
    """The task's result, the bytes it needed at most above those held before, and how that was found out.

    On a CPU: freed memory is handed back first, then the kernel's high-water mark is reset ("hwm"); where it may not
    be, a thread looks every millisecond ("polled"), which can miss a short peak.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = task()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before, "cuda"
    _trim()
    before = resident()
    if reset_peak():
        result = task()
        return result, max(0, _field("VmHWM") - before), "hwm"
    with _Watch() as watch:
        result = task()
    return result, max(0, watch.top - before), "polled"


def resident() -> int:
    """Bytes of this process in memory now."""
    return _field("VmRSS")


def reset_peak() -> bool:
    """Start the high-water mark anew; False where the kernel does not let this process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{_STATUS} has no {name}: peak memory can only be measured under Linux")
    return int(match[1]) << 10


def _trim() -> None:
    """Hand freed memory back to the system: what malloc retains would hide the next task's growth."""
    name = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None
    if trim is not None:
        trim(0)


class _Watch:
    """Looks at the resident set from a thread."""

    def __init__(self) -> None:
        self.top, self._done = resident(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._done.wait(0.001):
            self.top = max(self.top, int(Path("/proc/self/statm").read_text().split()[1]) * page)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.top = max(self.top, resident())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights a step reads: all but the input embedding, unless that is the head too."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    skipped = None if head is not None and head.weight is embedding else embedding
    return sum(w.numel() * w.element_size() for w in model.parameters() if w is not skipped)


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers and kv heads."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers * 2 * kv_heads * dim * dtype.itemsize


def step_bytes(model: PreTrainedModel, slots: float, batch: int) -> float:
    """Bytes a decode step must read: the weights once, and every row's slots."""
    return weight_bytes(model) + batch * slots * slot_bytes(model.config, model.dtype)


class Bandwidth:
    """Bytes per second this machine reads from memory, by a matrix times a vector and by a copy: the better of both.

    mib: size of the matrix; it has to be several times the last cache's.
    """

    def __init__(self, device: str, mib: int | None = None) -> None:
        cuda = device.startswith("cuda")
        side = int(((mib or (4096 if cuda else 256)) * 2**20 / 4) ** 0.5)
        self.device = device
        self.matrix, self.vector = torch.ones(side, side, device=device), torch.ones(side, device=device)
        self.copy = torch.empty_like(self.matrix)

    def sample(self) -> dict[str, float]:
        """One measurement: medians of five."""
        size = self.matrix.numel() * 4
        reading = self._seconds(lambda: torch.mv(self.matrix, self.vector))
        copying = self._seconds(lambda: self.copy.copy_(self.matrix))
        return {"bytes_per_s": max(size / reading, 2 * size / copying)}

    def _seconds(self, task: Any) -> float:
        taken = []
        for _ in range(5):
            settle(self.device)
            start = time.perf_counter()
            task()
            settle(self.device)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)


# A process of its own starts the command: what a child is said to have held begins with what its parent holds.
_START = (
    "import json, resource, subprocess, sys; code = subprocess.run([sys.executable, *sys.argv[1:]]).returncode; "
    "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024])); sys.exit(code)"
)


def run_command(arguments: Sequence[str]) -> Sample:
    """Run `python ARGUMENTS` in the repository: seconds, and the bytes it held at most.

    RuntimeError with what it said if it fails.
    """
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _START, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    wall = time.perf_counter() - start
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"python {' '.join(arguments)} ended with {done.returncode}:\n{said}")
    cpu, peak_bytes = json.loads(done.stdout.splitlines()[-1])
    return {"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak_bytes}
