"""The real scale: which rows it takes, what it says where they or the model are missing, and both of its verdicts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments import findings, reproduce
from experiments.lib import draw, real_scale, record, verdicts
from experiments.lib.exhibits import OWN, REAL, ROOT, load, names, params, sweeps
from experiments.lib.real_scale import HUB, commands, commands_of, scale_of
from experiments.lib.record import Made, Provenance, Rows
from experiments.lib.sweep import limit_of, smaller
from experiments.lib.tables import of
from experiments.lib.verdicts import Closer, Near, by_divergence, count_closer

ON_IT = [name for name in names() if sweeps(name, REAL) and not load(name).testbed_only]


@pytest.fixture
def data(tmp_path):
    """A folder with an empty file for each that real_data.yaml asks for."""
    for place in real_scale._files().values():
        for value in place.get("folder", {}).values():
            for subset in ("hotpotqa", "2wikimqa", "qasper", "multifieldqa_en"):
                path = tmp_path / "data" / value.format(subset=subset).replace("*", "9")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    return str(tmp_path / "data")


def here(monkeypatch, answer=True):
    monkeypatch.setattr(real_scale, "model_is_here", lambda: answer)


# -- which scale, which rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_IT)
def test_every_sweep_of_the_real_scale_is_one_task_on_one_model(name):
    for experiment in (*sweeps(name, REAL), *load(name).experiments(OWN)):
        swept = params(experiment)
        assert swept["model"] == real_scale.MODEL and swept["task"] in real_scale._files(), experiment
    assert len({limit_of(each, []) for each in sweeps(name, REAL)}) == 1


def test_real_is_the_default_where_the_model_and_data_are_there(monkeypatch, data):
    here(monkeypatch)
    assert scale_of(None, data) == scale_of(REAL, None) == scale_of(None, HUB) == REAL
    assert scale_of(None, None) == "testbed" and scale_of("paper", None) == "paper"
    here(monkeypatch, answer=False)
    assert scale_of(None, data) == "testbed"


def test_without_the_model_it_says_how_to_get_it_and_what_needs_none(monkeypatch, capsys):
    here(monkeypatch, answer=False)
    assert reproduce.main(["fig7", "--scale", "real"]) == 2
    error = capsys.readouterr().err
    assert "kvexp fetch smollm2_135m gets it (93 MB)" in error and "--scale testbed" in error


def test_rows_are_those_of_a_folder_of_the_hub_or_articles_of_our_own(data):
    (found,) = commands("keyformer_fig7", data)
    assert found.overrides == (f"task.data_files={data}/cnn_dailymail/cnndm_test150.jsonl",)
    assert found.rows == "task=cnn_dailymail, cnn_dailymail/cnndm_test150.jsonl of DATA"
    (found,) = commands("keyformer_fig7", HUB)
    assert found.overrides == () and found.rows.endswith("from the hub")
    (found,) = commands("keyformer_fig7", None)
    assert found.overrides == ("task=news",) and "no DATA was given" in found.rows


def test_each_subset_is_a_command_with_a_file_of_its_own(data):
    found = commands_of("real/pqcache_table2", data)
    assert [each.overrides[0] for each in found] == [
        f"task.subset={name}" for name in ("hotpotqa", "2wikimqa", "qasper", "multifieldqa_en")
    ]
    assert all("task.extended=true" in each.overrides for each in found)
    (own,) = commands_of("real/pqcache_table2", None)
    assert own.experiment == "real/pqcache_table2_own" and own.overrides == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a2sf_fig3", "--scale", "real"], "task=lm_eval, which no articles of kvexp's own can stand for"),
        (["fig7", "--data", str(ROOT)], "has no cnn_dailymail/cnndm_test150.jsonl"),
        (["fig7", "--data", "nowhere"], "DATA=nowhere: no such folder; DATA is a folder laid out as"),
        (["fig7", "--scale", "paper", "--data", "hub"], "--scale paper was asked for"),
        (["fig7", "--scale", "real", "--record"], "which need DATA"),
    ],
)
def test_what_cannot_be_is_one_error(monkeypatch, capsys, words, said):
    here(monkeypatch)
    assert reproduce.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_all_leaves_out_what_only_the_testbed_has_and_says_why(capsys, data):
    wanted = reproduce._with_a_real_scale(names(), data)
    said = capsys.readouterr().out
    assert wanted == ON_IT and "pqcache_table3: left out: it is about models whose every query head" in said
    assert "keyformer_fig9" not in said, "speed has no scale"
    few = reproduce._with_a_real_scale(names(), None)
    assert set(wanted) - set(few) == {"keyformer_table2", "a2sf_fig3", "a2sf_fig5", "a2sf_table1"}


def test_a_smoke_run_takes_few_examples_the_first_model_and_the_ends_of_the_budgets():
    assert smaller("real/keyformer_fig7") == ["limit=1", "model=smollm2_135m", "kv_ratio=0.2,0.9"]
    assert smaller("keyformer_fig7") == ["limit=2", "model=testbed_rope", "kv_ratio=0.2,0.9"]


# -- the second verdict ----------------------------------------------------------------------------------------


def run(method, kl, ratio=0.5, setting="", task="t", n=24, tokens=50):
    """A run whose examples have this mean divergence, give or take a hundredth of it."""
    each = kl * (1 + 0.01 * (-1.0) ** np.arange(n))
    row = {"model": "m", "task": task, "method": method, "setting": setting, "kv_ratio": ratio, "hash": "h", "n": n}
    row |= {"kl": kl, "sums": each * tokens, "counts": np.full(n, float(tokens))}
    return row | {"scores": {f"{task}{i}": {"kl": float(value)} for i, value in enumerate(each)}}


@pytest.mark.parametrize(("kl", "near"), [(0.01, True), (0.2, False), (0.05, None)])
def test_near_the_full_cache_is_under_a_twentieth_of_a_nat(kl, near):
    frame = pd.DataFrame([run("h2o", kl)])
    assert by_divergence(Near("h2o", of("h2o")))(frame)[0] is near
    away = by_divergence(Near("h2o", of("h2o"), within=False))(frame)[0]
    assert away is (None if near is None else not near)


def test_runs_of_several_tasks_are_one_sample():
    frame = pd.DataFrame([run("h2o", 0.01, task="a", n=12), run("h2o", 0.01, task="b", n=12)])
    assert by_divergence(Near("h2o", of("h2o")))(frame)[0] is True
    assert by_divergence(Near("h2o", of("h2o")))(frame[:1])[0] is None, "twelve examples have no interval"


@pytest.mark.parametrize(("mine", "verdict"), [(0.1, True), (0.3, False), (0.2, None)])
def test_closer_is_less_divergence_of_the_same_examples(mine, verdict):
    other = run("h2o", 0.2)
    other["scores"] = {name: {"kl": 0.2 + 0.05 * (-1) ** i} for i, name in enumerate(other["scores"])}
    frame = pd.DataFrame([run("keyformer", mine), other])
    found, words = by_divergence(Closer("keyformer than h2o", of("keyformer"), of("h2o")))(frame)
    assert found is verdict and "keyformer than h2o" in words


def test_what_is_only_told_decides_nothing_and_what_is_missing_leaves_it_open():
    frame = pd.DataFrame([run("keyformer", 0.01), run("h2o", 0.2)])
    near = Near("keyformer", of("keyformer"))
    assert by_divergence(near, Near("h2o", of("h2o"), judged=False))(frame)[0] is True
    assert by_divergence(near, Near("tova", of("tova"), judged=False))(frame)[0] is True
    assert by_divergence(near, Near("tova", of("tova")))(frame) == (None, "tova: not measured")
    assert by_divergence(near)(frame[:0]) == (None, "keyformer: not measured")


@pytest.mark.parametrize(
    ("kl", "verdict"),
    [
        ({"0.1": 0.3, "0.2": 0.2, "0.3": 0.1}, True),
        ({"0.1": 0.1, "0.2": 0.2, "0.3": 0.3}, False),
        ({"0.1": 0.2, "0.2": 0.1, "0.3": 0.3}, True),
        ({"0.1": 0.1, "0.2": 0.1, "0.3": 0.3}, None),
    ],
)
def test_recent_ratio_by_divergence_wants_one_of_the_two_ahead_of_each_other_ratio(kl, verdict):
    """As by ROUGE-2: one ratio of 20 to 30 % is enough, and a rival must be ahead of both."""
    runs = [run("keyformer", value) | {"setting": f"method.recent_ratio={ratio}"} for ratio, value in kl.items()]
    noise = {name: {"kl": kl["0.2"] + 0.01 * (-1) ** i} for i, name in enumerate(runs[1]["scores"])}
    found, words = load("keyformer_recent_ratio").divergence(
        pd.DataFrame([runs[0], runs[1] | {"scores": noise}, runs[2]])
    )
    assert found is verdict and "0.2 than 0.1" in words and "0.3 than 0.1" in words


def test_budgets_are_counted():
    frame = pd.DataFrame([run("keyformer", kl, r) for r, kl in ((0.2, 0.1), (0.5, 0.3))])
    frame = pd.concat([frame, pd.DataFrame([run("h2o", 0.2, r) for r in (0.2, 0.5)])])
    said = count_closer("keyformer", "h2o")(frame)
    assert said == "keyformer diverges less than h2o at 1, more at 1, open at 0 of 2 budgets"


FIG7 = {("keyformer", 0.7): 0.01, ("h2o", 0.9): 0.2, ("window", 0.9): 1.0, ("h2o", 0.7): 0.3}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({}, True), ({("keyformer", 0.7): 0.2}, False), ({("h2o", 0.9): 0.01}, False), ({("h2o", 0.9): 0.05}, None)],
)
def test_fig7_by_divergence(change, verdict):
    judge = load("keyformer_fig7").divergence
    frame = pd.DataFrame([run(m, kl, ratio) for (m, ratio), kl in (FIG7 | change).items()])
    assert judge(frame)[0] is verdict


@pytest.mark.parametrize("name", [name for name in ON_IT if load(name).divergence is not None])
def test_every_judgement_by_divergence_copes_with_one_run(name):
    one = run("keyformer", 0.1, 0.5, "method.tau_end=2.0 method.tau_init=1.0")
    verdict, words = load(name).divergence(pd.DataFrame([one]))
    assert verdict in (None, True, False) and words


# -- what is recorded ------------------------------------------------------------------------------------------


def made(name, ids, **own):
    rows = (Rows("cnn_dailymail", "files:1", ids),)
    about = Provenance("smollm2_135m", {"quantisation": "Q4_1"}, 6, ("abc",), ("task=cnn_dailymail",), len(ids), rows)
    whole = Made(name, pd.DataFrame(), None, "no number", 12.4, ROOT, (True, "KL 0.010"), about)
    return replace(whole, **own)


def test_ids_of_rows_are_kept_once_and_both_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MEASURED_REAL", tmp_path / "measured_real.json")
    record.record_real(made("keyformer_fig7", ("a", "b")))
    record.record_real(made("keyformer_table4", ("a", "b"), seconds=3.0))
    record.record_real(made("keyformer_fig7", ("a", "b"), seconds=1.0))
    known = json.loads(record.MEASURED_REAL.read_text())
    assert list(known) == ["exhibits", "rows"] and len(known["rows"]) == 1
    (rows,) = known["rows"].values()
    assert rows == {"task": "cnn_dailymail", "data": "files:1", "ids": ["a", "b"]}
    fig7 = record.recorded(REAL)["keyformer_fig7"]
    assert fig7["divergence"] == {"holds": True, "words": "KL 0.010"} and fig7["holds"] is None
    assert (fig7["n"], fig7["commits"], fig7["weights"], fig7["seconds"]) == (2, ["abc"], {"quantisation": "Q4_1"}, 12)
    record.record_real(made("keyformer_fig7", ("a",)))
    record.record_real(made("keyformer_table4", ("a",)))
    assert [each["ids"] for each in json.loads(record.MEASURED_REAL.read_text())["rows"].values()] == [["a"]]
    assert "SmolLM2-135M,divergence,holds,1,KL 0.010," in findings.judgements()
    about = replace(made("keyformer_fig7", ("a", "c")).provenance, model=record.SECOND)
    record.record_real(made("keyformer_fig7", ("a", "c"), words="another model", provenance=about))
    assert record.recorded(REAL)["keyformer_fig7"]["words"] == "no number"
    assert len(json.loads(record.MEASURED_REAL.read_text())["rows"]) == 2
    assert f"{record.SECOND},divergence,holds,2,KL 0.010," in findings.judgements()


def test_no_text_of_a_row_is_recorded():
    """Ids are digests, numbers or short names; a sentence would have spaces in plenty."""
    known = json.loads(record.MEASURED_REAL.read_text("utf-8")) if record.MEASURED_REAL.exists() else {"rows": {}}
    ids = [name for each in known["rows"].values() for name in each["ids"]]
    assert all(len(name) <= 64 and name.count(" ") <= 5 for name in ids)


def test_recorded_numbers_name_their_rows_and_weights():
    known = record.recorded(REAL)
    for name, entry in known.items():
        assert entry["model"] == real_scale.MODEL and entry["n"] > 0 and entry["source"], name
        assert load(name).measure is not None or (entry["rows"] and entry["weights"] and entry["commits"]), name


def test_divergence_is_read_beside_the_rows(tmp_path, monkeypatch):
    """The divergence is that of the exhibit's own first examples, not of those that another asked for."""
    from kvexp.run.store import Run

    found = Run.open(tmp_path, {"a": 1}, {"model": "m", "task": "t", "method": "h2o", "kv_ratio": 0.5, "setting": ""})
    lines = [
        {"example": str(i), "index": i, "text": "own", "first_by_prefill": True, "tokens": [1, 2, 3]}
        | {"kl": [9.0, 0.1, 0.3], "full_logprob": [0.0] * 3, "logprob": [0.0] * 3, "same_top1": [1] * 3}
        for i in range(4)
    ]
    (found.path / "divergence.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = pd.DataFrame(
        [{"model": "m", "task": "t", "method": "h2o", "setting": "", "kv_ratio": 0.5, "hash": found.hash}]
    )
    made = verdicts.divergence_frame(tmp_path, frame, 3)
    assert made["n"].tolist() == [3] and made["tokens"].tolist() == [6] and made["kl"][0] == pytest.approx(0.2)
    assert made["scores"][0]["2"]["kl"] == pytest.approx(0.2)


