"""Keyformer, Table 1: generated tokens per second."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio
from experiments.keyformer.fig9 import LENGTHS, METHODS
from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import NONE_YET, cells, draw_speed, found_of, ours, samples, with_paper
from experiments.lib.stats import above


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """New tokens of all prompts over the seconds of the whole generation, four beams as in the paper."""
    rows = []
    for length in LENGTHS:
        new = int(length.partition("+")[2])
        for batch in (1, 2):
            for cell in cells("whole", length=length, batch=batch, beams=4)[-1:]:
                for method in ("full", *METHODS):
                    rates = sorted(batch * new / sample["total_s"] for sample in samples(cell, method))
                    if rates:
                        found = Ratio(rates[len(rates) // 2], rates[0], rates[-1])
                        name = method if batch == 1 else f"{method} batch {batch}"
                        rows.append(ours(length, name, "tokens_per_s", found, cell))
    return with_paper("keyformer_table1", rows)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    draw_speed(table, figure, "tokens per second", ["tokens_per_s"])


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Lowest over highest and highest over lowest of the rates, against 2 (the larger batch is said beside it)."""
    at = [
        found_of(table, LENGTHS[-1], name, "tokens_per_s")
        for name in ("full", "keyformer@0.5", "keyformer@0.5 batch 2")
    ]
    if at[0] is None or at[1] is None:
        return None, NONE_YET
    low, high = at[1]["low"] / at[0]["high"], at[1]["high"] / at[0]["low"]
    larger = "" if at[2] is None else f"; batch 2: {at[2]['value'] / at[0]['value']:.2f}"
    said = f"{at[1]['value'] / at[0]['value']:.2f} ({low:.2f} to {high:.2f}) times full at {LENGTHS[-1]}{larger}"
    return above(low, high, 2.0), f"{said}, {at[0]['machine']}"


EXHIBITS = {
    "table1": Exhibit(
        claim=(
            "With half the KV cache Keyformer generates twice as many tokens per second as full attention at "
            "4096+4096, and 2.4 times as many with the larger batch that the smaller cache allows "
            "(arXiv:2403.09054, Table 1)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
