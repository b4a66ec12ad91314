"""Twelve minutes on a GPU: `make gpu-first` runs tests and times, the most valuable first, and writes one report.

    python -m benchmarks.gpu_first                 # --minutes N: in all; --only NAME …: some lines
    python -m benchmarks.gpu_first --report FILE   # default: gpu_report.md

A line is green where its command ended with 0 and, of tests, at least one has run. What no time is left for is named.
Times also go to benchmarks/results, with date and device. docs/gpu_details.md says what to do where a line is red.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import suite
from benchmarks.store import ROOT, provenance
from kvexp.util.output import watch_pipes

TAIL = 40  # lines of a command's output that the report shows
MINUTES, LINE = 12, 4  # at most: of all lines together, of one


@dataclass(frozen=True)
class Check:
    """One line of the report.

    name: as in docs/gpu_details.md; shows: what a green line says; module, words: `python -m module words`.
    """

    name: str
    shows: str
    module: str
    words: str

    @property
    def line(self) -> list[str]:
        return [sys.executable, "-m", self.module, *shlex.split(self.words)]


# Modules that the tests import, and the packages that bring them.
PACKAGES = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist", "hypothesis": "hypothesis"}
# What is known without a GPU.
WITHOUT = "Without a GPU there is make gpu-compile; docs/gpu_details.md says what a CPU can show."
TESTS = "-q -n0 -p no:cacheprovider --timeout=0"
GPU, KERNELS = "tests/core/test_gpu.py", "tests/core/test_triton.py"
# Words of the names of its tests.
SLOTS = "keep_the_same or bfloat16 or runs_are_identical or host_sync or renumbered or two_devices"
GRAPHS = "replayed or every_family or triton or together or captured or falls_back"
RETRIEVAL = "choose or offloading or pinned or cluster or flat or foreseen or home or oracle"


def _tests(name: str, shows: str, tests: str) -> Check:
    return Check(name, shows, "pytest", f"{TESTS} -s {GPU} -k '{tests}'")


def _times(name: str, shows: str, benchmark: str) -> Check:
    """A command of the suite, measured again also where it was measured before."""
    run = next(run for run in suite.GPU if run.name == benchmark)
    return Check(name, shows, f"benchmarks.{run.module}", f"{run.arguments} --again")


CHECKS = (
    _tests("graphs", "decode steps replayed from a CUDA graph are the eager ones", GRAPHS),
    _times("decode", "full cache and H2O after 8k tokens, captured and not", "captured_8k"),
    _times("rows", "one row and 24 of 2k tokens, captured", "captured_rows"),
    _times("prefill", "time to the first token of 8k tokens, with the kernels", "prefill_8k"),
    Check("kernels", "the Triton kernels, compiled, give the naive truth", "pytest", f"{TESTS} {KERNELS}"),
    _tests("slots", "CPU and GPU keep the same slots in float32; bounds in bfloat16", SLOTS),
    _tests("memory", "tensors hold on the GPU what a CPU counted on a pretended one", "allocator"),
    _tests("retrieval", "offloaded tokens come back in time", RETRIEVAL),
)


@dataclass(frozen=True)
class Outcome:
    """How a check ended: its exit status (None: stopped at a limit), seconds (0: not begun), the end of its output."""

    check: Check
    status: int | None
    seconds: float
    tail: str

    @property
    def word(self) -> str:
        if not self.seconds:
            return "not run"
        ran = self.check.module != "pytest" or re.search(r"\b[1-9]\d* passed", self.tail)
        return "green" if self.status == 0 and ran else "RED"


def run(check: Check, minutes: float) -> Outcome:
    """Run one check to its limit."""
    if minutes <= 0:
        return Outcome(check, None, 0.0, "no time was left")
    start = time.perf_counter()
    try:
        done = subprocess.run(
            check.line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=minutes * 60
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        status, output = None, (stopped.output or b"").decode(errors="replace") + f"\nstopped after {minutes:g} minutes"
    return Outcome(check, status, time.perf_counter() - start, "\n".join(output.splitlines()[-TAIL:]))


def report(outcomes: list[Outcome], about: dict[str, Any]) -> str:
    """The report as Markdown: where it ran, a line per check, then the end of every output."""
    lines = ["# First run on a GPU", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| check | | seconds | shows |", "|---|---|---|---|"]
    lines += [f"| {ran.check.name} | {ran.word} | {ran.seconds:.0f} | {ran.check.shows} |" for ran in outcomes]
    for outcome in outcomes:
        command = " ".join(outcome.check.line[1:])
        lines.append(f"\n## {outcome.check.name}: {outcome.word}\n\n`{command}`\n\n```\n{outcome.tail}\n```")
    return "\n".join(lines) + "\n"


def lacking(checks: Sequence[Check]) -> str | None:
    """What keeps these checks from running here, and what to do about it; None: nothing does."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA. On a machine with an NVIDIA GPU install torch's CUDA "
            f"build (https://pytorch.org/get-started/locally) and run this again. {WITHOUT}"
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA device: does nvidia-smi list one, and is its driver new enough "
            f"for CUDA {torch.version.cuda}? {WITHOUT}"
        )
    tests = any(check.module == "pytest" for check in checks)
    missing = [package for module, package in PACKAGES.items() if tests and find_spec(module) is None]
    if missing:
        return f"the tests need {', '.join(missing)}: make setup, or pip install {' '.join(missing)}"
    if any(check.name in ("kernels", "prefill") for check in checks) and find_spec("triton") is None:
        return "kernels and prefill need Triton: pip install 'kvexp[gpu]', or leave them out: ARGS='--only graphs …'"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first", description=__doc__)
    parser.add_argument("--only", nargs="+", default=None, choices=[check.name for check in CHECKS])
    parser.add_argument("--report", type=Path, default=Path("gpu_report.md"))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="at most, in all")
    options = parser.parse_args(arguments)
    chosen = [check for check in CHECKS if options.only is None or check.name in options.only]
    if (why := lacking(chosen)) is not None:
        print(f"nothing was run: {why}", file=sys.stderr)
        return 1
    about, outcomes, end = provenance("cuda"), list[Outcome](), time.monotonic() + 60 * options.minutes
    print(f"{about['machine']}, {about['date']}", flush=True)
    for check in chosen:
        outcomes.append(run(check, min(LINE, (end - time.monotonic()) / 60)))
        print(f"{outcomes[-1].word:7s} {check.name}: {outcomes[-1].seconds:.0f} s", flush=True)
        options.report.write_text(report(outcomes, about), encoding="utf-8")
    print(f"{options.report}: please send it to the project, also where every line is green")
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