def test_the_figure_of_divergence_pools_what_has_no_interval_alone():
    few = pd.DataFrame([run("h2o", kl, ratio, task=t, n=12) for kl, ratio in ((0.1, 0.5), (0.4, 0.2)) for t in "ab"])
    few = few.assign(kl_low=np.nan, kl_high=np.nan)
    one = draw.pooled(few)
    assert one["n"].tolist() == [24, 24] and one["kl"].tolist() == pytest.approx([0.1, 0.4])
    assert one["kl_low"].lt(one["kl"]).all() and one["kl_high"].gt(one["kl"]).all()
    figure = Figure()
    draw.draw_divergence(few, figure)
    assert [axes.get_title() for axes in figure.axes] == ["m: 2 tasks (n = 24)"]
    drawn = [line for line in figure.axes[0].lines if line.get_linestyle() == "None" and len(line.get_xdata())]
    assert [float(line.get_xdata()[0]) for line in drawn] == pytest.approx([0.1, 0.4])
    assert drawn[0].get_markerfacecolor() != "white" == drawn[1].get_markerfacecolor(), "smaller budgets are hollow"


def test_the_figure_of_divergence_has_curves_where_budgets_are_many():
    many = pd.DataFrame([run("h2o", 0.1 / ratio, ratio) for ratio in (0.2, 0.5, 0.9)]).assign(kl_low=0.05, kl_high=0.9)
    figure = Figure()
    draw.draw_divergence(many, figure)
    places = [list(line.get_xdata()) for line in figure.axes[0].lines]
    assert [0.2, 0.5, 0.9] in places and figure.axes[0].get_yscale() == "log"


