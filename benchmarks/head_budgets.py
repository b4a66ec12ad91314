"""Attention and bookkeeping of decode steps under budgets of kv heads, beside equal budgets of the same total.

    python -m benchmarks.head_budgets --prompt 4096 --batches 1 16

The model reads one prompt per variant, so that budgets are those of a real text; then every layer's cache takes random
queries, keys and values, step by step: products with weights are left out. A batch is copies of the one row. The method
is key_attention, whose heads differ most: it protects no token.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Sample, busy, in_turns, ratio, spent
from benchmarks.command import Command, error_of, shape_of
from benchmarks.shapes import ours, prompt_of, stock
from benchmarks.store import Cell
from benchmarks.table import Line, Target
from kvexp.util import watch_pipes

WAYS = ("uniform", "union", "adaptive", "global")
WARM = 4  # steps before the clock: the first ones copy what is shared and merge buffers
LIMIT = 1.25  # seconds over those of uniform budgets


class LayerSteps:
    """Decode steps of a prefilled cache's layers, fed with random tensors; used up by one turn."""

    def __init__(self, context: Any, batch: int, scale: float) -> None:
        from kvexp.core import AttentionParams

        self.states = context.fork([0] * batch).cache.layer_states
        self.params = AttentionParams(scale)

    def take(self, steps: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """So many steps; query [B, heads, steps, D], key and value [B, kv heads, steps, D]."""
        for step in range(steps):
            new = slice(step, step + 1)
            for state in self.states:
                state.forward(query[:, :, new], key[:, :, new], value[:, :, new], self.params, None)


def measure(options: Any, batches: list[int]) -> dict[int, list[dict[str, Any]]]:
    """Every way to share slots out, at every batch size."""
    from kvexp.core import Budget, CacheConfig
    from kvexp.generate import prefill
    from kvexp.methods import KeyAttention

    shape = shape_of(options).fitted(options.prompt + options.new + WARM + 8)
    model = ours(stock(shape, options.device))
    config, dice = model.config, torch.Generator().manual_seed(0)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ids = prompt_of(shape, options.prompt, options.device).tolist()
    contexts = {
        way: prefill(
            model, ids, CacheConfig(KeyAttention(), Budget(kv_ratio=options.ratio, heads=way), beyond_context=True),  # type: ignore[arg-type]
            max_new_tokens=options.new + WARM,
        )
        for way in WAYS
    }  # fmt: skip

    def turn(way: str, batch: int) -> Sample:
        steps = LayerSteps(contexts[way], batch, dim**-0.5)
        shapes = [(batch, count, options.new + WARM, dim) for count in (heads, kv_heads, kv_heads)]
        drawn = [torch.randn(shape, generator=dice).to(options.device) for shape in shapes]
        steps.take(WARM, *(x[:, :, :WARM] for x in drawn))
        _, wall, cpu = spent(lambda: steps.take(options.new, *(x[:, :, WARM:] for x in drawn)), options.device)
        return {"wall_s": wall / options.new, "cpu_s": cpu / options.new}

    found = {}
    for batch in batches:
        tasks: dict[str, Callable[[], Sample]] = {way: functools.partial(turn, way, batch) for way in WAYS}
        samples = in_turns(tasks, options.repeats)
        found[batch] = [{"variant": way, "samples": samples[way], **held(contexts[way].cache)} for way in WAYS]
    return found


def held(cache: Any) -> dict[str, Any]:
    """Bytes of keys and values after the prompt, and the slots of the widest head over the mean."""
    sizes = [len(head) for layer in range(len(cache.layers)) for head in cache.kept_positions(layer)[0]]
    return {"bytes": cache.memory_tracker.bytes, "widest": max(sizes) / statistics.mean(sizes)}


def title(key: Cell) -> str:
    return f"{key['shape']}, {key['prompt']} tokens, {key['ratio']:g} kept by key_attention, batch {key['batch']}"


def lines(cell: Cell) -> list[Line]:
    """Seconds per step over those of uniform budgets."""
    rows = {row["variant"]: row for row in cell["rows"]}
    uniform, found = rows.pop("uniform"), []
    for way, row in rows.items():
        if error := error_of(row) or error_of(uniform):
            found.append(Line(way, None, note=error))
            continue
        wall, cpu = (
            ratio([s[clock] for s in row["samples"]], [s[clock] for s in uniform["samples"]])
            for clock in ("wall_s", "cpu_s")
        )
        milliseconds = statistics.median(s["wall_s"] for s in row["samples"]) * 1e3
        note = (
            f"{milliseconds:.1f} ms a step; bytes {row['bytes'] / uniform['bytes']:.3f} of uniform; the widest head "
            f"has {row['widest']:.1f} times the mean"
        )
        measured = cell["key"]["device"] == "cpu" and not cell["key"]["tiny"]
        target = Target(LIMIT, "<=") if measured else None
        note = "; ".join(part for part in (busy(row["samples"]), note) if part)
        found.append(Line(f"{way}: seconds per step / uniform", wall, cpu, target=target, note=note))
    return found


def main(arguments: list[str] | None = None) -> int:
    command = Command("head_budgets", __doc__, arguments)
    command.add("--shape", default="smollm2_135m")
    command.add("--prompt", type=int, default=4096)
    command.add("--batches", type=int, nargs="+", default=[1, 16])
    command.add("--ratio", type=float, default=0.5)
    command.add("--new", type=int, default=32, help="steps per turn")
    options = command.options()
    with torch.no_grad():
        measured: dict[int, list[dict[str, Any]]] = {}

        def of_batch(batch: int) -> list[dict[str, Any]]:
            if not measured:  # one prefill for all batches
                measured.update(measure(options, options.batches))
            return measured[batch]

        for batch in options.batches:
            key = {"prompt": options.prompt, "batch": batch, "ratio": options.ratio, "new": options.new}
            command.cell(key, functools.partial(of_batch, batch), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
