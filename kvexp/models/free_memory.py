"""Free memory of this computer, within the limits set for this process and for the control groups it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
    try:
        import resource
    except ImportError:  # Windows has none
        return UNKNOWN
    limit, taken = resource.getrlimit(resource.RLIMIT_AS)[0], _lines(PROC / "self/statm")
    if limit == resource.RLIM_INFINITY or not taken:
        return UNKNOWN
    return int(limit) - int(taken[0].split()[0]) * resource.getpagesize()


def _of_groups() -> Iterator[int]:
    """Free bytes under the memory limit of each control group around this process (containers, SLURM)."""
    for line in _lines(PROC / "self/cgroup"):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if not controllers:
            yield from _left(CGROUPS, path, V2)
        elif "memory" in controllers.split(","):
            yield from _left(CGROUPS / "memory", path, V1)


def _left(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Free bytes of the control group at `path` under `root`, and of each group above it.

    names: its files of limit and usage, and the field of reclaimable bytes. Inside a container the path may be the
    host's: then the root is the group.
    """
    limit, taken, cached = names
    group = root / os.path.normpath(path).lstrip("/.")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # not there, or "max": without a limit
            most, now = (int((folder / name).read_text()) for name in (limit, taken))
            stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
            yield most - now + int(stat.get(cached, 0))
        if folder == root:
            return


def _lines(path: Path) -> list[str]:
    """Lines of a text file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
