"""Exhibits: each composes at both scales, and its table, picture and judgement work on numbers that are known."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from commands import config_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import index, reproduce
from experiments.lib import record, runner, sweep
from experiments.lib.draw import METHODS, MODEL_NAMES, MODELS, bars, curves, panel_title, settings_curves, settings_grid
from experiments.lib.exhibits import OWN, ROOT, declared, full_name, load, names, option, params, sweeps
from experiments.lib.record import Made
from experiments.lib.runner import Setup
from experiments.lib.tables import KEYS, frame_of, without
from kvexp.run.compose import options
from kvexp.run.store import Run, runs
from kvexp.util.errors import ConfigError
from tests.exhibits import changed

CONF = ROOT / "conf"
SWEPT = [(name, scale) for name in names() for scale in ("testbed", "paper")]


@pytest.mark.parametrize(("name", "scale"), SWEPT)
def test_every_sweep_composes(name, scale):
    """The first of each value, with every key set as a sweep sets it: wrong keys and options fail here."""
    for experiment in sweeps(name, scale):
        swept = params(experiment)
        first = [f"{key}={value.split(',')[0]}" for key, value in swept.items() if "[" not in value]
        config = config_of(f"experiment={experiment}", *first, return_hydra_config=True)
        assert config.hydra.mode.name == "MULTIRUN" and config.hydra.sweeper.params
        for group in [key for key in ("model", "task", "method") if key in swept]:
            assert set(swept[group].split(",")) <= set(options(group)), (experiment, group)


def test_names_carry_their_paper_and_fig7_is_short_for_keyformers():
    assert load("fig7") is load("keyformer_fig7") and full_name("fig7") == "keyformer_fig7"
    found = names()
    assert found.index("keyformer_fig7") < found.index("keyformer_fig10") < found.index("keyformer_table1")


def test_the_index_is_current():
    assert index.README.read_text("utf-8") == index.text(), "python -m experiments.index"
    rows = [line.strip("| ").split(" | ") for line in index.text().splitlines() if line.startswith("| `")]
    shown = {row[0].strip("`"): row[1] for row in rows}
    waiting = re.findall(r"`(\w+)`", " ".join(re.findall(r"^Speed, waiting .*$", index.text(), re.MULTILINE)))
    assert sorted([*shown, *waiting]) == sorted(names())
    assert shown == {name: index.shown(load(name).title) for name in shown}


@pytest.mark.parametrize("name", names())
def test_an_exhibit_has_a_claim_with_its_source_and_a_title_that_stands_for_its_name(name):
    title = load(name).title
    assert re.search(r"arXiv:\d{4}\.\d{5}", load(name).claim) and load(name).name == name
    assert re.match(r"(Keyformer|A2SF|PQCache), (Figs?\.|Table|section|appendix) [\w.]+", title) and "_" not in title
    assert len(title) > 30
    assert [each for each in names() if load(each).title == title] == [name]


def test_panels_are_titled_in_words():
    assert panel_title("testbed_rope", "testbed_summary") == "testbed, RoPE: summaries"
    assert panel_title("gptj_6b", "cnn_dailymail") == "GPT-J 6B: CNN/DailyMail"
    assert (
        panel_title("testbed_alibi", "testbed_choice after_eviction")
        == "testbed, ALiBi: multiple choice after eviction"
    )
    assert panel_title("my_model") == "my model", "a name nobody listed loses its underscores"
    assert set(MODEL_NAMES) <= set(options("model"))


def test_an_index_of_other_claims_is_not_current(tmp_path, monkeypatch, capsys):
    old = index.text().replace("ROUGE-2", "ROUGE-1", 1)
    assert old != index.text()
    (tmp_path / "README.md").write_text(old, encoding="utf-8")
    monkeypatch.setattr(index, "README", tmp_path / "README.md")
    monkeypatch.setattr(index, "DECLARED", tmp_path / "experiments.json")
    assert index.main(["--check"]) == 1
    assert index.main([]) == 0 and index.main(["--check"]) == 0


def test_the_written_table_leaves_out_what_nobody_filled():
    text = runner.markdown(pd.DataFrame({"a": [1.23456, None], "b": ["x|y", "z"], "c": ["", ""], "d": [None, None]}))
    assert text.splitlines() == ["| a | b |", "|---|---|", "| 1.235 | x\\|y |", "|  | z |"]


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupt_says_what_is_kept_and_begins_no_other_exhibit(tmp_path, capsys, monkeypatch, code):
    begun = []

    def interrupted(session):
        begun.append(1)
        session.begun, session.rows_written = True, 75
        raise SystemExit(code)

    monkeypatch.setattr(sweep, "main", interrupted)
    sweep._hashes.cache_clear()
    arguments = ["keyformer_fig7", "keyformer_fig8", "--scale", "testbed", "--outputs", str(tmp_path)]
    assert reproduce.main(arguments) == 130 and len(begun) == 1
    said = capsys.readouterr().err
    assert "interrupted: 75 rows were written" in said and "the same command goes on" in said
    assert "did not begin" not in said


def test_an_exhibit_says_how_long_it_takes_and_keeps_its_runs_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "planned_seconds", lambda experiment, words: 3600.0)
    monkeypatch.setattr(reproduce, "results", lambda names, setup, workers: iter(()))
    assert reproduce.main(["keyformer_fig3c", "--scale", "testbed"]) == 0
    said = capsys.readouterr().out
    assert "time for what is missing: about 60 min" in said and f"those in {tmp_path}/outputs/reproduce are" in said
    assert reproduce.main(["keyformer_fig3b", "--scale", "testbed"]) == 0, "measured inside the model: no plan knows it"
    assert re.search(r"time: \d+ (s|min) of CPU time from nothing, when it was recorded", capsys.readouterr().out)
    assert reproduce.main(["all", "--scale", "testbed"]) == 0
    assert re.search(r"\d+ exhibits: \d+ min of CPU time from nothing", capsys.readouterr().out)


@pytest.mark.slow
def test_a_smoke_run_writes_table_figure_and_judgement(tmp_path, capsys):
    """The real thing: a sweep of two examples, its table, its picture, resumed the second time."""
    assert reproduce.main(["keyformer_fig3c", "--smoke", "--outputs", str(tmp_path)]) == 0
    said, made = capsys.readouterr().out, [(run.hash, len(run.rows())) for run in runs(tmp_path)]
    assert len(made) >= 4 and all(count == 2 for _, count in made)
    folder = tmp_path / "exhibits" / "keyformer_fig3c"
    written = {path.name for path in folder.iterdir()}
    assert written == {"table.csv", "table.md", "figure.png", "figure.pdf", "sweep.log"}
    assert "testbed_rope key_attention" in said and re.search(r"(holds|does not hold|undecided): % of full", said)
    written = pd.read_csv(folder / "table.csv")
    assert set(written["method"]) == {"full", "window", "h2o", "key_attention"} and set(KEYS) <= set(written)
    sweep._hashes.cache_clear()
    assert reproduce.main(["keyformer_fig3c", "--smoke", "--outputs", str(tmp_path)]) == 0
    again = [(run.hash, len((run.path / "examples.jsonl").read_text().splitlines())) for run in runs(tmp_path)]
    assert again == made, "no row was made twice"


@pytest.mark.slow
def test_a_measurement_inside_the_model_is_taken_once(tmp_path, capsys, monkeypatch):
    arguments = ["keyformer_fig3b", "--smoke", "--outputs", str(tmp_path)]
    assert reproduce.main(arguments) == 0
    assert len(list((tmp_path / "collected").glob("keyformer_fig3b-*.csv"))) == 1

    def again(*_):
        pytest.fail("measured again")

    again.__module__ = load("keyformer_fig3b").measure.__module__  # whose text is part of what was collected
    changed(monkeypatch, "keyformer_fig3b", measure=again)
    assert reproduce.main(arguments) == 0, "what was collected is read"
    assert "40 % of the tokens hold testbed_rope" in capsys.readouterr().out


def test_a_missing_sweep_of_a_scale_is_said(monkeypatch, capsys, tmp_path):
    changed(monkeypatch, "keyformer_fig3c", at={"paper": "model=mpt_7b"})
    assert reproduce.main(["keyformer_fig3c", "--outputs", str(tmp_path)]) == 1
    assert "keyformer_fig3c has no sweep at the testbed scale" in capsys.readouterr().err


def test_the_options_of_experiment_are_those_that_are_declared():
    """conf/experiments.json is what kvexp reads, in a checkout and in a wheel."""
    written = (ROOT / "conf" / "experiments.json").read_text("utf-8")
    assert json.loads(written) == json.loads(json.dumps(declared())), "python -m experiments.index"
    every = [sweep for name in names() for scale in ("testbed", "real", "paper") for sweep in sweeps(name, scale)]
    assert set(every) <= set(declared()) and not {path.stem for path in CONF.glob("experiment/*.yaml")} & set(
        declared()
    )
    own = {name for exhibit in map(load, names()) for name in exhibit.experiments(OWN)}
    assert own and all(name.startswith("real/") and name.endswith("_own") for name in own)


def test_words_of_a_sweep_are_fixed_or_swept():
    """A key in both parts has the value of the scale, and is not swept where the scale fixes it."""
    made = option("task=news limit=null task.depths=[0,50] | model=a,b kv_ratio=0.5", "method=h2o | x=1,2 kv_ratio=0.2")
    assert made["defaults"] == [{"override /method": "h2o"}, {"override /task": "news"}]
    assert made["limit"] is None and made["task"] == {"depths": [0, 50]}
    assert list(made["hydra"]["sweeper"]["params"].items()) == [("model", "a,b"), ("x", "1,2"), ("kv_ratio", "0.5")]
    fixed = option("kv_ratio=0.2 | model=a", "kv_ratio=0.3,0.4")
    assert fixed["kv_ratio"] == 0.2 and fixed["hydra"]["sweeper"]["params"] == {"model": "a"}


# How exhibits are made: what is collected again, what a user overrides, what is recorded, whose points are beside.


IMPORTS = (
    "from experiments.lib.helper import x",
    "from experiments.lib import helper",
    "import experiments.lib.helper",
)


@pytest.mark.parametrize("line", IMPORTS)
def test_a_measurement_is_taken_again_when_a_module_it_uses_changes(tmp_path, monkeypatch, line):
    monkeypatch.setattr(runner, "HERE", tmp_path)
    (tmp_path / "mine.py").write_text(f"import json\n{line}\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("from experiments.deeper import y\nx = 1\n")
    (tmp_path / "deeper.py").write_text("y = 1\n")
    before = runner.sources("experiments.mine")
    assert len(before) == 3
    (tmp_path / "deeper.py").write_text("y = 2\n")
    assert runner.sources("experiments.mine") != before


def test_measurements_are_keyed_by_the_module_that_takes_them():
    text = (runner.HERE / "lib" / "inside.py").read_text()
    taken = {name: load(name).measure for name in names() if load(name).measure is not None}
    users = [name for name, measure in taken.items() if text in runner.sources(measure.__module__)]
    assert users == list(taken)
    assert {"keyformer_fig3a", "a2sf_fig4", "a2sf_table2"} <= set(users)


def paper(tmp_path, monkeypatch, *lines):
    (tmp_path / "paper").mkdir()
    head = "model,task,method,kv_ratio,setting,metric,value,source,kind,reading_error,note"
    (tmp_path / "paper" / "x.csv").write_text("\n".join([head, *lines]))
    monkeypatch.setattr("experiments.lib.tables.HERE", tmp_path)


def points(*runs):
    rows = [{"model": "m", "task": "t", "method": m, "setting": s, "kv_ratio": r, "value": 50.0} for m, s, r in runs]
    return pd.DataFrame(rows).assign(metric="acc", low=49.0, high=51.0, n=9)


def test_a_bar_has_the_papers_number_of_its_own_budget(tmp_path, monkeypatch):
    line = "m,t,h2o,{},,acc,{},a source,exact,,"
    paper(tmp_path, monkeypatch, line.format(0.5, 40), line.format(0.2, 30), "m,t,full,,,acc,60,a source,exact,,")
    figure = Figure()
    bars(points(("h2o", "", 0.2), ("h2o", "", 0.9)).assign(bar=["a", "b"]), figure, "x")
    marked = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_label() == "paper"]
    assert marked == [30.0]


def test_a_curve_stands_beside_the_papers_runs_of_its_own_setting(tmp_path, monkeypatch):
    line = "m,t,keyformer,0.6,{},acc,{},a source,exact,,"
    paper(tmp_path, monkeypatch, line.format("", 40), line.format("cache.positions=renumbered", 30))

    def marked(*settings):
        figure = Figure()
        curves(points(*(("keyformer", setting, 0.6) for setting in settings)), figure, "x")
        drawn = [each for each in figure.axes[0].containers if "(paper)" in str(each.get_label())]
        return {str(each.get_label()): float(each.lines[0].get_ydata()[0]) for each in drawn}

    assert marked("") == {"keyformer (paper)": 40.0}
    both = marked("", "cache.positions=renumbered")
    assert both == {"keyformer (paper)": 40.0, "keyformer cache.positions=renumbered (paper)": 30.0}


def test_a_legend_of_long_words_stays_inside_its_figure():
    """keyformer_table4's did not, on a single model."""
    rows = [("keyformer", f"method.fresh={f} method.noise={n}", 0.6) for f in ("true", "false") for n in ("a", "b")]
    shades = ["drawn anew for each query and key (the authors' code)"] * 2 + ["drawn once per key (Algorithm 1)"] * 2
    figure = Figure()
    FigureCanvasAgg(figure)
    bars(points(*rows).assign(bar=["a", "b"] * 2, shade=shades), figure)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


