"""Retrieval methods on the command line: what cannot work is said before weights, and rows say what fell back."""

from __future__ import annotations

import pytest
from test_runner import settings

from experiments import real_tasks
from experiments.lib import real_scale
from experiments.lib.exhibits import params
from experiments.real_tasks import FULL, PREFIX, main, run_task, task_names
from kvexp.results.table import notes, table, to_markdown
from kvexp.run.batches import evaluate_run
from kvexp.run.store import runs
from kvexp.util import ConfigError

# Retrieval methods on the command line: what cannot work is said before weights, and rows say what fell back.


FEW = "no more tokens to cluster than centroids: searched exactly"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["method=pqcache", "method.m=3"], "method.m=3 does not divide"),
        (["method=sparq", "method.r=1000"], "method.r=1000"),
        (["method=pqcache", "method.cache_tokens=64"], "cannot hold one block of 128"),
        (["method=infllm", "method.cache_tokens=5"], "cannot hold one block of 128"),
    ],
)
def test_what_cannot_work_is_said_before_weights_load(tmp_path, monkeypatch, overrides, says):
    """Not even those of the full-attention baseline, which has no such setting and would come first."""
    monkeypatch.setattr("kvexp.run.batches.load", lambda spec: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=says):
        evaluate_run(settings(tmp_path, *overrides))
    assert not [found for found in runs(tmp_path) if found.rows()]


def test_rows_and_table_say_what_fell_back(tmp_path):
    """4096 centroids are more than any prompt here has tokens: an exact search must not pass for PQCache."""
    record = evaluate_run(settings(tmp_path, "method=pqcache", "method.b=12", "method.n_sinks=1", "kv_ratio=0.5"))
    assert [row["receipt"]["retrieval"]["notes"] for row in record.rows()] == [[FEW], [FEW]]
    frame = table(tmp_path)
    by_method = {row["method"]: row for row in frame.to_dict("records")}
    assert by_method["pqcache"]["fell_back"] == f"2 of 2 rows: {FEW}"
    assert by_method["full"]["fell_back"] == ""
    assert by_method["pqcache"]["moved_bytes"] > by_method["pqcache"]["offloaded_bytes"] > 0
    assert any(line.endswith(f"2 of 2 rows: {FEW}") for line in notes(frame))
    assert "| TT2T | moved | cache hits |" in to_markdown(frame)
    assert "moved" not in to_markdown(frame[frame["method"] == "full"])


# The sweeps over every task on the real model: their files, and what is said of a name or folder there is not.


@pytest.mark.parametrize("name", task_names())
def test_a_sweep_is_one_task_on_the_real_model_whose_rows_are_known(name):
    swept = params(f"real/{PREFIX}{name}")
    assert swept["model"] == real_scale.MODEL and swept["task"] in real_scale._files()
    assert set(swept["kv_ratio"].split(",")) == {"0.2", "0.5", "0.7"}


def test_rows_of_a_folder_are_named_to_the_sweep(tmp_path, monkeypatch):
    (tmp_path / "soda").mkdir()
    (tmp_path / "soda" / "soda_original_examples.jsonl").touch()
    seen = []
    (tmp_path / "out" / "soda").mkdir(parents=True)
    monkeypatch.setattr(real_tasks, "sweep", lambda name, words: seen.append((name, words)) or [])
    assert run_task("soda", str(tmp_path), tmp_path / "out") == tmp_path / "out" / "soda"
    (name, first), (again, words) = seen
    assert name == again == "real/tasks_soda" and first == [*FULL, *words]
    assert words[0] == f"outputs_dir={tmp_path}/out/soda"
    assert words[1] == f"task.data_files=choice({tmp_path}/soda/soda_original_examples.jsonl)"


def test_what_is_not_there_is_told_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(real_scale, "model_is_here", lambda: True)
    assert main(["sodaa"]) == 2 and "no such sweep: sodaa; there are cnn_dailymail" in capsys.readouterr().err
    assert main(["soda", "--data", str(tmp_path / "none")]) == 2 and "no such folder" in capsys.readouterr().err
    assert main(["soda", "--data", str(tmp_path), "--outputs", str(tmp_path / "out")]) == 1
    assert "has no soda/soda_original_examples.jsonl" in capsys.readouterr().err
