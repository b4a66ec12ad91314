"""How cost grows: seconds and bytes against the prompt's length, variants of a sweep, examples of a batch, and layers;
and seconds of kvexp's commands against the runs of an outputs folder.

    python -m benchmarks.growth

One axis is moved at a time from a prompt of 1,024 tokens, one variant (h2o at a fifth), one example and all layers of
the model; further variants are other methods at a fifth that share the prompt's prefill, further examples other prompts
that are prefilled one by one and decoded together. Each point is the prefill and `--new` decode steps. The exponent
between two neighbouring points is the slope on log-log axes: at 1 the cost doubles with the axis, at 0 it stays.

The axis `runs` has no model: folders of runs with 100 rows each, written as `kvexp run` writes them but with made-up
scores. Measured are whole commands on them: a table, the report, the plan of the sweep, and the finished sweep again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Sample, busy, in_turns, peak, ratio, run_command, settle
from benchmarks.command import Command, Line, error_of, shape_of
from benchmarks.shapes import Shape, ours, stock, text_ids
from benchmarks.store import Cell
from kvexp.util.output import watch_pipes

START = {"prompt": 1024, "variants": 1, "examples": 1, "layers": 0}  # layers: 0 stands for all
AXES: dict[str, tuple[int, ...]] = {
    "prompt": (512, 1024, 2048, 4096, 7936),
    "variants": (1, 2, 5, 10, 20, 40),
    "examples": (1, 2, 4, 8, 16),
    "layers": (4, 8, 15, 30),
    "runs": (10, 100, 1000),
}
TINY: dict[str, tuple[int, ...]] = {
    **{"prompt": (16, 32), "variants": (1, 3), "examples": (1, 2), "layers": (1, 2)},
    "runs": (2, 4),
}
QUANTITIES = {"prefill_s": "seconds of the prefill", "step_s": "seconds of a decode step", "kv_bytes": "KV bytes held",
              "peak_bytes": "peak bytes above the weights"}  # fmt: skip
SWEEP = ("model=testbed_gqa", "task=testbed_summary", "method=h2o", "limit=100", "divergence=false")
COMMANDS = {  # name -> (what it is called, its words; None: the sweep's own, with these behind)
    "results": ("kvexp results", ("results",)),
    "report": ("kvexp report", ("report",)),
    "plan": ("the sweep with --dry-run", None),
    "again": ("the finished sweep again", None),
}
BEND = 0.3  # a change of exponent that is called a bend


def configs_of(variants: int, prompt: int) -> list[Any]:
    """That many configurations of a sweep: five methods in turn, each with a fifth of the prompt."""
    from kvexp import methods
    from kvexp.core import Budget, CacheConfig

    kinds = itertools.cycle((methods.H2O, methods.Keyformer, methods.A2SF, methods.TOVA, methods.Window))
    budget = Budget(tokens=max(4, prompt // 5))
    return [CacheConfig.of(kind(), budget, beyond_context=True) for kind in itertools.islice(kinds, variants)]


def prompts_of(shape: Shape, prompt: int, examples: int) -> list[list[int]]:
    """Different prompts of one length."""
    if not shape.real:
        dice = torch.Generator().manual_seed(0)
        return torch.randint(0, shape.config["vocab_size"], (examples, prompt), generator=dice).tolist()
    ids = text_ids()
    step = (len(ids) - prompt) // max(1, examples)
    return [ids[i * step : i * step + prompt] for i in range(examples)]


def cut(model: Any, layers: int) -> Any:
    """The model with its first layers only, weights shared; all for 0."""
    if not layers:
        return model
    short = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    short.model.layers = short.model.layers[:layers]
    short.config.num_hidden_layers = layers
    return short


def point(model: Any, shape: Shape, at: dict[str, int], new: int) -> Sample:
    """Prefill and decode at one point."""
    from kvexp.generate import GenerationParams
    from kvexp.generate.loop import decode_batches
    from kvexp.generate.prefill import prefill_together

    prompts, configs = prompts_of(shape, at["prompt"], at["examples"]), configs_of(at["variants"], at["prompt"])
    device, times = str(next(model.parameters()).device), list[float]()

    def run() -> int:
        settle(device)
        times.append(time.perf_counter())
        batches = [prefill_together(model, [ids], configs, max_new_tokens=new) for ids in prompts]
        times.append(time.perf_counter())
        held = sum(context.cache.memory_tracker.bytes for batch in batches for context in batch)
        params = GenerationParams(new, eos=None)
        decode_batches(model, batches, params, [[0]] * len(batches), None, start=times[0])
        settle(device)
        times.append(time.perf_counter())
        return held

    before = time.process_time()
    held, took, _ = peak(run, device)
    prefill, decode = times[1] - times[0], times[2] - times[1]
    return {
        "prefill_s": prefill, "step_s": decode / (new - 1), "kv_bytes": held, "peak_bytes": took,
        "wall_s": prefill + decode, "cpu_s": time.process_time() - before,
    }  # fmt: skip


def measure(options: Any, axis: str) -> list[dict[str, Any]]:
    """Every point of one axis, in turns."""
    places = (TINY if options.tiny else AXES)[axis]
    start = {**START, "prompt": 32} if options.tiny else START
    shape = shape_of(options).fitted(max(START["prompt"], *AXES["prompt"]) + options.new)
    theirs = stock(shape, options.device)
    points = {place: {**start, axis: place} for place in places}
    models = {layers: ours(cut(theirs, layers)) for layers in {at["layers"] for at in points.values()}}
    for layers, model in models.items():  # its linear layers keep a copy of the weights from the first forward on
        point(model, shape, {**start, "layers": layers}, options.new)
    tasks = {
        str(place): functools.partial(point, models[at["layers"]], shape, at, options.new)
        for place, at in points.items()
    }
    samples = in_turns(tasks, options.repeats, warm=0)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def ratios(count: int) -> list[str]:
    """Budgets of that many runs."""
    return [f"{(place + 1) / (count + 1):.4f}" for place in range(count)]


def write_runs(folder: Path, count: int) -> None:
    """Runs of h2o at that many budgets, and the full cache's, as `kvexp run` leaves them; scores are made up."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from kvexp.run.batches import opened
    from kvexp.run.guard import guard
    from kvexp.run.jobs import HydraJob, runs_of
    from kvexp.run.session import Session, active
    from kvexp.util.files import CONF

    guard()
    session, wanted = Session(typed_keys={"kv_ratio"}), []
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        for place, ratio in enumerate(ratios(count)):
            words = [*SWEEP, f"outputs_dir={folder}", f"kv_ratio={ratio}"]
            config = compose("config", words, return_hydra_config=True)
            choices = {
                str(group): str(name) for group, name in config.hydra.runtime.choices.items() if name is not None
            }
            plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            wanted += runs_of(HydraJob(plain, words, choices, place), session)
    examples = list(wanted[0].task.examples())
    for place, (_, run) in enumerate(opened([wanted[0].baseline(), *wanted])):
        receipt = {"slots": 50.0, "kv_bytes": 1000, "peak_kv_bytes": 2000, "first_eviction_step": 0 if place else None}
        row = {"prompt_tokens": 100, "new_tokens": 11, "prompt_cut": False, "skipped": None, "receipt": receipt}
        row |= {"output": "an answer", "reference": "the answer", "seconds": {"ttft": 0.5, "tt2t": 0.6, "tpot": 0.05}}
        scores = {"rouge1": 40.0 - 10 * place / count, "rougeL": 30.0}
        run.append(*({**row, "example": e.id, "index": i, "metrics": scores} for i, e in enumerate(examples)))
        run.finish(len(examples))


