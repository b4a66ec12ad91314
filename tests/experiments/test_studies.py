"""The testbed's export."""

from __future__ import annotations

import json
import shlex

import pytest
from commands import composed
from hydra.core.override_parser.overrides_parser import OverridesParser

import kvexp.run.batches as runner
from experiments.studies import testbed as command
from experiments.studies.testbed import export_tasks as export
from kvexp.run.model_spec import load
from kvexp.run.settings import settings_of
from kvexp.tasks import TestbedChoice, TestbedQA
from kvexp.util.errors import ConfigError

# The testbed through lm-eval's, LongBench's and needle's own code: high scores where nothing is evicted, and ours.


SIZE = 6
OWN = (f"task.size={SIZE}", "task.marked=4")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return export(tmp_path_factory.mktemp("testbed"), size=SIZE)


def settings(folder, *overrides):
    words = [*overrides, "model=testbed_rope", f"outputs_dir={folder}", "method=h2o", "kv_ratio=0.3"]
    return settings_of(*composed(*words))


def both(folder, *overrides):
    """Rows of full attention and of h2o at 0.3."""
    (asked,) = settings(folder, *overrides).parts()
    runner.evaluate_run(asked)
    return [runner.evaluate_run(each).rows() for each in (asked.baseline(), asked)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(rows, metric):
    return sum(row["metrics"][metric] for row in rows) / len(rows)


def test_lm_eval_and_our_own_choice_agree(tmp_path, written):
    """Item by item, choice by choice, with full attention and under eviction."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    theirs, ours = both(tmp_path, *written["lm_eval"]), both(tmp_path, "task=testbed_choice", *OWN)
    for one, other in zip(theirs, ours, strict=True):
        assert len(one) == len(other) == SIZE
        for row, own in zip(one, other, strict=True):
            assert row["prompt_tokens"] == own["prompt_tokens"] and row["reference"] == own["reference"]
            assert row["choices"]["tokens"] == own["choices"]["tokens"]
            assert row["choices"]["logprobs"] == pytest.approx(own["choices"]["logprobs"], abs=1e-4)
            assert row["metrics"]["acc"] == own["metrics"]["acc"]
    full, evicted = theirs
    assert [row["receipt"]["slots"] for row in evicted] == [row["receipt"]["slots"] for row in ours[1]]
    assert mean(full, "acc") >= 90 > mean(evicted, "acc")


def test_lm_evals_own_model_agrees(tmp_path, written):
    """The third judge: lm-eval's HFLM, which knows nothing of kvexp, on the same weights."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    (asked,) = settings(tmp_path, *written["lm_eval"], "limit=4").parts()
    items = list(asked.task.examples())
    hf = HFLM(AutoModelForCausalLM.from_pretrained(asked.model.path), tokenizer=load(asked.model)[1], batch_size=2)
    found = hf.loglikelihood([instance for item in items for instance in item.instances], disable_tqdm=True)
    full = runner.evaluate_run(asked.baseline()).rows()
    logprobs = [value for row in full for value in row["choices"]["logprobs"]]
    assert [value for value, _ in found] == pytest.approx(logprobs, abs=1e-4)


def test_longbenchs_code_on_the_questions(tmp_path, written):
    """Its prompt in front, its metric; the answers are those that our own task gets where nothing is evicted."""
    full, evicted = both(tmp_path, *written["longbench"])
    ours, _ = both(tmp_path, "task=testbed_qa", *OWN)
    assert [row["reference"] for row in full] == [row["reference"] for row in ours]
    assert mean(full, "score") >= 85 and mean(ours, "f1") >= 85
    assert mean(evicted, "score") < mean(full, "score")
    assert full[0]["prompt_tokens"] > ours[0]["prompt_tokens"]  # the official instruction


def test_needles_code_on_the_codes(tmp_path, written):
    full, evicted = both(tmp_path, *written["needle"], "task.lengths=[200]", "task.depths=[0,30]")
    assert len(full) == 6 and all(199 <= row["prompt_tokens"] <= 200 for row in full)
    assert mean(full, "exact") == 100 > mean(evicted, "exact")


def test_the_files_hold_what_the_tasks_ask(tmp_path):
    export(tmp_path, size=5, split="validation", seed=3)
    options = {"size": 5, "split": "validation", "seed": 3, "marked": 4}
    rows = read(tmp_path / "lm_eval" / "testbed_choice.test.jsonl")
    for row, example in zip(rows, TestbedChoice(**options).examples(), strict=True):
        assert row["prompt"] == example.prompt and row["choices"][row["answer"]] == example.reference
        assert tuple(f" {choice}" for choice in row["choices"]) == example.choices
    rows = read(tmp_path / "longbench" / "triviaqa.jsonl")
    for row, example in zip(rows, TestbedQA(**options).examples(), strict=True):
        assert f"{row['context']} {row['input']}" == example.prompt and row["answers"] == [example.reference]
    words = " ".join(path.read_text() for path in sorted((tmp_path / "haystack").iterdir())).split()
    assert "code" not in words and len(words) > 1000


def test_the_command_prints_commands_that_hydra_reads(tmp_path, capsys):
    command.main(["export", str(tmp_path / "a folder, with 'marks'"), "--size", "3"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["kvexp", "run"]] * 3
    for line in lines:
        values = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(line[2:])}
        place = {"lm_eval": "task.tasks", "longbench": "task.data_files", "needle": "task.haystack"}[values["task"]]
        assert "a folder, with 'marks'" in str(values[place])
        settings_of(*composed(*line[2:])).task.check()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        export(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"task\.size must be at least 1, got 0"):
        export(tmp_path, size=0)
