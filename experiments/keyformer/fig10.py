"""Keyformer, Fig. 10: the part of a step that depends on the cache, over full attention's."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio, ratio
from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import NONE_YET, cells, draw_speed, found_of, ours, samples, with_paper

PARTS, MARK = ("kv_movement_of_full", "gumbel_overhead_of_full"), 1 / 2.9
NAMES = {512: "512", 1024: "1k", 2048: "2k", 4096: "4k"}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """A step's time less that of a step with 64 slots, over the same of full; moving and multiplying are not parted."""
    rows = []
    for cell in cells("keyformer_figures", figure=10)[-1:]:
        for n in cell["key"]["lengths"]:
            for metric, found in zip(PARTS, _parts(cell, n), strict=True):
                if found is not None:
                    rows.append(ours(NAMES.get(n, str(n)), "keyformer@0.5", metric, found, cell))
    made = with_paper("keyformer_fig10", rows)
    return made[made["metric"].isin(PARTS)].reset_index(drop=True)


def _parts(cell: Any, n: int) -> tuple[Ratio | None, Ratio | None]:
    """(without noise, the noise), over full's part; None where full's part cannot be told from noise of the clock."""
    names = (f"{n} full", f"{n} keyformer@0.5", f"{n} keyformer_quiet@0.5", "little")
    times = [[sample["tpot_s"] for sample in samples(cell, name)] for name in names]
    if not all(times):
        return None, None
    full, noisy, quiet, least = times
    whole = [a - b for a, b in zip(full, least, strict=True)]
    if min(whole) <= 0:
        return None, None
    moved = ratio([a - b for a, b in zip(quiet, least, strict=True)], whole)
    return moved, ratio([a - b for a, b in zip(noisy, quiet, strict=True)], whole)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    draw_speed(table, figure, "", PARTS)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """The cache's part at 4k against 1 / 2.9 of full's."""
    row, noise = (found_of(table, "4k", "keyformer@0.5", metric) for metric in PARTS)
    if row is None:
        return None, NONE_YET
    said = f"the cache's part is {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f}) of full's"
    said += "" if noise is None else f", the noise {noise['value']:.2f}"
    return (True if row["high"] <= MARK else False if row["low"] > MARK else None), f"{said}, {row['machine']}"


EXHIBITS = {
    "fig10": Exhibit(
        claim=(
            "At 4k tokens half the cache makes moving keys and values 2.9 times cheaper, and the Gumbel noise "
            "costs a few percent of it (arXiv:2403.09054, Fig. 10: 0.35 and 0.06 of full)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
