"""The exhibits of A2SF and PQCache: verdicts on tables that are known."""

import math

import numpy as np
import pandas as pd
import pytest

from experiments.lib.exhibits import ROOT, load, names, sweeps
from experiments.lib.stats import mean_of, paired_gap, pooled_difference, positive, runs_of
from experiments.pqcache import fig7
from tests.exhibits import frame_of, run, whole

MINE = [name for name in names() if name.startswith(("a2sf_", "pqcache_"))]
GOOD, FAIR, POOR = [100] * 40, [100, 0] * 20, [0] * 38 + [100] * 2


@pytest.mark.parametrize(
    ("a2sf", "h2o", "wanted"), [(GOOD, FAIR, True), (POOR, FAIR, False), (FAIR, FAIR[::-1], None), (FAIR, FAIR, None)]
)
def test_table1_and_fig3_follow_the_scores(a2sf, h2o, wanted):
    each = (("window", POOR), ("h2o", h2o), ("a2sf", a2sf))
    rows = []
    for own in ("task.num_fewshot=1", "task.num_fewshot=0"):
        full = run("full", GOOD, setting=own)
        rows += [full, *(run(m, scores, 0.2, own, baseline=full["hash"]) for m, scores in each)]
    assert whole(load("a2sf_table1"), frame_of(*rows)) is wanted
    runs = (run(m, scores, ratio) for ratio in (0.2, 0.6) for m, scores in (*each, ("ideal", GOOD)))
    rows = [run("full", GOOD), *runs]
    leads = np.mean(a2sf) > np.mean(h2o)
    assert whole(load("a2sf_fig3"), frame_of(*rows)) is (wanted if wanted is not None or leads else False)


def test_fig5_asks_for_a_peak_and_for_no_history_over_h2o():
    def frame(low, none):
        scores = {0.0: none, 0.1: low, 0.2: low, 0.3: low, 0.5: FAIR, 0.9: FAIR}
        runs = [run("a2sf", s, 0.3, f"method.alpha={alpha}") for alpha, s in scores.items()]
        return frame_of(run("full", GOOD), run("h2o", POOR, 0.3), *runs)

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
        rows = [run("full", GOOD, metric=metric, task=task) for task, metric in tasks]
        for ratio in (0.2, 0.1):
            for method, scores in ({**rivals, "pqcache": mine, "oracle": GOOD}).items():
                rows += [run(method, scores, ratio, metric=metric, task=task) for task, metric in tasks]
        assert whole(load(name), frame_of(*rows)) is wanted
    each = {**rivals, "pqcache": mine}
    needles = [run("full", GOOD, metric="exact"), *(run(m, s, 0.2, metric="exact") for m, s in each.items())]
    assert whole(load("pqcache_fig8"), frame_of(*needles)) is (False if mine is FAIR else wanted)
    fig9a = [run(m, s, ratio, metric="rouge2") for ratio in (0.1, 0.2) for m, s in each.items()]
    assert whole(load("pqcache_fig9a"), frame_of(run("full", GOOD, metric="rouge2"), *fig9a)) is wanted


def test_fig9b_wants_sparq_to_gain_by_reading_more():
    def frame(more):
        reads = {"pqcache": (GOOD, GOOD), "infllm": (POOR, POOR), "sparq": (POOR, more)}
        runs = [
            run(m, s, 0.1, f"method.r={at}", "rouge2", search_share=0.03 * at)
            for m, pair in reads.items()
            for at, s in zip((1, 2), pair, strict=True)
        ]
        return frame_of(run("full", GOOD, metric="rouge2", search_share=math.nan), *runs)

    assert whole(load("pqcache_fig9b"), frame(FAIR)) is True
    assert whole(load("pqcache_fig9b"), frame(POOR)) is None


def test_fig9c_and_fig10c_compare_the_ends_of_their_sweeps():
    shapes = {(2, 6): FAIR, (2, 8): GOOD, (4, 3): POOR, (4, 4): POOR, (8, 2): POOR}
    runs = [run("pqcache", s, 0.1, f"method.b={b} method.m={m}") for (m, b), s in shapes.items()]
    assert whole(load("pqcache_fig9c"), frame_of(run("full", GOOD), *runs)) is True
    limits = {"1": GOOD, "5": FAIR, "25": FAIR, "adaptive": FAIR}
    runs = [run("pqcache", s, 0.1, f"method.max_iter={n}", "rouge2") for n, s in limits.items()]
    assert whole(load("pqcache_fig10c"), frame_of(run("full", GOOD, metric="rouge2"), *runs)) is False


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
    monkeypatch.setattr("experiments.pqcache.fig10a.cells", lambda *_, **__: [])
    for name in ("pqcache_fig10a", "pqcache_fig10b"):
        assert load(name).holds(load(name).table(pd.DataFrame()))[1].startswith("no GPU result yet")
    cpu = tmp_path / "found.json"
    cpu.write_text(
        '{"options": {"device": "cpu"}, "one_layer": [{"length": 8, "prefill_s": 1, "offload_s": 0, "kmeans_s": 2}]}'
    )
    assert fig7.measured(cpu).empty and fig7.holds(fig7.measured(cpu))[0] is None
    cpu.write_text(cpu.read_text().replace('"cpu"', '"cuda"'))
    assert fig7.holds(fig7.measured(cpu))[0] is True


# -- the arithmetic underneath ---------------------------------------------------------------------------------


def test_a_tie_is_no_win_and_a_document_counts_once():
    assert positive(0.0, 0.0) is None and positive(0.1, 0.2) is True and positive(-0.2, -0.1) is False
    assert math.isnan(mean_of([])[0]) and mean_of([1.0, math.nan, 3.0])[0] == 2.0
    rows = [run(m, s, 0.2, model=model) for model in ("a", "b") for m, s in (("a2sf", GOOD), ("h2o", FAIR))]
    once = pooled_difference(frame_of(*rows[:2]), runs_of("a2sf"), runs_of("h2o"), "acc")
    assert pooled_difference(frame_of(*rows), runs_of("a2sf"), runs_of("h2o"), "acc") == once and once[0] == 50.0
    frame = pd.DataFrame({"prompt": [0, 1, 0, 1], "side": [1, 1, 0, 0], "v": [3.0, 5.0, 1.0, 2.0]})
    assert paired_gap(frame, "v", frame["side"] == 1, frame["side"] == 0, ("prompt",))[0] == 2.5


@pytest.mark.parametrize("name", MINE)
def test_both_scales_have_their_sweeps(name):
    for scale in ("testbed", "paper"):
        for experiment in sweeps(name, scale):
            assert (ROOT / "conf" / "experiment" / f"{experiment}.yaml").exists()
