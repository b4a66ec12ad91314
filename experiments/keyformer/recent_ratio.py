"""Keyformer, appendix A.4: how much of the budget is the recent window."""

from __future__ import annotations

from functools import partial

import pandas as pd

from experiments.lib.data import points
from experiments.lib.divergence import Closer, by_divergence, lowest, of
from experiments.lib.draw import best_of, settings_curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import ends, estimate

KEY = "method.recent_ratio"


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """True if 0.2 or 0.3 is better than each ratio outside on every model, False if one outside beats both."""
    runs = table[table["recent"].notna()]
    outside = ~runs["recent"].isin([0.2, 0.3])
    wins = runs[outside & (runs["over_0.2_low"] > 0) & (runs["over_0.3_low"] > 0)]
    lost = outside & ((runs["over_0.2_high"] < 0) | (runs["over_0.3_high"] < 0))
    cells = [
        f"{r['model']} {r['recent']:g} against 0.3: {estimate(*ends(r, 'over_0.3'), sign=True)}"
        for _, r in wins.iterrows()
    ]
    best = best_of(runs, "recent")
    if len(wins):
        return False, f"better than both 0.2 and 0.3, ROUGE-2 points: {'; '.join(cells)}. Best ratio: {best}"
    sentence = f"no other ratio is better than both; worse than one of them: {int(lost.sum())} of {int(outside.sum())}"
    return (True if lost.sum() == outside.sum() else None), f"{sentence}. Best ratio: {best}"


def holds_by_divergence(frame: pd.DataFrame) -> tuple[bool | None, str]:
    """As by the metric: 0.2 or 0.3 diverges less than each ratio outside, and none outside less than both."""
    others = [word for word in sorted(set(frame["setting"])) if word not in (f"{KEY}=0.2", f"{KEY}=0.3")]
    pairs = [[_closer(best, word) for best in ("0.2", "0.3")] for word in others]
    told = partial(lowest, key=KEY, method="keyformer")
    _, words = by_divergence(*(pair for each in pairs for pair in each), told=told)(frame)
    found = [[made[0] for pair in each if (made := pair.found(frame)) is not None] for each in pairs]
    if any(each and all(verdict is False for verdict in each) for each in found):
        return False, words
    return (True if found and all(True in each for each in found) else None), words


def _closer(best: str, word: str) -> Closer:
    return Closer(
        f"{best} than {word.rpartition('=')[2]}", of("keyformer", f"{KEY}={best}"), of("keyformer", word), judged=False
    )


EXHIBITS = {
    "recent_ratio": Exhibit(
        claim=(
            "Keyformer works best when the recent window is 20 to 30 % of the budget (arXiv:2403.09054, section "
            "4.4.4 and appendix A.4; the appendix' numbers are not in the text we hold)"
        ),
        table=partial(
            points,
            metric="rouge2",
            over={f"over_{best}": ("keyformer", f"{KEY}={best}") for best in ("0.2", "0.3")},
            numbers={"recent": KEY},
        ),
        draw=partial(settings_curves, x="recent", xlabel="recent window (share of the budget)"),
        holds=holds,
        divergence=holds_by_divergence,
    ),
}
