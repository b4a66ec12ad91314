"""Intervals keep their promise in simulation: how often each end misses a known truth, on scores of many shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvexp.results import stats
from kvexp.results import stats as intervals
from kvexp.results.stats import Floats

ROUNDS = 800
Draw = Callable[[Any, int], tuple[Floats, Floats]]


def scaled(rng: Any, n: int) -> tuple[Floats, Floats]:
    base = rng.gamma(1.2, 10.0, n)
    return base * rng.lognormal(-0.18, 0.6, n), base


def mostly_unchanged(rng: Any, n: int) -> tuple[Floats, Floats]:
    base = rng.exponential(10.0, n)
    return np.where(rng.random(n) < 0.85, base, base * rng.exponential(1.0, n)), base


def half_unchanged(rng: Any, n: int) -> tuple[Floats, Floats]:
    base = rng.gamma(2, 12, n)
    changed = base * rng.gamma(4, 0.95 / 4, n) + rng.gamma(1, 1, n)
    return np.where(rng.random(n) < 0.4, base, changed), base


def right_or_wrong(rng: Any, n: int) -> tuple[Floats, Floats]:
    base = rng.random(n) < 0.6
    return 100.0 * np.where(rng.random(n) < 0.1, ~base, base), 100.0 * base


def heavy_tail(rng: Any, n: int) -> tuple[Floats, Floats]:
    """As mean divergences of answers are: log-normal, a few ten times the median."""
    return rng.lognormal(-2, 1.2, n), np.ones(n)


SHAPES: dict[str, tuple[Draw, float]] = {
    "scaled": (scaled, 1.0),
    "mostly unchanged": (mostly_unchanged, 1.0),
    "half unchanged": (half_unchanged, (0.4 * 24 + 0.6 * (24 * 0.95 + 1)) / 24),
    "right or wrong": (right_or_wrong, (0.6 * 0.9 + 0.4 * 0.1) / 0.6),
    "heavy tail": (heavy_tail, math.exp(-2 + 1.2**2 / 2)),
}
# Percent of samples whose interval lies (above, below) the truth, at most; 2.5 each is nominal.
BOUNDS = {
    ("scaled", 20): (2.5, 7),
    ("scaled", 50): (2.5, 5),
    ("mostly unchanged", 20): (2.5, 2.5),
    ("mostly unchanged", 50): (2.5, 4.5),
    ("half unchanged", 20): (2.5, 5),
    ("half unchanged", 50): (3, 4),
    ("right or wrong", 20): (2.5, 2.5),
    ("right or wrong", 50): (3, 3),
    ("heavy tail", 20): (2.5, 11),
    ("heavy tail", 50): (2.5, 9),
}


def misses(draw: Draw, truth: float, n: int, level: float, rounds: int = ROUNDS) -> tuple[float, float]:
    """Percent of samples whose interval lies above and below the truth."""
    rng, high_end, low_end = np.random.default_rng([7, n]), 0, 0
    for _ in range(rounds):
        top, bottom = draw(rng, n)
        if intervals.is_all_or_nothing(top, bottom):
            low, high = intervals.share_ratio_interval(top, bottom, level)
        else:
            means = stats.resampled_means(intervals.ratio_moments(top, bottom), 2000)
            low, high = intervals.ratio_interval(top, bottom, means, level)
        low_end += low > truth
        high_end += high < truth
    return 100 * low_end / rounds, 100 * high_end / rounds


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_ratios_miss_the_truth_as_seldom_as_docs_say(shape: str, n: int) -> None:
    above, below = misses(*SHAPES[shape], n, 0.95)
    most_above, most_below = BOUNDS[shape, n]
    assert above <= most_above and below <= most_below, (above, below)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "most"), [(20, (2.5, 6)), (50, (2.5, 5))])
def test_differences_miss_the_truth_as_seldom_as_docs_say(n: int, most: tuple[float, float]) -> None:
    rng, above, below = np.random.default_rng([8, n]), 0, 0
    for _ in range(ROUNDS):
        values = rng.exponential(1.0, n) - 1.0
        means = stats.resampled_means(intervals.mean_moments(values), 2000)
        low, high = intervals.mean_interval(values, means, 0.95)
        above, below = above + (low > 0), below + (high < 0)
    assert 100 * above / ROUNDS <= most[0] and 100 * below / ROUNDS <= most[1], (above, below)


@pytest.mark.slow
def test_a_pilot_brackets_the_number_that_decides() -> None:
    """80 % of pilots of 50 examples should bracket it; asked of them: between 65 and 95 %."""
    rng, hits, rounds = np.random.default_rng(9), 0, 200

    def sample(n: int) -> tuple[Floats, Floats]:
        base = rng.gamma(4, 8, n)
        return base * rng.normal(0.93, 0.3, n), base

    truth = stats.n_needed(gap=6.0, sd=stats.spread("rouge1", *sample(200_000)))
    for _ in range(rounds):
        low, high = stats.n_range("rouge1", *sample(50), 99.0)
        hits += low <= truth <= high
    assert 0.65 <= hits / rounds <= 0.95


@pytest.mark.slow
def test_verdicts_are_false_as_seldom_as_they_say() -> None:
    """Four metrics of a run that is as good as full attention, and of one at 97 %: false fails, false passes."""
    rng, fails, passes, rounds = np.random.default_rng(10), 0, 0, 300
    level = stats.corrected_level(4)
    for _ in range(rounds):
        base = rng.gamma(1.2, 10.0, 50)
        metrics = [base * rng.lognormal(-0.02, 0.2, 50) for _ in range(4)]
        ends = []
        for scores in metrics:
            means = stats.resampled_means(intervals.ratio_moments(scores, base), 2000)
            ends.append(100 * intervals.ratio_interval(scores, base, means, level)[1])
        fails += min(ends) < 99.0
        worse = base * 0.97 * rng.lognormal(-0.02, 0.2, 50)
        means = stats.resampled_means(intervals.ratio_moments(worse, base), 2000)
        passes += 100 * intervals.ratio_interval(worse, base, means, 0.95)[0] >= 99.0
    assert fails / rounds <= 0.025 + 0.015 and passes / rounds <= 0.025
