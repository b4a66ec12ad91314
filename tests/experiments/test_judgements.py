"""What exhibits make of known numbers: intervals, differences, verdicts in every direction, and the picture's lines."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments import keyformer, pqcache
from experiments.lib.exhibits import load
from experiments.lib.tables import (
    ahead,
    kl_estimate,
    mean_interval,
    mean_of,
    of,
    option,
    paired_difference,
    paired_gap,
    paper_numbers_for,
    points,
    pooled_difference,
    spelled,
)
from experiments.lib.verdicts import above, all_hold, better, positive
from experiments.pages.findings import INTERVAL
from kvexp.results.plots import MARK_COLOR
from tests.exhibits import frame_of, whole
from tests.exhibits import run as exhibit_run


def run(model, method, value, ratio=None, setting="", task="testbed_summary", metric="rouge2", n=40):
    """A run whose examples alternate by 1 around `value`: means and gaps are exact, and percent of full are points."""
    ends = {f"{metric}_low": value - 0.5, f"{metric}_high": value + 0.5}
    return exhibit_run(method, [value + (-1) ** i for i in range(n)], ratio, setting, metric, task, model, **ends)


def frame(*rows):
    return pd.DataFrame(list(rows)).astype({"kv_ratio": float})


def two_models(**values):
    """Runs of "a" and "b" under each (method, ratio) -> value, and full at 100."""
    places = [(model, task) for model in ("a", "b") for task in ("testbed_summary", "testbed_dialogue")]
    each = {("full", None): 100.0} | values["runs"]
    return frame(*(run(m, method, value, at, task=t) for (method, at), value in each.items() for m, t in places))


def test_a_paired_difference_of_a_constant_is_that_constant():
    ours = {str(i): {"rouge2": float(i) + 3} for i in range(30)}
    other = {str(i): {"rouge2": float(i)} for i in range(10, 40)}
    assert paired_difference(ours, other, "rouge2") == (3.0, 3.0, 3.0, 20)
    assert np.isnan(paired_difference({}, other, "rouge2")[0])


def test_a_spread_holds_the_mean_and_narrows_with_the_examples():
    low, high = mean_interval([0.0, 100.0] * 20)
    assert low < 50 < high and 25 < high - low < 40
    wide = mean_interval([0.0, 100.0] * 5)
    assert wide[1] - wide[0] > high - low
    assert all(np.isnan(mean_interval([1.0])))


def test_what_an_interval_decides():
    assert [above(99.0, 100, 99), above(90, 98.9, 99), above(90, 100, 99)] == [True, False, None]
    assert [better(0.1, 1), better(-1, 0), better(0, 0), better(-1, 1)] == [True, False, False, None]
    assert [all_hold([True, True]), all_hold([True, None]), all_hold([None, False]), all_hold([])] == [
        True,
        None,
        False,
        None,
    ]


def test_points_hold_the_interval_against_the_full_caches_line():
    made = points(
        frame(run("a", "full", 100.0), run("a", "h2o", 80.0, 0.5), run("a", "keyformer", 90.0, 0.5)), "rouge2", "h2o"
    )
    keyformer = made[made["method"].eq("keyformer")].iloc[0]
    assert (keyformer["low"], keyformer["value"], keyformer["high"]) == (89.5, 90.0, 90.5)
    assert (keyformer["ahead"], keyformer["ahead_low"], keyformer["ahead_high"]) == (10.0, 10.0, 10.0)
    assert made[made["method"].ne("keyformer")]["ahead"].isna().all()


def test_a_rival_of_another_setting_is_named():
    runs = frame(
        run("a", "full", 100.0),
        *(run("a", "keyformer", v, 0.5, f"method.x={s}") for s, v in (("1", 80.0), ("2", 90.0))),
    )
    assert ahead(runs, "rouge2", "keyformer", "method.x=1")["ahead"][2] == 10.0
    assert np.isnan(ahead(runs, "rouge2", "keyformer", "method.x=1")["ahead"][1])
    assert option("method.x=1 seed=2", "seed") == "2" and option("", "seed", "0") == "0"
    assert spelled("method.fresh=True method.a=False") == "method.fresh=true method.a=false" and spelled(None) == ""


FIG7 = {
    ("keyformer", 0.7): 99.8,
    ("h2o", 0.7): 90.0,
    ("h2o", 0.9): 95.0,
    ("window", 0.9): 60.0,
    ("keyformer", 0.9): 100.0,
}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, True),
        ({("keyformer", 0.7): 95.0}, False),
        ({("h2o", 0.9): 99.6}, False),
        ({("window", 0.9): 99.2}, None),
        ({("keyformer", 0.7): 99.1}, None),
    ],
)
def test_fig7_holds_where_all_its_parts_do(change, verdict):
    module = load("fig7")
    found, words = module.holds(module.table(two_models(runs=FIG7 | change)))
    assert found is verdict
    assert "keyformer at 0.7" in words and "better at 8, worse at 0" in words


def test_fig7_without_the_budget_it_is_about_says_so():
    module = load("fig7")
    left = {key: value for key, value in FIG7.items() if key != ("keyformer", 0.7)}
    assert module.holds(module.table(two_models(runs=left))) == (None, "keyformer at 0.7 was not run")


def noises(gumbel, others, models=("a",)):
    rows = []
    for model in models:
        rows.append(run(model, "full", 100.0))
        for fresh in ("true", "false"):
            for noise in ("gumbel", "gaussian", "constant", "none"):
                value = gumbel if noise == "gumbel" else others
                rows.append(run(model, "keyformer", value, 0.6, f"method.fresh={fresh} method.noise={noise}"))
    return frame(*rows)


@pytest.mark.parametrize(("gumbel", "verdict"), [(85.0, True), (80.0, False), (75.0, False)])
def test_table4_compares_gumbel_with_each_other(gumbel, verdict):
    module = load("keyformer_table4")
    found, words = module.holds(module.table(noises(gumbel, 80.0)))
    assert found is verdict
    assert "constant and none are the same to the last digit" in words


def test_table3_says_its_three_differences():
    module = load("keyformer_table3")
    rows = [run("a", "full", 100.0), run("a", "h2o", 70.0, 0.6), run("a", "window", 20.0, 0.6)]
    for setting, value in ((keyformer.OURS, 90.0), (keyformer.NEW, 80.0), (keyformer.SHARED, 85.0)):
        rows.append(run("a", "keyformer", value, 0.6, setting))
    made = module.table(frame(*rows).assign(rouge1=1.0, rougeL=1.0))
    found, words = module.holds(made)
    assert found is True
    for part in ("layer less shared +5.0", "original less new positions +10.0", "new positions less H2O +10.0"):
        assert part in words
    assert made["method"].tolist()[:3] == ["full", "window", "h2o"]


@pytest.mark.parametrize(("value", "verdict"), [(90.0, True), (99.8, False), (98.9, None)])
def test_fig5_wants_every_factor_below_the_mark(value, verdict):
    module = load("keyformer_fig5")
    rows = [run("a", "full", 100.0)]
    rows += [run("a", "h2o_damping", v, 0.5, f"method.damping={d}") for d, v in (("0.9", value), ("1.0", 80.0))]
    found, words = module.holds(module.table(frame(*rows)))
    assert found is verdict and "the best of 2 factors, 0.9" in words
    assert "(" not in words, "the best was chosen by the numbers that its interval would be of"


def test_a_curve_has_full_in_black_the_mark_in_red_and_intervals():
    module, figure = load("fig7"), Figure()
    module.draw(module.table(two_models(runs=FIG7)), figure)
    assert len(figure.axes) == 4
    assert figure.axes[0].get_title().startswith("a: summaries\n(n = 40)")
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["full"].get_color() == "black" and lines["full"].get_ydata()[0] == 100
    assert lines["99 % of full"].get_color() == MARK_COLOR and lines["99 % of full"].get_ydata()[0] == 99
    assert len(figure.axes[0].containers) == 3
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        "full",
        "99 % of full",
        "window",
        "h2o",
        "keyformer",
    }


def test_the_papers_points_stand_beside_the_papers_models_alone():
    module, figure = load("fig7"), Figure()
    runs = two_models(runs=FIG7)
    assert paper_numbers_for("keyformer_fig7", module.table(runs)).empty
    theirs_too = runs.replace({"model": {"a": "gptj_6b"}, "task": {"testbed_summary": "cnn_dailymail"}})
    module.draw(module.table(theirs_too), figure)
    marked = [any("(paper)" in str(bars.get_label()) for bars in axes.containers) for axes in figure.axes]
    assert sum(marked) == 1


@pytest.mark.parametrize(
    "name", ["keyformer_table4", "keyformer_fig5", "keyformer_fig3c", "keyformer_recent_ratio", "keyformer_tau"]
)
def test_pictures_of_settings_are_drawn(name, tmp_path):
    module = load(name)
    settings = {
        "keyformer_fig5": ("h2o_damping", ["method.damping=0.9", "method.damping=1.0"]),
        "keyformer_fig3c": ("h2o", [""]),
        "keyformer_recent_ratio": ("keyformer", [f"method.recent_ratio={r}" for r in ("0.1", "0.2", "0.3")]),
        "keyformer_tau": (
            "keyformer",
            ["method.tau_end=2.0 method.tau_init=1.0", "method.tau_end=4.0 method.tau_init=1.0"],
        ),
    }
    if name == "keyformer_table4":
        runs = noises(85.0, 80.0, ("a", "b"))
    else:
        method, given = settings[name]
        runs = frame(run("a", "full", 100.0), *(run("a", method, 80.0 + i, 0.5, s) for i, s in enumerate(given)))
    table, figure = module.table(runs), Figure()
    module.draw(table, figure)
    figure.savefig(tmp_path / "x.pdf")
    verdict, words = module.holds(table)
    assert verdict in (True, False, None) and re.search(r"\d", words)


# The exhibits of A2SF and PQCache: verdicts on tables that are known.


GOOD, FAIR, POOR = [100] * 40, [100, 0] * 20, [0] * 38 + [100] * 2


@pytest.mark.parametrize(
    ("a2sf", "h2o", "wanted"), [(GOOD, FAIR, True), (POOR, FAIR, False), (FAIR, FAIR[::-1], None), (FAIR, FAIR, None)]
)
def test_table1_and_fig3_follow_the_scores(a2sf, h2o, wanted):
    each = (("window", POOR), ("h2o", h2o), ("a2sf", a2sf))
    rows = []
    for own in ("task.num_fewshot=1", "task.num_fewshot=0"):
        full = exhibit_run("full", GOOD, setting=own)
        rows += [full, *(exhibit_run(m, scores, 0.2, own, baseline=full["hash"]) for m, scores in each)]
    assert whole(load("a2sf_table1"), frame_of(*rows)) is wanted
    runs = (exhibit_run(m, scores, ratio) for ratio in (0.2, 0.6) for m, scores in (*each, ("ideal", GOOD)))
    rows = [exhibit_run("full", GOOD), *runs]
    leads = np.mean(a2sf) > np.mean(h2o)
    assert whole(load("a2sf_fig3"), frame_of(*rows)) is (wanted if wanted is not None or leads else False)


def test_fig5_asks_for_a_peak_and_for_no_history_over_h2o():
    def frame(low, none):
        scores = {0.0: none, 0.1: low, 0.2: low, 0.3: low, 0.5: FAIR, 0.9: FAIR}
        runs = [exhibit_run("a2sf", s, 0.3, f"method.alpha={alpha}") for alpha, s in scores.items()]
        return frame_of(exhibit_run("full", GOOD), exhibit_run("h2o", POOR, 0.3), *runs)

    module = load("a2sf_fig5")
    assert whole(module, frame(GOOD, FAIR)) is True
    assert whole(module, frame(POOR, FAIR)) is False
    assert whole(module, frame(GOOD, POOR)) is None


RIVALS = ("h2o_c", "sparq", "infllm")


@pytest.mark.parametrize(("mine", "wanted"), [(GOOD, True), (POOR, False), (FAIR, None)])
def test_pqcache_is_judged_against_every_rival(mine, wanted):
    rivals = {"h2o_c": FAIR, "sparq": FAIR, "infllm": FAIR}
    tasks = [("t", "f1"), ("s", "rouge1")]
    for name in ("pqcache_table2", "pqcache_table3"):
        rows = [exhibit_run("full", GOOD, metric=metric, task=task) for task, metric in tasks]
        for ratio in (0.2, 0.1):
            for method, scores in ({**rivals, "pqcache": mine, "oracle": GOOD}).items():
                rows += [exhibit_run(method, scores, ratio, metric=metric, task=task) for task, metric in tasks]
        assert whole(load(name), frame_of(*rows)) is wanted
    each = {**rivals, "pqcache": mine}
    needles = [
        exhibit_run("full", GOOD, metric="exact"),
        *(exhibit_run(m, s, 0.2, metric="exact") for m, s in each.items()),
    ]
    assert whole(load("pqcache_fig8"), frame_of(*needles)) is (False if mine is FAIR else wanted)
    fig9a = [exhibit_run(m, s, ratio, metric="rouge2") for ratio in (0.1, 0.2) for m, s in each.items()]
    assert whole(load("pqcache_fig9a"), frame_of(exhibit_run("full", GOOD, metric="rouge2"), *fig9a)) is wanted


def test_fig9b_wants_sparq_to_gain_by_reading_more():
    def frame(more):
        reads = {"pqcache": (GOOD, GOOD), "infllm": (POOR, POOR), "sparq": (POOR, more)}
        runs = [
            exhibit_run(m, s, 0.1, f"method.r={at}", "rouge2", search_share=0.03 * at)
            for m, pair in reads.items()
            for at, s in zip((1, 2), pair, strict=True)
        ]
        return frame_of(exhibit_run("full", GOOD, metric="rouge2", search_share=math.nan), *runs)

    assert whole(load("pqcache_fig9b"), frame(FAIR)) is True
    assert whole(load("pqcache_fig9b"), frame(POOR)) is None


def test_fig9c_and_fig10c_compare_the_ends_of_their_sweeps():
    shapes = {(2, 6): FAIR, (2, 8): GOOD, (4, 3): POOR, (4, 4): POOR, (8, 2): POOR}
    runs = [exhibit_run("pqcache", s, 0.1, f"method.b={b} method.m={m}") for (m, b), s in shapes.items()]
    assert whole(load("pqcache_fig9c"), frame_of(exhibit_run("full", GOOD), *runs)) is True
    limits = {"1": GOOD, "5": FAIR, "25": FAIR, "adaptive": FAIR}
    runs = [exhibit_run("pqcache", s, 0.1, f"method.max_iter={n}", "rouge2") for n, s in limits.items()]
    assert whole(load("pqcache_fig10c"), frame_of(exhibit_run("full", GOOD, metric="rouge2"), *runs)) is False


def test_fig10d_wants_a_rise_and_a_fall():
    def frame(rates):
        rows = [
            {"model": "m", "prompt": p, "rate": rate + 0.001 * p, "prompt_tokens": 9.0}
            | {"setting": f"method.cache_blocks_per_step={n} method.cache_policy={policy}"}
            for policy in ("lru", "lfu")
            for n, rate in zip((1, 4, 16), rates, strict=True)
            for p in range(4)
        ]
        return pd.DataFrame(rows)

    assert whole(load("pqcache_fig10d"), frame((0.3, 0.6, 0.4))) is True
    assert whole(load("pqcache_fig10d"), frame((0.1, 0.3, 0.2))) is False
    assert whole(load("pqcache_fig10d"), frame((0.3, 0.4, 0.6))) is False


def test_speed_exhibits_say_that_no_gpu_hasrun(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.lib.speed.cells", lambda *_, **__: [])
    for name in ("pqcache_fig10a", "pqcache_fig10b"):
        assert load(name).holds(load(name).table(pd.DataFrame()))[1].startswith("no GPU result yet")
    cpu = tmp_path / "found.json"
    cpu.write_text(
        '{"options": {"device": "cpu"}, "one_layer": [{"length": 8, "prefill_s": 1, "offload_s": 0, "kmeans_s": 2}]}'
    )
    found = pqcache.fig7_table(pd.DataFrame(), cpu)
    assert found.empty and pqcache.fig7_holds(found)[0] is None
    cpu.write_text(cpu.read_text().replace('"cpu"', '"cuda"'))
    assert pqcache.fig7_holds(pqcache.fig7_table(pd.DataFrame(), cpu))[0] is True


# -- the arithmetic underneath ---------------------------------------------------------------------------------


def test_a_tie_is_no_win_and_a_document_counts_once():
    assert positive(0.0, 0.0) is None and positive(0.1, 0.2) is True and positive(-0.2, -0.1) is False
    assert math.isnan(mean_of([])[0]) and mean_of([1.0, math.nan, 3.0])[0] == 2.0
    rows = [exhibit_run(m, s, 0.2, model=model) for model in ("a", "b") for m, s in (("a2sf", GOOD), ("h2o", FAIR))]
    once = pooled_difference(frame_of(*rows[:2]), of("a2sf"), of("h2o"), "acc")
    assert pooled_difference(frame_of(*rows), of("a2sf"), of("h2o"), "acc") == once and once[0] == 50.0
    frame = pd.DataFrame({"prompt": [0, 1, 0, 1], "side": [1, 1, 0, 0], "v": [3.0, 5.0, 1.0, 2.0]})
    assert paired_gap(frame, "v", frame["side"] == 1, frame["side"] == 0, ("prompt",))[0] == 2.5


def test_an_example_that_makes_up_a_mean_takes_the_place_of_an_upper_end_and_of_no_lower_one():
    even, one = np.full(20, 0.02), np.array([0.4] + [0.001] * 19)
    assert kl_estimate(0.02, 0.01, 0.03, even) == "0.020 (0.010 … 0.030)"
    made = kl_estimate(0.021, 0.002, 5.031, one)
    assert made == "0.021 (from 0.002, 1 of 20 is 95 %)"
    assert kl_estimate(0.2, math.nan, math.nan, one[:4]) == "0.200 (too few)"
    assert re.fullmatch(INTERVAL, made), "FINDINGS.md finds such a number too"
