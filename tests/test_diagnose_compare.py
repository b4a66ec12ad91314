"""Gaps to the ideal and differences of two runs, on run folders and logs made by hand; classes of tokens."""

import io

import numpy as np
import pytest
from rich.console import Console

from kvexp.diagnose.__main__ import main
from kvexp.diagnose.classes import classes_of
from kvexp.diagnose.diff import differences, outcome
from kvexp.diagnose.gap import draw, gaps, show
from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import EVICTIONS, ExampleLog, write_example_log, write_table
from kvexp.record import Run
from kvexp.results import intervals, stats

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
        row = {
            "example": f"e{index}",
            "index": index,
            "metrics": {metric: score},
            "skipped": None,
            "output": str(score),
        }
        run.append(row | {"receipt": receipt, "new_tokens": 3})
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
    means = stats.resampled_means(intervals.mean_moments(selection[:, 0]), stats.resamples_for(stats.LEVEL))
    ends = intervals.mean_interval(selection[:, 0], means, stats.LEVEL)
    assert (row["selection_low"], row["selection_high"]) == ends
    assert row["budget_low"] <= 5.0 <= row["budget_high"]
    assert frame.attrs["missing"] == ["tova 0.5"], "its budget has no ideal run"


def test_few_examples_have_no_interval(tmp_path):
    full = made(tmp_path, "full", [100.0] * 19)
    made(tmp_path, "ideal", [95.0] * 19, baseline=full)
    made(tmp_path, "h2o", [50.0] * 18 + [100.0], baseline=full)
    out = io.StringIO()
    show(frame := gaps(tmp_path), Console(file=out, width=100))
    assert np.isnan(frame.loc[0, "selection_low"]) and "5.0 (too few)" in out.getvalue()
    assert "too few: under 20 examples" in out.getvalue()
    assert draw(frame).axes[0].patches


def test_less_may_be_better(tmp_path):
    full = made(tmp_path, "full", [1.0, 2.0], metric="nll")
    made(tmp_path, "ideal", [1.5, 2.5], metric="nll", baseline=full)
    made(tmp_path, "h2o", [3.5, 2.5], metric="nll", baseline=full)
    (row,) = gaps(tmp_path).to_dict("records")
    assert (row["budget"], row["selection"]) == (0.5, 1.0)


def test_a_budget_in_bytes_is_named_by_its_setting(tmp_path):
    full = made(tmp_path, "full", [100.0] * 20)
    for method, score in (("ideal", 90.0), ("h2o", 50.0)):
        made(tmp_path, method, [score] * 20, baseline=full, kv_ratio=None, setting="bytes_ratio=0.3")
    out = io.StringIO()
    show(frame := gaps(tmp_path), Console(file=out, width=100))
    assert "h2o    bytes_ratio=0.3 " in out.getvalue()
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


# -- diff --------------------------------------------------------------------------------------------------------------

WORDS = ["<s>", " a", " b", " c", " Some", " code", " Ann", " 4711", " .", " x", *[" w"] * 10]


def log(run, example, gone):
    """gone: (step, layer, head, position)."""
    told = ExampleLog(
        example, 20, 0, list(range(22)), [*WORDS, " ans", " wer"], [2, 2], same_output=True, same_kept=True
    )
    kinds = {"step": np.int32, "layer": np.int16, "head": np.int16, "position": np.int32}
    columns = {name: np.array([row[i] for row in gone], dtype=kind) for i, (name, kind) in enumerate(kinds.items())}
    write_table(run, example, EVICTIONS, columns, told.texts)
    write_example_log(run, told)


@pytest.fixture
def pair(tmp_path):
    full = made(tmp_path, "full", [100.0, 100.0, 50.0, 0.0, 80.0])
    a = made(tmp_path, "h2o", [100.0, 0.0, 60.0, 0.0, 10.0], baseline=full)
    b = made(tmp_path, "tova", [100.0, 100.0, 40.0, 0.0, 20.0], baseline=full)
    return full, a, b


def test_who_is_right(pair):
    _, a, b = pair
    found = outcome(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither) == (["e0"], ["e2"], ["e1"], ["e4"])


def test_what_each_held_and_the_other_not(pair, capsys):
    _, a, b = pair
    log(a, "e1", [(0, 0, 0, 7), (0, 0, 1, 7), (0, 1, 1, 6), (0, 0, 0, 9), (2, 1, 0, 8), (1, 0, 0, 20)])
    log(b, "e1", [(0, 0, 0, 9), (0, 1, 1, 0), (0, 1, 0, 19)])
    log(a, "e2", [])
    log(b, "e2", [(0, 0, 0, 5)])
    only_a, only_b = differences(a, b, ["e1"])
    assert only_b.by_class == {"digits": 2, "names": 1} and only_a.by_class == {"first": 1, "last": 1}
    assert only_b.by_decile == {"30-40 %": 3} and only_a.by_decile == {"0-10 %": 1, "90-100 %": 1}
    assert only_b.by_text == {"4711": 2, "Ann": 1}
    assert only_a.there["digits"] == 4 and only_a.there["last"] == 32 and only_a.there["0-10 %"] == 8
    assert differences(a, b, ["e1"], step=2)[1].by_class == {"digits": 2, "names": 1, "punctuation": 1}
    assert main(["diff", str(a.path), str(b.path)]) == 0
    out = capsys.readouterr().out
    assert "both 1, only A 1, only B 1, neither 1" in out and "2 (50.0 %)" in out and "4711 2" in out


def test_what_does_not_compare(pair, tmp_path, capsys):
    full, a, b = pair
    other = made(tmp_path, "full", [1.0], task="summary")
    elsewhere = made(tmp_path, "h2o", [1.0], task="summary", baseline=other)
    with pytest.raises(ConfigError, match="not measured against the same full-attention run"):
        outcome(a, elsewhere)
    with pytest.raises(ConfigError, match="not measured against the same"):
        outcome(full, a)
    assert main(["diff", str(a.path), str(b.path)]) == 2
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["The", " code", " of", " Al", "ice", " is", " 47", "11", "."], "other other other names names other digits"),
        (["x", ".", " Then", " some", " Bob", ",", "no", " seven"], "other punctuation other other names punctuation"),
        (["the", " code", " milo", " nine", " ;"], "other other names digits punctuation"),
    ],
)
def test_classes_go_by_words_not_by_tokens(texts, expected):
    padded = ["<s>", " it", " is", " ."] + [f" {texts[0]}", *texts[1:]] + [" z"] * 8
    found = classes_of(padded)
    assert found[:4] == ["first"] * 4 and found[-8:] == ["last"] * 8
    wanted = expected.split()
    assert found[4 : 4 + len(wanted)] == wanted
