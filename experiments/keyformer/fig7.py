"""Keyformer, Fig. 7: ROUGE-2 against the share of the cache, summaries above and conversation below."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import points
from experiments.lib.draw import curves, panels_of
from experiments.lib.stats import above, all_hold, ends, estimate

CLAIM = (
    "Keyformer reaches 99 % of full attention's ROUGE-2 with 70 % of the KV cache, while window attention and H2O stay "
    "below it even with 90 % (arXiv:2403.09054, Fig. 7 and section 4.1)"
)
SWEEPS = ("keyformer_fig7", "keyformer_fig7_soda")
METRIC = "rouge2"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return points(frame, METRIC, rival="h2o")


def draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table, figure, "keyformer_fig7")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Three parts in every panel: keyformer >= 99 % at 0.7, window < 99 % and h2o < 99 % at 0.9."""
    verdicts, found = [], []
    for model, task in panels_of(table):
        part = table[table["model"].eq(model) & table["task"].eq(task)]
        cells = []
        for method, ratio in (("keyformer", 0.7), ("h2o", 0.9), ("window", 0.9)):
            at = part[part["method"].eq(method) & part["kv_ratio"].eq(ratio)]
            if at.empty:
                return None, f"{method} at {ratio} was not run"
            row = at.iloc[0]
            reached = above(row["of_full_low"], row["of_full_high"], 99.0)
            verdicts.append(reached if method == "keyformer" else None if reached is None else not reached)
            cells.append(f"{method} at {ratio} {estimate(*ends(row, 'of_full'))}")
        found.append(f"{model}, {task}: {'; '.join(cells)}")
    return all_hold(verdicts), "% of full: " + ". ".join(found) + "." + _ahead(table)


def _ahead(table: pd.DataFrame) -> str:
    """How often keyformer's paired difference to H2O leaves out 0, over all panels and budgets."""
    rows = table[table["method"].eq("keyformer")]
    better, worse = int((rows["ahead_low"] > 0).sum()), int((rows["ahead_high"] < 0).sum())
    return (
        f" Keyformer against H2O (not part of the verdict): better at {better}, worse at {worse}, open at "
        f"{len(rows) - better - worse} of {len(rows)} points."
    )
