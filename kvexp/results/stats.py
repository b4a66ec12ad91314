"""Percentages of a baseline over paired examples, their bootstrap intervals, and what an interval decides."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

Floats: TypeAlias = NDArray[np.float64]

MARKS = (99.0, 99.9)  # MLPerf inference: percent of the baseline's quality
LENGTH_MARK = 90.0  # MLPerf inference: percent of the baseline's generated tokens
LEVEL = 0.95
POWER = 0.8
MIN_PAIRS = 20  # a bootstrap of fewer examples knows too little about its own width
RESAMPLES = 10_000
PILOT_RESAMPLES = 2_000  # of `n_range`, whose ends are told to two digits
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
    """Student's t with df degrees of freedom."""
    return float(stdtrit(df, p))


def t_tail(t: float, df: int) -> float:
    """Two-sided p of Student's t."""
    return float(2 * stdtr(df, -abs(t)))


def resamples_for(level: float) -> int:
    """Enough resamples for ten of them to lie beyond each end of the interval, within reason."""
    return int(min(MAX_RESAMPLES, max(RESAMPLES, math.ceil(20 / max(1 - level, 1e-9)))))


def resampled_means(columns: Floats, resamples: int) -> Floats:
    """Means of (n, C) columns under resampling of the n examples: (resamples, C).

    All columns share every draw, which keeps pairs together. The draws are a function of n alone, so a rerun, another
    metric or another run of the same size sees the same ones; more of them begin with those that fewer are.
    """
    return resampled_blocks([columns], resamples)[0]


def resampled_blocks(blocks: Sequence[Floats], resamples: int) -> list[Floats]:
    """`resampled_means` of each block (n, C), to the last digit what it is alone; all share the draws."""
    n = len(blocks[0])
    rng = np.random.default_rng([SEED, n])
    means = [np.empty((resamples, block.shape[1])) for block in blocks]
    step = max(1, min(RESAMPLES, 1_000_000 // n))
    for start in range(0, resamples, step):
        draws = rng.integers(n, size=(step, n)) + n * np.arange(step)[:, None]
        counts = np.bincount(draws.ravel(), minlength=step * n).reshape(step, n).astype(np.float64)
        rows = min(step, resamples - start)
        for mean, block in zip(means, blocks, strict=True):
            mean[start : start + rows] = (counts @ block / n)[:rows]
    return means


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


def n_range(metric: str, scores: Floats, base: Floats, mark: float, level: float = LEVEL) -> tuple[float, float]:
    """The middle 80 % of `n_needed` over resamples of these examples: what a pilot of this size knows of it."""
    n = len(scores)
    if n < MIN_PAIRS or not math.isfinite(float(percent(metric, scores.mean(), base.mean()))):
        return math.nan, math.nan
    columns = np.stack([scores, base, scores * scores, base * base, scores * base], axis=1)
    top, bottom, square, base_square, product = resampled_means(columns, PILOT_RESAMPLES).T
    at = percent(metric, top, bottom)
    slope = np.ones_like(at) if lower_is_better(metric) else at / 100.0
    offset = top - slope * bottom  # of the residual scores - slope * base, whose variance is that of one example
    variance = square - 2 * slope * product + slope * slope * base_square - offset * offset
    unit = at if lower_is_better(metric) else 100.0 / np.where(bottom > 0, bottom, np.nan)
    sd = unit * np.sqrt(np.maximum(variance, 0) * n / (n - 1))
    z = normal_quantile(1 - (1 - level) / 2) + normal_quantile(POWER)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.maximum(np.ceil((z * sd / np.abs(at - mark)) ** 2), MIN_PAIRS)
    wanted = np.where(np.isnan(wanted), np.inf, wanted)
    low, high = np.quantile(wanted, (0.1, 0.9), method="nearest")
    return float(low), float(high)
