"""Intervals of means and of paired differences, what they decide about a claim, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvexp.results.stats import LEVEL, RESAMPLES, interval, resampled_means
from kvexp.results.units import TOO_FEW

Scores = Mapping[str, Mapping[str, float]]  # example -> metric -> number


def spread(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of a mean; NaN for fewer than two values."""
    column = np.array(values, dtype=np.float64)[:, None]
    if len(column) < 2:
        return math.nan, math.nan
    return interval(resampled_means(column, RESAMPLES)[:, 0], len(column), LEVEL)


def difference(ours: Scores, theirs: Scores, metric: str) -> tuple[float, float, float, int]:
    """(mean of ours - theirs over the examples both scored, low, high, their number), in the metric's unit."""
    shared = [name for name in ours if name in theirs and metric in ours[name] and metric in theirs[name]]
    gaps = [ours[name][metric] - theirs[name][metric] for name in shared]
    low, high = spread(gaps)
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


def words(at: float, low: float, high: float, digits: int = 1, sign: bool = False) -> str:
    """ "96.1 (93.0 … 98.9)", or "96.1 (too few)" without an interval."""
    plus = "+" if sign else ""
    if math.isnan(low) or math.isnan(high):
        return f"{at:{plus}.{digits}f} ({TOO_FEW})"
    return f"{at:{plus}.{digits}f} ({low:{plus}.{digits}f} … {high:{plus}.{digits}f})"
