"""Tasks through the runner on the tiny byte model: lengths, rows, and mistakes found before a model loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import composed
from test_runner import settings as runner_settings

import kvexp.core.eviction as layer_attention
import kvexp.run.batches as runner
from experiments import real_tasks
from experiments.lib import real_scale
from experiments.lib.exhibits import params
from experiments.real_tasks import FULL, PREFIX, main, run_task, task_names
from kvexp.results.table import notes, table, to_markdown
from kvexp.run.batches import evaluate_run
from kvexp.run.plan import workload_of
from kvexp.run.settings import Settings, settings_of
from kvexp.run.store import runs
from kvexp.util.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"


def settings(folder, *overrides):
    return settings_of(*composed(f"outputs_dir={folder}", "kv_ratio=0.3", *overrides))


def rows(folder, *overrides):
    return runner.evaluate_run(settings(folder, *overrides)).rows()


NEEDLE = ["task=needle", f"task.haystack={FIXTURES}/haystack", "task.max_new_tokens=3", "task.depths=[0,100]"]


def test_needle_rows_carry_the_grid(tmp_path):
    found = rows(tmp_path, *NEEDLE, "task.lengths=[400,600]")
    assert [(row["info"]["length"], row["info"]["depth"]) for row in found] == [
        (400, 0),
        (400, 100),
        (600, 0),
        (600, 100),
    ]
    for row in found:  # a character that is white space at the end adds nothing
        assert row["info"]["length"] - 1 <= row["prompt_tokens"] <= row["info"]["length"]
    assert found[0]["info"]["answers"] == ["eat a sandwich and sit in Dolores Park on a sunny day"]
    assert set(found[0]["metrics"]) == {"word_recall", "exact"} and found[0]["chat_template"] is False
    assert found[0]["receipt"]["first_eviction_step"] == 0


def test_several_questions_are_answered_from_one_context(tmp_path):
    given = ["task=needle_multi", f"task.haystack={FIXTURES}/haystack", "task.max_new_tokens=3", "task.lengths=[500]"]
    found = rows(tmp_path, *given, "task.depths=[0]")
    assert len({row["prompt_tokens"] for row in found}) == 1 and len(found) == 3
    assert max(row["prompt_tokens"] + row["question_tokens"] for row in found) == 500
    assert len({row["receipt"]["slots"] - row["question_tokens"] for row in found}) <= 3
    in_prompt = rows(tmp_path, *given, "task.depths=[0]", "task.question=in_prompt")
    for row, other in zip(in_prompt, found, strict=True):
        assert row["question_tokens"] == 0
        assert row["prompt_tokens"] == other["prompt_tokens"] + other["question_tokens"]


def test_a_prompt_longer_than_the_model_is_a_skipped_row(tmp_path):
    found = rows(tmp_path, *NEEDLE, "task.lengths=[400,700]", "model.config.max_position_embeddings=512")
    assert [row["skipped"] for row in found] == [None, None, "too long", "too long"]
    assert found[2]["info"]["length"] == 700 and found[2]["prompt_tokens"] > 512  # the heat-map has a gap there


def test_a_haystack_too_short_is_said_before_the_model_loads(tmp_path, monkeypatch):
    class Words:
        def __call__(self, text, add_special_tokens=True, verbose=True):
            return type("Encoding", (), {"input_ids": list(range(len(text.split())))})

    monkeypatch.setattr("kvexp.run.prompts.tokenizer_of", lambda spec: Words())
    monkeypatch.setattr(runner, "load", lambda spec: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"makes a prompt of \d+ of this model's tokens, and 1500 are asked for"):
        runner.evaluate_run(settings(tmp_path, *NEEDLE, "task.lengths=[1500]", "method=full"))


LONG = ["task=longbench", "task.subset=qasper", f"task.data_files={FIXTURES}/longbench", "task.max_new_tokens=3"]


def test_longbench_rows_are_official_prediction_lines(tmp_path):
    found = rows(tmp_path, *LONG, "task.max_prompt_tokens=300")
    for row in found:
        assert row["prompt_cut"] and row["prompt_tokens"] == 300  # <s> and 149 bytes, and 150 bytes
        assert set(row["info"]) == {"answers", "all_classes", "length"} and set(row["metrics"]) == {"score"}
    record = runner.evaluate_run(settings(tmp_path, *LONG, "task.max_prompt_tokens=300"))
    assert record.labels["task"] == "longbench/qasper" and "subset" not in record.labels["setting"]


def test_a_frame_makes_a_template_unnecessary(tmp_path, monkeypatch):
    framed = rows(tmp_path, *LONG, "model.chat=true", "task.chat_frame='[INST]{prompt}[/INST]'", "limit=1")
    plain = rows(tmp_path, *LONG, "limit=1")
    assert framed[0]["prompt_tokens"] == plain[0]["prompt_tokens"] + len("[INST][/INST]")
    assert framed[0]["chat_template"] is True and plain[0]["chat_template"] is False
    trec = rows(tmp_path, *LONG, "model.chat=true", "task.subset=trec", "limit=1")  # of no template either
    assert trec[0]["chat_template"] is False
    monkeypatch.setattr(runner, "load", lambda spec: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"model\.chat=true, but this tokenizer has no chat template"):
        runner.evaluate_run(settings(tmp_path, *LONG, "model.chat=true", "method=full"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*LONG, "task.chat_frame='[INST]{prompt}[/INST]'"], "set model.chat=true or task.chat_frame=null"),
        ([*LONG, "task.chat_wrap=always"], "set model.chat=true"),
        (["task=gsm8k_cot", f"task.data_files={FIXTURES}/gsm8k.jsonl", "task.chat_wrap=true"], "set model.chat=true"),
    ],
)
def test_what_is_for_chat_models_is_refused_for_base_models(tmp_path, overrides, words):
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, *overrides)
    assert words in str(error.value)
    assert settings(tmp_path, *overrides, "model.chat=true").model.chat


TALE = ["task=stories", f"task.data_files={FIXTURES}/stories.jsonl", "task.max_new_tokens=2"]


def test_answers_that_leave_no_room_are_said_before_the_model_loads(tmp_path, monkeypatch):
    holds = "model.config.max_position_embeddings=64"
    monkeypatch.setattr(runner, "load", lambda spec: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"max_new_tokens=65 leaves no room .* holds 64 positions .* lower task\.max"):
        rows(tmp_path, *TALE, holds, "task.max_new_tokens=65")
    text = ["task=perplexity", f"task.data_files={FIXTURES}/perplexity.jsonl", "task.max_new_tokens=65"]
    hub = settings(tmp_path, "model=tiny", "task=aime25", holds, "task.max_new_tokens=65")
    with pytest.raises(ConfigError, match=r"max_new_tokens=65 leaves no room .* holds 64 positions"):
        workload_of(hub, {})
    workload_of(settings(tmp_path, "model=tiny", "task=perplexity", holds, "task.max_new_tokens=65"), {})
    with pytest.raises(pytest.fail.Exception, match="a model was loaded"):  # nothing is generated there
        rows(tmp_path, *text, holds, "task.prefill_tokens=16", "task.total_tokens=48")


def test_a_continuation_too_long_is_a_skipped_row_and_never_a_shorter_one(tmp_path):
    whole = rows(tmp_path, *TALE, "method=full")
    need = [row["prompt_tokens"] + row["info"]["nll_tokens"] - 1 for row in whole]  # the last token is fed to nobody
    held = sorted(need)[1]
    found = rows(tmp_path, *TALE, "method=full", f"model.config.max_position_embeddings={held}")
    assert [row["skipped"] for row in found] == [None if n <= held else "too long with its continuation" for n in need]
    assert sum(row["skipped"] is None for row in found) == 2 and len(set(need)) == 3
    for row, other in zip(found, whole, strict=True):
        assert row["skipped"] or row["info"]["nll_tokens"] == other["info"]["nll_tokens"]


def test_where_the_data_lies_changes_nothing(tmp_path):
    one = settings(tmp_path, *LONG)
    two = settings(tmp_path, *LONG, f"task.data_files={FIXTURES}/longbench/qasper.jsonl")
    assert one.identity == two.identity != settings(tmp_path, *LONG, "task.subset=trec").identity
    copy = tmp_path / "texts"
    copy.mkdir()
    for file in (FIXTURES / "haystack").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    here, there = settings(tmp_path, *NEEDLE), settings(tmp_path, *NEEDLE, f"task.haystack={copy}")
    assert here.identity == there.identity
    assert there.labels["setting"].count("task.haystack=texts") <= 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["task=govreport", f"task.data_files={FIXTURES}/govreport.jsonl"],
        ["task=soda", f"task.data_files={FIXTURES}/soda.jsonl"],
        ["task=gsm8k_cot", f"task.data_files={FIXTURES}/gsm8k.jsonl", "task.shots=1"],
        ["task=gsm8k_cot", f"task.data_files={FIXTURES}/gsm8k.jsonl", "task.shots=1", "task.question=after_eviction"],
        ["task=passkey", "task.lengths=[600]", "task.depths=[0,40,100]"],
        ["task=longbench", "task.subset=repobench-p", f"task.data_files={FIXTURES}/longbench"],
        ["task=longbench", "task.subset=passage_retrieval_zh", f"task.data_files={FIXTURES}/longbench"],
    ],
    ids=["govreport", "soda", "gsm8k", "gsm8k_asked_later", "passkey", "code", "chinese"],
)
def test_every_task_runs(tmp_path, overrides):
    record = runner.evaluate_run(settings(tmp_path, *overrides, "task.max_new_tokens=3", "method=h2o"))
    assert len(record.rows()) == 3 and record.finished
    for row in record.rows():
        assert row["metrics"] and row["skipped"] is None and row["receipt"]["first_eviction_step"] == 0
        json.dumps(row)


# Retrieval methods on the command line: what cannot work is said before weights, and rows say what fell back.


FEW = "no more tokens to cluster than centroids: searched exactly"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["method=pqcache", "method.m=3"], "method.m=3 does not divide"),
        (["method=sparq", "method.r=1000"], "method.r=1000"),
    ],
)
def test_what_cannot_work_is_said_before_weights_load(tmp_path, monkeypatch, overrides, says):
    """Not even those of the full-attention baseline, which has no such setting and would come first."""
    monkeypatch.setattr("kvexp.run.batches.load", lambda spec: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=says):
        evaluate_run(runner_settings(tmp_path, *overrides))
    assert not [found for found in runs(tmp_path) if found.rows()]


def test_rows_and_table_say_what_fell_back(tmp_path):
    """4096 centroids are more than any prompt here has tokens: an exact search must not pass for PQCache."""
    record = evaluate_run(
        runner_settings(tmp_path, "method=pqcache", "method.b=12", "method.n_sinks=1", "kv_ratio=0.5")
    )
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


# -- prompts longer than a model's positions: read in chunks with positions renumbered, refused where that cannot be ---


HELD, CHUNK, LENGTH = 200, 200, 2300  # the models of the testbed have 2,048 positions
BEYOND = (
    "model=testbed_gqa",
    "task=testbed_needle",
    f"task.lengths=[{LENGTH}]",
    "task.depths=[100]",
    "limit=1",
    "batch_size=1",
    "method=h2o",
    "budget=tokens",
    f"budget.tokens={HELD}",
    "prefill=bounded",
    f"prefill.chunk={CHUNK}",
    "cache.positions=renumbered",
)


def beyond(outputs: Path, *words: str) -> Settings:
    overrides = [*BEYOND, f"outputs_dir={outputs}", *words]
    config, choices = composed(*overrides)
    return settings_of(config, choices, overrides)


def test_a_prompt_beyond_the_models_positions_is_read_at_positions_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = layer_attention.with_renumbered_positions

    def watched(inputs: Any, positions: Any) -> Any:
        made = real(inputs, positions)
        seen.extend(int(each.max()) for each in made.rope_positions)
        return made

    monkeypatch.setattr(layer_attention, "with_renumbered_positions", watched)
    (row,) = evaluate_run(beyond(tmp_path, "cache.beyond_context=true")).rows()
    assert row["skipped"] is None and row["prompt_tokens"] > 2048
    assert HELD + CHUNK - 20 <= max(seen) <= HELD + CHUNK, "the last chunk stands behind what is held"
    token = row["receipt"]["kv_bytes"] / row["receipt"]["slots"]
    assert row["receipt"]["peak_kv_bytes"] < 2 * (HELD + CHUNK) * token < 0.5 * LENGTH * token


def test_without_leave_and_where_a_model_has_a_table_of_positions_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long; the model holds 2048 positions"):
        evaluate_run(beyond(tmp_path))
    with pytest.raises(ConfigError, match="a table of positions for 2048 tokens and no more"):
        evaluate_run(beyond(tmp_path, "cache.beyond_context=true", "model=testbed_rope"))
    with pytest.raises(ConfigError, match="cannot work on"):
        evaluate_run(beyond(tmp_path, "cache.beyond_context=true", "model=testbed_learned"))