LONG = "cache.some_long_option=renumbered method.another_one=0.25"
HARD = {
    "one point": [("h2o", "", 0.5)],
    "many": [(m, s, r) for m in METHODS[1::2] for s in ("", LONG) for r in (0.1, 0.9)],
    "no method": [],
}
NAN = float("nan")
QUICK = {("one point", 1, NAN), ("no method", 1, 0.0)}  # the others are slow together: four figures each
HARD_CASES = [
    pytest.param(rows, panels, value, marks=[] if (rows, panels, value) in QUICK else pytest.mark.slow)
    for rows in HARD
    for panels in (1, 4)
    for value in (0.0, 55.0, NAN)
]


@pytest.mark.parametrize(("rows", "panels", "value"), HARD_CASES)
def test_figures_of_hard_tables_do_not_warn(rows, panels, value):
    """Tables with nothing scored, no interval, one point, as many lines as there are methods: a warning is an error."""
    made = points(("full", "", None), *HARD[rows]).assign(of_full=100.0, of_full_low=100.0, of_full_high=100.0)
    made.loc[made["method"].ne("full"), ["value", "low", "high", "of_full", "of_full_low", "of_full_high"]] = value
    wide = ["low", "high", "of_full_low", "of_full_high"]
    made = pd.concat([made.assign(model=model) for model in MODELS[:panels]]).reset_index(drop=True)
    figures = [Figure() for _ in range(4)]
    curves(made.assign(**dict.fromkeys(wide, NAN)), figures[0])
    bars(made.assign(bar=made["method"] + " " + made["setting"], shade="a shade"), figures[1])
    settings_curves(made.assign(part=made["kv_ratio"]), figures[2], "part", "recent window")
    if len(HARD[rows]):
        settings_grid(made.assign(a=made["kv_ratio"], b=made["kv_ratio"]), figures[3], "a", "b")
    for figure in figures:
        figure.savefig(io.BytesIO(), format="png", dpi=50)


