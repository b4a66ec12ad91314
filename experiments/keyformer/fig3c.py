"""Keyformer, Fig. 3c: full attention, window attention and the heaviest hitters at half the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import points
from experiments.lib.draw import METHODS, in_order
from experiments.lib.stats import above, all_hold, estimate

CLAIM = (
    "With half the KV cache neither the newest tokens (window) nor those of the highest accumulated attention (H2O, "
    "key attention) give full attention's quality (arXiv:2403.09054, Fig. 3c and section 2.3.1)"
)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    made = points(frame, "rouge2")
    made = made.assign(bar=made["method"].str.replace("_", " "))
    order = in_order(made["method"].tolist(), METHODS)
    return made.sort_values("method", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    bars(table, figure, "keyformer_fig3c")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Every method below 99 % of full on every model."""
    runs = table[table["method"].ne("full")]
    reached = [above(low, high, 99.0) for low, high in zip(runs["of_full_low"], runs["of_full_high"], strict=True)]
    cells = [f"{r.model} {r.method} {estimate(r.of_full, r.of_full_low, r.of_full_high)}" for r in runs.itertuples()]
    return all_hold([None if each is None else not each for each in reached]), "% of full: " + "; ".join(cells)
