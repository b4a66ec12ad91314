"""PQCache, Fig. 10b: time per further token against the length of the prompt.

Drawn from benchmarks/results.
"""

from __future__ import annotations

import statistics

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio
from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import NONE_YET, cells, found_of, ours, samples
from experiments.lib.stats import all_hold
from experiments.pqcache.fig10a import LENGTHS, NAMES, drawn, faster, lengths, said, timed

METRIC = "tpot_s"
SECONDS = "seconds_per_token"
READING = 60 / 333  # seconds per token of a reader, as the paper counts


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """What is drawn, over full attention's; and the plain seconds of pqcache, which are held against a reader's."""
    rows = []
    for length in LENGTHS:
        for cell in cells("whole", shape="mistral_7b", length=length, batch=1)[-1:]:
            each = [sample[METRIC] for sample in samples(cell, "pqcache@0.2")]
            if each:
                found = Ratio(statistics.median(each), min(each), max(each))
                rows.append(ours(length, "pqcache@0.2", SECONDS, found, cell))
    over = timed(METRIC)
    return pd.concat([over, pd.DataFrame(rows, columns=over.columns)], ignore_index=True) if rows else over


def draw(table: pd.DataFrame, figure: Figure) -> None:
    drawn(table[table["metric"].eq(METRIC)], figure, METRIC, "time per token over full attention's")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """At every length measured: SPARQ slower than the others, and pqcache's slowest turn below a reader's time."""
    if table.empty:
        return None, NONE_YET
    others = [name for name in NAMES if not name.startswith("sparq")]
    verdicts = [faster(table, METRIC, at, name, "sparq@0.2") for at in lengths(table) for name in others]
    plain = [(at, found_of(table, at, "pqcache@0.2", SECONDS)) for at in lengths(table)]
    verdicts += [None if row is None else bool(row["high"] < READING) for _, row in plain]
    found = [(at, row) for at, row in plain if row is not None]
    told = ", ".join(f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}) at {at}" for at, row in found)
    return all_hold(verdicts), f"{said(table, METRIC)}; pqcache takes {told} seconds a token, a reader {READING:.2f}"


EXHIBITS = {
    "fig10b": Exhibit(
        claim=(
            "Per token SPARQ is the slowest, as it searches and fetches one after the other; PQCache is faster "
            "than it and faster than people read, 333 tokens a minute, at a fifth of the tokens "
            "(arXiv:2407.12820, Fig. 10b and section 4.3.2; no number of it is printed)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
