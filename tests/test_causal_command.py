"""`kvexp diagnose causal`: from a run to tables and a picture; measures of scores on arrays whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from scipy.stats import t as student
from test_diagnose_worst import made
from test_sweep_divergence import ONE_BY_ONE

from kvexp.diagnose.causal.causal_command import main
from kvexp.diagnose.causal.causal_files import METHODS, REMOVALS, SCORES, read_frame, read_measured
from kvexp.diagnose.causal.causal_measures import (
    mass_kept,
    mass_of_top,
    precision_at,
    rank_correlation,
    score_quality,
    superiority,
    weighted_ranks,
)
from kvexp.diagnose.causal.causal_pairs import company_rows, mean_with_interval, pair_rows
from kvexp.diagnose.causal.causal_run import method_settings
from kvexp.diagnose.causal.causal_tables import causal_tables, mass_rows, score_rows
from kvexp.diagnose.runs import settings_at
from kvexp.errors import ConfigError

WHOSE = {"h2o", "tova", "window", "streaming_llm", "answer_attention", "answer_attention_value", "answer_output_change"}
SMALL = ("--first", "2", "--tokens", "20", "--layers", "8", "--heads", "8", "--new-tokens", "6")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made(tmp_path_factory.mktemp("causal"), *ONE_BY_ONE)


@pytest.mark.slow
def test_the_command_measures_prints_draws_and_goes_on_where_it_was(run, tmp_path, capsys):
    picture, table = tmp_path / "causes.svg", tmp_path / "removals.csv"
    words = [str(run.path), *SMALL, "--methods", "h2o", "tova", "window"]
    assert main([*words, "--draw", str(picture), "--csv", str(table)]) == 0
    told = capsys.readouterr().out
    for title in (
        "effect of removing tokens",
        "by class of token",
        "by position",
        "where the effect is",
        "wrong answers",
        "differences within an example",
    ):
        assert title in told
    assert "2 examples" in told and "a minute" in told and "answer_output_change" in told
    assert picture.read_text().startswith("<?xml") and len(pd.read_csv(table)) > 2 * 36
    names = [name for name in {line["example"] for line in run.rows()} if read_measured(run, name)]
    assert len(names) == 2
    before = {name: read_frame(run, name, REMOVALS) for name in names}
    assert main([*words[:-1], "streaming_llm"]) == 0  # another method of the same removals
    for name in names:
        pd.testing.assert_frame_equal(before[name], read_frame(run, name, REMOVALS))
        assert set(read_frame(run, name, SCORES)["method"]) == WHOSE
    capsys.readouterr()


def test_the_tables_hold_what_the_files_say(run, capsys):
    assert main([str(run.path), *SMALL, "--methods", "h2o", "window", "random"]) == 0
    capsys.readouterr()
    examples = [read_measured(run, row["example"]) for row in run.rows()]
    tables = causal_tables(run, [each for each in examples if each is not None])
    rows = {row["method"]: row for row in score_rows(tables)}
    kept = {name: rows[name]["kept"] for name in ("h2o", "window", "random")}
    assert all(0.25 < value < 0.42 for value in kept.values())  # a sample's estimate of the budget, 0.3
    assert math.isnan(rows["answer_attention"]["mass"]) and not math.isnan(rows["answer_attention"]["rho"])
    assert sum(row["weight"] for row in mass_rows(tables)) == pytest.approx(2)  # once by class, once by position
    assert sum(row["mass"] for row in mass_rows(tables)) == pytest.approx(2)
    lines = read_frame(run, examples[0].example, METHODS)
    h2o = lines[(lines["method"] == "h2o") & (lines["layer"] < 0)].iloc[0]
    assert h2o["kl"] > 0 and 0 <= h2o["gone"] < 1 and h2o["judged"] == examples[0].judged


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "h3o"], "no method 'h3o'; one of a2sf"),
        (["--methods", "full"], "no method 'full'"),
        (["--methods", "pqcache"], "chooses anew for every query"),
        (["--tokens", "some"], "--tokens must be a whole number or all"),
        (["--span", "0"], "--span must be at least 1"),
        (["--first", "0"], "--first must be at least 1"),
        (["--example", "nobody"], "no example of the run named 'nobody'"),
        (["--draw", "causes.gif"], "must end in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_loads(run, words, told, capsys, monkeypatch):
    monkeypatch.setattr("kvexp.diagnose.runs.load", lambda *_: pytest.fail("a model was loaded"))
    assert main([str(run.path), *words]) == 2
    assert told in capsys.readouterr().err


def test_all_methods_are_those_with_a_score_and_the_others_are_named(run, capsys):
    found = method_settings(settings_at(run), ["all"])
    told = capsys.readouterr().out
    assert {"h2o", "tova", "snapkv", "random", "window", "streaming_llm"} <= set(found)
    assert not {"full", "ideal", "quest", "pqcache"} & set(found)
    assert "without pqcache: pqcache chooses anew for every query" in told and "without full" not in told
    assert found["tova"].cache.budget == found["h2o"].cache.budget
    with pytest.raises(ConfigError, match="one of a2sf"):
        method_settings(settings_at(run), ["nothing"])


# -- measures ---------------------------------------------------------------------------------------------------------


def test_equal_weights_give_spearmans_correlation():
    draws = np.random.default_rng(1)
    one, other = draws.normal(size=50), draws.integers(0, 6, 50).astype(float)
    weights = np.full(50, 3.0)
    assert rank_correlation(one, other, weights) == pytest.approx(spearmanr(one, other).statistic)
    assert rank_correlation(one, one**3, weights) == pytest.approx(1)
    assert math.isnan(rank_correlation(one, np.ones(50), weights)) and math.isnan(
        rank_correlation(one[:1], one[:1], weights[:1])
    )


def test_a_weight_is_so_many_tokens():
    values, weights = np.array([3.0, 1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0, 1.0])
    each = np.repeat(values, weights.astype(int))
    ranks = {value: np.mean([i + 0.5 for i, other in enumerate(sorted(each)) if other == value]) for value in values}
    assert weighted_ranks(values, weights) == pytest.approx([ranks[value] for value in values])
    other = np.array([1.0, 5.0, 2.0, 9.0])
    whole = rank_correlation(each, np.repeat(other, weights.astype(int)), np.ones(7))
    assert rank_correlation(values, other, weights) == pytest.approx(whole)


def test_mass_and_precision_of_a_choice():
    effect, weights = np.array([8.0, 1.0, 1.0, 0.0]), np.ones(4)
    best, worst = np.array([1.0, 0, 0, 0]), np.array([0, 0, 0, 1.0])
    assert mass_kept(effect, best, weights) == pytest.approx(0.8) and mass_kept(effect, worst, weights) == 0
    assert precision_at(effect, best, weights, 0.25) == 1 and precision_at(effect, worst, weights, 0.25) == 0
    assert precision_at(effect, np.full(4, 0.25), weights, 0.25) == pytest.approx(0.25)
    assert precision_at(effect, best, np.array([2.0, 1, 1, 1]), 0.6) == pytest.approx(2 / 3)
    assert math.isnan(mass_kept(np.zeros(4), best, weights))
    assert mass_of_top(effect, weights, 0.25) == pytest.approx(0.8) and mass_of_top(effect, weights, 1) == 1
    assert mass_of_top(effect[::-1], np.array([1.0, 1, 1, 2]), 0.2) == pytest.approx(8 / 18)  # half of the first


@pytest.mark.slow
def test_the_sampling_error_is_that_of_other_samples():
    """Draw many samples of one population: the spread of the estimates is what one sample says it is."""
    draws = np.random.default_rng(7)
    effect = draws.lognormal(sigma=1.5, size=2000)
    score = np.log(effect) + draws.normal(size=2000)
    kept = (score > np.quantile(score, 0.5)).astype(float)
    found = []
    for seed in range(40):
        picked = draws.choice(2000, 100, replace=False)
        found.append(score_quality(effect[picked], score[picked], kept[picked], np.full(100, 20.0), seed))
    for name in ("rho", "mass"):
        real = np.std([getattr(each, name) for each in found], ddof=1)
        said = np.mean([getattr(each, f"{name}_error") for each in found])
        assert 0.7 < said / real < 1.4, (name, said, real)
    truth = spearmanr(effect, score).statistic
    assert np.mean([each.rho for each in found]) == pytest.approx(truth, abs=0.03)


def test_superiority_is_the_share_of_pairs_won():
    some, others = np.array([1.0, 3.0]), np.array([0.0, 1.0, 2.0])
    assert superiority(some, others) == pytest.approx((1 + 0.5 + 3) / 6) and math.isnan(superiority(some, others[:0]))


def test_few_examples_have_students_interval_and_fewer_have_none():
    values = np.random.default_rng(3).normal(size=12)
    mean, low, high = mean_with_interval(np.append(values, np.nan))
    wanted = student.interval(0.95, 11, values.mean(), values.std(ddof=1) / math.sqrt(12))
    assert mean == pytest.approx(values.mean()) and (low, high) == pytest.approx(wanted)
    assert mean_with_interval(values[:4])[0] == pytest.approx(values[:4].mean())
    assert math.isnan(mean_with_interval(values[:4])[1]) and math.isnan(mean_with_interval(values[:0])[0])


def test_differences_are_taken_within_an_example():
    """A score that is 0.2 behind in every example is so exactly, however much the examples differ."""
    draws, rows = np.random.default_rng(5), []
    for example, base in enumerate(draws.uniform(0.3, 0.9, 6)):
        named = {"example": str(example), "precision": 0.6, "top": 0.6, "kept": 0.5}
        rows.append(named | {"method": "answer_attention", "rho": base, "mass": math.nan, "precision": math.nan})
        rows.append(named | {"method": "h2o", "rho": base - 0.2, "mass": 0.5 + 0.1 * (example % 2)})
    first, last = pair_rows(pd.DataFrame(rows))
    assert (first["method"], last["method"]) == ("answer_attention", "h2o") and first["behind"] == 0
    assert [last[key] for key in ("behind", "behind_low", "behind_high")] == pytest.approx([0.2] * 3)
    assert last["precision"] == pytest.approx(0.1) and last["mass_low"] < last["mass"] == pytest.approx(0.05)
    assert math.isnan(first["mass"]) and math.isnan(first["mass_low"])


def test_what_goes_with_a_divergence_is_asked_across_the_methods_of_one_example():
    """KL rises with the effect evicted and falls with the tokens gone; the level of an example says nothing."""
    names = ["a", "b", "c", "d", "e", "f"]
    quality, joint = [], []
    for example, level in (("x", 1.0), ("y", 50.0)):
        for place, name in enumerate(names):
            quality.append({"example": example, "method": name, "rho": 0.5, "mass": 0.9 - 0.1 * place})
            joint.append({"example": example, "method": name, "kl": level + place, "gone": -place, "gone_mass": 0.1})
    found = {row["what"]: row for row in company_rows(pd.DataFrame(quality), pd.DataFrame(joint))}
    assert found["evicted"]["rho"] == pytest.approx(1) and found["gone"]["rho"] == pytest.approx(-1)
    assert found["evicted"]["n"] == 2 and math.isnan(found["rho"]["rho"])  # the same for all: nothing to go by
    assert company_rows(pd.DataFrame(quality[:4]), pd.DataFrame(joint[:4])) == []
