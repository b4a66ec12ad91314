"""Several answers to an item: avg@N, pass@k and intervals over items, against naive recomputations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from report_runs import plain_row

from kvexp.results import stats
from kvexp.results.read import read_runs
from kvexp.results.samples import _stratified, pass_at, samples_table
from kvexp.results.table import table
from kvexp.results.views import main
from kvexp.run.plan import CHANCE, difference_seen, items_needed
from kvexp.run.store import Run


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


def test_exams_of_several_years_have_a_row_together(tmp_path, capsys):
    for year in (2024, 2025):
        base = recorded(tmp_path, "full", draws(year, 30, 4), year=year)
        recorded(tmp_path, "h2o", draws(year, 30, 4, 0.1), base.hash, year=year)
    frame = samples_table(read_runs(tmp_path))
    both = frame[frame["task"] == "aime24+aime25"].set_index("method").loc["h2o"]
    each = frame[frame["method"].eq("h2o") & frame["hash"].notna()]
    assert both["items"] == 60
    assert both["difference"] == pytest.approx(each["difference"].mean())
    assert both["difference_low"] < both["difference"] < both["difference_high"]
    assert main([str(tmp_path), "--view", "samples"]) == 0
    shown = capsys.readouterr().out
    assert "aime24+aime25" in shown and "avg@4" in shown and "pass@2" in shown


def test_strata_by_hand():
    a, b = np.array([0.0, 50.0] * 10), np.array([100.0, 0.0] * 10)
    found = _stratified("x", [a, b])
    variance = (np.var(a, ddof=1) / 20 + np.var(b, ddof=1) / 20) / 4
    free = variance**2 / sum((np.var(each, ddof=1) / 80) ** 2 / 19 for each in (a, b))
    assert found["x"] == 37.5
    assert found["x_high"] - 37.5 == pytest.approx(stats.t_quantile(0.975, free) * math.sqrt(variance))


def test_sizes_of_a_plan():
    """A standard deviation of 25 points over items: 30 see 12.8 points, 90 see 7.4, and 2 points take 1,230 items."""
    assert difference_seen(30, 1, 0, 25) == pytest.approx(12.8, abs=0.05)
    assert difference_seen(90, 1, 0, 25) == pytest.approx(7.4, abs=0.05)
    assert items_needed(2, 1, 0, 25) == pytest.approx(1230, abs=5)
    assert items_needed(2, 64) < items_needed(2, 16) < items_needed(2, 4) < items_needed(2, 1)
    assert items_needed(difference_seen(100, 4), 4) == 100
    # A simulation of the assumption: chances of an item are uniform, methods differ by nothing.
    rng = np.random.default_rng(5)
    answers = 100 * (rng.random((2, 200_000, 4)) < rng.random((1, 200_000, 1)))
    assert (answers[0].mean(1) - answers[1].mean(1)).std() == pytest.approx(math.sqrt(2 * CHANCE / 4), rel=0.02)
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    assert difference_seen(30, 4) == pytest.approx(z * math.sqrt((100 + 2 * CHANCE / 4) / 30))
