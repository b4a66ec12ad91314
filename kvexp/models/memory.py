"""Free memory of this computer."""

from __future__ import annotations

import os


def available() -> int:
    """Bytes that can be taken without pushing anything out; more than there can be where the system does not tell."""
    with open("/proc/meminfo") if os.path.exists("/proc/meminfo") else open(os.devnull) as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
