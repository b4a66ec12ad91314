"""Predicted times of an A100 by `benchmarks.roofline`, and the same predictor held against what a CPU measured.

    python -m benchmarks.predict

Writes benchmarks/predicted/: cpu.json (every measured CPU cell, its prediction and the error), and one file per
benchmark of the GPU suite with the cells' keys, so that the first real run can be laid beside it. Predictions never
enter benchmarks/results, and every cell carries the predictor's error on the CPU.

What a GPU reaches is its data sheet's, by a share. How fast the CPU multiplies is found from the prompts of one model
(`CALIBRATION`, the real one); the prompts, steps and sweeps of the other models are what the predictor is held against.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import real_model
from benchmarks.roofline import Speeds, decode_step, generation, layout, prefill, sweep
from benchmarks.store import Cell, Results
from benchmarks.variants import THEIRS, variant
from kvexp.run.plan import MACHINES
from kvexp.util import watch_pipes

PREDICTED = Path(__file__).resolve().parent / "predicted"
LABEL = "predicted, A100 80GB"
A100 = Speeds.of(MACHINES["a100"])
CALIBRATION = real_model.NAME  # of no prompt, step or sweep that the predictor is held against
PAPER = ("full", "h2o@0.9", "keyformer@0.5", "h2o@0.5")
LONG = ("full", "h2o@0.2", "keyformer@0.2", "a2sf@0.2", "h2o@0.5", "keyformer@0.5")
SWEEP = ("full", *(f"{method}@{share}" for method in ("h2o", "keyformer", "a2sf") for share in ("0.2", "0.5", "0.7")))


def cpu_speeds(cell: Cell, bandwidth: float, prompts: list[Cell]) -> Speeds:
    """The CPU of a measured cell: the bandwidth that its run reached, else `bandwidth`; products as fast as `prompts`,
    the prefills of the calibration's model, say, else as in plans.
    """
    rows = [row for row in cell["rows"] if row["variant"] == "bandwidth"]
    reached = statistics.median(sample["bytes_per_s"] for sample in rows[0]["samples"]) if rows else bandwidth
    plain, threads = Speeds.of(MACHINES["cpu"]), cell["key"]["threads"]
    found = replace(plain, bandwidth=reached)
    here = [one for one in prompts if one["key"]["threads"] == threads]
    if len(here) < 2:
        each = plain.linear * threads
        return replace(found, linear=each, attention=each, observation=each)
    linear, attention, observation = product_rates(here)
    return replace(found, linear=linear, attention=attention, observation=observation)


def product_rates(prompts: list[Cell]) -> tuple[float, float, float]:
    """Operations per second of linear layers, of attention and of an observation, from one model's prompts.

    A short prompt takes its time in linear layers, a long one in attention: the rates are those of least squared
    relative error over all lengths with the full cache. What H2O takes beyond it is the observation.
    """
    of, full, h2o = layout(CALIBRATION), variant("full"), variant("h2o@0.2")
    work = [prefill(of, h2o, cell["key"]["prompt"], 1) for cell in prompts]
    taken = [_ttft(cell, full.name) for cell in prompts]
    shares = [[one.linear / s, one.attention / s] for one, s in zip(work, taken, strict=True)]
    (linear, attention), *_ = np.linalg.lstsq(np.array(shares), np.ones(len(shares)), rcond=None)
    beyond = [_ttft(cell, h2o.name) - s for cell, s in zip(prompts, taken, strict=True)]
    observation = statistics.median(one.observation / s for one, s in zip(work, beyond, strict=True))
    return float(1 / linear), float(1 / attention), observation


def _ttft(cell: Cell, name: str) -> float:
    """Median seconds to the first token."""
    row = next(row for row in cell["rows"] if row["variant"] == name)
    return statistics.median(sample["ttft_s"] for sample in row["samples"])


def cpu_check(folder: Path | None = None) -> list[dict[str, Any]]:
    """Every variant of every CPU cell of decode, prefill and sweep: measured and predicted seconds, and the error."""
    every = {name: Results(name, *([folder] if folder else [])).cells for name in ("decode", "prefill", "sweep")}
    found = {name: [cell for cell in cells if _on_cpu(cell)] for name, cells in every.items()}
    prompts = [cell for cell in every["prefill"] if _calibrates(cell)]
    reached = [cpu_speeds(cell, 0, prompts).bandwidth for cell in found["decode"]]
    lines = []
    for name, cells in found.items():
        for cell in cells:
            at = cpu_speeds(cell, statistics.median(reached), prompts)
            for what, measured, predicted in _compared(name, cell, at):
                error = predicted / measured - 1
                key = {k: cell["key"][k] for k in ("shape", "model", "prompt", "batch", "rows") if k in cell["key"]}
                seconds = {"measured_s": _short(measured), "predicted_s": _short(predicted), "error": round(error, 3)}
                lines.append({"benchmark": name, **key, "variant": what, **seconds})
    return lines


def _calibrates(cell: Cell) -> bool:
    """Whether a cell is the calibration's: a prompt of its model on a CPU."""
    key = cell["key"]
    return bool(key["shape"] == CALIBRATION and key["device"] == "cpu" and not key["tiny"])


