"""The results table: tiny cases by hand, honest counting, verdicts, coverage of the bootstrap, what is printed."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_runs import plain_row as row
from report_runs import write
from rich.console import Console

import kvexp
from kvexp.results import stats
from kvexp.results import stats as intervals
from kvexp.results.blocks import count, seconds
from kvexp.results.plots import draw_quality as draw
from kvexp.results.read import read_runs
from kvexp.results.stats import n_needed
from kvexp.results.table import CONTAINS, print_table, quality_table, table, to_markdown
from kvexp.results.views import main
from kvexp.run.compose import listed
from kvexp.run.store import Run, refuse
from kvexp.util.errors import ConfigError
from kvexp.util.output import size

SEED = 7
ROOT = Path(__file__).resolve().parents[2]


def one(outputs: Path, method: str) -> dict[str, Any]:
    (found,) = table(outputs, {"method": method}).to_dict("records")
    return found


def noisy(n: int = 100, seed: int = SEED) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).gamma(4, 8, n)]


# --- edited by hand


def edit(run: Run, line: int, **fields: Any) -> None:
    file = run.path / "examples.jsonl"
    lines = file.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | fields)
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metrics": {"rouge1": "50"}}, "metrics.rouge1 must be a number, got '50'"),  # other fields: test_record.py
        ({"receipt": [1]}, "receipt must be a group of fields, got [1]"),
    ],
)
def test_a_run_with_an_edited_row_is_shown_without_numbers(
    tmp_path: Path, fields: Any, words: str, capsys: Any
) -> None:
    """Its other rows would give another mean; other runs are as they were, and runs against it have no verdict."""
    base = write(tmp_path, "full", [10.0] * 30)
    bad = write(tmp_path, "h2o", [9.0] * 30, base.hash)
    write(tmp_path, "a2sf", [9.0] * 30, base.hash)
    before = one(tmp_path, "a2sf")
    edit(bad, 4, **fields)
    found = one(tmp_path, "h2o")
    assert found["status"] == "failed" and found["n"] == 0 and "rouge1" not in found
    assert f"{bad.path}/examples.jsonl:5: {words}; correct the line, or remove it" in found["note"]
    after = one(tmp_path, "a2sf")
    assert {k: v for k, v in after.items() if v == v} == {k: v for k, v in before.items() if v == v}
    edit(base, 0, **fields)
    assert "examples.jsonl:1: " in one(tmp_path, "a2sf")["note"] and one(tmp_path, "a2sf")["verdict99"] == "undecided"
    assert main([str(tmp_path)]) == 0
    assert "Traceback" not in "".join(capsys.readouterr())


# --- by hand


def test_ended_is_the_share_of_generated_answers_that_ended_by_themselves(tmp_path: Path) -> None:
    run = write(tmp_path, "full", [])
    for index, reason in enumerate(["stop", "length", "stop", "stop", None]):  # None: judged, not generated
        run.append(row(index, 1.0, finish_reason=reason))
    run.append(row(5, None, finish_reason=None))
    assert one(tmp_path, "full")["ended"] == 75
    write(tmp_path, "h2o", [1.0])  # rows of before
    assert math.isnan(one(tmp_path, "h2o")["ended"])


def test_percent_is_over_the_examples_both_have(tmp_path: Path) -> None:
    base = write(tmp_path, "full", [10.0, 30.0, None, 500.0])
    write(tmp_path, "h2o", [10.0, 10.0, 70.0, None], base.hash)
    found = one(tmp_path, "h2o")
    assert found["rouge1_of_full"] == pytest.approx(100 * (10 + 10) / (10 + 30))  # e2 and e3 have no partner
    assert (found["n"], found["skipped"], found["paired"], found["changed"]) == (3, 1, 2, 1)
    assert found["rouge1"] == pytest.approx((10 + 10 + 70) / 3)
    assert found["verdict99"] == "undecided" and "2 paired examples" in found["note"]


def test_pairs_are_by_id_and_need_a_score_in_every_metric(tmp_path: Path) -> None:
    base = write(tmp_path, "full", [10.0, 30.0, 50.0])
    run = write(tmp_path, "h2o", [], base.hash, done=False)
    for index, score in ((1, 30.0), (0, 10.0), (2, {"rouge1": None})):
        run.append(row(index, score))
    run.finish(3)
    found = one(tmp_path, "h2o")
    assert (found["paired"], found["changed"]) == (2, 0) and found["rouge1_of_full"] == pytest.approx(100)


def test_a_skipped_row_has_no_score_even_if_it_says_so(tmp_path: Path) -> None:
    run = write(tmp_path, "full", [10.0, 30.0], done=False)
    run.append(row(2, 0.0, skipped="too long"))
    run.append(row(3, None, skipped=None))  # not skipped by name, and nothing to count either
    found = one(tmp_path, "full")
    assert (found["n"], found["skipped"], found["rouge1"]) == (2, 2, 20)


UNTIMED = {"seconds": {"ttft": None, "tt2t": None, "tpot": None}}


@pytest.mark.parametrize(
    ("rows", "head", "cell", "below"),
    [
        ([{"receipt": {"batch_size": size}} for size in (4, 4, 2)], "batch", "2-4", "TTFT and TPOT are the batch's"),
        ([{"prompt_cut": True}], "prompt cut", "1", ""),
        ([{}, {"metrics": {}, "skipped": "too long"}], "skipped", "1", "without a score: too long (1)"),
        ([{}, UNTIMED, UNTIMED], "timed", "1", "timed: of how many of the n examples"),
        (
            [{}, {"load": 0.5}, {"load": 0.49}],
            "timed",
            "2",
            "busy machine: times of 1 of 3 examples are not comparable",
        ),
        ([{"seconds": {"ttft": 0.5}}], "TTFT", "500 ms", "TTFT, TPOT: medians over the n examples"),
    ],
)
def test_columns_stand_where_a_row_has_something_to_say(
    tmp_path: Path, rows: list[dict[str, Any]], head: str, cell: str, below: str
) -> None:
    def shown() -> tuple[list[str], str]:
        text = to_markdown(table(tmp_path))
        return [each.strip() for each in text.splitlines()[2].split("|")], text

    write(tmp_path, "full", [10.0, 30.0], changes={"receipt": {"first_eviction_step": None, "batch_size": 1}} | UNTIMED)
    assert head not in shown()[0]
    run = write(tmp_path, "h2o", [], done=False)
    for index, changes in enumerate(rows):
        run.append(row(index, 10.0, **changes))
    run.finish(len(rows))
    heads, text = shown()
    line = next(line for line in text.splitlines() if line.startswith("| h2o"))
    assert line.split("|")[heads.index(head)].strip() == cell and below in text


def test_times_of_a_busy_machine_are_not_shown(tmp_path: Path) -> None:
    """Half a core taken by others: no median of them is made, and a line says why."""
    write(tmp_path, "full", [10.0, 30.0], changes={"load": 0.4})
    write(tmp_path, "h2o", [10.0, 30.0], changes={"load": 0.5})
    full, h2o = (one(tmp_path, method) for method in ("full", "h2o"))
    assert (full["busy"], full["timed"], h2o["busy"], h2o["timed"]) == (0, 2, 2, 0)
    assert full["ttft_s"] > 0 and all(math.isnan(h2o[name]) for name in ("ttft_s", "tt2t_s", "tpot_s", "tokens_per_s"))
    text = to_markdown(table(tmp_path, {"method": "h2o"}))
    assert "busy machine: times are not comparable" in text and "TTFT" not in text


def test_the_share_of_captured_steps_is_said(tmp_path: Path) -> None:
    note = "{} of 40 decode steps were replayed from a CUDA graph; h2o is not captured: why"
    run = write(tmp_path, "h2o", [], done=False)
    for index, replayed in enumerate((36, 30, 0)):
        run.append(row(index, 10.0, info={"cuda_graph": note.format(replayed)}))
    run.finish(3)
    write(tmp_path, "full", [10.0, 30.0])
    text = to_markdown(table(tmp_path))
    assert "55 % of the decode steps were replayed from a CUDA graph" in text and text.count("CUDA graph") == 1


def test_percent_and_spread_by_hand() -> None:
    base, scores = np.array([10.0, 20.0, 30.0]), np.array([10.0, 16.0, 22.0])
    assert stats.percent("rouge1", scores.mean(), base.mean()) == pytest.approx(80.0)
    # residuals scores - 0.8 * base = 2, 0, -2: their deviation is 2, over a mean of 20, in percent
    assert stats.spread("rouge1", scores, base) == pytest.approx(10.0)
    assert stats.percent("nll", 2.1, 2.0) == pytest.approx(90.48374180359595)  # 100 * exp(-0.1): a higher NLL is worse
    assert np.isnan(stats.percent("rouge1", 3.0, 0.0))
    # means are equal; differences 0, .5, -.5
    assert stats.spread("nll", np.array([1.0, 2.5, 2.5]), np.array([1.0, 2.0, 3.0])) == pytest.approx(100 * 0.5)


def test_n_needed_by_hand() -> None:
    # (1.959964 + 0.841621)^2 = 7.848879, times (10 / 1)^2
    assert n_needed(gap=1.0, sd=10.0) == 785
    assert n_needed(gap=2.0, sd=10.0) == 197  # twice the gap, a quarter of the examples
    assert n_needed(gap=1.0, sd=10.0, level=stats.corrected_level(15)) > 785
    assert n_needed(gap=0.0, sd=10.0) == math.inf
    assert n_needed(gap=50.0, sd=1.0) == stats.MIN_PAIRS
    assert math.isnan(n_needed(gap=math.nan, sd=1.0))


def test_bootstrap_error_is_the_error_of_the_mean() -> None:
    sample = np.random.default_rng(SEED).normal(50, 10, 101)
    means = stats.resampled_means(sample[:, None], 10_000)
    assert means.std() == pytest.approx(sample.std() / math.sqrt(101), rel=0.03)
    means = stats.resampled_means(intervals.mean_moments(sample), 10_000)
    low, high = intervals.mean_interval(sample, means, 0.95)
    half = 1.984 * sample.std(ddof=1) / math.sqrt(101)  # the t interval
    assert (low, high) == pytest.approx((sample.mean() - half, sample.mean() + half), abs=0.1 * half)
    assert low <= sample.mean() - half * 0.999 and high >= sample.mean() + half * 0.999, "never shorter than Student's"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(99.0, 101, "pass"), (98.9, 99.0, "undecided"), (90, 98.99, "fail"), (98, 100, "undecided")],
)
def test_an_interval_decides(low: float, high: float, expected: str) -> None:
    assert stats.decide(low, high, 99.0) == expected
    assert stats.decide(math.nan, math.nan, 99.0) == "undecided"


def test_a_resample_without_a_baseline_score_may_be_anything() -> None:
    """One of 30 examples scores at all: a third of the resamples miss it, and say nothing about the ratio."""
    top, bottom = np.zeros(30), np.zeros(30)
    top[0], bottom[0], top[1] = 50.0, 60.0, 10.0
    means = stats.resampled_means(intervals.ratio_moments(top, bottom), 2000)
    assert intervals.ratio_interval(top, bottom, means, 0.95) == (0.0, math.inf)


@pytest.mark.parametrize(("right", "n", "high"), [(0, 100, 1 - 0.025**0.01), (1, 60, 0.0894)])
def test_next_to_nothing_right_is_no_proof_of_nothing(right: int, n: int, high: float) -> None:
    """Zero or one of n scores: so many of all may (Clopper and Pearson), each as much as the baseline's best."""
    top, bottom = np.where(np.arange(n) < right, 10.0, 0.0), np.full(n, 20.0)
    means = stats.resampled_means(intervals.ratio_moments(top, bottom), 2000)
    low, found = intervals.ratio_interval(top, bottom, means, 0.95)
    assert low <= top.mean() / bottom.mean() < found == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize(("both", "first", "second"), [(43, 7, 23), (10, 0, 1), (60, 0, 0)])
