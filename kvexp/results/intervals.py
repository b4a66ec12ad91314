"""Confidence intervals of a mean, of a ratio of two paired means, and of a ratio of two paired shares.

Examples are the units that are resampled: tokens of one answer are not independent of each other.

- Means and ratios of means take the wider end of two intervals on each side: Student's t, and the bootstrap-t (Efron
  and Tibshirani, An Introduction to the Bootstrap, section 12.5), which divides every resample's deviation by its own
  standard error and so follows the skew of the scores. Ratios, and means of what cannot be negative, are treated on
  the log scale. Neither alone holds its level on both skewed and sparsely changed scores; docs/protocols.md has the
  rates that simulation found.
- Shares (scores that are all or nothing) take the hybrid interval of Bonett and Price (2006), doi:10.1002/sim.2388,
  which needs no resampling and keeps its level where next to no example changed.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betaincinv

from kvexp.results.stats import Floats, normal_quantile, t_quantile

LEAST_ERROR = 0.4  # a resample's standard error counts as at least this share of the sample's: one near 0 explodes t
LARGEST_LOG = 50.0  # an end of a ratio beyond exp(+-50) is 0 or infinity

Interval = tuple[float, float]
NONE: Interval = (math.nan, math.nan)


def mean_moments(values: Floats) -> Floats:
    """values [n] -> columns [n, 2] whose resampled means `mean_interval` takes."""
    return np.stack([values, values * values], axis=1)


def mean_interval(values: Floats, resampled: Floats, level: float) -> Interval:
    """Of the mean of values [n], which may have either sign; resampled [R, 2]: means of `mean_moments`."""
    n = len(values)
    if n < 2:
        return NONE
    at, error = _mean_error(mean_moments(values).mean(axis=0), n)
    if not error > 0:
        return float(at), float(at)
    each, errors = _mean_error(resampled, n)
    t = (each - at) / np.maximum(errors, LEAST_ERROR * error)
    below, above = _quantiles(t, n, level)
    return float(at - above * error), float(at + below * error)


def _mean_error(moments: Floats, n: int) -> tuple[Floats, Floats]:
    """Mean and standard error from moments [..., 2]."""
    mean = moments[..., 0]
    return mean, np.sqrt(np.maximum(moments[..., 1] - mean * mean, 0) / (n - 1))


def ratio_moments(top: Floats, bottom: Floats) -> Floats:
    """Two columns [n] -> columns [n, 5] whose resampled means `ratio_interval` takes."""
    return np.stack([top, bottom, top * top, bottom * bottom, top * bottom], axis=1)


def ratio_interval(top: Floats, bottom: Floats, resampled: Floats, level: float) -> Interval:
    """Of mean(top) / mean(bottom), both >= 0 and paired [n]; resampled [R, 5]: means of `ratio_moments`.

    bottom of ones gives the interval of a mean that cannot be negative. Where bottom scores in every resample, but so
    few examples of top are not 0 that resamples without them leave the upper end infinite, it is what top would give if
    as many examples were not 0 as n draws allow (Clopper and Pearson 1934), each as large as the largest seen.
    """
    n = len(top)
    if n < 2 or not bottom.mean() > 0:
        return NONE
    at_most = float(_share_at_most(int((top > 0).sum()), n, level) * max(top.max(), bottom.max()) / bottom.mean())
    if not top.any():
        return 0.0, at_most
    at, error = _ratio_error(ratio_moments(top, bottom).mean(axis=0), n)
    spread = float(error / at)
    if not spread > 0:
        return float(at), float(at)
    with np.errstate(divide="ignore", invalid="ignore"):
        each, errors = _ratio_error(resampled, n)
        t = np.log(each / at) / np.maximum(errors / each, LEAST_ERROR * spread)
    below, above = _quantiles(t, n, level)
    high = _times_exp(at, below * spread)
    if math.isinf(high) and resampled[:, 1].min() > 0:
        high = at_most
    return _times_exp(at, -above * spread), high


def _share_at_most(k: int, n: int, level: float) -> float:
    """Upper end of the exact interval of a share of which k of n were seen (Clopper and Pearson 1934)."""
    return 1.0 if k == n else float(betaincinv(k + 1, n - k, (1 + level) / 2))


def _ratio_error(moments: Floats, n: int) -> tuple[Floats, Floats]:
    """Ratio of means and its standard error (delta method) from moments [..., 5]."""
    ratio = moments[..., 0] / moments[..., 1]
    variance = moments[..., 2] - 2 * ratio * moments[..., 4] + ratio * ratio * moments[..., 3]
    return ratio, np.sqrt(np.maximum(variance, 0) / (n - 1)) / moments[..., 1]


def _quantiles(t: Floats, n: int, level: float) -> tuple[float, float]:
    """How many standard errors above and below the estimate the interval reaches: (up, down), each at least Student's.

    A resample without a ratio (its baseline scored 0, or the run did) may lie anywhere: it counts on both sides.
    """
    tail = (1 - level) / 2
    student = t_quantile(1 - tail, n - 1)
    unknown = np.isnan(t)
    low = np.quantile(np.where(unknown, -np.inf, t), tail, method="lower")
    high = np.quantile(np.where(unknown, np.inf, t), 1 - tail, method="higher")
    return max(float(-low), student), max(float(high), student)


def _times_exp(at: Floats | float, power: float) -> float:
    if abs(power) > LARGEST_LOG:
        return math.inf if power > 0 else 0.0
    return float(at * math.exp(power))


def is_all_or_nothing(*columns: Floats) -> bool:
    """Whether scores, in percent, are shares of examples that are right: every one 0 or 100."""
    return all(bool(np.isin(column, (0.0, 100.0)).all()) for column in columns)


def share_ratio_interval(top: Floats, bottom: Floats, level: float) -> Interval:
    """Of share(top > 0) / share(bottom > 0), paired [n] (Bonett and Price 2006, the hybrid interval of equation 7)."""
    one, other = top > 0, bottom > 0
    both, n_one, n_other = int((one & other).sum()), int(one.sum()), int(other.sum())
    seen = n_one + n_other - both  # examples that either has right
    if not n_other:
        return NONE
    z = normal_quantile(1 - (1 - level) / 2)
    apart = math.sqrt((seen - both + 2) / ((n_one + 1) * (n_other + 1)))
    alone = sum(math.sqrt((1 - (k + 1) / (seen + 2)) / (k + 1)) for k in (n_one, n_other))
    low_one, high_one = _wilson(n_one, seen, z * apart / alone)
    low_other, high_other = _wilson(n_other, seen, z * apart / alone)
    return low_one / high_other, high_one / low_other if low_other > 0 else math.inf


def _wilson(k: int, n: int, z: float) -> Interval:
    """Wilson's score interval of k of n, z standard errors wide on each side."""
    share, more = k / n, z * z / n
    half = z * math.sqrt(share * (1 - share) / n + more / (4 * n))
    return (share + more / 2 - half) / (1 + more), (share + more / 2 + half) / (1 + more)
