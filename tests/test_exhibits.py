"""Exhibits: each composes at both scales, and its table, picture and judgement work on numbers that are known."""

import importlib
import re

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import index, reproduce
from experiments.lib import runner, sweep
from experiments.lib.data import COLUMNS, KEYS, paper_numbers
from experiments.lib.exhibits import ROOT, full_name, load, module_of, names, sweeps
from experiments.lib.sweep import smaller
from experiments.lib.titles import MODELS, exhibit_title, panel_title
from kvexp.errors import ConfigError
from kvexp.record import runs
from tests.exhibits import changed

CONF = ROOT / "conf"
SWEPT = [(name, scale) for name in names() for scale in ("testbed", "paper")]


@pytest.mark.parametrize(("name", "scale"), SWEPT)
def test_every_sweep_composes(name, scale):
    """The first of each value, with every key set as a sweep sets it: wrong keys and options fail here."""
    for experiment in sweeps(name, scale):
        params = OmegaConf.load(CONF / "experiment" / f"{experiment}.yaml").hydra.sweeper.params
        first = [f"{key}={str(value).split(',')[0]}" for key, value in params.items() if "[" not in str(value)]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", [f"experiment={experiment}", *first], return_hydra_config=True)
        assert config.hydra.mode.name == "MULTIRUN"
        groups = [key for key in ("model", "task", "method") if key in params]
        for group in groups:
            options = [choice.strip() for choice in str(params[group]).split(",")]
            assert all((CONF / group / f"{choice}.yaml").exists() for choice in options), (experiment, group)


@pytest.mark.parametrize("name", names())
def test_a_claim_is_a_sentence_with_its_source(name):
    exhibit, module = load(name), importlib.import_module(module_of(name))
    assert re.search(r"arXiv:\d{4}\.\d{5}", exhibit.claim) and (module.__doc__ or "").strip()
    assert all(callable(part) for part in (exhibit.table, exhibit.draw, exhibit.holds))


def test_names_carry_their_paper_and_fig7_is_short_for_keyformers():
    assert load("fig7") is load("keyformer_fig7") and full_name("fig7") == "keyformer_fig7"
    found = names()
    assert found.index("keyformer_fig7") < found.index("keyformer_fig10") < found.index("keyformer_table1")
    assert not {"pq_recall", "window_nll", "long_texts"} & set(found)


def test_an_unknown_name_is_one_error_with_the_names_there_are(capsys):
    assert reproduce.main(["keyformer_fig77"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no exhibit 'keyformer_fig77'; there are keyformer_fig1,") and error.count("\n") == 1
    with pytest.raises(ConfigError, match="and fig7 for keyformer_fig7"):
        load("fig8")


def test_a_smoke_run_has_no_numbers_to_record(capsys):
    assert reproduce.main(["fig7", "--smoke", "--record"]) == 2
    assert "a --smoke run has none" in capsys.readouterr().err


def test_smoke_takes_the_first_model_and_the_ends_of_the_budgets():
    assert smaller("keyformer_fig7") == ["limit=2", "model=testbed_rope", "kv_ratio=0.2,0.9"]


def test_the_index_is_current():
    assert index.README.read_text("utf-8") == index.text(), "python -m experiments.index"
    rows = [line.split(" | ") for line in index.text().splitlines() if "`make reproduce-" in line and line[0] == "|"]
    assert tuple(row[4].strip("`").removeprefix("make reproduce-") for row in rows) == names()
    assert [row[0].strip("| ") for row in rows] == [exhibit_title(name) for name in names()]


@pytest.mark.parametrize("name", names())
def test_titles_are_words(name):
    """Of exhibits, each another, and told instead of the name in what we conclude."""
    title = exhibit_title(name)
    assert re.match(r"(Keyformer|A2SF|PQCache), (Figs?\.|Table|section|appendix) [\w.]+", title) and "_" not in title
    found = (ROOT / "experiments" / "FINDINGS.md").read_text("utf-8").replace(f"make reproduce-{name}", "")
    assert len(title) > 30 and not re.search(rf"\b{name}\b", found)
    assert [each for each in names() if exhibit_title(each) == title] == [name]


def test_panels_are_titled_in_words():
    assert panel_title("testbed_rope", "testbed_summary") == "testbed, RoPE: summaries"
    assert panel_title("gptj_6b", "cnn_dailymail") == "GPT-J 6B: CNN/DailyMail"
    assert (
        panel_title("testbed_alibi", "testbed_choice after_eviction")
        == "testbed, ALiBi: multiple choice after eviction"
    )
    assert panel_title("my_model") == "my model", "a name nobody listed loses its underscores"
    listed = {path.stem for path in (CONF / "model").glob("*.yaml")}
    assert set(MODELS) <= listed


def test_an_index_of_other_claims_is_not_current(tmp_path, monkeypatch, capsys):
    old = index.text().replace("70 % of the KV cache", "60 % of the KV cache", 1)
    assert old != index.text()
    (tmp_path / "README.md").write_text(old, encoding="utf-8")
    monkeypatch.setattr(index, "README", tmp_path / "README.md")
    assert index.main(["--check"]) == 1
    assert index.main([]) == 0 and index.main(["--check"]) == 0


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "paper").glob("*.csv")), ids=lambda path: path.stem)
def test_the_papers_numbers_are_read(path):
    frame = paper_numbers(path.stem)
    assert list(frame.columns[: len(COLUMNS)]) == COLUMNS and len(frame)
    assert frame["value"].notna().all() and frame["kind"].isin(["exact", "digitised", "text"]).all()
    assert frame.loc[frame["kind"].eq("digitised"), "reading_error"].gt(0).all()
    assert not frame["setting"].astype(str).str.contains("#").any()
    for group in ("model", "method"):
        known = {option.stem for option in (CONF / group).glob("*.yaml")}
        assert set(frame[group]) <= known, group