@pytest.mark.real
def test_an_exhibit_runs_on_the_real_model_with_one_example(smollm2, tmp_path, capsys):
    """On articles of our own: rows, divergence, both verdicts, and nothing to record."""
    arguments = ["keyformer_fig3c", "--scale", "real", "--smoke", "--outputs", str(tmp_path)]
    assert reproduce.main([*arguments, "--set", "task.max_new_tokens=4"]) == 0
    said = capsys.readouterr().out
    assert "rows: task=news in place of cnn_dailymail: no DATA was given" in said
    assert "undecided: % of full: smollm2_135m window" in said and "by divergence undecided: KL in nats" in said
    folder = tmp_path / "exhibits" / "keyformer_fig3c_real"
    assert (folder / "figure.png").exists() and len(pd.read_csv(folder / "divergence.csv")) == 3
    assert (folder / "divergence.png").exists()


@pytest.mark.parametrize(("mine", "verdict"), [(90.0, True), (70.0, False)])
def test_a_forgetting_factor_is_held_against_h2o_where_the_question_is_read_alike(mine, verdict):
    """H2O's setting is the place of the question alone, A2SF's has its factor too."""
    from tests.exhibits import run as scored

    rows = []
    for asked, score in (("in_prompt", mine), ("after_eviction", mine - 5)):
        words = f"task.question={asked}"
        full = scored("full", [100.0] * 24, setting=words, task="news_qa", metric="exact")
        rows.append({**full, "question": asked})
        for method, setting, value in (("h2o", words, 80.0), ("a2sf", f"method.alpha=0.1 {words}", score)):
            run = scored(method, [value] * 24, 0.3, setting, "exact", "news_qa", baseline=full["hash"])
            rows.append({**run, "question": asked})
    exhibit = load("a2sf_factors")
    table = exhibit.table(pd.DataFrame(rows))
    found, words = exhibit.holds(table)
    assert found is verdict and "news_qa in_prompt" in words and "nan" not in words
    assert set(table["task"]) == {"news_qa in_prompt", "news_qa after_eviction"}
    figure = Figure()
    exhibit.draw(table, figure)
    titles = [" ".join(axes.get_title().split()) for axes in figure.axes]
    assert [title.count("eviction") for title in titles] == [0, 1]
    assert [title.count("question in prompt") for title in titles] == [1, 0]
