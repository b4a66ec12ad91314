"""Percentages of a baseline over paired examples, their bootstrap intervals, and what an interval decides."""

import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

MARKS = (99.0, 99.9)  # MLPerf inference: percent of the baseline's quality
LENGTH_MARK = 90.0  # MLPerf inference: percent of the baseline's generated tokens
LEVEL = 0.95
POWER = 0.8
MIN_PAIRS = 20  # a bootstrap of fewer examples knows too little about its own width
RESAMPLES = 10_000
MAX_RESAMPLES = 50_000
SEED = 95


def lower_is_better(metric: str) -> bool:
    return metric == "nll" or metric.endswith("_nll")


def percent(metric: str, mean: Floats | float, base: Floats | float) -> Floats:
    """Percent of the baseline, 100 = as good, NaN where the baseline scores 0.

    A score gives the ratio of the two means; a negative log-likelihood in nats gives exp(base - mean), the ratio of the
    two perplexities turned so that more is better. Both are functions of the means, so one bootstrap serves both.
    """
    top, bottom = np.asarray(mean, dtype=np.float64), np.asarray(base, dtype=np.float64)
    if lower_is_better(metric):
        return np.asarray(100.0 * np.exp(bottom - top))
    return np.asarray(100.0 * np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0))


def spread(metric: str, scores: Floats, base: Floats) -> float:
    """Standard deviation per example of `percent`, by the delta method: divided by sqrt(n) it is the standard error."""
    at = float(percent(metric, scores.mean(), base.mean()))
    if len(scores) < 2 or not math.isfinite(at):
        return math.nan
    if lower_is_better(metric):
        return at * float(np.std(scores - base, ddof=1))
    return 100.0 * float(np.std(scores - at / 100.0 * base, ddof=1)) / float(base.mean())


def normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def t_quantile(p: float, df: int) -> float:
    """Student's t by the Cornish-Fisher expansion in 1/df: within 1e-3 of the exact value for p <= 0.9995, df >= 19."""
    z = normal_quantile(p)
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    )


def tail(level: float, n: int) -> float:
    """The bootstrap quantile that stands for (1 - level) / 2: the expanded percentile interval.

    The plain percentile interval is too short for small n, as if it used n for n - 1 and a normal for a t; asking for
    this smaller quantile repairs both (Hesterberg, arXiv:1411.5279).
    """
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(1 - (1 - level) / 2, n - 1))


def resamples_for(level: float, n: int) -> int:
    """Enough resamples for ten of them to lie beyond the quantile asked for, within reason."""
    return int(min(MAX_RESAMPLES, max(RESAMPLES, math.ceil(10 / max(tail(level, n), 1e-9)))))


def resampled_means(columns: Floats, resamples: int) -> Floats:
    """Means of (n, C) columns under resampling of the n examples: (resamples, C).

    All columns share every draw, which keeps pairs together. The draws are a function of n alone, so a rerun, another
    metric or another run of the same size sees the same ones.
    """
    n = len(columns)
    rng = np.random.default_rng([SEED, n])
    means = np.empty((resamples, columns.shape[1]))
    step = max(1, 1_000_000 // n)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        draws = rng.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        counts = np.bincount(draws.ravel(), minlength=rows * n).reshape(rows, n)
        means[start : start + rows] = counts @ columns / n
    return means


def interval(values: Floats, n: int, level: float) -> tuple[float, float]:
    """Expanded percentile interval of bootstrap values (n = examples resampled).

    A resample whose baseline scored 0 (NaN) can have any percentage: it counts as 0 below and as infinity above.
    """
    if n < 2:
        return math.nan, math.nan
    p = tail(level, n)
    unknown = np.isnan(values)
    low = np.quantile(np.where(unknown, 0.0, values), p, method="lower")
    high = np.quantile(np.where(unknown, np.inf, values), 1 - p, method="higher")
    return float(low), float(high)


def corrected_level(comparisons: int, level: float = LEVEL) -> float:
    """Bonferroni: with every interval at this level, all of them hold together at `level`."""
    return 1 - (1 - level) / max(1, comparisons)


def decide(low: float, high: float, mark: float) -> str:
    """pass, fail, or undecided where the interval straddles the mark (or there is none)."""
    if low >= mark:
        return "pass"
    return "fail" if high < mark else "undecided"


def n_needed(gap: float, sd: float, level: float = LEVEL, power: float = POWER) -> float:
    """Examples after which the interval leaves out the mark with probability `power`, if the estimate is the truth.

    gap: |percent - mark|; sd: `spread`, same unit; level: of the (corrected) interval. Infinite where gap is 0.
    """
    if math.isnan(gap) or math.isnan(sd):
        return math.nan
    if gap == 0:
        return math.inf if sd else float(MIN_PAIRS)
    z = normal_quantile(1 - (1 - level) / 2) + normal_quantile(power)
    return float(max(MIN_PAIRS, math.ceil((z * sd / gap) ** 2)))
