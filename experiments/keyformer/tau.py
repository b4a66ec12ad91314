"""Keyformer, appendix A.8: the temperature's start and end."""

from __future__ import annotations

from functools import partial

import pandas as pd

from experiments.lib.data import points
from experiments.lib.divergence import Closer, by_divergence, of
from experiments.lib.draw import best_of, settings_grid
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import estimate

PAPERS_CHOICE = "method.tau_end=2.0 method.tau_init=1.0"


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Some schedule is better than the paper's on some model (False), or every one is worse on every model (True)."""
    schedule = [f"{start:g} to {end:g}" for start, end in zip(table["tau_init"], table["tau_end"], strict=True)]
    table = table.assign(schedule=schedule)
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


def holds_by_divergence(frame: pd.DataFrame) -> tuple[bool | None, str]:
    """The paper's schedule diverges less than every other."""
    others = [word for word in sorted(set(frame["setting"])) if word != PAPERS_CHOICE]
    mine = of("keyformer", PAPERS_CHOICE)
    closer = [Closer(f"1 to 2 than {_schedule(word)}", mine, of("keyformer", word)) for word in others]
    return by_divergence(*closer)(frame)


def _schedule(setting: str) -> str:
    end, start = (word.rpartition("=")[2] for word in setting.split())
    return f"{float(start):g} to {float(end):g}"


EXHIBITS = {
    "tau": Exhibit(
        claim=(
            "tau from 1 at the prompt to 2 at the last token gives the best outcome (arXiv:2403.09054, section "
            "3.3.2 and appendix A.8; the appendix' numbers are not in the text we hold)"
        ),
        table=partial(
            points,
            metric="rouge2",
            over={"over": ("keyformer", PAPERS_CHOICE)},
            numbers={"tau_init": "method.tau_init", "tau_end": "method.tau_end"},
        ),
        draw=partial(settings_grid, down="tau_init", across="tau_end"),
        holds=holds,
        divergence=holds_by_divergence,
    ),
}