def _on_cpu(cell: Cell) -> bool:
    """Whether a cell is a CPU's, of a layout that a prediction knows."""
    key = cell["key"]
    known = key.get("shape") in ("to_beat", "llama_100m") or key.get("model") == "100m"
    return key["device"] == "cpu" and not key["tiny"] and known


def _compared(name: str, cell: Cell, at: Speeds) -> list[tuple[str, float, float]]:
    """(variant, measured, predicted) of a cell."""
    key = cell["key"]
    if name == "sweep":
        of, variants = layout("llama_100m"), [variant(each) for each in SWEEP]
        made = sweep(at, of, variants, 2048, 64, key["rows"])
        measured = {row["variant"]: row["samples"] for row in cell["rows"]}
        pairs = (("basic", "one_by_one_s"), ("shared_prefill", "shared_s"))
        return [(each, statistics.median(s["wall_s"] for s in measured[each]), made[how]) for each, how in pairs]
    of, lines = layout(key["shape"]), []
    for row in cell["rows"]:
        if row["variant"] == "bandwidth":
            continue
        v = variant(row["variant"])
        if name == "decode":
            seconds = decode_step(of, v, row["slots"], key["batch"]).seconds(at)
        else:
            seconds = prefill(of, v, key["prompt"], 1).seconds(at)
        field = "tpot_s" if name == "decode" else "ttft_s"
        lines.append((row["variant"], statistics.median(sample[field] for sample in row["samples"]), seconds))
    return lines