def test_shares_the_other_way_round(both: int, first: int, second: int) -> None:
    """A share that did not change: that is not exact."""
    top = np.array([100.0] * (both + first) + [0.0] * (second + 3))
    bottom = np.array([100.0] * both + [0.0] * first + [100.0] * second + [0.0] * 3)
    low, high = intervals.share_ratio_interval(top, bottom, 0.95)
    assert low < top.mean() / bottom.mean() < high
    assert intervals.share_ratio_interval(bottom, top, 0.95) == pytest.approx((1 / high, 1 / low))


# --- verdicts


def test_any_of_several_metrics_fails_a_run_so_each_has_its_share_of_the_errors(tmp_path: Path) -> None:
    """Equal scores as one metric and as four: passing asks no more of four, failing does."""
    base, rng = noisy(), np.random.default_rng(3)
    worse = [float(score * rng.normal(0.96, 0.1)) for score in base]
    for folder, names in ((tmp_path / "one", ["rouge1"]), (tmp_path / "four", ["rouge1", "rouge2", "rougeL", "acc"])):
        full = write(folder, "full", [dict.fromkeys(names, score) for score in base])
        write(folder, "h2o", [dict.fromkeys(names, score) for score in worse], full.hash)
    single, four = (one(tmp_path / name, "h2o") for name in ("one", "four"))
    assert four["rouge1_low_corrected"] == pytest.approx(single["rouge1_low_corrected"], rel=1e-3)
    assert four["rouge1_high_corrected"] > single["rouge1_high_corrected"] + 0.1
    assert four["rouge1_high"] == pytest.approx(single["rouge1_high"], rel=1e-3), "the printed interval is at 95 %"


