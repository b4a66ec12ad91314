"""Start-up: --help, the core's import above torch's, one example by default, the model's share of a run.

    python -m benchmarks.startup

Ratios are seconds over the seconds allowed: at most 1.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clock import Sample, busy, in_turns, ratio
from benchmarks.command import Command, error_of
from benchmarks.processes import command as run_command
from benchmarks.store import Cell
from benchmarks.table import Line, Target
from kvexp.hf.fetch import WHEELS, whole
from kvexp.util import watch_pipes

TESTBED = ("model=testbed_rope", "task=testbed_summary")
REAL = "run.py limit=1, default model"  # measured where its weights were fetched
ALLOWED = {"run.py --help": 2.0, "import kvexp.core, above torch": 1.5, "run.py limit=1": 10.0, REAL: 15.0}


def measure(options: Any) -> list[dict[str, Any]]:
    """One cell: every command, in turns."""

    def run(*words: str) -> Sample:
        with tempfile.TemporaryDirectory() as out:
            sample = run_command(["run.py", *words, f"outputs_dir={out}"])
            return {**sample, "model_s": model_seconds(Path(out))}

    tasks = {
        "run.py --help": lambda: run_command(["run.py", "--help"]),
        "import torch": lambda: run_command(["-c", "import torch"]),
        "import kvexp.core": lambda: run_command(["-c", "import torch, kvexp.core"]),
        "run.py limit=1": functools.partial(run, *TESTBED, "limit=1"),
    }
    if whole(WHEELS["smollm2_135m"].gguf_sha256) is not None:
        tasks[REAL] = functools.partial(run, "limit=1")
    if options.rows:
        tasks["run.py"] = functools.partial(run, *TESTBED, f"limit={options.rows}")
    samples = in_turns(tasks, options.repeats)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def model_seconds(outputs: Path) -> float:
    """Seconds of prefill and decoding in the rows of a run. Rows of one batch carry the same times: counted once."""
    total = 0.0
    for file in outputs.glob("*/examples.jsonl"):
        batches = {}
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            times, steps = row.get("seconds") or {}, row.get("new_tokens") or 0
            if times.get("ttft") is None:
                continue
            place = (times["ttft"], times.get("tpot"))
            batches[place] = max(batches.get(place, 0), steps)
        total += sum(first + (each or 0.0) * max(0, steps - 1) for (first, each), steps in batches.items())
    return total


def title(key: Cell) -> str:
    return "start-up"


def lines(cell: Cell) -> list[Line]:
    """Seconds over what is allowed; the share of a run that the model takes."""
    rows = {row["variant"]: row["samples"] for row in cell["rows"]}
    found = []
    for name, allowed in ALLOWED.items():
        if name == REAL and name not in rows:
            continue
        wall, cpu = (_seconds(rows, name, clock) for clock in ("wall_s", "cpu_s"))
        over = [allowed] * len(wall)
        note = busy(rows.get(name, rows["import kvexp.core"]))
        found.append(
            Line(
                f"{name}: seconds / {allowed:g}", ratio(wall, over), ratio(cpu, over), None, None, Target(1, "<="), note
            )
        )
    for name in ("run.py limit=1", REAL, "run.py"):
        if name in rows and not error_of({"samples": rows[name]}):
            share = ratio([s["model_s"] for s in rows[name]], [s["wall_s"] for s in rows[name]])
            found.append(Line(f"{name}: prefill and decoding, of all its time", share))
    return found


def _seconds(rows: dict[str, list[Sample]], name: str, clock: str) -> list[float]:
    if name in rows:
        return [sample[clock] for sample in rows[name]]
    pairs = zip(rows["import kvexp.core"], rows["import torch"], strict=True)
    return [with_core[clock] - alone[clock] for with_core, alone in pairs]


def main(arguments: list[str] | None = None) -> int:
    command = Command("startup", __doc__, arguments)
    command.add(
        "--rows", type=int, default=None, help="also a run of so many of the testbed's examples, for the model's share"
    )
    options = command.options()
    command.cell({"rows": options.rows}, functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
