"""Means and paired differences with 95 % bootstrap intervals, what they decide about a claim, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results.stats import LEVEL, RESAMPLES, mean_moments, resampled_means
from kvexp.results.stats import mean_interval as interval_of_mean
from kvexp.results.table import TOO_FEW

Scores = Mapping[str, Mapping[str, float]]  # example -> metric -> number
Gap = tuple[float, float, float]  # mean, low, high


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean (`kvexp.results.stats`); NaN for fewer than two values."""
    column = np.array(values, dtype=np.float64)
    if len(column) < 2:
        return math.nan, math.nan
    return interval_of_mean(column, resampled_means(mean_moments(column), RESAMPLES), LEVEL)


def paired_difference(ours: Scores, theirs: Scores, metric: str) -> tuple[float, float, float, int]:
    """(mean of ours - theirs over the examples both scored, low, high, their number), in the metric's unit."""
    shared = [name for name in ours if name in theirs and metric in ours[name] and metric in theirs[name]]
    gaps = [ours[name][metric] - theirs[name][metric] for name in shared]
    low, high = mean_interval(gaps)
    return (float(np.mean(gaps)) if gaps else math.nan), low, high, len(gaps)


def above(low: float, high: float, mark: float) -> bool | None:
    """Whether an interval lies at or above the mark (True), below it (False), or across it (None)."""
    if low >= mark:
        return True
    return False if high < mark else None


def better(low: float, high: float) -> bool | None:
    """Whether a difference is above 0 (True), at or below it (False: a tie is no improvement), or open (None)."""
    if low > 0:
        return True
    return False if high <= 0 else None


def all_hold(parts: Iterable[bool | None]) -> bool | None:
    """A claim of several parts: False if one is contradicted, True if all are supported, else None."""
    parts = list(parts)
    if False in parts:
        return False
    return True if parts and None not in parts else None


def ends(row: Any, name: str) -> Gap:
    """The columns NAME, NAME_low and NAME_high of one row: a number and its interval."""
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


def estimate(at: float, low: float, high: float, digits: int = 1, sign: bool = False) -> str:
    """ "96.1 (93.0 … 98.9)", or "96.1 (too few)" without an interval."""
    plus = "+" if sign else ""
    if math.isnan(low) or math.isnan(high):
        return f"{at:{plus}.{digits}f} ({TOO_FEW})"
    return f"{at:{plus}.{digits}f} ({low:{plus}.{digits}f} … {high:{plus}.{digits}f})"


def mean_of(values: Sequence[float]) -> Gap:
    """Of independent examples (prompts, documents), never of layers or heads of one; NaN values are left out."""
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return float("nan"), float("nan"), float("nan")
    low, high = mean_interval(found.tolist())
    return float(found.mean()), low, high


def mean_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """As columns of a table: NAME, NAME_low, NAME_high."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), mean_of(values), strict=True))


def paired_gap(frame: pd.DataFrame, value: str, one: pd.Series, other: pd.Series, by: Sequence[str]) -> Gap:
    """One part of a frame less another, over the examples that both have; `by` names an example.

    Models that read the same prompts are averaged within a prompt: they are no further examples.
    """
    sides = [frame[part].groupby(list(by))[value].mean() for part in (one, other)]
    return mean_of((sides[0] - sides[1]).dropna().tolist())


def interval_columns(name: str, found: Gap) -> dict[str, float]:
    """A number of the whole table as columns that are the same in every row."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def positive(low: float, high: float) -> bool | None:
    """Whether a difference is above 0 (True), below (False) or neither: two methods that tie do not beat each other."""
    if low > 0:
        return True
    return False if high < 0 else None


Side = Callable[[pd.Series], bool]


def pooled_difference(frame: pd.DataFrame, one: Side, other: Side, metric: str) -> Gap:
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


def runs_of(method: str, **wanted: float) -> Side:
    """Runs of a method, whose columns have these values: runs_of("a2sf", kv_ratio=0.2)."""
    return lambda run: run["method"] == method and all(run[name] == value for name, value in wanted.items())
