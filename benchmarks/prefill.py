"""Time to the first token and peak memory against the length of the prompt: what it costs a method to observe it.

    python -m benchmarks.prefill --prompts 1024 2048 4096 8192
    python -m benchmarks.prefill --prompts 8192 --observe naive --variants hf h2o@0.2

Everything is divided by Hugging Face's own full cache over SDPA in the same turn. What is measured is a whole
generation of one token: the model, the observation, the eviction at the end of the prompt. Peak memory is above the
weights and above the copies that packed linear layers keep. A prompt of 256 tokens warms every variant up.
"""

from __future__ import annotations

import functools
import statistics
import sys
from typing import Any

import torch

from benchmarks.clock import Sample, busy, in_turns, over, peak, spent
from benchmarks.command import Command, Line, Target, error_of, shape_of
from benchmarks.shapes import NAME, Shape, Variant, one, ours, packed, prompt_of, stock, variant
from benchmarks.store import Cell
from kvexp.util.output import watch_pipes

METHODS = ("h2o", "keyformer", "keyformer_quiet", "a2sf", "snapkv")
DEFAULT = ["hf", "full", *(f"{method}@0.2" for method in METHODS)]
WARM = 256
# Most seconds to the first token over Hugging Face's prefill, by prompt, of the real model on two cores.
REAL = {
    "full": dict.fromkeys((1024, 4096, 7168), 1.0),
    "h2o@0.2": {1024: 1.05, 4096: 1.12, 7168: 1.15},
    "keyformer@0.2": {1024: 1.08, 4096: 1.25, 7168: 1.30},
    "a2sf@0.2": dict.fromkeys((1024, 4096, 7168), 1.0),
}


def prefill(v: Variant, models: dict[str, Any], shape: Shape, prompt: int, observe: str) -> Sample:
    """One generation of one token."""
    device = str(next(models["hf"].parameters()).device)
    if v.theirs:
        sample, wall, cpu = spent(lambda: one(v, models, shape, prompt, 1, 1, 1, prompt), device)
        return {"ttft_s": sample["ttft_s"], "peak_bytes": sample["peak_bytes"], "wall_s": wall, "cpu_s": cpu}
    from kvexp.generate import GenerationParams, generate

    ids, plan = prompt_of(shape, prompt).tolist(), v.plan(prompt)
    said = {} if v.kind in ("full", "short") else {"observe": observe}
    run = functools.partial(generate, models["kvexp"], ids, *plan, decoding=GenerationParams(1, eos=None), **said)
    (answer, took, _), wall, cpu = spent(lambda: peak(lambda: run(beyond_context=True), device), device)
    return {"ttft_s": answer.timing.ttft_s, "peak_bytes": took, "wall_s": wall, "cpu_s": cpu}


def measure(options: Any, prompt: int) -> list[dict[str, Any]]:
    """Every variant over one prompt, in turns."""
    shape = shape_of(options).fitted(prompt + 8)
    theirs = stock(shape, options.device)
    models = {"hf": theirs, "kvexp": ours(theirs)}
    chosen = [variant(name) for name in options.variants]
    if any(v.model == "hf_packed" for v in chosen):
        models["hf_packed"] = packed(theirs)
    for v in chosen:
        prefill(v, models, shape, min(WARM, prompt), options.observe)
    tasks = {v.name: functools.partial(prefill, v, models, shape, prompt, options.observe) for v in chosen}
    samples = in_turns(tasks, options.repeats, warm=0)
    return [{"variant": v.name, "samples": samples[v.name]} for v in chosen]


def title(key: Cell) -> str:
    return f"{key['shape']}, prompt {key['prompt']}, observe={key['observe']}"


def lines(cell: Cell) -> list[Line]:
    """Time to the first token over Hugging Face's, then peak memory over Hugging Face's."""
    key, rows = cell["key"], {row["variant"]: row for row in cell["rows"]}
    good = {name: row["samples"] for name, row in rows.items() if error_of(row) is None}
    said = [Line(name, None, note=error_of(row) or "") for name, row in rows.items() if name not in good]
    if "hf" not in good:
        return said
    hf = good.pop("hf")
    said.append(Line(f"hf: {_median(hf, 'ttft_s'):.2f} s, {_median(hf, 'peak_bytes') / 2**20:.0f} MiB", None))
    for name, samples in good.items():
        time, cpu = (over(samples, hf, clock) for clock in ("ttft_s", "cpu_s"))
        said.append(
            Line(f"{name}: time to the first token / hf", time, cpu, None, None, _time(name, key), busy(samples))
        )
    for name, samples in good.items():
        note = f"{_median(samples, 'peak_bytes') / 2**20:.0f} MiB"
        memory = over(samples, hf, "peak_bytes")
        said.append(Line(f"{name}: peak memory / hf", memory, target=_memory(name, key), note=note))
    return said


def _time(name: str, key: Cell) -> Target | None:
    """The issue: 1.5 on a CPU after 8k tokens of the shape to beat; h2o 1.3 on a GPU after 32k of Llama-2-7B."""
    at = (key["shape"], key["prompt"], key["device"])
    if at == ("to_beat", 8192, "cpu") and name in ("h2o@0.2", "keyformer@0.2", "a2sf@0.2"):
        return Target(1.5, "<=")
    if at[0] == NAME and key["prompt"] in REAL.get(name, {}):
        return Target(REAL[name][key["prompt"]], "<=")
    return Target(1.3, "<=") if at == ("llama2_7b", 32768, "cuda") and name == "h2o@0.2" else None


def _memory(name: str, key: Cell) -> Target | None:
    if key["shape"] == NAME and key["prompt"] >= 7168:
        return Target(1.1, "<=")
    at = (key["shape"], key["prompt"], key["device"]) == ("to_beat", 8192, "cpu")
    return Target(1.2, "<=") if at and name in ("h2o@0.2", "keyformer@0.2", "a2sf@0.2") else None


def _median(samples: list[Sample], field: str) -> float:
    return statistics.median(sample[field] for sample in samples)


def main(arguments: list[str] | None = None) -> int:
    command = Command("prefill", __doc__, arguments)
    command.add("--shape", default="to_beat")
    command.add("--prompts", type=int, nargs="+", default=[1024, 4096])
    command.add("--observe", default="blocked", choices=("naive", "blocked", "triton"))
    command.add("--variants", nargs="+", default=DEFAULT)
    options = command.options()
    for prompt in options.prompts:
        key = {"prompt": prompt, "observe": options.observe, "variants": options.variants}
        with torch.no_grad():
            command.cell(key, functools.partial(measure, options, prompt), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