def test_the_written_table_leaves_out_what_nobody_filled():
    text = runner.markdown(pd.DataFrame({"a": [1.23456, None], "b": ["x|y", "z"], "c": ["", ""], "d": [None, None]}))
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| 1.235 | x\\|y |", "|  | z |"]


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupt_says_what_is_kept_and_begins_no_other_exhibit(tmp_path, capsys, monkeypatch, code):
    begun = []

    def interrupted(session):
        begun.append(1)
        session.begun, session.rows_written = True, 75
        raise SystemExit(code)

    monkeypatch.setattr(sweep, "main", interrupted)
    sweep._hashes.cache_clear()
    asked = ["keyformer_fig7", "keyformer_fig8", "--scale", "testbed", "--outputs", str(tmp_path)]
    assert reproduce.main(asked) == 130 and len(begun) == 1
    said = capsys.readouterr().err
    assert "interrupted: 75 rows were written" in said and "the same command goes on" in said
    assert "did not begin" not in said


@pytest.mark.slow
def test_a_smoke_run_writes_table_figure_and_judgement(tmp_path, capsys):
    """The real thing: a sweep of two examples, its table, its picture, resumed the second time."""
    assert reproduce.main(["keyformer_fig3c", "--smoke", "--outputs", str(tmp_path)]) == 0
    said, made = capsys.readouterr().out, [(run.hash, len(run.rows())) for run in runs(tmp_path)]
    assert len(made) >= 4 and all(count == 2 for _, count in made)
    folder = tmp_path / "exhibits" / "keyformer_fig3c"
    assert {path.name for path in folder.iterdir()} == {
        "table.csv",
        "table.md",
        "figure.png",
        "figure.pdf",
        "sweep.log",
    }
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
    changed(monkeypatch, "keyformer_fig3b", measure=lambda *_: pytest.fail("measured again"))
    assert reproduce.main(arguments) == 0, "what was collected is read"
    assert "40 % of the tokens hold testbed_rope" in capsys.readouterr().out


def test_a_missing_sweep_of_a_scale_is_said(monkeypatch, capsys, tmp_path):
    changed(monkeypatch, "keyformer_fig3c", sweeps=("nowhere",))
    assert reproduce.main(["keyformer_fig3c", "--outputs", str(tmp_path)]) == 1
    assert "has no sweep at this scale (conf/experiment/nowhere.yaml)" in capsys.readouterr().err
