"""Tokens per second at the largest batch that fits, per variant, over the first variant at its own largest batch.

    python -m benchmarks.throughput --shape mpt_7b --lengths 2048+2048 --variants hf full h2o@0.5 keyformer@0.5

The largest batch is found by doubling and halving; running out of memory is an answer, not an end. --limit-gib counts
as out of memory what needs more than that above the weights: the way to try this where there is no GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.clock import OUT_OF_MEMORY, Sample, attempt, in_turns, ratio
from benchmarks.command import Command, Line, error_of, shape_of
from benchmarks.shapes import Variant, one, ours, stock, variant
from benchmarks.store import Cell
from benchmarks.whole import joined, windows
from kvexp.util.output import watch_pipes


def largest(fits: Callable[[int], bool], most: int, fine: float = 0.0) -> int:
    """The largest batch in [0, most] that fits, if a batch fits whenever a larger one does; `fine`: to this share."""
    good, bad, batch = 0, most + 1, 1
    while batch <= most and fits(batch):
        good, batch = batch, batch * 2
    if batch <= most:
        bad = batch
    elif good < most:
        batch = most
        if fits(batch):
            return most
        bad = most
    while bad - good > max(1, fine * good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def measure(options: Any, length: str) -> list[dict[str, Any]]:
    """One cell: per variant, the largest batch, and samples at that batch."""
    prompt, new = (int(count) for count in length.split("+"))
    shape = shape_of(options).fitted(prompt + new + 8)
    theirs = stock(shape, options.device)
    models = {"hf": theirs, "kvexp": ours(theirs)}
    step, limit = min(new, options.window), options.limit_gib

    def run(v: Variant, at: int, batch: int, tokens: int) -> Sample:
        return one(v, models, shape, at, batch, options.beams, tokens, prompt)

    def fits(v: Variant, batch: int) -> bool:
        tokens = min(4, new)  # the fullest moment is the end, or the prefill: try both
        for at in {windows(v, prompt, new, tokens)[0], windows(v, prompt, new, tokens)[-1]}:
            sample = attempt(functools.partial(run, v, at, batch, tokens))
            if "error" in sample or (limit is not None and sample["peak_bytes"] >= limit * 2**30):
                return False
        return True

    rows: list[dict[str, Any]] = []
    tasks: dict[str, Callable[[], Sample]] = {}
    chosen = [variant(name) for name in options.variants]
    for v in chosen:
        batch = largest(functools.partial(fits, v), options.most, 0.1)
        rows.append({"variant": v.name, "batch": batch})
        for at in windows(v, prompt, new, options.window) if batch else ():
            tasks[f"{v.name} {at}"] = functools.partial(run, v, at, batch, step)
    samples = in_turns(tasks, options.repeats) if tasks else {}
    for v, row in zip(chosen, rows, strict=True):
        parts = [
            samples[name] for at in windows(v, prompt, new, options.window) if (name := f"{v.name} {at}") in samples
        ]
        row["samples"] = joined(parts, new) if parts else [{"error": f"{OUT_OF_MEMORY} at batch 1"}]
    return rows


def title(key: Cell) -> str:
    limit = f", within {key['limit_gib']:g} GiB" if key["limit_gib"] is not None else ""
    return f"{key['shape']}, {key['length']} tokens, beams {key['beams']}, the largest batch that fits{limit}"


def lines(cell: Cell) -> list[Line]:
    """Batch and tokens per second, over the first variant's."""
    rows, new = cell["rows"], int(cell["key"]["length"].split("+")[1])
    base, said = rows[0], []
    for row in rows:
        batch = f"batch {row['batch']}" + (" (the most tried)" if row["batch"] == cell["key"]["most"] else "")
        died = error_of(row) or (f"{base['variant']} fits at no batch" if error_of(base) else None)
        if died:
            said.append(Line(f"{row['variant']}: tokens per second", None, note=f"{batch}; {died}"))
            continue
        reached, first = ([r["batch"] * new / s["total_s"] for s in r["samples"]] for r in (row, base))
        said.append(Line(f"{row['variant']}: tokens per second / {base['variant']}", ratio(reached, first), note=batch))
    return said


def main(arguments: list[str] | None = None) -> int:
    command = Command("throughput", __doc__, arguments)
    command.add("--shape", default="to_beat")
    command.add("--lengths", nargs="+", default=["1024+256"], help="prompt+new")
    command.add("--beams", type=int, default=1)
    command.add("--window", type=int, default=32, help="as in benchmarks.whole")
    command.add("--most", type=int, default=256, help="the largest batch to try")
    command.add("--limit-gib", type=float, default=None)
    command.add("--variants", nargs="+", default=["full", "h2o@0.2", "keyformer@0.2", "a2sf@0.2"])
    options = command.options()
    for length in options.lengths:
        key = {"length": length, "beams": options.beams, "window": options.window, "most": options.most}
        key |= {"limit_gib": options.limit_gib, "variants": options.variants}
        command.cell(key, functools.partial(measure, options, length), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
