"""The first hour on a GPU: `make gpu-first` runs what no GPU has run yet, in order, and writes one report to send back.

    python -m benchmarks.gpu_first                 # about an hour; --only NAME … runs some lines
    python -m benchmarks.gpu_first --report FILE   # default: gpu_report.md

A line is green where its command ended with 0 and, of tests, at least one has run. docs/gpu_details.md says what each
shows and what to do where it is red.
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

from benchmarks.store import ROOT, provenance
from kvexp.util.output import watch_pipes

TAIL = 40  # lines of a command's output that the report shows
MINUTES = 15  # per line


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
CHECKS = (
    Check("kernels", "the Triton kernels, compiled, give the naive truth", "pytest", f"{TESTS} {KERNELS}"),
    *(
        Check(name, shows, "pytest", f"{TESTS} -s {GPU} -k '{tests}'")
        for name, shows, tests in (
            ("memory", "tensors hold on the GPU what a CPU counted on a pretended one", "allocator"),
            ("slots", "CPU and GPU keep the same slots in float32; bounds in bfloat16", SLOTS),
            ("graphs", "decode steps replayed from a CUDA graph are the eager ones", GRAPHS),
            ("retrieval", "offloaded tokens come back in time", RETRIEVAL),
        )
    ),
    Check("decode", "seconds per token after 8k tokens", "benchmarks.suite", "gpu --only decode_8k"),
    Check("prefill", "time to the first token of 8k and 32k tokens", "benchmarks.suite", "gpu --only prefill"),
    Check("table1", "Keyformer's Table 1 at 1024+1024", "benchmarks.suite", "gpu --only table1_1k"),
)


@dataclass(frozen=True)
class Outcome:
    """How a check ended: its exit status (None: stopped at the limit), seconds, and the end of its output."""

    check: Check
    status: int | None
    seconds: float
    tail: str

    @property
    def word(self) -> str:
        ran = self.check.module != "pytest" or re.search(r"\b[1-9]\d* passed", self.tail)
        return "green" if self.status == 0 and ran else "RED"


def run(check: Check, minutes: float = MINUTES) -> Outcome:
    """Run one check to its limit."""
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
    lines = ["# First hour on a GPU", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| check | | seconds | shows |", "|---|---|---|---|"]
    for outcome in outcomes:
        lines.append(f"| {outcome.check.name} | {outcome.word} | {outcome.seconds:.0f} | {outcome.check.shows} |")
    for outcome in outcomes:
        lines += [
            "",
            f"## {outcome.check.name}: {outcome.word}",
            "",
            f"`{' '.join(outcome.check.line[1:])}`",
            "",
            "```",
            outcome.tail,
            "```",
        ]
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
    if any(check.name == "kernels" for check in checks) and find_spec("triton") is None:
        return "the line kernels needs Triton: pip install 'kvexp[gpu]', or leave it out: ARGS='--only memory slots …'"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first", description=__doc__)
    parser.add_argument("--only", nargs="+", default=None, choices=[check.name for check in CHECKS])
    parser.add_argument("--report", type=Path, default=Path("gpu_report.md"))
    options = parser.parse_args(arguments)
    chosen = [check for check in CHECKS if options.only is None or check.name in options.only]
    why = lacking(chosen)
    if why is not None:
        print(f"nothing was run: {why}", file=sys.stderr)
        return 1
    outcomes = []
    for check in chosen:
        outcomes.append(run(check))
        print(f"{outcomes[-1].word:5s} {check.name}: {outcomes[-1].seconds:.0f} s", flush=True)
        options.report.write_text(report(outcomes, provenance("cuda")), encoding="utf-8")
    print(f"{options.report}: please send it to the project, also where every line is green")
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
