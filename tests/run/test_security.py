"""What must not happen, whatever a configuration, a data set or a model folder says."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from commands import run_py
from omegaconf import OmegaConf
from small import small
from tiny import stock

from kvexp.hf import load_model
from kvexp.hf.load import check_source
from kvexp.run.store import runs
from kvexp.util.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FEW = small("limit=2", "task.max_new_tokens=3", "task.nll=false", "method=h2o", "kv_ratio=0.5")
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return lambda *words: run_py(monkeypatch, capsys, *words, f"outputs_dir={tmp_path / 'out'}")


@pytest.mark.parametrize(
    "key",
    [
        *("method", "cache", "task.instruction", "anything"),
        *(pytest.param(group, marks=pytest.mark.slow) for group in ("task", "budget", "generation", "model", "log")),
        *("hydra.callbacks.more", "hydra.callbacks.table", "hydra.launcher", "hydra.launcher.more", "hydra.sweeper"),
        "hydra.callbacks.table.more",
    ],
)
def test_a_target_of_somebody_elses_is_never_called(command, tmp_path, key):
    """os.mkdir stands for any callable: it would leave a folder."""
    made = tmp_path / "called"
    words = [f"++{key}._target_=os.mkdir", f"++{key}._args_=[{made}]"]
    code, out, err = command("-m", "kv_ratio=0.3,0.5", *[w for w in FEW if not w.startswith("kv_ratio")], *words)
    assert code == 1 and not made.exists(), out + err
    assert not list(runs(tmp_path / "out"))
    if not key.startswith("hydra."):
        assert "_target_" in err and "Traceback" not in err + out


def test_logging_configurations_are_refused(command, tmp_path):
    code, _, err = command(*FEW, "+hydra.job_logging.handlers.x={class: os.mkdir}")
    assert code == 1 and "leave it out" in err
    assert command(*FEW, "+hydra.hydra_logging.version=1")[0] == 1


def test_every_target_of_the_configurations_is_kvexps_own():
    for file in (ROOT / "conf").rglob("*.yaml"):
        text = file.read_text()
        for line in text.splitlines():
            if line.strip().startswith("_target_:"):
                target = line.split(":", 1)[1].strip()
                assert target == "null" or target.startswith(("kvexp.", "hydra_plugins.kvexp_")), f"{file}: {target}"
        OmegaConf.create(text)  # a safe loader refuses tags


def test_yaml_tags_are_not_obeyed(tmp_path):
    (tmp_path / "evil.yaml").write_text("a: !!python/object/apply:os.mkdir [called]\n")
    with pytest.raises(yaml.YAMLError):
        OmegaConf.load(tmp_path / "evil.yaml")


def names(node):
    """Dotted name of what is called, as far as it is one."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id] if isinstance(node, ast.Name) else [*parts, "?"]))


DANGEROUS = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "tempfile.mktemp"),
}


def test_no_code_of_ours_evaluates_or_unpickles():
    sources = [*ROOT.glob("kvexp/**/*.py"), *ROOT.glob("hydra_plugins/*.py"), *ROOT.glob("experiments/**/*.py")]
    for file in [*sources, *ROOT.glob("benchmarks/*.py"), ROOT / "run.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, options = names(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
            assert name not in DANGEROUS, f"{file}:{node.lineno} calls {name}"
            if name == "torch.load":
                assert ast.unparse(options["weights_only"]) == "True", f"{file}:{node.lineno}"
            assert ast.unparse(options.get("shell", ast.Constant(False))) == "False", f"{file}:{node.lineno}"


def test_pickled_weights_are_refused_with_the_way_to_convert(tmp_path):
    model = stock("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only pickled weights") as refused:
        load_model(str(tmp_path))
    code = str(refused.value).partition('python -c "')[2].partition('"')[0]
    exec(code)  # the way that the message shows
    (tmp_path / "pytorch_model.bin").unlink()
    assert torch.equal(load_model(str(tmp_path)).lm_head.weight, model.lm_head.weight)


def test_code_beside_a_model_does_not_run_unless_asked(tmp_path, monkeypatch):
    """A folder that brings its own classes: refused at once, without a question on the terminal."""
    called = tmp_path / "called"
    folder = tmp_path / "model"
    stock("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text(f"import os\nos.mkdir({str(called)!r})\nclass Strange: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for look in (check_source, load_model):
        with pytest.raises(ConfigError, match="cannot load"):
            look(str(folder))
    assert not called.exists()


def test_trusted_code_is_named_in_every_row_and_in_the_identity(command, tmp_path):
    words = ("model=testbed_rope", "task=testbed_summary", "limit=1", "task.max_new_tokens=2", "method=full")
    assert command(*words)[0] == 0
    assert command(*words, "model.trust_remote_code=true")[0] == 0
    marked = {run.config["model"]["trust_remote_code"]: run.rows() for run in runs(tmp_path / "out")}
    assert [row["trust_remote_code"] for row in marked[True]] == [True]
    assert not any("trust_remote_code" in row for row in marked[False]) and marked[False]


def test_ids_of_a_data_set_are_never_file_names(command, tmp_path):
    rows = tmp_path / "data" / "rows.jsonl"
    rows.parent.mkdir()
    ids = ["../../../evil", "/tmp/kvexp_evil", "a\0b", "con", "x" * 5000, "..", "~root", "$(touch evil)"]
    text = "Once there was a dog who ran to the hill and then came home to sleep in the sun. "
    rows.write_text("".join(json.dumps({"id": name, "text": text * 2}) + "\n" for name in ids))
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    words = [w for w in FEW if not w.startswith("limit")]
    code, out, err = command(*words, f"task.data_files={rows}")
    assert code == 0, err + out
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before
    assert not Path("/tmp/kvexp_evil").exists()
    assert all(len(path.name) <= 32 for path in (tmp_path / "out").rglob("*"))
    assert [[row["example"] for row in run.rows()] for run in runs(tmp_path / "out")] == [ids] * 2


def test_the_key_of_an_account_is_written_nowhere(command, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, KEY)
    before = set(os.environ)
    code, out, err = command("-m", "log=wandb", "log.mode=offline", "kv_ratio=0.3,1.5", *FEW[:-1])
    assert code == 1, "one job is wrong, so that a refusal is written too"
    assert "wandb: " in out, out + err
    assert KEY not in out + err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files) and len(files) > 10
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
    assert not any(set(run.env) & before for run in runs(tmp_path / "out"))


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        ("requests.exceptions.ConnectionError: api.osv.dev", 1, (0, "audit: skipped, the advisory service")),
        ("Found 1 known vulnerability in 1 package", 1, (1, "Found 1 known vulnerability")),
        ("No known vulnerabilities found", 0, (0, "No known vulnerabilities")),
    ],
)
def test_the_audit_skips_only_where_nobody_can_be_asked(tmp_path, says, status, expected):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {status}\n")
    python.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "audit", python], capture_output=True, text=True)
    assert done.returncode == expected[0] and done.stdout.startswith(expected[1])
    assert len(done.stdout.splitlines()) == 1
