"""What `--dry-run` says of five sweeps, against what they then take: seconds, and bytes at the peak.

    python -m benchmarks.dry_run_check
    python -m benchmarks.dry_run_check --sweeps prompt_8k --limit-gib 12

First `--dry-run=measure` measures the models on this machine and keeps that in kvexp's cache folder; then each sweep is
planned and run, whole commands, into a fresh folder. Answers have their full length (generation.eos=null), as the plan
counts them. `prompt_8k` is a prompt of 8k tokens under twenty variants, with divergence: a sixth sweep, on request.
--limit-gib: address space of planning and of the sweep.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from typing import Any

from benchmarks.clock import Ratio, Sample
from benchmarks.command import Command
from benchmarks.processes import watched
from benchmarks.real_model import NAME
from benchmarks.store import Cell
from benchmarks.table import Line, Target
from kvexp.util import watch_pipes

MODELS = {"real": f"model={NAME}", "testbed": "model=testbed_rope"}
TWENTY = ("method=h2o,keyformer,a2sf,window,tova", "kv_ratio=0.2,0.5,0.7,0.9")
NEEDLE = ("task=needle", "task.filler=grass", "task.depths=[50]", "task.max_new_tokens=24", "divergence=true")
H2O_KEYFORMER = ("method=h2o,keyformer", "kv_ratio=0.2,0.5,0.7")
NEWS = ("task=news", "divergence=false")
# name -> (model, words of the command)
SWEEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "variants_20": ("real", (*NEWS, "limit=2", "task.max_new_tokens=48", *TWENTY)),
    "divergence": (
        "real",
        ("task=news", "divergence=true", "limit=3", "task.max_new_tokens=32", *H2O_KEYFORMER),
    ),
    "windows": (
        "real",
        (*NEWS, "limit=4", "task.max_new_tokens=64", "method=window,streaming_llm", "kv_ratio=0.2,0.5"),
    ),
    "prompt_3k": ("real", (*NEEDLE, "task.lengths=[3000]", "method=h2o,a2sf,tova", "kv_ratio=0.2,0.5")),
    "testbed": (
        "testbed",
        ("task=testbed_summary", "limit=24", "divergence=true", "method=h2o,a2sf,keyformer,window", "kv_ratio=0.2,0.5"),
    ),
}
ON_REQUEST = {"prompt_8k": ("real", (*NEEDLE, "task.lengths=[8000]", *TWENTY))}
KNOWN = SWEEPS | ON_REQUEST
SECONDS_OFF, BYTES_OFF = 0.3, 0.15  # of what was taken


def words_of(name: str, tiny: bool) -> list[str]:
    """The command line of a sweep; tiny: with two random layers, on few tokens."""
    model, words = KNOWN[name]
    if not tiny:
        return ["-m", MODELS[model], *words, "generation.eos=null"]
    small = ["model=tiny", "task=sample", "task.nll=false", "task.max_new_tokens=2", "limit=2", "generation.eos=null"]
    return ["-m", *small, *(word for word in words if word.startswith(("method=", "kv_ratio=", "divergence=")))]


def measure_models(names: list[str], tiny: bool) -> None:
    """Measure each model of these sweeps by the command itself."""
    models = ["model=tiny"] if tiny else sorted({MODELS[KNOWN[name][0]] for name in names})
    words = ["task=sample", "method=h2o", "kv_ratio=0.5", "limit=1"]
    for model in models:
        watched(["run.py", "--dry-run", model, *words])  # brings files into memory: the start is measured too
        watched(["run.py", "--dry-run=measure", model, *words])


def one(name: str, tiny: bool, limit: int | None) -> Sample:
    """Plan a sweep, then run it."""
    with tempfile.TemporaryDirectory() as out:
        words = [*words_of(name, tiny), f"outputs_dir={out}"]
        planned = json.loads(str(watched(["-m", "benchmarks.plan", *words], limit)["said"]).splitlines()[-1])
        taken = watched(["run.py", *words], limit)
    del taken["said"]
    return {**taken, "planned": planned}


def measure(options: Any) -> list[dict[str, Any]]:
    """One cell: every sweep, one after the other."""
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the commands
    measure_models(options.sweeps, options.tiny)
    limit = None if options.limit_gib is None else int(options.limit_gib * 2**30)
    turns = [{name: one(name, options.tiny, limit) for name in options.sweeps} for _ in range(options.repeats)]
    return [{"variant": name, "samples": [turn[name] for turn in turns]} for name in options.sweeps]


def title(key: Cell) -> str:
    limit = "" if key["limit_gib"] is None else f", in {key['limit_gib']:g} GiB of address space"
    return f"planned against taken{limit}"


def lines(cell: Cell) -> list[Line]:
    """By what share of what was taken a plan was off."""
    found = []
    for row in cell["rows"]:
        for what, key, taken_as, unit, most in (
            ("seconds", "seconds", "wall_s", 1.0, SECONDS_OFF),
            ("MB at the peak", "bytes", "peak_bytes", 1e6, BYTES_OFF),
        ):
            pairs = [(sample["planned"][key], sample[taken_as]) for sample in row["samples"]]
            if any(planned is None for planned, _ in pairs):
                found.append(Line(f"{row['variant']}: {what}", None, note="not known beforehand"))
                continue
            off = sorted(abs(planned / taken - 1) for planned, taken in pairs)
            said = ", ".join(f"{planned / unit:.3g} planned, {taken / unit:.3g} taken" for planned, taken in pairs)
            target = None if cell["key"]["tiny"] else Target(most, "<=")
            found.append(
                Line(
                    f"{row['variant']}: {what}, off by",
                    Ratio(off[len(off) // 2], off[0], off[-1]),
                    target=target,
                    note=said,
                )
            )
    return found


def main(arguments: list[str] | None = None) -> int:
    command = Command("dry_run_check", __doc__, arguments)
    command.add("--sweeps", nargs="+", default=list(SWEEPS), choices=list(KNOWN))
    command.add("--limit-gib", type=float, default=None)
    options = command.options()
    key = {"sweeps": options.sweeps, "limit_gib": options.limit_gib}
    command.cell(key, functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
