"""Intervals keep their promise in simulation: how often each end misses a known truth, on scores of many shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from report_runs import plain_row
from scipy.stats import betabinom, binomtest

from kvexp.results import promise, stats
from kvexp.results import stats as intervals
from kvexp.results.divergence import holm_corrected
from kvexp.results.promise import held, mean_bound, most_beyond, prompts_needed, share_bound, share_p_value
from kvexp.results.read import read_runs
from kvexp.results.samples import pass_at, samples_table
from kvexp.results.stats import Floats
from kvexp.results.table import table
from kvexp.results.views import main
from kvexp.run.store import Run

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


# Promises by hand and against a naive graph of hypotheses, and how often they are wrong in simulation.


DRAWS = 1000


@pytest.mark.parametrize(
    ("share", "error", "beyond", "n"),
    [(0.9, 0.05, 0, 29), (0.9, 0.05, 1, 46), (0.95, 0.05, 0, 59), (0.99, 0.05, 0, 299), (0.9, 0.1, 0, 22)],
)
def test_prompts_needed_by_the_table_of_wilks(share, error, beyond, n):
    """Numbers of the one-sided tolerance limits of Wilks (1941), as printed in every table of them."""
    assert prompts_needed(share, error, beyond) == n
    assert most_beyond(n, share, error) == beyond
    assert most_beyond(n - 1, share, error) == beyond - 1


def test_p_value_and_bound_say_the_same():
    for n in (5, 29, 40):
        for beyond in range(n + 1):
            for share in (0.5, 0.9, 0.95):
                p = share_p_value(beyond, n, share)
                assert p == pytest.approx(binomtest(beyond, n, 1 - share, alternative="less").pvalue)
                assert (p <= 0.05) == (share_bound(beyond, n, 0.05) >= share - 1e-12)
            exact = binomtest(beyond, n, alternative="less").proportion_ci(0.95, method="exact")
            assert share_bound(beyond, n, 0.05) == pytest.approx(1 - exact.high)
            assert promise.chance(beyond, n, 40, 3) == pytest.approx(
                betabinom.cdf(3, 40, beyond + 0.5, n - beyond + 0.5)
            )
    assert promise.chance(1, 9, 40, -1) == 0
    assert share_p_value(0, 0, 0.9) == 1 and share_bound(0, 0, 0.05) == 0
    assert promise.largest_share(29, 0.05) == pytest.approx(0.05 ** (1 / 29))


def graph_of_hypotheses(chains, error):
    """Algorithm 1 of Bretz et al. (2009) with its matrix of weights: which hypotheses it rejects, chain by chain."""
    names = [(c, i) for c, chain in enumerate(chains) for i in range(len(chain))]
    p = {name: chains[name[0]][name[1]] for name in names}
    level = {(c, i): error / len(chains) if i == 0 else 0.0 for c, i in names}
    weight = {(one, other): 0.0 for one in names for other in names}
    for c, chain in enumerate(chains):
        for i in range(len(chain) - 1):
            weight[(c, i), (c, i + 1)] = 1.0
        for other in range(len(chains)):
            if other != c:
                weight[(c, len(chain) - 1), (other, 0)] = 1 / (len(chains) - 1)
    left, rejected = set(names), set()
    while found := sorted(name for name in left if p[name] <= level[name]):
        gone = found[0]
        left.remove(gone)
        rejected.add(gone)
        new = {}
        for one in left:
            level[one] += level[gone] * weight[gone, one]
            for other in left:
                if one == other:
                    new[one, other] = 0.0
                    continue
                loop = 1 - weight[one, gone] * weight[gone, one]
                through = weight[one, other] + weight[one, gone] * weight[gone, other]
                new[one, other] = through / loop if loop > 0 else 0.0
        weight = new
    return [sum((c, i) in rejected for i in range(len(chain))) for c, chain in enumerate(chains)]


def test_chains_are_the_graph_of_bretz_and_holm():
    rng = np.random.default_rng(1)
    for _ in range(300):
        chains = [rng.beta(0.3, 4, rng.integers(1, 5)) for _ in range(rng.integers(1, 5))]
        assert held(chains, 0.05) == graph_of_hypotheses(chains, 0.05)
        p = rng.beta(0.3, 4, 6)
        assert held([[each] for each in p], 0.05) == (holm_corrected(p) <= 0.05).tolist()
    assert held([[0.01, 0.06, 0.0]], 0.05) == [1], "what comes behind a failure is not looked at"
    assert held([[], [0.04]], 0.05) == [0, 1], "a chain without candidates spends nothing"


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda rng, n: rng.beta(0.3, 5, n), id="beta"),
        pytest.param(lambda rng, n: 1.0 * (rng.random(n) < 0.06), id="rare"),
        pytest.param(lambda rng, n: np.full(n, 0.5) + rng.choice([-0.5, 0.5], n), id="coin"),
        pytest.param(lambda rng, n: np.minimum(rng.exponential(0.05, n), 1), id="exponential"),
    ],
)
def test_bound_on_the_mean_is_not_passed_too_often(draw, confidence):
    rng = np.random.default_rng(2)
    mean = draw(np.random.default_rng(3), 2_000_000).mean()
    covered = np.mean([mean_bound(draw(rng, 40), 1 - confidence) >= mean for _ in range(DRAWS)])
    assert covered >= confidence - 0.015


def test_bound_on_the_mean_by_hand():
    """Two prompts without loss: the first bet, from the variance 1/4, and the second are capped, or are not."""
    error = 0.5
    bets = [np.sqrt(2 * np.log(2) / (2 * 0.25)), np.sqrt(2 * np.log(2) / (2 * (0.25 + 0.0625) / 2))]
    least = np.linspace(0.001, 0.999, 999)
    capital = np.array([np.prod([1 + min(bet, 0.75 / m) * (1 - m) for bet in bets]) for m in least])
    assert mean_bound(np.zeros(2), error) == pytest.approx(1 - least[capital >= 2].max(), abs=2e-3)
    assert mean_bound(np.ones(50), 0.05) == 1
    assert mean_bound(np.zeros(0), 0.05) == 1
    with pytest.raises(ValueError, match=r"losses must be in \[0, 1\], got 0.0..1.5"):
        mean_bound(np.array([0, 1.5]), 0.05)


# Several answers to an item: avg@N, pass@k and intervals over items, against naive recomputations.


def recorded(outputs: Path, method: str, right: np.ndarray, baseline: str | None = None, **info: object) -> Run:
    """A run whose answers to item i are right[i] (bool, [items, samples])."""
    year = info.get("year", 2025)
    labels = {"model": "tiny", "task": f"aime{year % 100}", "method": method, "kv_ratio": None, "setting": ""}
    run = Run.open(outputs, labels, labels, baseline=baseline)
    for index, (item, sample) in enumerate(np.ndindex(right.shape)):
        fine = bool(right[item, sample])
        row = plain_row(index, {"accuracy": 100.0 * fine}, example=f"{item} sample {sample + 1}")
        row["info"] = {"item": str(item), "sample": sample + 1, "graded": "right" if fine else "looping", "year": year}
        row["output_tokens"] = [1, 2, 3, 4] if method == "full" or fine else [1, 2, 9, 4]
        row["receipt"]["first_eviction_step"] = None if method == "full" else 0
        run.append(row)
    run.finish(right.size)
    return run


def draws(seed: int, items: int, samples: int, less: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((items, samples)) < np.clip(rng.random((items, 1)) - less, 0, 1)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n, c, k in ((4, 1, 2), (6, 2, 3), (5, 0, 2), (5, 5, 1), (8, 3, 4)):
        answers = [i < c for i in range(n)]
        naive = fmean(any(some) for some in itertools.combinations(answers, k))
        assert pass_at(k, np.array([float(c)]), np.array([float(n)]))[0] == pytest.approx(naive, abs=1e-12)
    assert math.isnan(pass_at(3, np.array([1.0]), np.array([2.0]))[0])


def test_items_are_what_an_interval_is_made_of(tmp_path):
    """Eight answers to each of 30 items are 30 pairs: taken for 240 they would have an interval half as wide."""
    full, less = draws(1, 30, 8), draws(1, 30, 8, 0.2)
    base = recorded(tmp_path, "full", full)
    recorded(tmp_path, "h2o", less, base.hash)
    found = table(tmp_path).set_index("method").loc["h2o"]
    assert (found["n"], found["paired"]) == (240, 30)
    assert found["accuracy_of_full"] == pytest.approx(100 * less.mean() / full.mean())
    top, bottom = 100 * less.mean(1), 100 * full.mean(1)
    means = stats.resampled_means(stats.ratio_moments(top, bottom), stats.RESAMPLES)
    low, high = stats.ratio_interval(top, bottom, means, stats.LEVEL)
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx((100 * low, 100 * high))


def test_the_view_against_a_naive_recomputation(tmp_path):
    full, less = draws(1, 30, 8), draws(1, 30, 8, 0.2)
    base = recorded(tmp_path, "full", full)
    recorded(tmp_path, "h2o", less, base.hash)
    frame = samples_table(read_runs(tmp_path)).set_index("method")
    row, whole = frame.loc["h2o"], frame.loc["full"]
    assert (row["items"], row["samples"], row["k"]) == (30, 8, 4)
    assert row["avg"] == pytest.approx(100 * less.mean())
    assert row["full"] == pytest.approx(whole["avg"]) == pytest.approx(100 * full.mean())
    gaps = 100 * (less.mean(1) - full.mean(1))
    assert row["difference"] == pytest.approx(gaps.mean())
    half = stdev(gaps) / math.sqrt(30) * 2.045  # Student's t of 29 degrees of freedom; the bootstrap may be wider
    assert row["difference_low"] <= gaps.mean() - half + 1e-2
    assert row["difference_high"] >= gaps.mean() + half - 1e-2
    naive = [fmean(any(some) for some in itertools.combinations(item, 4)) for item in less]
    assert row["pass"] == row["pass@4"] == pytest.approx(100 * fmean(naive))
    assert row["looping"] == pytest.approx(100 * (1 - less.mean()))
    assert row["same"] == pytest.approx(100 * (less.sum() * 4 + (~less).sum() * 2) / (240 * 4))
    assert math.isnan(whole["difference"])


def test_the_interval_over_items_holds_its_level():
    """In simulation: 95 % intervals of avg@4 over 30 items miss the true mean in 8 % of exams at most."""
    missed, resampled = 0, None
    rng = np.random.default_rng(3)
    for _ in range(300):
        scores = 100 * (rng.random((30, 4)) < rng.beta(1, 1, (30, 1))).mean(1)
        resampled = stats.resampled_means(stats.mean_moments(scores), 2000)
        low, high = stats.mean_interval(scores, resampled, stats.LEVEL)
        missed += not low <= 50 <= high
    assert missed <= 24


def test_each_exam_has_its_rows(tmp_path, capsys):
    for year in (2024, 2025):
        base = recorded(tmp_path, "full", draws(year, 30, 4), year=year)
        recorded(tmp_path, "h2o", draws(year, 30, 4, 0.1), base.hash, year=year)
    assert set(samples_table(read_runs(tmp_path))["task"]) == {"aime24", "aime25"}
    assert main([str(tmp_path), "--view", "samples"]) == 0
    shown = capsys.readouterr().out
    assert "aime24" in shown and "avg@4" in shown and "pass@2" in shown
