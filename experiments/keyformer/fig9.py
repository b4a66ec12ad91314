"""Keyformer, Fig. 9: inference speed-up over full attention at equal quality."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import NONE_YET, cells, draw_speed, found_of, ours, over, samples, with_paper
from experiments.lib.stats import above

LENGTHS, METHODS, MARK = ("1024+1024", "2048+2048", "4096+4096"), ("h2o@0.9", "keyformer@0.5"), 2.0


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Total time of full attention (kvexp's own) over that of the method, four beams as in the paper."""
    rows = []
    for length in LENGTHS:
        for cell in cells("whole", length=length, batch=1, beams=4)[-1:]:
            for method in METHODS:
                found = over(samples(cell, "full"), samples(cell, method), "total_s")
                rows += [] if found is None else [ours(length, method, "speedup", found, cell)]
    return with_paper("keyformer_fig9", rows)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    draw_speed(table, figure, "speed-up over full attention", ["speedup"])


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """The smallest and the largest of the turns' ratios against 2."""
    row = found_of(table, LENGTHS[-1], "keyformer@0.5", "speedup")
    if row is None:
        return None, NONE_YET
    said = f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f}) times full attention at {LENGTHS[-1]}"
    return above(row["low"], row["high"], MARK), f"{said} on {row['machine']}"


EXHIBITS = {
    "fig9": Exhibit(
        claim=(
            "Keyformer with half the KV cache generates 4096 tokens after 4096 about twice as fast as full "
            "attention, and H2O, which needs 90 %, 1.7 times (arXiv:2403.09054, Fig. 9: 2.05 and 1.71 on an A100)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
