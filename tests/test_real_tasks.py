"""The sweeps over every task on the real model: their files, and what is said of a name or folder there is not."""

import pytest
from omegaconf import OmegaConf

from experiments import real_tasks
from experiments.lib import real_scale
from experiments.lib.exhibits import ROOT
from experiments.real_tasks import FULL, PREFIX, main, run_task, task_names


@pytest.mark.parametrize("name", task_names())
def test_a_sweep_is_one_task_on_the_real_model_whose_rows_are_known(name):
    params = OmegaConf.load(ROOT / "conf/experiment/real" / f"{PREFIX}{name}.yaml").hydra.sweeper.params
    assert params.model == real_scale.MODEL and str(params.task) in real_scale._files()
    assert set(str(params.kv_ratio).split(",")) == {"0.2", "0.5", "0.7"}


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
