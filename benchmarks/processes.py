"""Whole commands as a user types them: their seconds by the wall's clock and by the processor's, and their memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clock import Sample
from benchmarks.machine import ROOT


def command(arguments: Sequence[str]) -> Sample:
    """Run `python ARGUMENTS` in the repository; RuntimeError with what it said if it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"python {' '.join(arguments)} ended with {done.returncode}:\n{said}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "cpu_s": cpu}


LOOK_S = 0.5  # between two looks at the memory of a command, which take milliseconds of it


def watched(arguments: Sequence[str], limit: int | None = None) -> Sample:
    """`command`, with peak_bytes: the most its processes held together, and said: what it printed.

    Of one process that is its high-water mark. Of several, whose shared pages count once, it is the most that was seen,
    looking every LOOK_S: a shorter peak can be missed. limit: bytes of address space of each process.
    """

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        line = [sys.executable, *arguments]
        options = {"cwd": ROOT, "env": environment, "stdout": said, "stderr": subprocess.STDOUT}
        with subprocess.Popen(line, preexec_fn=limited, **options) as process:  # type: ignore[call-overload]
            while process.poll() is None:
                peak = max(peak, _held(process.pid))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        said.seek(0)
        text = said.read()
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {process.returncode}:\n{text[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak, "said": text}


def _held(process: int) -> int:
    """Bytes of a process at its own peak, or if it has others below it, of all of them now, shared pages once."""
    each = [process]
    for one in each:
        with contextlib.suppress(OSError):
            each += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    peak = _field(process, "status", "VmHWM")
    return peak if len(each) == 1 else max(peak, sum(_field(one, "smaps_rollup", "Pss") for one in each))


def _field(process: int, file: str, name: str) -> int:
    """Bytes of a line such as `Pss: 12 kB`; 0 where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/{file}").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0