def test_the_number_to_decide_is_a_range(tmp_path: Path) -> None:
    base, rng = noisy(50), np.random.default_rng(4)
    full = write(tmp_path, "full", base)
    write(tmp_path, "h2o", [float(score * rng.normal(0.98, 0.3)) for score in base], full.hash)
    found = one(tmp_path, "h2o")
    assert 50 < found["needed_low"] < found["needed"] < found["needed_high"]
    low, high = count(found["needed_low"]), count(found["needed_high"])
    assert f"{low}-{high} / " in to_markdown(table(tmp_path))


def test_verdicts_and_what_decides_them(tmp_path: Path) -> None:
    scores = noisy()
    base = write(tmp_path, "full", [{"rouge1": score, "rouge2": score} for score in scores])
    shaken = [score + noise for score, noise in zip(scores, np.random.default_rng(1).normal(0, 6, 100), strict=True)]
    runs = {
        "same": (scores, scores, 11, ("pass", "pass", "pass")),
        "near": ([0.995 * score for score in scores], scores, 11, ("pass", "fail", "pass")),
        "half": ([0.5 * score for score in scores], scores, 11, ("fail", "fail", "fail")),
        "shaken": ([float(score) for score in shaken], scores, 11, ("undecided", "undecided", "undecided")),
        "second": (scores, [0.9 * score for score in scores], 11, ("fail", "fail", "fail (R-2)")),
        "short": (scores, scores, 9, ("fail", "fail", "fail (length)")),  # of 11 tokens each
        "shorter": (scores, scores, 10, ("pass", "pass", "pass")),
    }
    for method, (first, second, tokens, _) in runs.items():
        metrics = [{"rouge1": one, "rouge2": two} for one, two in zip(first, second, strict=True)]
        write(tmp_path, method, metrics, base.hash, changes={"new_tokens": tokens})
    found = table(tmp_path).set_index("method")
    lines = {line.split(" |")[0][2:]: line for line in to_markdown(table(tmp_path)).splitlines() if line[:1] == "|"}
    for method, (*_, (at99, at999, shown)) in runs.items():
        assert tuple(found.loc[method, ["verdict99", "verdict999"]]) == (at99, at999), method
        assert f"| {shown} |" in lines[method]
    assert found.loc["half", ["rouge1_low", "rouge1_high"]].tolist() == pytest.approx([50, 50])
    shaken_row = found.loc["shaken"]
    assert shaken_row["rouge1_low"] < shaken_row["rouge1_of_full"] < shaken_row["rouge1_high"]
    assert shaken_row["needed"] > 100 and math.isnan(found.loc["same", "needed"])
    assert found.loc["second", "rouge1_verdict99"] == "pass" and found.loc["second", "headline"] == "rouge1"
    assert found.loc["short", "length_of_full"] == pytest.approx(100 * 9 / 11) and not found.loc["short", "length_ok"]


