"""Tasks of a user's own: a file or module on the command line, what identifies them, what is wrong with them."""

from __future__ import annotations

import json
import re
import sys

import pandas as pd
import pytest
from commands import forgetting, run_py, settings
from test_shared_prefill import content

import kvexp
from kvexp import cli
from kvexp.diagnose.show import main as diagnose
from kvexp.results.views import main as results
from kvexp.run.store import runs
from kvexp.run.user_code import admitted, load_class
from kvexp.run.workers import JobBatch, run_batch
from kvexp.tasks import Prompts
from kvexp.util.errors import ConfigError

REGISTRY = sys.modules["kvexp.run.user_code"]
FEW = ("model=tiny", "limit=2", "task.max_new_tokens=2")

LAMPS = '''"""Colours of lamps."""

from dataclasses import dataclass

from kvexp.tasks import Example, Task


@dataclass(frozen=True)
class Lamps(Task):
    metrics = ("accuracy",)

    data_files: str | None = "lamps.jsonl"
    size: int = 1

    def example(self, row, where):
        return Example(row["id"], f"{row['text']} Which colour?" * self.size, row["answer"])

    def score(self, output, reference, example):
        return {"accuracy": 100 * (reference in output)}
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Classes, modules and folders that a test has loaded, paths that it has added."""
    with forgetting(monkeypatch, "lamps", "other"):
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with lamps.py and its rows in it."""
    (tmp_path / "lamps.py").write_text(LAMPS)
    rows = [{"id": f"r{i}", "text": f"The lamp is {colour}. It rained. " * 6, "answer": colour} for i, colour in
            enumerate(("red", "blue", "green"))]  # fmt: skip
    (tmp_path / "lamps.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *words: run_py(monkeypatch, capsys, *words, *FEW)


def by_hash(folder):
    return {run.hash: run for run in runs(folder / "outputs")}


def test_a_file_is_a_task_with_its_fields_and_its_code_identifies_the_runs(command, folder, capsys):
    code, out, err = command("task=lamps.py:Lamps", "method=h2o", "task.size=2")
    assert code == 0 and "lamps.Lamps" in out and "accuracy" in out, out + err
    first = by_hash(folder)
    assert len(first) == 2
    for run in first.values():
        task = run.config["task"]
        assert (task["name"], task["size"]) == ("Lamps", 2), (
            "a field counts even where kvexp's own of that name does not"
        )
        assert task["source"]["class"] == "lamps.Lamps" and len(task["source"]["files"]["lamps.py"]) == 64
        assert run.labels["task"] == "lamps.Lamps" and all(set(row["metrics"]) == {"accuracy"} for row in run.rows())
        assert run.rows()[0]["prompt_tokens"] > 90, "the size did not reach the prompt"
    for words in (["task=lamps.Lamps"], ["task=./lamps.py"]):
        code, out, err = command(*words, "method=h2o", "task.size=2")
        assert code == 0 and "2 of 2 rows are there already" in out, out + err
    assert by_hash(folder).keys() == first.keys()
    (folder / "lamps.py").write_text(LAMPS.replace("Which colour", "What colour"))
    assert command("task=lamps.py", "method=h2o", "task.size=2")[0] == 0
    new = by_hash(folder).keys() - first.keys()
    assert len(new) == 2, "the baseline's prompts are others too"
    capsys.readouterr()
    assert results(["outputs", "--csv", "now.csv"]) == 0
    assert "left out: 2 runs of older code of lamps.Lamps; --all-versions" in capsys.readouterr().out
    assert set(pd.read_csv("now.csv")["hash"]) == new
    assert results(["outputs", "--csv", "all.csv", "--all-versions"]) == 0
    both = pd.read_csv("all.csv")
    assert len(both) == 4 and both["code"].nunique() == 2 and both["setting"].str.contains("code=").all()


def test_in_a_sweep_beside_a_task_of_kvexps(command, folder):
    words = ("-m", "task=lamps.py:Lamps,sample", "method=h2o,window", "kv_ratio=0.3")
    code, out, err = command("--dry-run", *words)
    assert code == 0 and "6 runs" in out and not (folder / "outputs").exists(), out + err
    assert command(*words)[0] == 0
    code, out, err = command(*words, "hydra/launcher=basic", "outputs_dir=alone")
    assert code == 0, out + err
    ours, alone = content(folder / "outputs"), content(folder / "alone")
    assert len(ours) == 6 and ours.keys() == alone.keys()
    for name, (*_, rows) in ours.items():
        for example, row in rows.items():
            assert row["output"] == alone[name][-1][example]["output"]
            assert row["receipt"]["kept_digest"] == alone[name][-1][example]["receipt"]["kept_digest"]
    assert settings("task=sample").identity["task"].get("source") is None


def test_a_worker_loads_the_same_code_or_none(folder):
    lamps = load_class("task", "lamps.py:Lamps")
    shipped = [(lamps.group, lamps.reference, lamps.source)]
    assert run_batch(JobBatch([], [], shipped)).failures == [] and list(admitted("task")) == ["lamps.Lamps"]
    assert not admitted("method")
    (folder / "lamps.py").write_text(LAMPS.replace("100", "50"))
    REGISTRY._ADMITTED.clear()
    with pytest.raises(ConfigError, match=r"code of .*lamps\.py:Lamps is not, in this worker, what it was"):
        run_batch(JobBatch([], [], shipped))


def test_compare_takes_a_file_a_class_and_an_object(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    few = {"kv_ratio": 0.3, "model": "tiny", "limit": 1, "task__max_new_tokens": 2}
    first = kvexp.compare(["h2o"], "lamps.py:Lamps", **few)
    assert set(first["task"]) == {"lamps.Lamps"} and "accuracy" in first
    import lamps

    assert set(kvexp.compare(["h2o"], lamps.Lamps, **few)["hash"]) == set(first["hash"])
    other = kvexp.compare(["h2o"], lamps.Lamps(size=2), **few)
    assert not set(other["hash"]) & set(first["hash"]) and other.whole["setting"].str.contains("task.size=2").all()
    own = kvexp.compare(["h2o"], Prompts(max_new_tokens=2), data=str(prompts_in(folder)), **few)
    assert set(own["task"]) == {"prompts"}


def prompts_in(folder):
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "It rained on Monday and on Friday, and then it was warm again."}))
    return file


def test_its_settings_are_listed(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvexp", "tasks", "lamps.py", "sample"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and "task=lamps.py\n# Colours of lamps.\n" in out and "size: 1\n" in out
    assert "task=sample\n" in out and "\nlimit:" not in out


def test_a_run_folder_loads_no_code(command, folder, capsys):
    assert command("task=lamps.py", "method=h2o")[0] == 0
    (name,) = (run.hash for run in by_hash(folder).values() if run.labels["method"] == "h2o")
    REGISTRY._ADMITTED.clear()
    marker = folder / "was_run"
    (folder / "lamps.py").write_text(f"open({str(marker)!r}, 'w')\n{LAMPS}")
    assert diagnose(["show", f"outputs/{name}", "0"]) == 2 and not marker.exists()
    assert "say so on the command line: task=lamps.Lamps" in capsys.readouterr().err
    (folder / "lamps.py").write_text(LAMPS)
    assert diagnose(["show", f"outputs/{name}", "0", "task=lamps.py"]) == 0, capsys.readouterr().err


def changed(old, new):
    assert old in LAMPS
    return LAMPS.replace(old, new)


FILE = "task=lamps.py:Lamps"
WRONG = {  # words; what the one line says; lamps.py, where it is another
    "no file": ("task=lamp.py:Lamps", r"task=lamp\.py: there is no such file; did you mean lamps\.py\?"),
    "no module": ("task=lamp.Lamps", r"no module lamp in .*; did you mean lamps\.py\?"),
    "no class": ("task=lamps.py:Lamp", r"no class Lamp in lamps .*; did you mean Lamps\?"),
    "a method": (FILE, r"Lamps in lamps .* extends kvexp\.tasks\.Task", "from kvexp.methods import H2O as Lamps\n"),
    "two in a file": (
        "task=lamps.py",
        r"has 2 tasks \(Lamps, More\); say which",
        f"{LAMPS}\nclass More(Lamps): pass\n",
    ),
    "kvexp's own": ("task=lamps.XSum", "is kvexp's own XSum; `kvexp tasks`", "from kvexp.tasks import XSum\n"),
    "rows of another kind": ("task=lamps.txt", r"task=lamps\.txt must be .* or of rows FILE\.jsonl"),
    "syntax": (FILE, r"lamps\.py line 1: SyntaxError", "def f(:\n"),
    "a type": (FILE, r"Lamps\.size is a object, which no configuration", changed("int = 1", "object = object()")),
    "no type": (
        FILE,
        r"Lamps\.seed has no type, .* write seed: int = 7",
        changed("    size", "    seed = 7\n    size"),
    ),
    "no example": (FILE, r"Lamps has no example: write def example\(", changed("def example", "def exampl")),
    "no score": (FILE, r"Lamps has no score: write def score\(self, output", changed("def score", "def scor")),
    "no metrics": (FILE, "Lamps says no metrics: write metrics =", changed('metrics = ("accuracy",)', "pass")),
    "metrics of letters": (FILE, "Lamps says no metrics: write metrics =", changed('("accuracy",)', '"accuracy"')),
    "other scores": (FILE, r"must return \{metric: percent\} of accuracy, got", changed('{"accuracy"', '{"acc"')),
    "no number": (FILE, r"Lamps\.score: accuracy must be a number, got True", changed("100 * ", "")),
    "no text": (FILE, r"Lamps\.example: id must be a text, got 3", changed('row["id"]', "3")),
    "None": (FILE, r"Lamps\.example must return an Example, got None", changed("return Example(", "Example(")),
    "no data": (f"{FILE} task.data_files=null", "names no data: set task.data_files=PATH"),
    "no row": (f"{FILE} task.data_files=empty.jsonl", r"empty\.jsonl is empty; name a file"),
    "typed": (f"{FILE} task.size=much", "task.size must be a whole number, got 'much'"),
    "setting": (f"{FILE} task.sise=2", r"no setting task\.sise; did you mean task\.size\?"),
    "of the run": (f"{FILE} +task.limit=2", "task.limit is set by limit=N"),
    "not typed": ("task=sample task._target_=lamps.Lamps", r"say so on the command line: task=lamps\.Lamps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_before_anything_runs(command, folder, case, monkeypatch):
    words, said, *text = WRONG[case]
    (folder / "lamps.py").write_text(text[0] if text else LAMPS)
    for name in ("lamps.txt", "empty.jsonl"):
        (folder / name).touch()
    monkeypatch.setattr("kvexp.run.model_spec.load", lambda *_: pytest.fail("a model was loaded"))
    code, out, err = command(*words.split())
    assert code == 1 and "Traceback" not in err, out + err
    (line,) = (line for line in err.splitlines() if line and not line.startswith("busy machine"))
    assert re.search(said, line), err
