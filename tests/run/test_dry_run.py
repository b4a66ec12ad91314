"""--dry-run: the plan is that of the runs themselves, and making it loads nothing and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run_py
from small import small
from tiny import tiny

from kvexp.generate import GenerationParams, generate
from kvexp.hf.load import random_config, shape_of
from kvexp.methods import H2O, Full, KVzip, KVzipPlus
from kvexp.run.compose import listed
from kvexp.run.plan import DATA, MODELS, scaled, second_passes
from kvexp.run.store import runs

CONF = Path(__file__).resolve().parents[2] / "conf"
FEW = small("limit=4", "task.max_new_tokens=5", "task.nll=false", "batch_size=2")

# As the hub counts the tensors beside each config.json.
COUNTED = {
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "facebook/opt-2.7b": 2_651_596_800,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
}


@pytest.mark.parametrize("name", COUNTED)
def test_published_shapes_have_the_models_parameters(name):
    family, config = MODELS[name]
    assert shape_of(random_config(family, **config)).parameters == COUNTED[name]


def test_every_model_and_subset_of_the_configurations_is_published():
    from kvexp.tasks.longbench import SUBSETS

    paths = {node.get("path") for node in listed("model").values()}
    assert {path for path in paths if path and "/" in path and not path.startswith("kvexp/")} <= set(MODELS)
    assert {f"longbench {name}" for name in SUBSETS} <= set(DATA)


def test_bytes_of_a_token_are_those_of_the_cache():
    model = tiny("llama")
    shape = shape_of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    held = generate(model, [[3, 4, 5, 6, 7]], Full(), decoding=GenerationParams(1)).memory_tracker.bytes
    assert held % shape.token_bytes("float32") == 0 and held >= 5 * shape.token_bytes("float32")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return lambda *words: run_py(monkeypatch, capsys, *words, f"outputs_dir={tmp_path / 'out'}")


def test_a_plan_tells_what_the_sweep_then_does(command, tmp_path, monkeypatch):
    sweep = ("-m", "method=h2o,window", "kv_ratio=0.3,0.5", *FEW)
    with monkeypatch.context() as patch:
        patch.setattr("kvexp.hf.load.AutoModelForCausalLM.from_pretrained", None)
        patch.setattr("kvexp.hf.random_model", None)
        code, out, err = command("--dry-run", *sweep)
    assert code == 0 and err == "", err
    assert not (tmp_path / "out").exists(), "a plan writes nothing"
    assert "4 job(s), 5 runs with 1 full-attention baseline(s)" in out
    assert "prefills shared by 5; 4 prefills" in out and "estimated for" in out
    assert command(*sweep)[0] == 0
    rows = [row for run in runs(tmp_path / "out") for row in run.rows()]
    prompts = scaled(sum(row["prompt_tokens"] for row in rows) / 5)  # each is read once
    assert f"total: 0 done, 0 partly, 5 to do; {prompts} prompt tokens" in out
    assert "100 new tokens" in out and len(rows) == 20
    assert "h2o kv_ratio=0.5 task.max_new_tokens=5 task.nll=False, 4 texts to force" in out and "16 texts forced" in out
    assert "text" not in command("--dry-run", "divergence=false", *sweep)[1]
    assert "total: 5 done, 0 partly, 0 to do; 0 prompt tokens, at most 0 new tokens" in command("--dry-run", *sweep)[1]
    more = command("--dry-run", "divergence_text=both", *sweep)[1]
    assert "1 done, 4 partly, 0 to do" in more and "4 texts to force" in more and "16 texts forced" in more
    assert f"{prompts} prompt tokens" in more, "the prompts are read once more"
    only = command("--dry-run", "divergence=only", "divergence_text=reference", *sweep)[1]
    assert "16 texts forced" in only and "0 new tokens" in only and "/4 rows" not in only
    assert "total: 1 done, 0 partly, 4 to do" in only
    one = next(run for run in runs(tmp_path / "out") if run.baseline)
    file = one.path / "examples.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:3]))
    again = command("--dry-run", *sweep)[1]
    assert "total: 4 done, 1 partly, 0 to do" in again and "3/4 rows" in again


def test_a_plan_goes_by_measured_rows_of_the_same_model_and_machine(command, tmp_path):
    assert command("method=h2o", "kv_ratio=0.5", "divergence=true", *FEW)[0] == 0
    code, out, _ = command("--dry-run", "-m", "hydra/launcher=basic", "method=h2o,tova", "kv_ratio=0.5", *FEW)
    assert code == 0 and "time: measured on 8 rows" in out and "prefills shared" not in out
    assert "2 done" in out and "1 to do" in out
    assert "estimated for one A100" in command("--dry-run=a100", "method=tova", *FEW)[1]
    for run in runs(tmp_path / "out"):
        env = json.loads((run.path / "env.json").read_text())
        (run.path / "env.json").write_text(json.dumps(env | {"device": "another"}))
    assert "measured" not in command("--dry-run", "method=tova", *FEW)[1]


def test_wrong_jobs_are_told_and_the_others_planned(command):
    code, out, err = command("--dry-run", "-m", "method=h2o", "kv_ratio=0.5,1.5", *FEW)
    assert code == 1 and "kv_ratio must be in (0, 1], got 1.5" in err and "2 to do" in out
    assert command("--dry-run", "task=perplexity", "model=tiny")[0] == 0
    for word, message in (("--dry-run=b100", "one of a100, h100, h200, cpu"), ("hydra/sweeper=optuna", "plans grids")):
        code, out, err = command("--dry-run", word, *FEW)
        assert code == 1 and message in err and "Traceback" not in err + out


def test_a_model_on_the_hub_is_planned_from_what_is_published(command):
    words = ("model=llama2_7b", "task=cnn_dailymail", "method=h2o", "kv_ratio=0.5", "limit=100")
    code, out, err = command("--dry-run=a100", *words)
    assert code == 0, err
    assert "6,738,415,616 parameters, the published configuration" in out and "published sizes of the data set" in out
    assert "weights 13.5 GB" in out
    code, out, err = command("--dry-run=a100", "model=llama2_7b", "model.path=someone/unknown", *words[1:])
    assert code == 0 and "memory not known" in out and "and what is not known" in out


def test_runs_that_declare_the_same_second_pass_share_it():
    methods = (KVzip(), KVzip(), KVzip(chunk=500), KVzipPlus(), H2O())
    runs = [SimpleNamespace(method=method) for method in methods]
    assert [second_passes(runs[:count]) for count in range(1, 6)] == [1, 1, 2, 3, 3]
    assert second_passes(runs[4:]) == 0