def test_a_higher_nll_fails(tmp_path: Path) -> None:
    base = write(tmp_path, "full", [{"nll": score / 10} for score in noisy()])
    write(tmp_path, "worse", [{"nll": score / 10 + 0.1} for score in noisy()], base.hash)
    write(tmp_path, "better", [{"nll": score / 10 - 0.1} for score in noisy()], base.hash)
    assert one(tmp_path, "worse")["nll_of_full"] == pytest.approx(100 * math.exp(-0.1))
    assert (one(tmp_path, "worse")["verdict99"], one(tmp_path, "better")["verdict999"]) == ("fail", "pass")


def test_a_budget_that_never_bit_is_void(tmp_path: Path) -> None:
    base = write(tmp_path, "full", [*noisy(), 20.0])
    never = {"receipt": {"first_eviction_step": None}}
    write(tmp_path, "h2o", noisy(), base.hash, changes=never)
    found = one(tmp_path, "h2o")
    assert (found["verdict99"], found["verdict999"], found["evicted"]) == ("void", "void", 0)
    assert pd.isna(found.get("rouge1_of_full")) and found["comparisons"] == 0 and "void" in found["note"]
    run = write(tmp_path, "tova", noisy(), base.hash, done=False, changes=never)
    run.append(row(100, 20.0))  # one eviction is enough
    run.finish(101)
    assert one(tmp_path, "tova")["evicted"] == 1 and one(tmp_path, "tova")["verdict99"] == "pass"


def test_verdicts_are_corrected_for_the_compared_runs_of_their_model_and_task(tmp_path: Path) -> None:
    base = write(tmp_path, "full", noisy())
    for index in range(5):
        shaken = np.random.default_rng(index).normal(0, 3, 100)
        write(tmp_path, "h2o", [float(a + b) for a, b in zip(noisy(), shaken, strict=True)], base.hash, kv_ratio=index)
    every, alone = table(tmp_path), table(tmp_path, {"method": ["h2o"], "kv_ratio": 2})
    assert set(every["comparisons"]) == {5} and set(alone["comparisons"]) == {1}
    assert every["confidence"].iloc[0] == pytest.approx(0.99)
    wide, narrow = every[every["kv_ratio"] == 2].iloc[0], alone.iloc[0]
    assert wide["rouge1_low"] == narrow["rouge1_low"] == narrow["rouge1_low_corrected"]
    assert wide["rouge1_low_corrected"] < wide["rouge1_low"] and wide["rouge1_high_corrected"] > wide["rouge1_high"]


def test_another_task_or_model_in_the_folder_changes_no_verdict(tmp_path: Path) -> None:
    base = write(tmp_path, "full", noisy())
    for index in range(3):
        shaken = np.random.default_rng(index).normal(0, 3, 100)
        write(tmp_path, "h2o", [float(a + b) for a, b in zip(noisy(), shaken, strict=True)], base.hash, kv_ratio=index)
    alone = table(tmp_path)
    assert set(alone["comparisons"]) == {3}
    for other in ({"task": "cnn_dailymail"}, {"model": "gpt2"}):
        base = write(tmp_path, "full", noisy(), **other)
        for ratio in (0.1, 0.2, 0.3, 0.4):
            write(tmp_path, "tova", noisy(100, SEED + 1), base.hash, kv_ratio=ratio, **other)
    both = table(tmp_path)
    assert set(both["comparisons"]) == {3, 4}
    same = both[both["model"].eq("tiny") & both["task"].eq("xsum")]
    pd.testing.assert_frame_equal(same.reset_index(drop=True), alone)
    text = to_markdown(both)
    assert "98.33 % for 3 runs, 98.75 % for 4 runs" in text and "99 % (3 runs)" in text and "99 % (4 runs)" in text


# --- runs that are not whole