def test_a_run_of_two_exhibits_is_shown_to_each_by_its_own_labels_and_limit(tmp_path):
    """Table 4's Gumbel noise is Fig. 7's keyformer: whoever asks last, each finds the setting that it swept."""
    shown = {"model": "m", "task": "t", "tokens": None}
    base = Run.open(
        tmp_path, {"a": 0}, shown | {"method": "full", "kv_ratio": None, "setting": "", "experiment": "one"}
    )
    names = {"one": "", "two": "method.noise=gumbel", "three": "seed=0"}
    for name, setting in names.items():
        labels = shown | {"method": "keyformer", "kv_ratio": 0.6, "setting": setting, "experiment": name}
        run = Run.open(tmp_path, {"a": 1}, labels, baseline=base.hash)
    for one in (base, run):
        scores = enumerate((1.0, 0.0, 0.0, 0.0))
        one.append(*({"example": str(i), "index": i, "metrics": {"acc": score}} for i, score in scores))
        one.finish(4)
    few = frame_of(tmp_path, [base.hash, run.hash], ["one"], 2)
    assert few["n"].tolist() == [2, 2] and few["acc"].tolist() == [0.5, 0.5], "of a run that was asked for more since"
    assert [list(scores) for scores in few["scores"]] == [["0", "1"]] * 2
    for name, setting in names.items():
        assert frame_of(tmp_path, [run.hash], [name])["setting"].tolist() == [setting]


