"""What few bits cost in time: prefill and seconds per token of quantised slots, beside the full cache's.

    python -m benchmarks.quantised --prompts 1024 4096

Each turn prefills one prompt under every variant and decodes `--new` tokens. `full` and `h2o` at half are the caches as
the model makes them; `k4v4` and the like are bits of keys and of values (docs/quantised_cache.md). Every step of a
quantised cache reads its codes, writes keys and values of a layer anew and reads them: `held` is what it keeps, `moved`
what a step reads and writes of the cache in all layers, from their sizes. h2o's own step is the fast one, which caches
of codes do not take.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.clock import Sample, busy, in_turns, ratio, settle
from benchmarks.command import Command, error_of, shape_of
from benchmarks.growth import prompts_of
from benchmarks.shapes import Shape, ours, stock
from benchmarks.store import Cell
from benchmarks.table import Line
from kvexp.util import watch_pipes

BITS = (8, 4, 2)
FULL = "full"


def configs_of(prompt: int, group: int) -> dict[str, Any]:
    """Variant -> what its cache does; group: numbers per scale."""
    from kvexp.core import Budget, CacheConfig, Quantization
    from kvexp.methods import H2O, Full

    half, window = Budget(tokens=max(4, prompt // 2)), min(32, max(1, prompt // 4))
    hows = {bits: Quantization(bits, bits, group=group, residual=window) for bits in BITS}
    made = {FULL: CacheConfig(Full(), beyond_context=True), "h2o half": CacheConfig(H2O(), half, beyond_context=True)}
    for bits, how in hows.items():
        made[f"full k{bits}v{bits}"] = CacheConfig(Full(), quantization=how, beyond_context=True)
    made["h2o half k4v4"] = CacheConfig(H2O(), half, quantization=hows[4], beyond_context=True)
    return made


def point(model: Any, config: Any, ids: list[int], new: int) -> Sample:
    """One prefill, and `new` tokens decoded."""
    from kvexp.generate import GenerationParams, decode, prefill

    device = str(next(model.parameters()).device)
    settle(device)
    cpu, start = time.process_time(), time.perf_counter()
    context = prefill(model, [ids], config, max_new_tokens=new)
    settle(device)
    between = time.perf_counter()
    (made,) = decode(model, [context], GenerationParams(new, eos=None), [0], None, start=start)
    settle(device)
    end, tracker = time.perf_counter(), made.cache.memory_tracker
    slots = [state.require_slots() for state in made.cache.layer_states]
    dense = sum(one.keys.nbytes + one.values.nbytes for one in slots)
    coded = config.quantization is not None
    return {
        "prefill_s": between - start,
        "step_s": (end - between) / (new - 1),
        "held_bytes": tracker.bytes,
        "peak_bytes": tracker.peak_bytes,
        "moved_bytes": tracker.bytes + 2 * dense if coded else dense,
        "wall_s": end - start,
        "cpu_s": time.process_time() - cpu,
    }


def measure(options: Any, shape: Shape, prompt: int) -> list[dict[str, Any]]:
    """Every variant on one prompt, in turns."""
    model = ours(stock(shape.fitted(prompt + options.new), options.device))
    (ids,) = prompts_of(shape, prompt, 1)
    width = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    configs = configs_of(prompt, min(32, int(width)))
    tasks = {name: functools.partial(point, model, config, ids, options.new) for name, config in configs.items()}
    samples = in_turns(tasks, options.repeats)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def title(key: Cell) -> str:
    return f"{key['shape']}, quantised slots, prompt of {key['prompt']} tokens, {key['new']} new"


def lines(cell: Cell) -> list[Line]:
    """Of each variant, over the full cache: seconds per token, then prefill; what it holds and moves."""
    rows = {row["variant"]: row["samples"] for row in cell["rows"] if error_of(row) is None}
    found = [Line(row["variant"], None, note=error_of(row) or "") for row in cell["rows"] if error_of(row)]
    full = rows.get(FULL)
    if full is None:
        return found
    for quantity, words in (("step_s", "seconds per token"), ("prefill_s", "prefill")):
        for name, samples in rows.items():
            each = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
            told = [busy(samples), f"{each[quantity]:.3g} s"]
            if quantity == "step_s":
                told += [f"{part} {each[f'{part}_bytes'] / 2**20:.3g} MiB" for part in ("held", "moved", "peak")]
            over = ratio([s[quantity] for s in samples], [s[quantity] for s in full]) if name != FULL else None
            found.append(Line(f"{words}: {name} / {FULL}", over, note="; ".join(part for part in told if part)))
    return found


def main(arguments: list[str] | None = None) -> int:
    command = Command("quantised", __doc__, arguments)
    command.add("--shape", default="smollm2_135m")
    command.add("--prompts", nargs="+", type=int, default=[1024, 4096])
    command.add("--new", type=int, default=24)
    options = command.options()
    shape = shape_of(options)
    for prompt in options.prompts:
        with torch.no_grad():
            key = {"prompt": prompt, "new": options.new}
            command.cell(key, functools.partial(measure, options, shape, prompt), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