def test_partial_and_failed_runs_are_listed_and_not_judged(tmp_path: Path) -> None:
    base = write(tmp_path, "full", noisy())
    write(tmp_path, "going", noisy(40), base.hash, done=False)
    write(tmp_path, "broken", noisy(40), base.hash, done=False).fail(RuntimeError("out of memory\nat line 3"))
    write(tmp_path, "never", [], base.hash, done=False).fail(ValueError("no such file"))
    going, broken, never = (one(tmp_path, method) for method in ("going", "broken", "never"))
    assert [each["status"] for each in (going, broken, never)] == ["partial", "failed", "failed"]
    assert [each["verdict99"] for each in (going, broken, never)] == ["undecided"] * 3
    assert going["paired"] == 40 and going["rouge1_of_full"] == pytest.approx(100)
    assert broken["note"] == "failed: RuntimeError: out of memory"
    assert never["n"] == 0 and math.isnan(never["slots"])


def test_why_a_run_has_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = noisy(40)
    base = write(tmp_path, "full", scores)
    partial = write(tmp_path, "full", scores[:30], done=False, kv_ratio=1.0)
    zero = write(tmp_path, "full", [0.0] * 40, kv_ratio=0.9)
    few = write(tmp_path, "full", scores[: stats.MIN_PAIRS - 1], kv_ratio=0.8)
    runs: dict[str, tuple[list[float | None], str | None, str]] = {
        "tova": ([*scores[:-1], None], base.hash, "1 of the examples the baseline scored have no score"),
        "snapkv": (list(scores), partial.hash, "baseline partial"),
        "window": (list(scores), "0123456789abcdef", "0123456789abcdef is not here"),
        "knorm": (list(scores), None, "no baseline was recorded"),
        "h2o": ([1.0] * 40, zero.hash, "the baseline scores 0 in rouge1: no percentage of that"),
        "sparq": (list(scores), few.hash, f"{stats.MIN_PAIRS - 1} paired examples are too few"),
    }
    for method, (given, baseline, _) in runs.items():
        write(tmp_path, method, given, baseline)
    monkeypatch.setattr("kvexp.NUMERICS", 10**6)
    write(tmp_path, "quest", scores, base.hash)
    found = table(tmp_path).set_index("method")
    for method, words in {**{name: each[2] for name, each in runs.items()}, "quest": "NUMERICS is 1000000"}.items():
        assert found.loc[method, "verdict99"] == "undecided" and words in found.loc[method, "note"], method
    assert found.loc[["h2o", "quest"], "rouge1_of_full"].isna().all()


def heads(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("**")]