# -- overrides -------------------------------------------------------------------------------------------------


def test_an_override_goes_to_every_sweep_or_to_the_one_it_names():
    setup = Setup("paper", Path("o"), given=("model.device=cuda", "keyformer_fig7_soda:task.data_files=a:b=c.parquet"))
    assert setup.overrides("paper/keyformer_fig7") == ["model.device=cuda"]
    assert setup.overrides("paper/keyformer_fig7_soda") == ["model.device=cuda", "task.data_files=a:b=c.parquet"]


def test_what_a_user_set_is_no_setting_of_the_exhibit():
    """Exhibits look for the runs of a setting by its words, in which a file's folder does not appear."""
    given = ["task.data_files=/data/cnn.parquet", "model=gptj_6b"]
    assert without("method.noise=none task.data_files=cnn.parquet", given) == "method.noise=none"
    assert without("", given) == "" and without("seed=1 seed=11", ["seed=1"]) == "seed=11"


def test_an_override_may_be_of_an_option_that_the_sweep_brings():
    """Neither key is of the default method or task."""
    given = Setup("testbed", Path("o"), given=("method.tau_end=3.5", "task.size=7")).overrides("keyformer_table4")
    fewer = [*given, "model=testbed_rope", "method.noise=none"]
    found = sweep.jobs("keyformer_table4", [sweep.late(word) for word in fewer])
    assert [(one.method.tau_end, one.task.size) for one in found] == [(3.5, 7)] * 2
    settings = {without(one.labels["setting"], given) for one in found}
    assert settings == {"method.fresh=True method.noise=none", "method.fresh=False method.noise=none"}
    assert sweep.late("model=a,b") == "model=a,b" and sweep.late("~x") == "~x"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fig7", "--smoke", "--record"], "a --smoke run has none"),
        (["keyformer_fig77"], "error: no exhibit 'keyformer_fig77'; there are keyformer_fig1,"),
        (["fig7", "--set", "model"], "--set wants KEY=VALUE or SWEEP:KEY=VALUE, got 'model'"),
        (["fig7", "--set", "fig8:a=b"], "no sweep 'fig8' here; there are keyformer_fig7, keyformer_fig7_soda"),
        (["fig7", "--set", "limit=3", "--record"], "--set changes them"),
        (["fig7", "--workers", "0"], "--workers must be 1 or more, got 0"),
    ],
)
def test_words_that_do_not_go_together_are_one_error(capsys, words, said):
    assert reproduce.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.slow