def measure_runs(options: Any) -> list[dict[str, Any]]:
    """Every command on every folder, in turns; the sweep itself once before, so that it is known as finished."""
    places = (TINY if options.tiny else AXES)["runs"]
    with tempfile.TemporaryDirectory() as parent:
        tasks: dict[str, Callable[[], Sample]] = {}
        for count in places:
            folder = Path(parent) / str(count)
            write_runs(folder, count)
            sweep = ["run.py", "-m", *SWEEP, f"outputs_dir={folder}", f"kv_ratio={','.join(ratios(count))}"]
            time.sleep(3)  # files as young as a command are never taken for settled
            run_command(sweep)
            for name, (_, words) in COMMANDS.items():
                line = (
                    [*sweep, *["--dry-run"] * (name == "plan")]
                    if words is None
                    else ["-m", "kvexp", *words, str(folder)]
                )
                tasks[f"{count} {name}"] = functools.partial(run_command, line)
        samples = in_turns(tasks, options.repeats, warm=0)
    rows = []
    for count in places:
        turns_of = zip(*(samples[f"{count} {name}"] for name in COMMANDS), strict=True)
        rows.append({
            "variant": str(count),
            "samples": [
                {key: sum(sample[key] for sample in turn) for key in ("wall_s", "cpu_s")}
                | {f"{name}_s": sample["wall_s"] for name, sample in zip(COMMANDS, turn, strict=True)}
                | {f"{name}_bytes": sample["peak_bytes"] for name, sample in zip(COMMANDS, turn, strict=True)}
                for turn in turns_of
            ],
        })  # fmt: skip
    return rows