def two_numerics(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    for numerics in (kvexp.NUMERICS, kvexp.NUMERICS + 1):
        monkeypatch.setattr("kvexp.NUMERICS", numerics)
        base = write(outputs, "full", noisy())
        write(outputs, "h2o", noisy(seed=8), base.hash)
    return numerics


def test_each_numerics_has_a_table_of_its_own_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = two_numerics(tmp_path, monkeypatch)
    frame = table(tmp_path)
    assert heads(to_markdown(frame)) == [
        f"**tiny / xsum, NUMERICS {newest}**",
        f"**tiny / xsum, NUMERICS {newest - 1}**",
    ]
    assert set(frame["comparisons"]) == {1}, "a family of runs each"
    figure = draw(frame, None)
    assert [axes.get_title().split(" (")[0] for axes in figure.axes] == [
        f"tiny / xsum, NUMERICS {value}" for value in (newest, newest - 1)
    ]
    assert heads(to_markdown(table(tmp_path, {"numerics": newest}))) == ["**tiny / xsum**"]


def test_where_n_differs_it_stands_beside_every_number_and_line(tmp_path: Path) -> None:
    base = write(tmp_path, "full", noisy(60))
    for ratio, n in ((0.2, 60), (0.5, 60), (0.3, 30)):
        write(tmp_path, "h2o", noisy(n, seed=8), base.hash, kv_ratio=ratio)
    console = Console(file=(file := io.StringIO()), width=60, markup=False)  # type: ignore[arg-type]
    print_table(table(tmp_path), console)
    parts = [line for line in file.getvalue().splitlines() if line.startswith("method")]
    assert len(parts) > 2 and all(line.split()[:3] == ["method", "kv_ratio", "n"] for line in parts)
    (axes,) = draw(table(tmp_path), None).axes
    assert axes.get_title() == "tiny / xsum (n = 30 to 60)"
    assert {"h2o", "h2o (n = 30)"} <= set(axes.get_legend_handles_labels()[1])
    (axes,) = draw(table(tmp_path, first=30), None).axes
    assert axes.get_title() == "tiny / xsum (n = 30)"


def test_runs_that_no_label_tells_apart_say_what_differs(tmp_path: Path) -> None:
    """The data file was edited, say: two rows of one name."""
    labels = {"model": "tiny", "task": "xsum", "method": "full", "kv_ratio": None}
    for data, seed in (("a", 7), ("b", 8)):
        run = Run.open(tmp_path, {"method": {"name": "full"}, "data": {"sha": data}}, labels)
        for index, score in enumerate(noisy(20, seed)):
            run.append(row(index, score))
        run.finish(20)
    assert table(tmp_path)["setting"].nunique() == 2 and table(tmp_path)["setting"].str.startswith("data=").all()
    assert table(tmp_path)["also"].eq("").all()


def test_hiding_runs_moves_no_95_percent_interval() -> None:
    """Verdicts of many runs take more draws, which begin with those that fewer are."""
    columns = [np.stack([noisy(30), noisy(30, seed=s)], axis=1) for s in range(3)]
    alone = stats.resampled_means(columns[1], stats.RESAMPLES)
    for resamples in (stats.RESAMPLES, 2 * stats.RESAMPLES):
        assert (stats.resampled_blocks(columns, resamples)[1][: stats.RESAMPLES] == alone).all()
    assert len(np.unique(alone[:, 0])) > 1000 and abs(alone[:, 0].mean() - columns[1][:, 0].mean()) < 0.5


def refused(outputs: Path, **labels: Any) -> None:
    named = {"model": "tiny", "task": "xsum", "method": "h2o", "kv_ratio": 7.0} | labels
    refuse(outputs, [f"{key}={value}" for key, value in named.items()], named, ConfigError("no such thing"))


def test_refused_jobs_are_one_line_and_go_once_their_kind_has_run(tmp_path: Path) -> None:
    refused(tmp_path)
    refused(tmp_path, method="h2oo", kv_ratio=0.5)
    refused(tmp_path, model="stranger", kv_ratio=0.5)
    base = write(tmp_path, "full", noisy(20))
    text = to_markdown(table(tmp_path))
    (line,) = (line for line in text.splitlines() if "h2oo" in line)
    assert (
        line.startswith("- refused, without rows: ") and "tiny / xsum h2o 7" in line and "stranger / xsum h2o" in line
    )
    assert heads(text) == ["**tiny / xsum**"] and "refused" not in text.replace(line, "")
    write(tmp_path, "h2o", noisy(20, seed=8), base.hash)
    text = to_markdown(table(tmp_path))
    assert "h2oo" not in text and "h2o 7" not in text and "refused, without rows: stranger / xsum h2o 0.5;" in text
    assert table(tmp_path, {"status": "refused"})["note"].str.contains("no such thing").sum() == 3
    refused(tmp_path)  # again, after the run: it is told again
    assert "tiny / xsum h2o 7" in to_markdown(table(tmp_path))


def test_a_metric_that_asks_for_containment_is_called_so(tmp_path: Path) -> None:
    for task, name in (("news_qa", "contains"), ("testbed_qa", "exact")):
        write(tmp_path, "full", [{"exact": 100.0, "f1": 27.0}] * 2, task=task)
        head = next(line for line in to_markdown(table(tmp_path, {"task": task})).splitlines() if line.startswith("|"))
        assert f" {name} " in head and {"contains": " exact ", "exact": " contains "}[name] not in head


def test_the_tasks_whose_exact_is_containment() -> None:
    """By their code: a task that gives `exact` to `contains` is on the list, and no other."""
    texts = [file.read_text() for file in (ROOT / "kvexp" / "tasks").rglob("*.py")]
    bodies = [body for text in texts for body in re.split(r"^(?=class \w+\()", text, flags=re.M)[1:]]
    asks = re.compile(r"exact\S* =.*contains\(|\"exact\": .*contains\(")
    classes = {re.match(r"class (\w+)", body)[1] for body in bodies if asks.search(body)}
    known = {name: node["_target_"].rpartition(".")[2] for name, node in listed("task").items()}
    assert {name for name, cls in known.items() if cls in classes} == set(CONTAINS)


@pytest.mark.parametrize("n", [2, stats.MIN_PAIRS - 1])
def test_of_too_few_pairs_no_percentage_interval_or_forecast_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n: int
) -> None:
    """A baseline of mostly zeros once gave 0.0..inf and 5.13M to decide."""
    base = write(tmp_path / "out", "full", [0.0] * (n - 1) + [30.0])
    write(tmp_path / "out", "h2o", [0.0] * (n - 1) + [29.0], base.hash)
    assert main([str(tmp_path / "out"), "--csv", str(tmp_path / "a.csv"), "--markdown", str(tmp_path / "a.md")]) == 0
    terminal, markdown = capsys.readouterr().out, (tmp_path / "a.md").read_text(encoding="utf-8")
    head, _, _, line = (line.split(" | ") for line in markdown.splitlines() if line.startswith("|"))
    assert [name for name, cell in zip(head, line, strict=True) if cell == "too few"] == [
        *("R-1 % of full", "95 % interval", "n to decide")
    ]
    for text in (terminal, markdown):
        assert "inf" not in text and "n to decide: examples" not in text
    assert f"{n} paired examples are too few: a percentage of full and a verdict need at least 20" in markdown
    assert f"{n} examples: a first look, no verdicts, 20 needed" in terminal and "99 %?" not in terminal
    row = pd.read_csv(tmp_path / "a.csv").set_index("method").loc["h2o"]
    ends = ("low", "high", "low_corrected", "high_corrected")
    assert row[[*(f"rouge1_{end}" for end in ends), "needed", "needed999"]].isna().all()
    assert row["rouge1_of_full"] == pytest.approx(100 * 29 / 30) and row["paired"] == n, (
        "numbers stay numbers in a file"
    )