def test_overrides_reach_the_runs_and_leave_the_settings_alone(tmp_path, capsys):
    given = ["--set", "limit=3", "--set", "task.size=3", "--set", "seed=5"]
    assert reproduce.main(["keyformer_table4", "--smoke", "--outputs", str(tmp_path), *given]) == 0
    table = pd.read_csv(tmp_path / "exhibits" / "keyformer_table4" / "table.csv")
    assert set(table["n"]) == {3} and set(table["bar"].dropna()) == {"gumbel", "gaussian", "constant", "none"}
    assert not table["setting"].astype(str).str.contains("size|seed").any()
    assert table["behind"].notna().sum() == 6, "every other noise is compared with Gumbel drawn the same way"


# -- what is recorded ------------------------------------------------------------------------------------------


def test_seconds_are_those_of_a_run_that_found_nothing_there(tmp_path, monkeypatch):
    file = tmp_path / "measured.json"
    monkeypatch.setattr(record, "MEASURED", file)

    def kept(seconds, fresh):
        record.record("a", "testbed", True, "1 of 1", seconds if fresh else None)
        return json.loads(file.read_text())["testbed"]["a"]["seconds"]

    assert kept(0.4, False) is None
    assert [kept(70.2, True), kept(0.4, False), kept(30.0, True)] == [70, 70, 30]


