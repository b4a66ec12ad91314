"""What exhibits make of known numbers: intervals, differences, verdicts in every direction, and the picture's lines."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments.keyformer import table3
from experiments.lib.data import ahead, option, paper_numbers_for, points, spelled
from experiments.lib.exhibits import load
from experiments.lib.stats import above, all_hold, better, mean_interval, paired_difference
from kvexp.figures.style import MARK_COLOR


def run(model, method, value, ratio=None, setting="", task="testbed_summary", metric="rouge2", n=40):
    """One row of a frame whose examples alternate by 1 around `value`: means and gaps are exact."""
    scores = {str(i): {metric: value + (-1) ** i} for i in range(n)}
    base = method == "full"
    row = {
        "model": model,
        "task": task,
        "method": method,
        "setting": setting,
        "kv_ratio": ratio,
        "n": n,
        "scores": scores,
    }
    row |= {"hash": f"{model}{task}{method}{ratio}{setting}", "baseline": None if base else f"{model}{task}fullNone"}
    row |= {"verdict99": "baseline" if base else "fail", metric: value}
    ends = {
        "of_full": value,
        "low": value - 0.5,
        "high": value + 0.5,
    }  # full is 100, so percent and points are the same
    return row | {f"{metric}_{end}": None if base else number for end, number in ends.items()}


def frame(*rows):
    return pd.DataFrame(list(rows)).astype({"kv_ratio": float})


def two_models(**values):
    """Runs of "a" and "b" under each (method, ratio) -> value, beside full at 100."""
    rows = [run(m, "full", 100.0, task=t) for m in ("a", "b") for t in ("testbed_summary", "testbed_dialogue")]
    for (method, ratio), value in values["runs"].items():
        rows += [
            run(m, method, value, ratio, task=t) for m in ("a", "b") for t in ("testbed_summary", "testbed_dialogue")
        ]
    return frame(*rows)


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
    for setting, value in ((table3.OURS, 90.0), (table3.NEW, 80.0), (table3.SHARED, 85.0)):
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
