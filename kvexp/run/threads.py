"""Threads of torch: at most the free cores, which sleep while they wait where other processes want their cores.

OpenMP's threads spin where they wait for each other. Where another process wants one of their cores, they all wait
until the scheduler gives it back, at every product; threads that sleep instead are slower on an idle machine. No
setting is good for both (benchmarks/README.md).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from kvexp.util import ConfigError, cpu_quota, say

BUSY = 0.5  # cores wanted that other processes take; measured: from there on spinning threads are no faster than fewer
SAMPLE_S = 0.1  # seconds between two readings, at least: the system counts hundredths of a second
USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@dataclass(frozen=True)
class Threads:
    """What torch gets. count: threads, None as torch has them; sleeping: whether they sleep while they wait.

    load: cores that both torch and other processes want.
    """

    count: int | None
    sleeping: bool
    load: float


def decide_threads(
    cores: int, quota: float, others: float, environ: Mapping[str, str], asked: int | None = None
) -> Threads:
    """Threads of a process that may run on so many cores, and only for quota seconds per second (inf: no limit).

    others: cores that other processes take. asked: `threads=N`. Where the user has set one of `USERS`, nothing but that
    is decided.
    """
    whole = max(1, int(min(cores, quota)))
    given = environ.get("OMP_NUM_THREADS", "")
    wanted = asked or (min(int(given), cores) if given.isdecimal() else 0) or whole
    load = max(0.0, wanted + others - cores)
    if any(name in environ for name in USERS):
        return Threads(asked, False, load)
    busy, count = load >= BUSY, asked
    if count is None and (busy or whole < cores):
        count = max(1, math.ceil(whole - load - 0.5)) if busy else whole
    return Threads(count, busy, load)


class LoadMeter:
    """Cores that other processes take from its making on."""

    def __init__(self) -> None:
        self.began, self.taken = time.monotonic(), _seconds_of_others()

    def others(self) -> float:
        """Cores on average, of those that this process may run on; waits until SAMPLE_S have passed."""
        time.sleep(max(0.0, SAMPLE_S + self.began - time.monotonic()))
        return max(0.0, (_seconds_of_others() - self.taken) / (time.monotonic() - self.began))


def _cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    process = psutil.Process()
    affinity = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(psutil.cpu_count() or 1)
    return list(affinity)


def _seconds_of_others() -> float:
    """Seconds that the cores of this process have worked for others since the machine started."""
    times = psutil.cpu_times(percpu=True)
    worked = (times[core] for core in _cores() if core < len(times))
    busy = sum(core.user + core.nice + core.system + getattr(core, "steal", 0.0) for core in worked)
    return float(busy) - time.process_time()


_meter = LoadMeter()
_load: float | None = None  # as torch was imported; None where something else imported it
_asked: int | None = None  # threads=N


def import_torch() -> None:
    """Import torch with the threads that are decided now; nothing where it has been imported already.

    OpenMP reads its variables only then. They are taken back, so that processes started later decide for themselves.
    """
    global _load
    if "torch" in sys.modules:
        return
    others, cores = _meter.others(), len(_cores())
    threads = decide_threads(cores, cpu_quota(), others, os.environ, _asked)
    if threads.sleeping:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        import torch
    finally:
        if threads.sleeping:
            del os.environ["OMP_WAIT_POLICY"]
    if threads.count is not None:
        torch.set_num_threads(_asked or min(threads.count, torch.get_num_threads()))
    _load = threads.load
    if threads.sleeping and _asked is None:
        count = torch.get_num_threads()
        say(
            f"busy machine: other processes take {others:.1f} of {cores} cores, so torch has {count} "
            f"thread{'s' * (count != 1)} (threads=N: so many)",
            file=sys.stderr,
            flush=True,
        )


def use_threads(count: int) -> None:
    """Let torch have so many threads, whether it has been imported or not. ConfigError for a second number."""
    global _asked
    if _asked not in (None, count):
        raise ConfigError(f"threads={count}, but this command has threads={_asked}: give each a command")
    _asked = count
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def machine_load(meter: LoadMeter | None = None) -> float | None:
    """Cores wanted by torch's threads and by other processes as it was imported, or by the meter where more.

    None where something else imported torch.
    """
    if _load is None:
        return None
    now = 0.0 if meter is None else sys.modules["torch"].get_num_threads() + meter.others() - len(_cores())
    return round(max(_load, now), 2)