def test_the_print_takes_a_metric_that_has_percentages(tmp_path: Path) -> None:
    base = write(tmp_path, "full", [{"rouge1": 0.0, "nll": 2.0}] * 30)
    write(tmp_path, "h2o", [{"rouge1": 0.0, "nll": 2.1}] * 30, base.hash)
    text = "\n".join(printed(table(tmp_path), 200))
    assert "nll %" in text and "90.5..90.5" in text


def test_runs_with_the_same_trouble_share_a_line(sweep: Path) -> None:
    few = {"task": "xsum", "method": "h2o"}
    for path in sweep.glob("*/done.json"):
        path.unlink()
    lines = [line for line in printed(table(sweep, few), 1000) if "partial: 30 rows" in line]
    assert len(lines) == 1 and re.match(r"tiny / xsum: h2o 0\.2 \(\w{6}\), h2o 0\.5 \(\w{6}\): partial", lines[0])


# --- memory and speed


def test_cost_by_hand(tmp_path: Path) -> None:
    run = write(tmp_path, "h2o", [], done=False)
    receipts = [{"slots": 10.0, "kv_bytes": 100, "peak_kv_bytes": 300}, {"slots": 20.0, "kv_bytes": 200}]
    run.append(row(0, 1.0, new_tokens=1, seconds={"ttft": 1.0, "tt2t": None, "tpot": None}, receipt=receipts[0]))
    run.append(row(1, 1.0, new_tokens=5, seconds={"ttft": 2.0, "tt2t": 2.5, "tpot": 0.5}, receipt=receipts[1]))
    run.append(row(2, None, seconds={}, receipt={"slots": 1e9, "kv_bytes": 10**9}))  # skipped: in none of these
    run.finish(3)
    found = one(tmp_path, "h2o")
    assert (found["slots"], found["kv_bytes"], found["peak_kv_bytes"]) == (15, 150, 2000)
    assert (found["ttft_s"], found["tpot_s"]) == (1.5, 0.5)
    assert found["tokens_per_s"] == pytest.approx((1 + 5) / (1.0 + 2.0 + 4 * 0.5))
    assert (found["n"], found["timed"]) == (2, 2)


# --- choosing, printing, writing


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    outputs = tmp_path / "outputs"
    for task in ("xsum", "cnn_dailymail"):
        metrics = [{name: score for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")} for score in noisy(30)]
        base = write(outputs, "full", metrics, task=task, kv_ratio=1.0)
        for method in ("h2o", "keyformer"):
            for index, ratio in enumerate((0.5, 0.2)):
                worse = [{name: score * (0.9 + ratio / 9) for name, score in each.items()} for each in metrics]
                receipt = {"kv_bytes": 10**6 * (index + 1), "peak_kv_bytes": 10**7}
                write(outputs, method, worse, base.hash, task=task, kv_ratio=ratio, changes={"receipt": receipt})
    return outputs


def test_where_takes_values_lists_and_numbers(sweep: Path) -> None:
    assert len(table(sweep)) == 10
    assert len(table(sweep, {"method": "h2o"})) == 4
    found = table(sweep, {"method": ["h2o", "full"], "task": "xsum"})
    assert list(zip(found["method"], found["kv_ratio"], strict=True)) == [("full", 1.0), ("h2o", 0.2), ("h2o", 0.5)]
    assert len(table(sweep, {"kv_ratio": "0.50"})) == 4
    assert table(sweep, {"status": "failed"}).empty
    with pytest.raises(ConfigError, match=r"cannot choose runs by metod; their labels are .*method"):
        table(sweep, {"metod": "h2o"})


def printed(df: pd.DataFrame, width: int, x: str = "kv_ratio") -> list[str]:
    out = io.StringIO()
    print_table(df, Console(file=out, width=width), x)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 120, 300])
def test_a_narrow_console_gets_every_column_whole(sweep: Path, width: int) -> None:
    lines = printed(table(sweep), width)
    tables = [line for line in lines if line.startswith(("method", "h2o", "keyformer", "full"))]
    assert max(map(len, tables)) <= width
    rows = [line for line in tables if line.startswith("h2o ")]
    assert len(rows) % 4 == 0 and (width < 300 or len(rows) == 4)  # no row is wrapped
    assert sum(line.count("9.54 MiB") for line in rows) == 4
    assert sum(line.count("R-Lsum") for line in tables) == 2
    assert [line for line in lines if re.match(r"tiny / \S+$", line)] == ["tiny / cnn_dailymail", "tiny / xsum"]
    assert "for the compared runs of one model and task: 98.75 % for 4 runs" in to_markdown(table(sweep))


