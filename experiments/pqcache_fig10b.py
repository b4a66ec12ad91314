"""PQCache, Fig. 10b: time per further token against the length of the prompt. Drawn from benchmarks/results."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.pqcache_fig10a import drawn, fastest, timed

CLAIM = (
    "Per token SPARQ is the slowest, as it searches and fetches one after the other; PQCache is faster than it and "
    "fast "
    "enough to read along, at a fifth of the tokens (arXiv:2407.12820, Fig. 10b; no number of it is printed)"
)
SWEEPS = ()
METRIC = "tpot_s"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return timed(METRIC)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    drawn(table, figure, METRIC, "time per token over full attention's")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Pqcache against SPARQ alone."""
    return fastest(table, METRIC, ("sparq@0.2",))
