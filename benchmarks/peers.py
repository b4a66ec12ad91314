"""NVIDIA's kvpress against Hugging Face's full cache: what its presses cost at prefill, and per token.

    make peers && .venv-peers/bin/python -m benchmarks.peers --prompts 1024 2048 4096

kvpress needs an older transformers than kvexp, so the two never meet in one process: both are compared with Hugging
Face's full cache in their own run, and those ratios with each other (`python -m benchmarks.report`). "prefill" evicts
once, after the prompt; "every step" is DecodingPress with an interval of one token. Presses that look at attention
weights need eager attention, which materialises them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clock import Bandwidth, Sample, busy, in_turns, over, peak, spent, step_bytes
from benchmarks.command import Command, Line, error_of, shape_of
from benchmarks.shapes import decoded, prefilled, prompt_of, stock
from benchmarks.store import Cell
from kvexp.util.output import watch_pipes

# name -> (press, attention, where it evicts)
CASES = {
    "hf": (None, "sdpa", None),
    "observed_attention, prefill": ("ObservedAttentionPress", "eager", "prefill"),
    "streaming_llm, prefill": ("StreamingLLMPress", "sdpa", "prefill"),
    "snapkv, prefill": ("SnapKVPress", "sdpa", "prefill"),
    "observed_attention, every step": ("ObservedAttentionPress", "eager", "step"),
    "streaming_llm, every step": ("StreamingLLMPress", "sdpa", "step"),
    "knorm, every step": ("KnormPress", "sdpa", "step"),
}


def measure(options: Any, prompt: int) -> list[dict[str, Any]]:
    """One cell: every press after `prompt` tokens."""
    shape = shape_of(options).fitted(prompt + options.new + 8)
    device = options.device
    sdpa = stock(shape, device)
    eager = stock(shape, device, "eager")
    eager.load_state_dict(sdpa.state_dict(), assign=True)
    models = {"sdpa": sdpa, "eager": eager}
    bandwidth = Bandwidth(device, 1 if options.tiny else None)
    budget = int(options.kv_ratio * prompt + 1e-9)
    tasks: dict[str, Callable[[], Sample]] = {"bandwidth": bandwidth.sample}
    for name in options.cases:
        press, attention, place = CASES[name]
        tasks[name] = functools.partial(_one, press, place, models[attention], shape, prompt, budget, options)
    samples = in_turns(tasks, options.repeats)
    rows: list[dict[str, Any]] = [{"variant": "bandwidth", "samples": samples["bandwidth"]}]
    for name in options.cases:
        slots = prompt + options.new / 2 if CASES[name][0] is None else budget
        rows.append({"variant": name, "step_bytes": step_bytes(sdpa, slots, 1), "samples": samples[name]})
    return rows


def _one(
    press: str | None, place: str | None, model: Any, shape: Any, prompt: int, budget: int, options: Any
) -> Sample:
    """Prefill and decode under a press: seconds, and bytes needed above what was there."""
    import kvpress

    device, new = options.device, options.new
    ids = prompt_of(shape, prompt, device)
    at_prefill: Any = contextlib.nullcontext()
    at_steps: Any = contextlib.nullcontext()
    if place == "prefill":
        at_prefill = getattr(kvpress, press)(compression_ratio=1 - budget / prompt)(model)
    elif place == "step":  # the first step brings a full cache down to the budget: it belongs to the prefill
        at_steps = kvpress.DecodingPress(getattr(kvpress, press)(), compression_interval=1, target_size=budget)(model)

    def start() -> Any:
        with at_prefill:
            return prefilled(model, ids)

    (cache, wall, cpu), took, how = peak(lambda: spent(start, device), device)
    with at_steps:
        decoded(model, cache, 1, prompt, 1, device)
        times = decoded(model, cache, 1, prompt + 1, new, device)
    return {**times, "ttft_s": wall, "ttft_cpu_s": cpu, "peak_bytes": took, "peak_by": how}


def title(key: Cell) -> str:
    return f"kvpress on {key['shape']}, {key['prompt']} + {key['new']} tokens, kv_ratio {key['kv_ratio']:g}"


def lines(cell: Cell) -> list[Line]:
    """Time per token, to the first, and peak memory at prefill, over Hugging Face's full cache."""
    rows = {row["variant"]: row for row in cell["rows"]}
    bandwidth = statistics.median(s["bytes_per_s"] for s in rows.pop("bandwidth")["samples"])
    base = rows["hf"]["samples"]
    said = []
    for name, row in rows.items():
        if error_of(row) or error_of(rows["hf"]):
            said.append(Line(name, None, note=error_of(row) or "hf: no sample"))
            continue
        samples = row["samples"]
        typical = statistics.median(sample["tpot_s"] for sample in samples)
        rate, floor = row["step_bytes"] / typical, typical / (row["step_bytes"] / bandwidth)
        times, by_cpu = over(samples, base, "tpot_s"), over(samples, base, "cpu_s")
        said.append(Line(f"{name}: seconds per token / hf", times, by_cpu, rate, floor, note=busy(samples)))
        if name.endswith("prefill"):
            first, first_cpu = over(samples, base, "ttft_s"), over(samples, base, "ttft_cpu_s")
            said.append(Line(f"{name}: seconds of prefill / hf", first, first_cpu))
            said.append(Line(f"{name}: peak memory of prefill / hf", over(samples, base, "peak_bytes")))
    return said


def main(arguments: list[str] | None = None) -> int:
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    command = Command("peers", __doc__, arguments)
    command.add("--shape", default="to_beat")
    command.add("--prompts", type=int, nargs="+", default=[1024, 4096])
    command.add("--new", type=int, default=64)
    command.add("--kv-ratio", type=float, default=0.2)
    command.add("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = command.options()
    for prompt in options.prompts:
        key = {"prompt": prompt, "new": options.new, "kv_ratio": options.kv_ratio, "cases": options.cases}
        with torch.no_grad():
            command.cell(key, functools.partial(measure, options, prompt), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
