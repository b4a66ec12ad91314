"""Gaps to the ideal on run folders made by hand; log and replay of what is not a plain budget."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from commands import admit_in_test
from rich.console import Console
from test_conversations import ShortDialogue, talk
from test_eviction_log import assert_kept_is_what_is_not_logged, case_of, held, job, run_job, run_of, watched

from kvexp.core import Budget, HeadScores, Quantization
from kvexp.diagnose.case import cases, rows_of
from kvexp.diagnose.gap import draw, gaps, show
from kvexp.diagnose.options import Log
from kvexp.diagnose.replay import NOTHING_UNDONE, Replay
from kvexp.diagnose.show import main
from kvexp.methods import H2O, TOVA, SnapKV
from kvexp.results import stats
from kvexp.run.batches import evaluate_run
from kvexp.run.evictions import read_evictions, read_example_log
from kvexp.run.store import Run
from kvexp.util.errors import ConfigError

BUDGET = {"kv_ratio": 0.3, "tokens": None, "of": "prompt", "counts_self": True, "pyramid": 0.0}


def made(outputs, method, scores, *, baseline=None, metric="exact", task="needle", kv_ratio=0.3, setting=""):
    """A finished run of these scores, one example each."""
    config = {"method": {"name": method}, "task": task, "metric": metric}
    config |= {} if method == "full" else {"budget": BUDGET | {"kv_ratio": kv_ratio}}
    ratio = None if method == "full" else kv_ratio
    labels = {"model": "m", "task": task, "method": method, "kv_ratio": ratio, "tokens": None, "setting": setting}
    run = Run.open(outputs, config, labels, baseline=baseline.hash if baseline else None)
    receipt = {"first_eviction_step": 0, "kept_digest": "x", "batch_size": 1}
    for index, score in enumerate(scores):
        row = {"example": f"e{index}", "index": index, "metrics": {metric: score}, "skipped": None}
        run.append(row | {"output": str(score), "receipt": receipt, "new_tokens": 3})
    run.finish(len(scores))
    return run


# -- gap ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path):
    full = made(tmp_path, "full", [100.0, 90.0, 80.0, 70.0] * 5)
    made(tmp_path, "ideal", [100.0, 80.0, 80.0, 60.0] * 5, baseline=full)
    made(tmp_path, "h2o", [50.0, 80.0, 20.0, 70.0] * 5, baseline=full)
    made(tmp_path, "tova", [100.0, 80.0, 80.0, 60.0] * 5, baseline=full, kv_ratio=0.5)
    return tmp_path


def test_points_lost_by_hand(sweep):
    frame = gaps(sweep)
    (row,) = frame.to_dict("records")
    assert (row["method"], row["n"], row["metric"]) == ("h2o", 20, "exact")
    assert (row["full"], row["ideal"], row["score"]) == (85.0, 80.0, 55.0)
    assert (row["budget"], row["selection"]) == (5.0, 25.0)
    selection = np.array([[50.0], [0.0], [60.0], [-10.0]] * 5)
    means = stats.resampled_means(stats.mean_moments(selection[:, 0]), stats.resamples_for(stats.LEVEL))
    ends = stats.mean_interval(selection[:, 0], means, stats.LEVEL)
    assert (row["selection_low"], row["selection_high"]) == ends
    assert row["budget_low"] <= 5.0 <= row["budget_high"]
    assert frame.attrs["missing"] == ["tova 0.5"], "its budget has no ideal run"


def triple(outputs, full, ideal, h2o, **options):
    """The rows of `gaps` for three runs of these scores, and what `show` prints of them."""
    baseline = made(outputs, "full", full, metric=options.get("metric", "exact"))
    made(outputs, "ideal", ideal, baseline=baseline, **options)
    made(outputs, "h2o", h2o, baseline=baseline, **options)
    frame, out = gaps(outputs), io.StringIO()
    show(frame, Console(file=out, width=100))
    return frame, out.getvalue()


def test_few_examples_have_no_interval(tmp_path):
    frame, out = triple(tmp_path, [100.0] * 19, [95.0] * 19, [50.0] * 18 + [100.0])
    assert np.isnan(frame.loc[0, "selection_low"]) and "5.0 (too few)" in out and "too few: under 20 examples" in out
    assert draw(frame).axes[0].patches


def test_less_may_be_better(tmp_path):
    frame, _ = triple(tmp_path, [1.0, 2.0], [1.5, 2.5], [3.5, 2.5], metric="nll")
    assert (frame.loc[0, "budget"], frame.loc[0, "selection"]) == (0.5, 1.0)


def test_a_budget_in_bytes_is_named_by_its_setting(tmp_path):
    budget = {"kv_ratio": None, "setting": "bytes_ratio=0.3"}
    frame, out = triple(tmp_path, [100.0] * 20, [90.0] * 20, [50.0] * 20, **budget)
    assert "h2o    bytes_ratio=0.3 " in out
    assert "h2o bytes_ratio=0.3" in [label.get_text() for label in draw(frame).axes[0].get_xticklabels()]


def test_the_table_and_the_bars(sweep, capsys):
    frame = gaps(sweep)
    out = io.StringIO()
    show(frame, Console(file=out, width=100))
    assert "5.0 (" in out.getvalue() and "25.0 (" in out.getvalue() and "tova 0.5" in out.getvalue()
    low, high = draw(frame).axes[0].patches
    assert (low.get_height(), high.get_height(), high.get_y()) == (5.0, 25.0, 5.0)
    frame.loc[0, "budget"] = -4.0  # the ideal set did better than everything: a gain hangs below the line
    low, high = draw(frame).axes[0].patches
    assert (low.get_height(), low.get_y(), high.get_y()) == (-4.0, 0.0, 0.0)
    assert main(["gap", str(sweep), "--draw", str(sweep / "gap.svg"), "--csv", str(sweep / "gap.csv")]) == 0
    assert (sweep / "gap.svg").exists() and "selection" in (sweep / "gap.csv").read_text()
    assert main(["gap", str(sweep), "--draw", "gap.txt"]) == 2
    assert main(["gap", str(sweep), "-w", "method=tova"]) == 2
    assert "run the same sweep with method=ideal" in capsys.readouterr().err


# Log and replay of head budgets, of quantised slots and of turns of a conversation, or why there is none.


FEW_BITS = Quantization(4, 4, residual=8, group=7)
HEADS = {
    "union": Budget(tokens=12, heads="union"),
    "adaptive": Budget(tokens=12, heads="adaptive"),
    "global": Budget(tokens=12, heads="global"),
    "threshold": Budget(threshold=3.0, threshold_recent=4),
    "duo": Budget(tokens=20, heads="duo", stream_sinks=2, stream_recent=4),
}
RETRIEVAL = HeadScores.of(torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.7]]))  # three of six heads fit: 0.7 and up


def with_budget(family, method, how, **plan):
    case = case_of(family, method, positions="original", **plan)
    scores = RETRIEVAL if how == "duo" else None
    return dataclasses.replace(case, cache=dataclasses.replace(case.cache, budget=HEADS[how], head_scores=scores))


@pytest.mark.parametrize("how", HEADS)
def test_head_budgets_have_a_log_and_a_replay(how):
    case = with_budget("llama", H2O(recent_ratio=0.2), how)
    made, table = watched(case)
    assert_kept_is_what_is_not_logged(case, made, table)
    counts = [len(held(table, layer, head, len(case.prompt), 0)) for layer in range(2) for head in range(3)]
    if how == "union":
        assert set(counts) == {11}
    elif how == "duo":
        assert counts == [5, 31, 5, 31, 5, 31], "a retrieval head lost something, or a streaming one did not"
    elif how != "threshold":
        assert sum(counts) == 11 * len(counts) and len(set(counts)) > 1, "heads hold different numbers"
    replay = Replay(case, 2)
    first, last = replay.answers([NOTHING_UNDONE, replay.everything])
    assert [first] == made.tokens and [last] == case.full().generate_again().tokens


def test_quantised_slots_have_a_log_and_say_why_no_replay():
    plain = case_of("llama", TOVA(), question=[50, 51])
    case = dataclasses.replace(plain, cache=dataclasses.replace(plain.cache, quantization=FEW_BITS))
    made, table = watched(case)
    assert_kept_is_what_is_not_logged(case, made, table)
    with pytest.raises(ConfigError, match=r"quantised slots drop what is evicted: .* cache\.bits=16"):
        Replay(case)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (
            "h2o",
            ("cache.bits=4", "cache.residual=8", "cache.group=8"),
            "explain a run of the same method with cache.bits=16",
        ),
        ("d2o", (), "method=d2o puts other numbers into kept slots"),
    ],
)
def test_a_replay_is_refused_before_a_model_loads(tmp_path, command, capsys, monkeypatch, method, options, reason):
    run_job(job(tmp_path, f"method={method}", *options, limit=1))
    assert not command.failures
    run = run_of(tmp_path, method)
    monkeypatch.setattr("kvexp.diagnose.case.load", None)
    for words in (["replay", str(run.path), "0"], ["explain", str(run.path)]):
        assert main(words) == 2
        assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("history", "method"), [("own", "h2o"), pytest.param("reference", "keyformer", marks=pytest.mark.slow)]
)
def test_a_turn_is_diagnosed_behind_all_that_was_fed_before_it(tmp_path, monkeypatch, history, method):
    admit_in_test(monkeypatch, ShortDialogue)
    one = talk(tmp_path, f"method={method}", "kv_ratio=0.4", history=history)
    run = evaluate_run(one)
    rows = sorted(rows_of(run).values(), key=lambda row: row["index"])
    Log().write(one, run, rows[:3])
    for row in rows[:3]:
        told = read_example_log(run, row["example"])
        assert told.same and told.prompt_tokens + told.question_tokens == row["info"]["fed"]
        assert len(read_evictions(run, row["example"])) > 0
    assert told.question_tokens > 0
    tokens = {row["example"]: row["output"] for row in rows}
    for row, case, _ in cases(one, rows[1:2]):
        replay = Replay(case, 2)
        first, last = replay.answers([NOTHING_UNDONE, replay.everything])
        assert case.tokenizer.decode(first, skip_special_tokens=True) == tokens[row["example"]]
        assert [last] == case.full().generate_again().tokens


def test_marked_spans_are_spared_in_a_diagnosis_as_in_the_run():
    case = case_of("llama", SnapKV(window=4))
    spared = dataclasses.replace(
        case, cache=dataclasses.replace(case.cache, keep="span"), spans=((6, 9),), seed=case.seed
    )
    for one, where in ((case, False), (spared, True)):
        _, table = watched(one)
        assert all({6, 7, 8} <= set(held(table, layer, head, 31, 0)) for layer in (0, 1) for head in range(3)) == where
