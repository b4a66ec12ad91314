"""Means and paired gaps of numbers measured prompt by prompt and not scored, with 95 % bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.paired import spread

Gap = tuple[float, float, float]  # mean, low, high


def mean_of(values: Sequence[float]) -> Gap:
    """Of independent examples (prompts, documents), never of layers or heads of one; NaN values are left out."""
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return float("nan"), float("nan"), float("nan")
    low, high = spread(found.tolist())
    return float(found.mean()), low, high


def columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """As columns of a table: NAME, NAME_low, NAME_high."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), mean_of(values), strict=True))


def gap(frame: pd.DataFrame, value: str, one: pd.Series, other: pd.Series, by: Sequence[str]) -> Gap:
    """One part of a frame less another, over the examples that both have; `by` names an example.

    Models that read the same prompts are averaged within a prompt: they are no further examples.
    """
    sides = [frame[part].groupby(list(by))[value].mean() for part in (one, other)]
    return mean_of((sides[0] - sides[1]).dropna().tolist())


def repeated(name: str, found: Gap) -> dict[str, float]:
    """A number of the whole table as columns that are the same in every row."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def better(low: float, high: float) -> bool | None:
    """Whether a difference is above 0 (True), below (False) or neither: two methods that tie do not beat each other."""
    if low > 0:
        return True
    return False if high < 0 else None
