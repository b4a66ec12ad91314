"""Every command of both suites in its tiny form: it runs on a CPU, resumes, and its tables have their lines."""

import importlib
import json

import pytest
import torch

from benchmarks import decode, report, throughput
from benchmarks.clock import OUT_OF_MEMORY
from benchmarks.command import Command
from benchmarks.suite import CPU, GPU, PEERS, REAL, Run, main

COMMANDS = ("startup", "sweep", "real_sweep", "dry_run_check")  # modules that run whole commands: too slow here
HERE = [run for run in (*CPU, *GPU, *REAL) if run.python != str(PEERS) and run.module not in COMMANDS]


def _kinds() -> list[Run]:
    """One run per module, layout and tiny form: lengths are the tiny form's, so that more would be the same again."""
    kinds = {}
    for run in HERE:
        words = run.arguments.split()
        shape = words[words.index("--shape") + 1] if "--shape" in words else ""
        kinds.setdefault((run.module, shape, run.tiny, "--figures 10" in run.arguments), run)
    return list(kinds.values())


KINDS = _kinds()


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("run", KINDS, ids=lambda run: f"{run.module}-{run.name}")
def test_a_command_of_the_suites_runs(run, tmp_path, capsys) -> None:
    module = importlib.import_module(f"benchmarks.{run.module}")
    line = [*run.words(tiny=True), "--out", str(tmp_path), "--device", "cpu", "--threads", "1"]
    assert module.main(line) == 0
    first = capsys.readouterr().out
    assert "TINY" in first and "| what" in first
    assert OUT_OF_MEMORY not in first
    cells = json.loads((tmp_path / f"{run.module}.json").read_text())
    assert cells and all(cell["key"]["tiny"] for cell in cells)
    if run in (KINDS[0], KINDS[-1]):
        assert module.main(line) == 0
        assert "has this already" in capsys.readouterr().out
        assert json.loads((tmp_path / f"{run.module}.json").read_text()) == cells


@pytest.mark.parametrize("run", [*CPU, *GPU, *REAL], ids=lambda run: run.name)
def test_the_real_forms_are_understood(run, tmp_path, monkeypatch) -> None:
    """Arguments and variants are read, and every cell is asked for; nothing is measured."""
    module, asked = importlib.import_module(f"benchmarks.{run.module}"), []
    monkeypatch.setattr(Command, "cell", lambda self, key, *_: asked.append(key))
    assert module.main([*run.words(), "--out", str(tmp_path), "--device", "cpu"]) == 0
    keys = [json.dumps(key) for key in asked]
    assert keys and len(keys) == len(set(keys))


def test_a_limit_is_an_answer(tmp_path, capsys) -> None:
    """What needs more than the limit at batch 1 says so, in the table too."""
    line = ["--tiny", "--shape", "mpt_7b", "--lengths", "8+4", "--limit-gib", "0", "--repeats", "1", "--most", "2"]
    assert throughput.main([*line, "--variants", "full", "h2o@0.5", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("batch 0; out of memory at batch 1") == 2


def test_the_report_has_every_table_and_no_tiny_one_unasked(tmp_path, capsys) -> None:
    line = ["--tiny", "--prompts", "20", "--new", "3", "--repeats", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert decode.main([*line, "--variants", "hf", "h2o@0.5"]) == 0
    shown = capsys.readouterr().out.strip()
    assert report.main([str(tmp_path)]) == 1
    assert "no results" in capsys.readouterr().out
    assert report.main([str(tmp_path), "--tiny"]) == 0
    assert capsys.readouterr().out.strip() == shown


def test_a_suite_runs_its_commands_and_says_what_failed(tmp_path, capfd) -> None:
    words = ["gpu", "--tiny", "--out", str(tmp_path), "--only"]
    assert main([*words, "llama2_2k"]) == 0
    assert "1 of 1 done" in capfd.readouterr().out
    assert (tmp_path / "whole.json").exists()
    (tmp_path / "whole.json").write_text("not json")
    assert main([*words, "llama2_2k"]) == 1
    assert "not: llama2_2k" in capfd.readouterr().out


def test_what_takes_long_runs_on_request_alone(capsys) -> None:
    def names(*words: str) -> list[str]:
        assert main(["real", "--list", *words]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert names("--all") == [run.name for run in REAL]
    assert names() == [run.name for run in REAL if not run.more] and len(names()) == 5
    assert names("--only", "real_growth") == ["real_growth"]


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in CPU if run.module in ("startup", "sweep")], ids=lambda run: run.name)
def test_commands_that_start_commands(run, tmp_path, capsys) -> None:
    module = importlib.import_module(f"benchmarks.{run.module}")
    assert module.main([*run.words(tiny=True), "--out", str(tmp_path), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "TINY" in said
    assert run.module == "startup" or " 0 of 10 rows differ" in said