def errors(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By benchmark: the median and the largest of the errors' sizes, and of how many; Hugging Face's caches apart."""
    sizes: dict[str, list[float]] = {}
    for line in lines:
        theirs = line["variant"].partition("@")[0] in THEIRS  # they copy, which is not predicted
        sizes.setdefault(line["benchmark"] + " of Hugging Face" * theirs, []).append(abs(line["error"]))
    return {
        name: {"median": round(statistics.median(each), 2), "largest": round(max(each), 2), "of": len(each)}
        for name, each in sizes.items()
    }


def whole_cells() -> list[Cell]:
    """Keyformer's Table 1 and Fig. 9 on MPT-7B, and long prompts of Llama-2-7B."""
    cells = []
    for length in (1024, 2048, 4096):
        for batch, beams in ((1, 1), (1, 4), (2, 4)):
            cells.append(_whole("mpt_7b", length, length, batch, beams, PAPER))
    return [*cells, *(_whole("llama2_7b", length, 64, 1, 1, LONG) for length in (2048, 8192, 32768))]


def _whole(shape: str, prompt: int, new: int, batch: int, beams: int, names: tuple[str, ...]) -> Cell:
    of, rows = layout(shape), []
    for name in names:
        v = variant(name)
        made = generation(A100, of, v, prompt, new, batch * beams)
        limit = decode_step(of, v, v.slots(prompt, new), batch * beams).limit(A100)
        rows.append({"variant": name, "samples": [_rounded(made)], "step_limited_by": limit})
    return {"key": {"shape": shape, "length": f"{prompt}+{new}", "batch": batch, "beams": beams}, "rows": rows}


def figure_cells() -> list[Cell]:
    """Keyformer's Figs. 1 and 10 on MPT-7B, as `benchmarks.keyformer_figures` measures them."""
    of, full = layout("mpt_7b"), variant("full")
    first = [
        {
            "variant": str(n),
            "kv_bytes": 2 * n * of.token_bytes,
            "weight_bytes": of.read_bytes,
            "samples": [_rounded(generation(A100, of, full, n, n, 1))],
        }
        for n in (512, 1024, 2048, 4096, 8192)
    ]
    last: list[dict[str, Any]] = [_step("little", full, 64)]
    for n in (512, 1024, 2048, 4096):
        for name in ("full", "keyformer@0.5", "keyformer_quiet@0.5"):
            v = variant(name)
            last.append(_step(f"{n} {name}", v, n + n // 2 if v.grows else v.slots(n, 0)))
    lengths = [512, 1024, 2048, 4096]
    return [
        {"key": {"shape": "mpt_7b", "figure": 1, "lengths": [*lengths, 8192], "beams": 1}, "rows": first},
        {"key": {"shape": "mpt_7b", "figure": 10, "lengths": lengths, "beams": 1}, "rows": last},
    ]


def _step(name: str, v: Any, slots: float) -> dict[str, Any]:
    seconds = decode_step(layout("mpt_7b"), v, slots, 1).seconds(A100)
    return {"variant": name, "samples": [_rounded({"tpot_s": seconds})]}


def sweep_cells() -> list[Cell]:
    """Nine variants and the full cache on 100 prompts of 2k tokens, 128 new tokens each."""
    cells = []
    for shape in ("mpt_7b", "llama2_7b"):
        made = sweep(A100, layout(shape), [variant(name) for name in SWEEP], 2048, 128, 100)
        key = {"shape": shape, "prompt": 2048, "new": 128, "rows": 100, "variants": list(SWEEP)}
        cells.append(
            {"key": key, "rows": [{"variant": name, "samples": [{"wall_s": _short(s)}]} for name, s in made.items()]}
        )
    return cells


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: _short(value) for name, value in seconds.items()}


def _short(value: float) -> float:
    """Four digits: a prediction has no more."""
    return float(f"{value:.4g}")


def predictions() -> dict[str, Any]:
    """The files of benchmarks/predicted by name."""
    check = cpu_check()
    about = {
        "machine": LABEL,
        "flops": _short(A100.linear),
        "bandwidth": _short(A100.bandwidth),
        "layer_s": A100.layer_s,
        "predictor_error_on_cpu": errors(check),
    }
    made = {"whole": whole_cells(), "keyformer_figures": figure_cells(), "sweep": sweep_cells()}
    files: dict[str, Any] = {name: [{**cell, "from": about} for cell in cells] for name, cells in made.items()}
    return {"cpu": {"errors": errors(check), "lines": check}, **files}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 where the files are out of date"
    )
    options = parser.parse_args(arguments)
    stale = []
    for name, content in predictions().items():
        path, text = PREDICTED / f"{name}.json", json.dumps(content, indent=1) + "\n"
        if options.check:
            stale += [] if path.exists() and path.read_text("utf-8") == text else [path.name]
            continue
        PREDICTED.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name == "cpu":
            print(json.dumps(content["errors"], indent=1))
    for name in stale:
        print(f"benchmarks/predicted/{name} is out of date: python -m benchmarks.predict")
    return 1 if stale else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
