"""What this machine gives the process: memory, and cores for torch's threads, within its control groups."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import math
import os
import sys
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvexp.util.errors import ConfigError
from kvexp.util.output import say

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


# Threads of torch: at most as many as cores are idle; on a busy machine they sleep instead of spin. Decided as torch
# is imported.
#
# OpenMP's threads spin where they wait for each other. Where another process wants one of their cores, they all wait
# until the scheduler gives it back, at every product; threads that sleep instead are slower on an idle machine. No
# setting is good for both (benchmarks/README_details.md).

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
    cores: int, quota: float, others: float | None, environ: Mapping[str, str], requested: int | None = None
) -> Threads:
    """Threads of a process that may run on so many cores, and only for quota seconds per second (inf: no limit).

    cores: 0 where the system does not tell; others: cores that other processes take, None where it does not tell that.
    requested: `threads=N`. Where the user has set one of `USERS`, nothing but that is decided.
    """
    if not cores:
        return Threads(requested)
    whole = max(1, int(min(cores, quota)))
    given = environ.get("OMP_NUM_THREADS", "")
    wanted = requested or (min(int(given), cores) if given.isdecimal() else 0) or whole
    load = max(0.0, wanted + (others or 0.0) - cores)
    busy, user_sets = load >= BUSY, any(name in environ for name in USERS)
    count = requested
    if count is None and not user_sets and (busy or whole < cores):
        count = max(1, math.ceil(whole - load - 0.5)) if busy else whole
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if busy and not user_sets else {}
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
        taken, process, seconds = _seconds_of_cores(), time.process_time(), self.seconds
        if taken is None or self.taken is None or seconds < SAMPLE_S:
            return None
        return max(0.0, (taken - self.taken - (process - self.own)) / seconds)


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
    limits = [math.inf]
    for folder, unified in _groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # not there, or "max": without a limit
            names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            most, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            limits += [most / period] if most > 0 else []
    return min(limits)


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
        decided = decide_threads(cores, _quota(), self.meter.others(), os.environ, _threads_asked)
        os.environ.update(decided.variables)
        try:
            execute(torch)
        finally:
            for name in decided.variables:
                del os.environ[name]
        if decided.count is not None:
            torch.set_num_threads(_threads_asked or min(decided.count, torch.get_num_threads()))
        threads = decided


def watch_torch() -> None:
    """From now on the import of torch decides about its threads; nothing where it has been imported already."""
    if "torch" not in sys.modules and not any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
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