def test_a_speed_exhibit_waits_for_a_gpu():
    entry = {"holds": None, "words": f"{record.WAITS}: somewhere", "seconds": 0}
    assert record.status(entry) == "waits for a GPU"
    assert record.status(entry | {"words": "+1 (-1 … 2)"}) == "undecided"


# -- one after the other, or side by side ----------------------------------------------------------------------


def test_what_goes_wrong_with_one_is_told_and_the_next_is_made(tmp_path, monkeypatch, capsys):
    def refused(table):
        raise ConfigError("not so")

    def broken(table):
        raise ZeroDivisionError("a defect")

    changed(monkeypatch, "keyformer_fig1", holds=refused)
    changed(monkeypatch, "keyformer_fig9", holds=broken)
    wanted = ["keyformer_fig1", "keyformer_fig9", "keyformer_fig10"]
    assert reproduce.main([*wanted, "--outputs", str(tmp_path)]) == 1
    out, error = capsys.readouterr()
    assert "error: not so" in error and "ZeroDivisionError: a defect" in error and "Traceback" in error
    assert "2 of 3 could not be made: keyformer_fig1, keyformer_fig9" in error and "keyformer_fig10 (testbed)" in out


def test_those_that_take_longest_come_first(tmp_path, monkeypatch):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"testbed": {"a": {"seconds": 3}, "b": {"seconds": 9}, "c": {"seconds": None}}}))
    monkeypatch.setattr(record, "MEASURED", file)
    assert runner.longest_first(["a", "b", "c", "new"], "testbed") == ["b", "a", "c", "new"]


@pytest.mark.slow
def test_two_processes_make_what_one_does(tmp_path):
    """Two exhibits that share runs, at once: the tables are those of one process."""
    wanted = ["keyformer_fig3c", "keyformer_fig5", "keyformer_fig1"]
    alone = dict(runner.results(wanted, Setup("testbed", tmp_path / "one", smoke=True), 1))
    both = dict(runner.results(wanted, Setup("testbed", tmp_path / "two", smoke=True), 2))
    for name in wanted:
        assert isinstance(alone[name], Made) and isinstance(both[name], Made), both[name]
        pd.testing.assert_frame_equal(alone[name].table, both[name].table)


# -- PQCache's Fig. 10b ----------------------------------------------------------------------------------------


def cell(**seconds):
    rows = [{"variant": "full", "samples": [{"tpot_s": 0.02}] * 2}]
    for name, each in seconds.items():
        rows.append({"variant": f"{name}@0.2", "samples": [{"tpot_s": s} for s in each]})
    return {"rows": rows, "from": {"machine": "a GPU"}, "key": {}}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, True),
        ({"pqcache": (0.19, 0.2), "sparq": (0.3, 0.4)}, False),  # slower than one reads
        ({"sparq": (0.03, 0.04)}, False),  # InfLLM is slower
        ({"sparq": (0.06, 0.09)}, None),  # InfLLM's turns and SPARQ's overlap
        ({"h2o": ()}, None),  # ran out of memory
    ],
)
def test_fig10b_judges_sparq_and_the_reader(monkeypatch, change, verdict):
    seconds = {"h2o": (0.01, 0.02), "infllm": (0.05, 0.07), "pqcache": (0.04, 0.05), "sparq": (0.1, 0.12)} | change
    found = cell(**seconds)
    monkeypatch.setattr("experiments.lib.speed.cells", lambda *_, length, **__: [found] if length == "2048+30" else [])
    fig10b = load("pqcache_fig10b")
    table = fig10b.table(pd.DataFrame())
    assert fig10b.holds(table)[0] is verdict
    fig10b.draw(table, Figure())


@pytest.mark.parametrize("scale", ["testbed", "paper"])
def test_the_sweeps_of_an_exhibit_have_one_limit(scale):
    for name in names():
        wanted = sweeps(name, scale)
        assert len({sweep.limit_of(each, []) for each in wanted}) <= 1, name
    assert sweep.limit_of("keyformer_fig7", []) == 120 and sweep.limit_of("keyformer_fig7", ["limit=2"]) == 2
    assert sweep.limit_of("paper/pqcache_fig8", []) is None
