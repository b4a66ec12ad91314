"""A sweep through two Hydra launchers: how much one shared prefill saves, and whether the rows are the same.

    python -m benchmarks.sweep --slow basic --fast shared_prefill --model testbed

Nine variants (h2o, keyformer, a2sf at three budgets) and their baseline, each time into a fresh folder, the two
launchers in turns. testbed: the default model and task. 100m: a random Llama of 100 M parameters, 2k-token prompts and
64 new tokens. Times are of the whole command, start-up included.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clock import Sample, busy, in_turns, ratio
from benchmarks.command import Command
from benchmarks.processes import command as run_command
from benchmarks.shapes import SHAPES
from benchmarks.store import Cell
from benchmarks.table import Line, Target
from kvexp.util import watch_pipes

VARIANTS = ("method=h2o,keyformer,a2sf", "kv_ratio=0.2,0.5,0.7")
TARGETS = {"testbed": 4.0, "100m": 5.0}
# Of a row, what two runs of one configuration must agree in; the rest are times.
SAME = ("example", "index", "prompt_tokens", "skipped", "metrics", "new_tokens", "receipt", "output")


def overrides(model: str, folder: Path, rows: int | None, tiny: bool) -> list[str]:
    """Model and task of the sweep."""
    if model == "testbed":
        return ["model=testbed_rope", "task=testbed_summary", *([f"task.size={rows}"] if rows else [])]
    shape, prompt = (SHAPES["llama_100m"], 2048)
    if tiny:
        shape, prompt = shape.tiny(), 64
    stories = folder / "stories.jsonl"
    stories.write_text("".join(json.dumps({"id": i, "text": _text(i, 2 * prompt)}) + "\n" for i in range(rows or 2)))
    config = {**shape.config, "max_position_embeddings": 4096, "vocab_size": max(259, shape.config["vocab_size"])}
    fields = [f"++model.config.{name}={value}" for name, value in config.items()]
    answer = ["generation.max_new_tokens=64", "generation.eos=null"]
    return ["model=tiny", *fields, "task=stories", f"task.data_files={stories}", "task.nll=false", *answer]


def _text(seed: int, characters: int) -> str:
    """Words of five letters: with a byte tokenizer, half of them make a prompt of half as many tokens."""
    dice = random.Random(seed)
    words = ("".join(dice.choices("abcdefghij", k=5)) for _ in range(characters // 6))
    return " ".join(words)


def measure(options: Any) -> list[dict[str, Any]]:
    """One cell: both launchers, and in how many rows they differ."""
    with tempfile.TemporaryDirectory() as place:
        what = overrides(options.model, Path(place), options.rows, options.tiny)
        found: dict[str, dict[str, Any]] = {}

        def run(launcher: str) -> Sample:
            with tempfile.TemporaryDirectory(dir=place) as out:
                line = ["run.py", "-m", f"hydra/launcher={launcher}", *VARIANTS, *what, f"outputs_dir={out}"]
                sample = run_command(line)
                found[launcher] = rows_of(Path(out))
            return sample

        launchers = (options.slow, options.fast)
        samples = in_turns({name: functools.partial(run, name) for name in launchers}, options.repeats, warm=0)
    slow, fast = (found[name] for name in launchers)
    rows: list[dict[str, Any]] = [{"variant": name, "samples": samples[name]} for name in launchers]
    return [*rows, {"variant": "rows", "samples": [{"rows": len(slow), **differences(slow, fast)}]}]


def differences(slow: dict[str, Any], fast: dict[str, Any]) -> dict[str, Any]:
    """In how many rows the launchers differ, and in what."""
    places = [place for place in slow.keys() | fast.keys() if slow.get(place) != fast.get(place)]
    pairs = [(slow.get(place) or {}, fast.get(place) or {}) for place in places]
    return {"differ": len(places), "in": [name for name in SAME if any(a.get(name) != b.get(name) for a, b in pairs)]}


def rows_of(outputs: Path) -> dict[str, Any]:
    """Folder and example -> what must be the same whichever launcher wrote it, in whatever order."""
    found = {}
    for file in sorted(outputs.glob("*/examples.jsonl")):
        for row in map(json.loads, file.read_text("utf-8").splitlines()):
            found[f"{file.parent.name}/{row['example']}"] = {name: row.get(name) for name in SAME}
    return found


def title(key: Cell) -> str:
    rows = f", {key['rows']} rows" if key["rows"] else ""
    return f"{key['model']}: {' '.join(VARIANTS)} and the baseline{rows}"


def lines(cell: Cell) -> list[Line]:
    """How many times faster, and the rows' verdict."""
    key, (slow, fast, same) = cell["key"], cell["rows"]
    wall, cpu = (
        ratio([s[clock] for s in slow["samples"]], [s[clock] for s in fast["samples"]]) for clock in ("wall_s", "cpu_s")
    )
    told = same["samples"][0]
    verdict = f"{told['differ']} of {told['rows']} rows differ" + "".join(f", in {name}" for name in told.get("in", []))
    note = "; ".join(part for part in (busy(fast["samples"]), verdict) if part)
    target = None if key["tiny"] else Target(TARGETS[key["model"]], ">=")
    return [Line(f"seconds of {slow['variant']} / {fast['variant']}", wall, cpu, target=target, note=note)]


def main(arguments: list[str] | None = None) -> int:
    command = Command("sweep", __doc__, arguments)
    command.add("--slow", default="basic")
    command.add("--fast", default="shared_prefill")
    command.add("--model", choices=list(TARGETS), default="testbed")
    command.add("--rows", type=int, default=None, help="examples; default: all of the testbed's task, 2 of 100m")
    options = command.options()
    key = {"model": options.model, "slow": options.slow, "fast": options.fast, "rows": options.rows}
    command.cell(key, functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
