"""Seconds per token against prompt, budget and batch, eviction at every step, against Hugging Face's full cache.

    python -m benchmarks.decode --prompts 1024 2048 4096 8192 --batches 1 8

Each variant prefills one prompt once; every turn decodes from a copy of that. "x floor": the measured time over the
time to read the step's bytes at the bandwidth this machine showed in the same turns. The speed-up that the bytes
predict is over the faster of the two full caches. What it costs to score, select and overwrite is the time above that
of full attention over as many slots ("short"), the difference of the two attention kernels included.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clock import Bandwidth, Ratio, Sample, busy, in_turns, ratio, spent, step_bytes
from benchmarks.command import Command, Line, Target, error_of, shape_of
from benchmarks.shapes import (
    NAME,
    Shape,
    Variant,
    copied,
    decoded,
    ours,
    packed,
    prefilled,
    prompt_of,
    static_cache,
    stock,
    variant,
)
from benchmarks.store import Cell
from kvexp.util.output import watch_pipes

RATIOS = (0.2, 0.5)
CLOCKS = ("tpot_s", "cpu_s")
# Most seconds per token over Hugging Face's, by prompt, of the real model on two cores.
REAL = {
    "full": dict.fromkeys((1024, 4096, 6144), 0.90),
    "h2o@0.2": {1024: 0.82, 4096: 0.66, 6144: 0.58},
    "keyformer@0.2": {1024: 0.84, 4096: 0.68, 6144: 0.60},
    "a2sf@0.2": {1024: 0.82, 4096: 0.66, 6144: 0.58},
}
METHODS = ("h2o", "keyformer", "a2sf", "streaming_llm")
DEFAULT = ["hf", "hf_static", "full", *(f"{method}@{share}" for share in RATIOS for method in (*METHODS, "short"))]


class Prefilled:
    """What one prompt leaves behind, per variant: prefilled when first asked for, and kept for every batch size."""

    def __init__(self, options: Any, prompt: int) -> None:
        self.options, self.prompt, self.device, self.new = options, prompt, options.device, options.new
        self.kept: dict[Variant, Any] = {}

    @functools.cached_property
    def shape(self) -> Shape:
        return shape_of(self.options).fitted(self.prompt + self.new + 8)

    @functools.cached_property
    def theirs(self) -> Any:
        return stock(self.shape, self.device)

    @functools.cached_property
    def packed(self) -> Any:
        return packed(self.theirs)

    @functools.cached_property
    def mine(self) -> Any:
        return ours(self.theirs)

    def model(self, v: Variant) -> Any:
        """The model that a variant runs on: the same weights in all of them."""
        return {"hf": lambda: self.theirs, "hf_packed": lambda: self.packed, "kvexp": lambda: self.mine}[v.model]()

    def of(self, v: Variant) -> Any:
        """Hugging Face's cache, or kvexp's context."""
        if v not in self.kept:
            self.kept[v] = self._prefill(v)
        return self.kept[v]

    def _prefill(self, v: Variant) -> Any:
        if v.theirs:
            static = static_cache(self.theirs, self.prompt + self.new + 1) if v.kind == "hf_static" else None
            return prefilled(self.model(v), prompt_of(self.shape, self.prompt, self.device), static)
        from kvexp.generate import prefill

        ids, plan = prompt_of(self.shape, v.prompt_tokens(self.prompt)).tolist(), v.plan(self.prompt)
        how = {"max_new_tokens": self.new + 1, "beyond_context": True, "quantization": v.quantization(self.mine)}
        return prefill(self.mine, ids, *plan, graph=v.graph, **how)

    def decode(self, v: Variant, batch: int) -> Sample:
        """One turn: decode `batch` rows from a copy."""
        if v.theirs:
            return decoded(self.model(v), copied(self.of(v), batch), batch, self.prompt, self.new, self.device)
        from kvexp.generate import GenerationParams, generate_from_context

        rows, decoding = self.of(v).fork([0] * batch), GenerationParams(self.new, eos=None)
        answer, wall, cpu = spent(
            lambda: generate_from_context(self.mine, rows, [[0]] * batch, decoding=decoding), self.device
        )
        return {"tpot_s": answer.timing.tpot_s, "wall_s": wall / self.new, "cpu_s": cpu / self.new}


def measure(options: Any, left: Prefilled, batch: int) -> list[dict[str, Any]]:
    """One cell: every variant after a prompt, `batch` rows of it."""
    bandwidth = Bandwidth(options.device, 1 if options.tiny else None)
    chosen = [variant(name) for name in options.variants]
    if batch > 1:  # a static cache cannot be repeated row by row, and its prefill of a batch takes minutes on a CPU
        chosen = [v for v in chosen if v.kind != "hf_static"]
    tasks: dict[str, Callable[[], Sample]] = {v.name: functools.partial(left.decode, v, batch) for v in chosen}
    samples = in_turns({**tasks, "bandwidth": bandwidth.sample}, options.repeats)
    rows: list[dict[str, Any]] = [{"variant": "bandwidth", "samples": samples["bandwidth"]}]
    for v in chosen:
        slots = v.slots(left.prompt, left.new)
        size = step_bytes(left.theirs, slots, batch)
        rows.append({"variant": v.name, "slots": slots, "step_bytes": size, "samples": samples[v.name]})
    return rows


def title(key: Cell) -> str:
    return f"{key['shape']}, {key['prompt']} + {key['new']} tokens, batch {key['batch']}"


def lines(cell: Cell) -> list[Line]:
    """Time per token over Hugging Face's; then how much of the bytes' speed-up was reached; then what books cost."""
    key, rows = cell["key"], {row["variant"]: row for row in cell["rows"]}
    bandwidth = statistics.median(s["bytes_per_s"] for s in rows.pop("bandwidth")["samples"])
    good = {name: row for name, row in rows.items() if error_of(row) is None}
    said = [Line(name, None, note=error_of(row) or "") for name, row in rows.items() if name not in good]
    if "hf" in good:
        said += [_per_token(name, row, good["hf"], bandwidth, key) for name, row in good.items()]
    if "hf_packed" in good:  # without what the linear layers gain: eviction's own part
        said += [_over_packed(name, row, good["hf_packed"]) for name, row in good.items() if not variant(name).theirs]
    full = min((n for n in ("hf", "full") if n in good), key=lambda n: statistics.median(_times(good[n])), default=None)
    evicting = {name: row for name, row in good.items() if "@" in name and variant(name).kind != "short"}
    evicting = {name: row for name, row in evicting.items() if variant(name).bits == 16}  # codes move other bytes
    if full:
        said += [_of_the_bytes(name, row, full, good[full], key) for name, row in evicting.items()]
    pairs = ((name, row, good.get(f"short@{variant(name).kv_ratio:g}")) for name, row in evicting.items())
    return said + [_books(name, row, short, key) for name, row, short in pairs if short is not None]


def _per_token(name: str, row: Any, hf: Any, bandwidth: float, key: Cell) -> Line:
    """Over Hugging Face's full cache: at 20 % after 4k tokens at most 0.60; REAL's limits for the real model."""
    at = (key["shape"], key["prompt"], key["batch"], key["device"]) == ("to_beat", 4096, 1, "cpu")
    target = Target(0.60, "<=") if at and name in ("h2o@0.2", "keyformer@0.2", "a2sf@0.2") else None
    if key["shape"] == NAME and key["batch"] == 1 and key["prompt"] in REAL.get(name, {}):
        target = Target(REAL[name][key["prompt"]], "<=")
    typical = statistics.median(_times(row))
    rate, floor = row["step_bytes"] / typical, typical / (row["step_bytes"] / bandwidth)
    wall, cpu = (ratio(_times(row, clock), _times(hf, clock)) for clock in CLOCKS)
    return Line(f"{name}: seconds per token / hf", wall, cpu, rate, floor, target, busy(row["samples"]))


def _over_packed(name: str, row: Any, packed: Any) -> Line:
    wall, cpu = (ratio(_times(row, clock), _times(packed, clock)) for clock in CLOCKS)
    return Line(f"{name}: seconds per token / hf_packed", wall, cpu, note=busy(row["samples"]))


def _of_the_bytes(name: str, row: Any, over: str, full: Any, key: Cell) -> Line:
    """The issue: after 8k tokens at least 0.8 of the speed-up that the bytes predict on a CPU, 0.9 on a GPU."""
    predicted = full["step_bytes"] / row["step_bytes"]
    wall, cpu = (ratio([t / predicted for t in _times(full, clock)], _times(row, clock)) for clock in CLOCKS)
    target = Target(0.8 if key["device"] == "cpu" else 0.9, ">=")
    title, judged = f"{name}: of the speed-up over {over} that the bytes predict", key["prompt"] >= 8192
    return Line(title, wall, cpu, target=target if judged and not key["tiny"] else None, note=busy(row["samples"]))


def _books(name: str, row: Any, short: Any, key: Cell) -> Line:
    """The issue: at most 5 % of a step."""
    wall, cpu = (_excess(_times(row, clock), _times(short, clock)) for clock in CLOCKS)
    target = None if key["tiny"] else Target(0.05, "<=")
    title = f"{name}: score, select and overwrite, of a step"
    return Line(title, wall, cpu, target=target, note=busy(row["samples"]))


def _excess(times: list[float], least: list[float]) -> Ratio:
    return ratio([t - s for t, s in zip(times, least, strict=True)], times)


def _times(row: dict[str, Any], clock: str = "tpot_s") -> list[float]:
    return [sample[clock] for sample in row["samples"]]


def main(arguments: list[str] | None = None) -> int:
    command = Command("decode", __doc__, arguments)
    command.add("--shape", default="to_beat")
    command.add("--prompts", type=int, nargs="+", default=[1024, 4096])
    command.add("--batches", type=int, nargs="+", default=[1])
    command.add("--new", type=int, default=64)
    command.add("--variants", nargs="+", default=DEFAULT)
    options = command.options()
    for prompt in options.prompts:
        left = Prefilled(options, prompt)
        for batch in options.batches:
            key = {"prompt": prompt, "batch": batch, "new": options.new, "variants": options.variants}
            with torch.no_grad():
                command.cell(key, functools.partial(measure, options, left, batch), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
