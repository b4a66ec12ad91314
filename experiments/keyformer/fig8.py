"""Keyformer, Fig. 8: ROUGE-2 of long documents against the share of the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import points
from experiments.lib.draw import curves, panels_of
from experiments.lib.stats import above, all_hold, better, ends, estimate

CLAIM = (
    "On long documents Keyformer keeps 99 % of full attention's ROUGE-2 with half the KV cache, and H2O is "
    "significantly lower at the same size (arXiv:2403.09054, Fig. 8 and section 4.1)"
)
RATIO = 0.5


def table(frame: pd.DataFrame) -> pd.DataFrame:
    return points(frame, "rouge2", rival="h2o")


def draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table, figure, "keyformer_fig8")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """keyformer >= 99 % at half the cache, and its paired difference to h2o above 0."""
    verdicts, found = [], []
    for model, task in panels_of(table):
        at = table[table["model"].eq(model) & table["task"].eq(task) & table["kv_ratio"].eq(RATIO)]
        ours, rival = at[at["method"].eq("keyformer")], at[at["method"].eq("h2o")]
        if ours.empty or rival.empty:
            return None, f"keyformer and h2o at {RATIO} were not run"
        run, other = ours.iloc[0], rival.iloc[0]
        verdicts += [above(run["of_full_low"], run["of_full_high"], 99.0), better(run["ahead_low"], run["ahead_high"])]
        found.append(
            f"{model} at {RATIO}: keyformer {estimate(*ends(run, 'of_full'))} % of full"
            f", h2o {estimate(*ends(other, 'of_full'))} %, "
            f"difference {estimate(*ends(run, 'ahead'), sign=True)} ROUGE-2 points"
        )
    return all_hold(verdicts), "; ".join(found)
