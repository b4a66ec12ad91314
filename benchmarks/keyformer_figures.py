"""The Keyformer paper's Figs 1 and 10 (arXiv:2403.09054) on an MPT-7B layout with random weights.

    python -m benchmarks.keyformer_figures --figures 1 10

Fig 1: what a generation of full attention costs as sequences grow, over 512 tokens. Fig 10: the part of a step that
depends on the cache, over full attention's; that part is a step's time less the time with almost no cache. The
paper splits it into moving and multiplying, which one kernel does not; its overhead of the Gumbel noise is a step with
noise less one without.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.clock import Sample, in_turns, ratio, slot_bytes, weight_bytes
from benchmarks.command import Command, Line, error_of, shape_of
from benchmarks.shapes import Variant, one, ours, stock, variant
from benchmarks.store import Cell
from benchmarks.whole import joined, windows
from kvexp.util.output import watch_pipes

# The paper's own figures, read off its plots (Fig 1 to 0.5, Fig 10 to 0.01).
FIGURE_1 = {1024: 3.3, 2048: 8.5, 4096: 27.4, 8192: 50.0, 16384: 75.6}
FIGURE_10 = {512: (0.41, 0.23), 1024: (0.37, 0.14), 2048: (0.35, 0.09), 4096: (0.35, 0.06)}
NAMES = ("full", "keyformer@0.5", "keyformer_quiet@0.5")


def _models(options: Any, positions: int) -> tuple[Any, dict[str, Any]]:
    shape = shape_of(options).fitted(positions + 8)
    theirs = stock(shape, options.device)
    return shape, {"hf": theirs, "kvexp": ours(theirs)}


def figure_1(options: Any) -> list[dict[str, Any]]:
    """Total time of n + n tokens under full attention, all lengths in turns; bytes of cache and of weights."""
    shape, models = _models(options, 2 * max(options.lengths))
    full, tasks = variant("full"), dict[str, Callable[[], Sample]]()
    for n in options.lengths:
        for at in windows(full, n, n, options.window):
            tasks[f"{n} {at}"] = functools.partial(
                one, full, models, shape, at, 1, options.beams, min(n, options.window), n
            )
    samples = in_turns(tasks, options.repeats)
    model, rows = models["hf"], []
    for n in options.lengths:
        parts = [samples[f"{n} {at}"] for at in windows(full, n, n, options.window)]
        kv = 2 * n * options.beams * slot_bytes(model.config, model.dtype)
        rows.append(
            {"variant": str(n), "kv_bytes": kv, "weight_bytes": weight_bytes(model), "samples": joined(parts, n)}
        )
    return rows


def figure_10(options: Any) -> list[dict[str, Any]]:
    """Seconds per token in the middle of n + n tokens, with and without budget and noise, and with 64 tokens alone."""
    shape, models = _models(options, 2 * max(options.lengths))
    little, tasks = min(64, min(options.lengths)), dict[str, Callable[[], Sample]]()

    def run(v: Variant, n: int, at: int) -> Callable[[], Sample]:
        return functools.partial(one, v, models, shape, at, 1, options.beams, options.window, n)

    tasks["little"] = run(variant("full"), little, little)
    for n in options.lengths:
        for name in NAMES:
            v = variant(name)
            tasks[f"{n} {name}"] = run(v, n, n + n // 2 if v.grows else n)
    samples = in_turns(tasks, options.repeats)
    return [{"variant": name, "samples": taken} for name, taken in samples.items()]


def title(key: Cell) -> str:
    return f"Keyformer's Fig {key['figure']} on {key['shape']}, {key['beams']} beams"


def lines(cell: Cell) -> list[Line]:
    """The figure's bars as ratios, with the paper's; what ran out of memory says so."""
    rows = {row["variant"]: row for row in cell["rows"]}
    died = [Line(name, None, note=reason) for name, row in rows.items() if (reason := error_of(row))]
    good = {name: row for name, row in rows.items() if not error_of(row)}
    return (_lines_1(good, cell["key"]) if cell["key"]["figure"] == 1 else _lines_10(good, cell["key"])) + died


def _lines_1(rows: dict[str, Any], key: Cell) -> list[Line]:
    first, said = next(iter(rows)), []
    for name, row in list(rows.items())[1:]:
        over = ratio(*([sample["total_s"] for sample in rows[n]["samples"]] for n in (name, first)))
        share = f"cache / weights {row['kv_bytes'] / row['weight_bytes']:.2f}"
        paper = f"; paper, over 512: {FIGURE_1[int(name)]}" if int(name) in FIGURE_1 and not key["tiny"] else ""
        said.append(Line(f"{name}+{name} tokens: time / {first}+{first}", over, note=share + paper))
    return said


def _lines_10(rows: dict[str, Any], key: Cell) -> list[Line]:
    said: list[Line] = []
    if "little" not in rows:
        return said
    for n in key["lengths"]:
        if any(f"{n} {name}" not in rows for name in NAMES):
            continue
        full, noisy, quiet = (_times(rows[f"{n} {name}"]) for name in NAMES)
        least = _times(rows["little"])
        whole = [a - b for a, b in zip(full, least, strict=True)]
        if min(whole) <= 0:
            said.append(Line(f"{n}+{n}", None, note="full attention's cache takes no more time than the clock's noise"))
            continue
        cache = ratio([a - b for a, b in zip(quiet, least, strict=True)], whole)
        noise = ratio([a - b for a, b in zip(noisy, quiet, strict=True)], whole)
        paper = FIGURE_10.get(n) if not key["tiny"] else None
        notes = [f"paper: {number}" if paper else "" for number in paper or ("", "")]
        said.append(Line(f"{n}+{n}: keyformer 50 %, cache's part / full's", cache, note=notes[0]))
        said.append(Line(f"{n}+{n}: its Gumbel noise / full's part", noise, note=notes[1]))
    return said


def _times(row: dict[str, Any]) -> list[float]:
    return [sample["tpot_s"] for sample in row["samples"]]


def main(arguments: list[str] | None = None) -> int:
    command = Command("keyformer_figures", __doc__, arguments)
    command.add("--shape", default="mpt_7b")
    command.add("--figures", type=int, nargs="+", default=[1, 10], choices=[1, 10])
    command.add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    command.add("--beams", type=int, default=1)
    command.add("--window", type=int, default=32, help="as in benchmarks.whole")
    options = command.options()
    for figure in options.figures:
        key = {"figure": figure, "lengths": options.lengths, "beams": options.beams, "window": options.window}
        measure = figure_1 if figure == 1 else figure_10
        command.cell(key, functools.partial(measure, options), title, lines)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
