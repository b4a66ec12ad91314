"""Two methods compared over all models, tasks and budgets of an exhibit at once: one paired interval."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from experiments.means import Gap, mean_of

Side = Callable[[pd.Series], bool]


def pooled(frame: pd.DataFrame, one: Side, other: Side, metric: str) -> Gap:
    """Mean of one - other over (task, example), each the mean over the runs that a side chooses.

    Models, budgets and settings of a side are averaged within an example first: a document that several models read is
    one document, and counts once.
    """
    sides = [_means(frame[frame.apply(side, axis=1)], metric) for side in (one, other)]
    return mean_of((sides[0] - sides[1]).dropna().tolist())


def _means(runs: pd.DataFrame, metric: str) -> pd.Series:
    found = [
        {"example": f"{run['task']} {example}", "value": scored[metric]}
        for _, run in runs.iterrows()
        for example, scored in run["scores"].items()
        if metric in scored
    ]
    return pd.DataFrame(found, columns=["example", "value"]).groupby("example")["value"].mean()


def of(method: str, **wanted: float) -> Side:
    """Runs of a method, whose columns have these values: of("a2sf", kv_ratio=0.2)."""
    return lambda run: run["method"] == method and all(run[name] == value for name, value in wanted.items())