def test_bytes_can_be_the_axis(sweep: Path) -> None:
    lines = printed(table(sweep, {"task": "xsum"}), 200, x="bytes")
    ordered = [line.split()[:3] for line in lines if line.startswith(("h2o", "keyformer"))]
    assert [(method, f"{amount} {unit}") for method, amount, unit in ordered] == [
        *(("h2o", "977 KiB"), ("keyformer", "977 KiB"), ("h2o", "1.91 MiB"), ("keyformer", "1.91 MiB"))
    ]
    with pytest.raises(ConfigError, match="x must be one of kv_ratio, bytes"):
        print_table(table(sweep), x="slots")


def test_a_label_that_varies_is_shown(tmp_path: Path) -> None:
    for seed in (1, 2):
        write(tmp_path, "random", noisy(), seed=seed, dtype="float32")
    head = next(line for line in printed(table(tmp_path), 200) if line.startswith("method"))
    assert "seed" in head and "dtype" not in head


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1536), "1.5 KiB"),
        (size(1000 * 1024), "1000 KiB"),
        (size(1024**3), "1 GiB"),
        (size(math.nan), "-"),
        (seconds(0.0000123), "12 us"),
        (seconds(0.0213), "21.3 ms"),
        (seconds(0.9996), "1 s"),
        (seconds(1234.5), "1234 s"),
        (count(9999), "9999"),
        (count(44_400), "44k"),
        (count(999_600), "1M"),
        (count(math.inf), ">1G"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_command_prints_and_writes(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"table.{kind}" for kind in ("csv", "parquet", "markdown")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert main([str(sweep), "--where", "method=h2o,keyformer", "task=xsum", *options]) == 0
    assert "keyformer" in capsys.readouterr().out
    expected = table(sweep, {"method": ["h2o", "keyformer"], "task": "xsum"})
    read = pd.read_csv(files["csv"])
    assert list(read.columns) == list(expected.columns)
    assert read["rouge1_low"].to_numpy() == pytest.approx(expected["rouge1_low"].to_numpy())
    pd.testing.assert_frame_equal(pd.read_parquet(files["parquet"]), expected, check_dtype=False)
    assert files["markdown"].read_text(encoding="utf-8").startswith("**tiny / xsum**")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--where", "method=none"], 1, "has method=none; there are method=full,h2o,keyformer"),
        (["--where", "metod=h2o"], 2, "cannot choose runs by metod"),
        (["--where", "h2o"], 2, "LABEL=VALUE"),
        (["--csv", "/no/such/folder/t.csv"], 2, "cannot write /no/such/folder/t.csv"),
    ],
)
def test_command_explains(
    sweep: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main([str(sweep), *arguments]) == code
    found = capsys.readouterr()
    assert message in found.out + found.err


def test_no_folder_and_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "no run under" in capsys.readouterr().out
    assert table(tmp_path).empty


def test_the_folder_of_a_run_is_that_run(sweep: Path) -> None:
    run = next(path.parent for path in sorted(sweep.glob("*/config.json")) if "keyformer" in path.read_text("utf-8"))
    assert list(table(run)["hash"]) == [run.name] and list(table(run)["method"]) == ["keyformer"]


def test_rows_of_other_prompts_are_no_pair(tmp_path: Path) -> None:
    """The example's id is the same, its tokens are not: a template or tokenizer changed between the two runs."""
    full = write(tmp_path, "full", [50.0] * 20, changes={"prompt_digest": "1" * 16})
    write(tmp_path, "h2o", [40.0] * 20, baseline=full.hash, changes={"prompt_digest": "2" * 16})
    with pytest.raises(ConfigError, match="example e0 was asked with other tokens"):
        table(tmp_path)


def test_a_choice_reads_the_rows_of_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = {task: write(tmp_path, "full", [50.0 + i for i in range(24)], task=task).hash for task in ("xsum", "soda")}
    for task, method, ratio in [
        ("xsum", "h2o", 0.5),
        ("xsum", "h2o", 0.2),
        ("xsum", "tova", 0.5),
        ("soda", "h2o", 0.5),
    ]:
        write(tmp_path, method, [40.0 + i for i in range(24)], bases[task], task=task, kv_ratio=ratio)
    read: list[str] = []
    rows = Run.rows

    def counted(run: Run) -> list[dict[str, Any]]:
        read.append(f"{run.labels['task']} {run.labels['method']}")
        return rows(run)

    monkeypatch.setattr(Run, "rows", counted)
    for where in ({"method": "h2o", "kv_ratio": 0.5}, {"task": ["soda"]}, {"method": "h2o", "status": "done"}, {}):
        read.clear()
        alone = read_runs(tmp_path, where, alone=True)
        some = sorted(read)
        pd.testing.assert_frame_equal(quality_table(alone), quality_table(read_runs(tmp_path, where)))
        if "kv_ratio" in where:
            assert some == ["soda full", "soda h2o", "xsum full", "xsum h2o"]
    with pytest.raises(ConfigError, match="cannot choose runs by colour"):
        read_runs(tmp_path, {"colour": "red"}, alone=True)
    read.clear()
    refuse(tmp_path, ["method=h2o"], {"model": "tiny", "task": "xsum", "method": "h2o"}, ValueError("no"))
    read_runs(tmp_path, {"kv_ratio": 0.2}, alone=True)
    assert len(read) == 6, "any run may have made up for the refused job"