def quantities(axis: str) -> dict[str, str]:
    """Quantity -> its name, of what is measured along an axis."""
    if axis != "runs":
        return QUANTITIES
    seconds = {f"{name}_s": f"seconds of {words}" for name, (words, _) in COMMANDS.items()}
    return seconds | {f"{name}_bytes": f"peak bytes of {words}" for name, (words, _) in COMMANDS.items()}


def exponents(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Slopes between neighbours on log-log axes."""
    return [
        math.log(max(b, 1e-12) / max(a, 1e-12)) / math.log(q / p)
        for (p, a), (q, b) in itertools.pairwise(zip(places, values, strict=True))
    ]


def bends(places: Sequence[float], slopes: Sequence[float]) -> list[float]:
    """The inner points at which the exponent changes by more than `BEND`."""
    pairs = zip(places[1:-1], itertools.pairwise(slopes), strict=True)
    return [place for place, (before, after) in pairs if abs(after - before) > BEND]


def turns(row: dict[str, Any], quantity: str) -> list[float]:
    """What the turns of a point took; of peaks the least: pages that the system had taken back come on top."""
    values = [sample[quantity] for sample in row["samples"]]
    return [min(values)] if quantity == "peak_bytes" else values


def medians(cell: Cell, quantity: str) -> tuple[list[float], list[float]]:
    """(places, medians of the turns) of the points that ran."""
    rows = [row for row in cell["rows"] if error_of(row) is None]
    return [float(row["variant"]) for row in rows], [statistics.median(turns(row, quantity)) for row in rows]


def title(key: Cell) -> str:
    if key["axis"] == "runs":
        return "cost of commands against the runs of a folder, 100 rows each"
    return f"{key['shape']}, cost against {key['axis']}, {key['new']} new tokens"


def lines(cell: Cell) -> list[Line]:
    """Per quantity: last point over first, exponents between neighbours, and where they change."""
    rows = [row for row in cell["rows"] if error_of(row) is None]
    said = [Line(f"{row['variant']}", None, note=error_of(row) or "") for row in cell["rows"] if row not in rows]
    if len(rows) < 2:
        return said
    first, last = rows[0], rows[-1]
    for quantity, words in quantities(cell["key"]["axis"]).items():
        places, values = medians(cell, quantity)
        slopes = exponents(places, values)
        bent = ", ".join(f"{place:g}" for place in bends(places, slopes))
        notes = [
            busy(s for row in rows for s in row["samples"]),
            "exponents " + " ".join(f"{slope:.2f}" for slope in slopes),
            f"bends at {bent}" if bent else "",
            f"{shown(quantity, values[0])} to {shown(quantity, values[-1])}",
        ]
        title = f"{words}: {cell['key']['axis']} {places[-1]:g} / {places[0]:g}"
        under = turns(first, quantity)
        if min(under) <= 0:  # what the smallest point took fitted into memory that the process held already
            said.append(
                Line(title, None, note="; ".join(["nothing measured at the first point", *filter(None, notes)]))
            )
            continue
        over = ratio(turns(last, quantity), under)
        said.append(Line(title, over, note="; ".join(note for note in notes if note)))
    return said


def shown(quantity: str, value: float) -> str:
    return f"{value:.3g} s" if quantity.endswith("_s") else f"{value / 2**20:.3g} MiB"


def main(arguments: list[str] | None = None) -> int:
    command = Command("growth", __doc__, arguments)
    command.add("--shape", default="smollm2_135m")
    command.add("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    command.add("--new", type=int, default=12)
    options = command.options()
    for axis in options.axes:
        with torch.no_grad():
            key = {"axis": axis, "new": options.new}
            task = (
                functools.partial(measure_runs, options)
                if axis == "runs"
                else functools.partial(measure, options, axis)
            )
            command.cell(key, task, title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
