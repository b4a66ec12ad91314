"""A command that left nothing to do, given again: shown from what is kept of it, unless anything has changed since."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from commands import run_py
from small import small

import kvexp.run.jobs as jobs
from kvexp.hf.calibrate import QUERIES
from kvexp.run.store import Run, runs
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF, cache_folder

SAID = "nothing to do"
SMALL = ["limit=2", "task.max_new_tokens=4", "task.continuation_words=3", "task.nll=false"]  # of task=sample
SWEEP = ["-m", "method=h2o,window", "kv_ratio=0.5"]
MODEL = Path(__file__).parents[2] / "kvexp/tasks/testbed_models/testbed_rope"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def settled(monkeypatch):
    """Files of this test count although they are younger than its commands."""
    monkeypatch.setattr(jobs, "SETTLED_NS", -(10**18))


@pytest.fixture
def given(tmp_path, monkeypatch, capsys):
    """given(*words) -> what run.py prints in this process; of rows and into a folder of its own."""
    rows = tmp_path / "rows.jsonl"
    shutil.copy(CONF / "task" / "sample.jsonl", rows)

    def called(*words):
        code, out, err = run_py(
            monkeypatch, capsys, *small(*words, *SMALL), f"task.data_files={rows}", f"outputs_dir={tmp_path / 'out'}"
        )
        assert code == 0, err
        return out

    return called


def test_the_same_table_without_a_look_at_the_jobs(settled, given, tmp_path, monkeypatch):
    first = given(*SWEEP)
    assert SAID not in first
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*.json*")}
    with monkeypatch.context() as patched:
        patched.setattr(jobs, "settings_of_job", None)  # which imports torch
        again = given(*SWEEP)
    assert f"{SAID}: 3 runs are complete" in again
    assert again.partition("\n\n")[2].partition("\n\n")[0] in first, "the rows of its table"
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").rglob("*.json*")}
    assert SAID not in given("method=h2o", "kv_ratio=0.5"), "one of its runs alone is another command"


def test_settings_of_a_job_are_built_once(given, monkeypatch):
    made, build = [], jobs.settings_of_job
    monkeypatch.setattr(jobs, "settings_of_job", lambda job, session: made.append(job.number) or build(job, session))
    given(*SWEEP)
    assert made == [0, 1]


def test_runs_have_the_names_they_were_asked_for_under_last(settled, given, tmp_path):
    def names():
        return {run.labels["method"]: (run.asked, run.command["overrides"]) for run in runs(tmp_path / "out")}

    given(*SWEEP)
    first = names()
    for run in runs(tmp_path / "out"):
        run.ask(run.labels | {"setting": "seen=otherwise"}, {"overrides": []})
    assert names() != first
    assert SAID in given(*SWEEP)
    again = names()
    for method, (asked, overrides) in first.items():
        assert again[method] == ([*(each | {"setting": "seen=otherwise"} for each in asked[:1]), *asked], overrides)
    assert SAID in given(*SWEEP) and names() == again


def test_a_run_alone(settled, given):
    first, again = given("method=h2o"), given("method=h2o")
    assert SAID not in first and f"{SAID}: 2 runs are complete" in again


def _damaged(folder: Path) -> None:
    run = next(iter(runs(folder / "out")))
    file = run.path / "examples.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])


def _another_row(folder: Path) -> None:
    file = folder / "rows.jsonl"
    first, *rest = file.read_text().splitlines()
    row = json.loads(first)
    key = next(key for key, value in row.items() if isinstance(value, str) and len(value) > 50)
    file.write_text("\n".join([json.dumps(row | {key: row[key].swapcase()}), *rest]) + "\n")


def _statistics(folder: Path) -> None:
    file = QUERIES.path(_model_digest(folder))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"0")


def _model_digest(folder: Path) -> str:
    from kvexp.run.batches import settings_at
    from kvexp.run.model_spec import model_digest

    for run in runs(folder / "out"):
        with contextlib.suppress(ConfigError):  # runs of the data before
            return model_digest(settings_at(run).model)
    raise AssertionError("no run")


CHANGES = {  # what the result depends on -> a change of it
    "rows": _damaged,
    "a run's folder": lambda folder: shutil.rmtree(next(iter(runs(folder / "out"))).path),
    "a failure": lambda folder: next(iter(runs(folder / "out"))).fail(ValueError("by hand")),
    "the data": _another_row,
    "statistics of the model": _statistics,
    "kvexp's files": lambda folder: (folder / "own" / "new.py").write_text("pass\n"),
    "packages": lambda folder: (folder / "site" / "torch-99.dist-info").mkdir(),
    "an option of one's own": lambda folder: (folder / "conf" / "generation" / "mine.yaml").write_text(
        (folder / "conf" / "generation" / "mine.yaml").read_text() + "# another\n"
    ),
    "the environment": lambda folder: os.environ.update(KVEXP_OF_A_TEST="1"),
    "the folder one is in": lambda folder: os.chdir(folder / "own"),
}


def test_any_change_is_seen(settled, given, tmp_path, monkeypatch):
    for folder in ("own", "site", "conf/generation"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(CONF / "generation" / "greedy.yaml", tmp_path / "conf" / "generation" / "mine.yaml")
    monkeypatch.setattr(jobs, "OWN_FOLDERS", (*jobs.OWN_FOLDERS, tmp_path / "own"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.setenv("KVEXP_OF_A_TEST", "0")
    monkeypatch.chdir(tmp_path)
    words = ("method=h2o", "kv_ratio=0.5", "--config-dir", str(tmp_path / "conf"), "generation=mine")
    given(*words)
    for name, change in CHANGES.items():
        assert SAID in given(*words), f"before {name} changes"
        change(tmp_path)
        assert SAID not in given(*words), f"{name} changed"
    monkeypatch.setattr(jobs, "DEVICES", ("null",))
    assert SAID not in given(*words), "another device is there"
    assert SAID in given(*words)
    assert SAID not in given(*words, "seed=1"), "other words"


def test_a_file_of_the_model_is_seen(settled, tmp_path, monkeypatch, capsys):
    shutil.copytree(MODEL, tmp_path / "model")
    words = [f"model={tmp_path / 'model'}", "task=testbed_qa", "limit=2", f"outputs_dir={tmp_path / 'out'}"]

    def said():
        code, out, err = run_py(monkeypatch, capsys, *words)
        assert code == 0, err
        return SAID in out

    assert [said(), said()] == [False, True]
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.1}))
    assert [said(), said()] == [False, True]
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert not said()


def test_what_is_not_kept(given, tmp_path, monkeypatch):
    given("method=h2o")
    assert SAID not in given("method=h2o"), "the rows are younger than the command"
    monkeypatch.setattr(jobs, "SETTLED_NS", -(10**18))
    mine = tmp_path / "mine.py"
    mine.write_text("from dataclasses import dataclass\nfrom kvexp.methods import H2O\n\n\n@dataclass(frozen=True)\n"
                    'class Mine(H2O):\n    name: str = "mine"\n')  # fmt: skip
    for words in ([f"method={mine}"], ["method=h2o", "diagnose=log"], ["method=h2o", "objective=rouge1"]):
        given(*words)
        assert SAID not in given(*words), words
    assert not Run.load(next(iter(runs(tmp_path / "out"))).path).failure()


def test_what_lacks_rows_is_not_kept(settled, given, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run_job", lambda job, session, **_: session.made.append((job, _parts(job, session))))
    for run in range(2):
        assert SAID not in given("method=h2o"), run


def _parts(job, session):
    """The runs of a job, whose folders are made and left empty."""
    from kvexp.run.batches import opened

    parts = jobs.runs_of(job, session)
    opened([*(part.baseline() for part in parts), *parts])
    return parts


def test_a_damaged_note_does_not_count(settled, given):
    given(*SWEEP)
    notes = list((cache_folder() / "finished").glob("*.json"))
    for note in notes:
        note.write_text('{"places": []}')
    assert SAID not in given(*SWEEP)
    assert SAID in given(*SWEEP)
