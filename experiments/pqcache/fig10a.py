"""PQCache, Fig. 10a: time to the second token against the length of the prompt.

Drawn from benchmarks/results.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import ratio
from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import COLUMNS, NONE_YET, cells, draw_speed, found_of, ours, samples
from experiments.lib.stats import all_hold

LENGTHS = ("2048+30", "4096+30", "8192+30", "16384+30", "32768+30")  # those of benchmarks.suite are among them
NAMES = ("h2o@0.2", "sparq@0.2", "infllm@0.2", "pqcache@0.2")
METRIC = "tt2t_s"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return timed(METRIC)


def timed(metric: str) -> pd.DataFrame:
    """Seconds of each method over full attention's (kvexp's own) per length: median, least and most of the turns."""
    rows = []
    for length in LENGTHS:
        for cell in cells("whole", shape="mistral_7b", length=length, batch=1)[-1:]:
            base = samples(cell, "full")
            for name in NAMES:
                found = samples(cell, name)
                if base and found:
                    each = ratio([one[metric] for one in found], [one[metric] for one in base])
                    rows.append(ours(length, name, metric, each, cell))
    return pd.DataFrame(rows, columns=COLUMNS)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    drawn(table, figure, METRIC, "time to token 2 over full attention's")


def drawn(table: pd.DataFrame, figure: Figure, metric: str, ylabel: str) -> None:
    """The points, or one line that says that there are none: the paper prints no numbers to show in their place."""
    if table.empty:
        figure.set_size_inches(4.0, 1.0)
        figure.text(0.5, 0.5, NONE_YET, ha="center", va="center", fontsize=8)
        return
    draw_speed(table, figure, ylabel, [metric])


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """At every length measured, pqcache's slowest turn against the others' fastest."""
    if table.empty:
        return None, NONE_YET
    verdicts = [faster(table, METRIC, length, "pqcache@0.2", name) for length in lengths(table) for name in NAMES[:-1]]
    return all_hold(verdicts), said(table, METRIC)


def lengths(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["seqlen"]))


def faster(table: pd.DataFrame, metric: str, length: str, one: str, other: str) -> bool | None:
    """Whether one method takes less than another: the turns' ranges must not overlap to say so."""
    mine, its = (found_of(table, length, name, metric) for name in (one, other))
    if mine is None or its is None:
        return None
    return True if mine["high"] < its["low"] else False if mine["low"] > its["high"] else None


def said(table: pd.DataFrame, metric: str) -> str:
    """Every number of a metric, in words."""
    found = []
    for length in lengths(table):
        each = [(name, found_of(table, length, name, metric)) for name in NAMES]
        cells = [
            f"{n} {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for n, row in each if row is not None
        ]
        found.append(f"{', '.join(cells)} at {length}")
    return f"{metric} over full attention's on {table['machine'].iloc[0]}: {'; '.join(found)}"


EXHIBITS = {
    "fig10a": Exhibit(
        claim=(
            "PQCache has the second token earliest of H2O, SPARQ, InfLLM and itself, since its clustering hides "
            "behind the prefill (arXiv:2407.12820, Fig. 10a; no number of it is printed)"
        ),
        sweeps=(),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
