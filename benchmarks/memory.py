"""Peak memory of a task above what was held before it: the device's own count, or the process's resident set."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {name}: peak memory can only be measured under Linux")
    return int(found[1]) << 10


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
