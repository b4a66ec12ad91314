"""Keyformer, appendix A.8: the temperature's start and end."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import ahead, option, points
from experiments.lib.draw import best_of, settings_grid
from experiments.lib.stats import estimate

CLAIM = (
    "tau from 1 at the prompt to 2 at the last token gives the best outcome (arXiv:2403.09054, section 3.3.2 and "
    "appendix A.8; the appendix' numbers are not in the text we hold)"
)
THEIRS = "method.tau_end=2.0 method.tau_init=1.0"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """`over`: the paired difference to tau 1 to 2."""
    made = points(frame, "rouge2").assign(**ahead(frame, "rouge2", "keyformer", THEIRS, "over"))
    for end in ("init", "end"):
        given = made["setting"].map(lambda text, end=end: option(text, f"method.tau_{end}"))
        made = made.assign(**{f"tau_{end}": pd.to_numeric(given, errors="coerce")})
    schedule = [f"{a:g} to {b:g}" for a, b in zip(made["tau_init"], made["tau_end"], strict=True)]
    made = made.assign(schedule=schedule)
    return made.sort_values(["model", "tau_init", "tau_end"], na_position="first", ignore_index=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    settings_grid(table, figure, "tau_init", "tau_end")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Some schedule is better than theirs on some model (False), or every one is worse on every model (True)."""
    runs = table[table["tau_init"].notna() & table["over"].notna()]
    wins, lost = runs[runs["over_low"] > 0], runs[runs["over_high"] < 0]
    ends = table[table["tau_init"].eq(1.0)].groupby("model")["value"].agg(lambda v: v.max() - v.min()).max()
    flat = f"with tau_init 1, tau_end moves ROUGE-2 by at most {ends:.1f} points"
    cells = [
        f"{r.model} {r.schedule} {estimate(r.over, r.over_low, r.over_high, sign=True)}" for r in wins.itertuples()
    ]
    if len(wins):
        return False, f"better than 1 to 2, ROUGE-2 points: {'; '.join(cells)}; {flat}"
    sentence = f"worse than 1 to 2: {len(lost)} of {len(runs)}, better: none; {flat}"
    return (
        True if len(lost) == len(runs) else None
    ), f"{sentence}. Best: {best_of(table[table['tau_init'].notna()], 'schedule')}"
