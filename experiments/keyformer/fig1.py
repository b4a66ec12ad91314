"""Keyformer, Fig. 1: what full attention costs as sequences grow."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio
from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import NONE_YET, cells, draw_speed, found_of, ours, over, samples, with_paper
from experiments.lib.stats import above

TIMES, LENGTHS = 16.0, ("1024", "2048", "4096", "8192")


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Total time of full attention over that of 512 tokens, and GB of KV cache and weights."""
    rows = []
    for cell in cells("keyformer_figures", figure=1)[-1:]:
        for row in cell["rows"]:
            found = over(samples(cell, row["variant"]), samples(cell, "512"), "total_s")
            if found is not None:
                rows.append(ours(row["variant"], "full", "total_time_over_512", found, cell))
            size = row.get("kv_bytes", 0) / 2**30
            rows.append(ours(row["variant"], "full", "kv_GB", Ratio(size, size, size), cell))
    made = with_paper("keyformer_fig1", rows)
    return made[made["metric"].isin(["total_time_over_512", "kv_GB"])].reset_index(drop=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    draw_speed(table, figure, "", ["total_time_over_512", "kv_GB"])


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Whether 16 times the tokens take more than 16 times as long."""
    row = found_of(table, "8192", "full", "total_time_over_512")
    if row is None:
        return None, NONE_YET
    said = f"{row['value']:.1f} ({row['low']:.1f} to {row['high']:.1f}) times as long for {TIMES:g} times the tokens"
    return above(row["low"], row["high"], TIMES), f"{said}, {row['machine']}"


EXHIBITS = {
    "fig1": Exhibit(
        claim=(
            "From 512 to 8192 tokens, 16 times as many, MPT-7B takes about 50 times as long, and its KV cache "
            "outgrows its weights (arXiv:2403.09054, Fig. 1, four beams)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
