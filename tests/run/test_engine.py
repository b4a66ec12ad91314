"""engine=openvino as a run: its rows are the engine's, its baseline its own full cache, and what it refuses."""

from __future__ import annotations

import pytest

from experiments.studies import composed_runs
from kvexp.diagnose.show import main
from kvexp.generate.openvino import WHEEL
from kvexp.run.batches import evaluate_run, opened, why_alone
from kvexp.run.labels import refusal
from kvexp.run.session import Session
from kvexp.run.store import run_hash
from kvexp.util.errors import ConfigError

GQA = ["model=testbed_gqa", "task=testbed_summary", "limit=2", "batch_size=1"]
BLOCKS = ["method=openvino", "method.recent_size=64", "budget=tokens", "budget.tokens=128"]
ENGINE = "engine=openvino"


def settings(*words):
    ((one,),) = [composed_runs(words, Session())[1]]
    return one


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=h2o"], "set method=openvino or method=full, got method=h2o"),
        (["method=openvino"], "set budget=tokens budget.tokens=N in place of a ratio"),
        ([*BLOCKS[:3], "budget.tokens=200"], "must be a multiple of 32, got 200"),
        ([*BLOCKS, "method.aggregation=adaptive_rkv"], "never computes the diversity"),
        ([*BLOCKS, "method.block=16"], "set method.block=32, got 16"),
        ([*BLOCKS, "cache.evict_every=4"], "evict_every alone"),
        ([*BLOCKS, "generation=beam4"], "set generation=greedy"),
        (["method=full", "model.weights=int8"], "model.weights=null"),
        (["method=full", "model=testbed_rope"], "models of type llama, qwen2, qwen3, and this one is gptj"),
        (["method=full", "task=news_qa"], "set task.question=in_prompt"),
        (["method=full", "task=dialogue"], "take a task that generates one answer"),
        (["method=full", "engine.cache=q4"], r"engine.cache must be .*u8.*, got 'q4'"),
    ],
)
def test_what_the_engine_cannot_be_asked_is_said_before_anything_loads(words, said):
    with pytest.raises(ConfigError, match=said):
        settings(*GQA, ENGINE, *words)


def test_identity_has_the_engine_and_its_precisions_and_no_other_run_changes():
    plain, engine = settings(*GQA, *BLOCKS), settings(*GQA, *BLOCKS, ENGINE)
    assert "engine" not in plain.identity
    assert engine.identity["engine"] == {"name": WHEEL, "cache": "f32", "inference": "f32", "activations": 0}
    assert {key: value for key, value in engine.identity.items() if key != "engine"} == plain.identity
    eight = settings(*GQA, *BLOCKS, ENGINE, "engine.cache=u8")
    hashes = {run_hash(one.identity) for one in (plain, engine, eight)}
    assert len(hashes) == 3
    assert engine.baseline().identity["engine"] == engine.identity["engine"]
    assert run_hash(eight.baseline().identity) != run_hash(engine.baseline().identity)
    assert ENGINE in engine.labels["setting"]
    assert why_alone(engine)
    assert "its twin" in refusal(engine)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return evaluate_run(settings(*GQA, *BLOCKS, f"outputs_dir={tmp_path_factory.mktemp('twin')}"))


def test_an_engines_run_is_not_diagnosed_and_its_twin_is_named(twin, tmp_path, monkeypatch, capsys):
    asked = settings(*GQA, *BLOCKS, ENGINE, f"outputs_dir={tmp_path}")
    for _, run in opened([asked.baseline(), asked]):
        run.append(*twin.rows())
    monkeypatch.setattr("kvexp.diagnose.case.load", None)
    for words in (["show", "0"], ["replay", "0"], ["explain"]):
        command, *more = words
        assert main([command, str(run.path), *more]) == 2
        assert "diagnose its twin, the same run without engine" in " ".join(capsys.readouterr().err.split())
    assert main(["gap", str(tmp_path), "--where", f"setting={asked.labels['setting']}"]) == 2
    assert "no ideal run: engine=openvino does not show" in " ".join(capsys.readouterr().out.split())


def test_a_twins_evictions_are_not_undone_and_what_else_can_be_asked_is_said(twin, monkeypatch, capsys):
    monkeypatch.setattr("kvexp.diagnose.case.load", None)
    for command, *more in (["replay", "0"], ["explain"]):
        assert main([command, str(twin.path), *more]) == 2
        assert "take kvexp diagnose show or gap" in " ".join(capsys.readouterr().err.split())


def test_rows_are_the_twins_token_for_token(tmp_path, monkeypatch):
    pytest.importorskip("openvino_genai", reason=f"needs {WHEEL}: pip install 'kvexp[openvino]'")
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    where = f"outputs_dir={tmp_path / 'out'}"
    asked = settings(*GQA, *BLOCKS, ENGINE, where)
    session = Session()
    made = evaluate_run(asked, session)
    assert session.rows_written == 4  # two, and two of its baseline
    evaluate_run(asked, session)
    assert session.rows_written == 4  # it resumes
    twin = evaluate_run(settings(*GQA, *BLOCKS, "model.weights=float16", where))
    for row, other in zip(made.rows(), twin.rows(), strict=True):
        assert row["output_tokens"] == other["output_tokens"]
        assert row["metrics"] == other["metrics"]
        assert row["finish_reason"] == other["finish_reason"]
        assert len(row["info"]["output_logprobs"]) == row["new_tokens"]
        assert row["receipt"]["slots"] == -(-other["receipt"]["slots"] // 32) * 32
        assert row["receipt"]["first_eviction_step"] is not None
    (base,) = [path for path in (tmp_path / "out").iterdir() if path.name == made.baseline]
    assert base.is_dir()
