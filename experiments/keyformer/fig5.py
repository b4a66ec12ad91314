"""Keyformer, Fig. 5: damping the accumulated scores at half the cache."""

from __future__ import annotations

from functools import partial

import pandas as pd

from experiments.lib.data import points
from experiments.lib.divergence import Near, by_divergence, lowest
from experiments.lib.draw import settings_curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate
from experiments.lib.verdicts import below_mark


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Every factor's interval below 99 % of full."""
    runs = table[table["damping"].notna()]
    below = [below_mark(low, high) for low, high in zip(runs["of_full_low"], runs["of_full_high"], strict=True)]
    best = runs.loc[runs["of_full"].idxmax()]
    sentence = (
        f"the best of {len(runs)} factors, {best['damping']:g}, reaches {estimate(*ends(best, 'of_full'))} % of full"
    )
    if best["damping"] != 1 and not pd.isna(best["ahead"]):
        sentence += f", {estimate(*ends(best, 'ahead'), sign=True)} ROUGE-2 points from no damping"
    return all_hold(below), sentence


def holds_by_divergence(frame: pd.DataFrame) -> tuple[bool | None, str]:
    """Every factor away from the full cache."""
    factors = sorted(set(frame["setting"]))
    near = [Near(one.rpartition("=")[2], partial(_is, setting=one), within=False) for one in factors]
    return by_divergence(*near, told=partial(lowest, key="method.damping", method="h2o_damping"))(frame)


def _is(run: pd.Series, setting: str) -> bool:
    return bool(run["setting"] == setting)


EXHIBITS = {
    "fig5": Exhibit(
        claim=(
            "With half the KV cache and 20 % of it recent, no damping factor of the accumulated attention reaches "
            "full attention's quality (arXiv:2403.09054, Fig. 5 and section 2.3.3; the figure's numbers are not "
            "published)"
        ),
        table=partial(
            points,
            metric="rouge2",
            rival="h2o_damping",
            setting="method.damping=1.0",
            numbers={"damping": "method.damping"},
        ),
        draw=partial(settings_curves, x="damping", xlabel="damping factor (1: none)"),
        holds=holds,
        divergence=holds_by_divergence,
    ),
}
