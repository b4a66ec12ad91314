"""Keyformer, appendix A.4: how much of the budget is the recent window."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import ahead, option, points
from experiments.lib.draw import best_of, settings_curves
from experiments.lib.stats import ends, estimate

CLAIM = (
    "Keyformer works best when the recent window is 20 to 30 % of the budget (arXiv:2403.09054, section 4.4.4 and "
    "appendix A.4; the appendix' numbers are not in the text we hold)"
)
KEY = "method.recent_ratio"
BEST = ("0.2", "0.3")


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """`over_0.2` and `over_0.3`: the paired differences to these two ratios."""
    made = points(frame, "rouge2")
    ratio = pd.to_numeric(made["setting"].map(lambda text: option(text, KEY)), errors="coerce")
    for best in BEST:
        made = made.assign(**ahead(frame, "rouge2", "keyformer", f"{KEY}={best}", f"over_{best}"))
    return made.assign(recent=ratio).sort_values(["model", "recent"], na_position="first", ignore_index=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    settings_curves(table, figure, "recent", "recent window (share of the budget)")


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
