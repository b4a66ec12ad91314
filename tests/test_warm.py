"""Before the first example that is timed, something like it is generated that no row tells of."""

import pytest
import torch
from test_conf import composed
from test_runner import settings

import kvexp.generate
from kvexp.config.settings import settings_of
from kvexp.evaluate.evaluate_run import NEW, PROMPT, evaluate_run


@pytest.fixture
def calls(monkeypatch):
    """(prompt lengths, method, max_new_tokens) of every generation."""
    made, generate = [], kvexp.generate.generate

    def watched(model, prompts, cache, *, decoding, **rest):
        made.append(([len(ids) for ids in prompts], cache.method.name, decoding.max_new_tokens))
        return generate(model, prompts, cache, decoding=decoding, **rest)

    monkeypatch.setattr(kvexp.generate, "generate", watched)
    return made


def test_each_run_warms_up_once_under_its_own_method(tmp_path, calls):
    record = evaluate_run(settings(tmp_path, "limit=3", "batch_size=2", "kv_ratio=0.3", "generation=beam4"))
    assert [(method, new) for _, method, new in calls] == [
        *(("full", NEW), ("full", 4), ("full", 4)),
        *(("h2o", NEW), ("h2o", 4), ("h2o", 4)),
    ]
    assert calls[0][0] == [PROMPT, PROMPT] and min(calls[1][0]) > PROMPT
    rows = record.rows()
    assert [row["example"] for row in rows] == ["sample-0", "sample-1", "sample-2"]
    assert all(row["seconds"]["ttft"] > 0 for row in rows)
    calls.clear()
    evaluate_run(settings(tmp_path, "limit=3", "batch_size=2", "kv_ratio=0.3", "generation=beam4"))
    assert calls == [], "a run with all rows"


def test_rows_are_the_same_without(tmp_path, monkeypatch):
    words = ("limit=2", "kv_ratio=0.3", "generation=sampling", "method=keyformer")

    def rows(name):
        return [
            {k: v for k, v in row.items() if k != "seconds"}
            for row in evaluate_run(settings(tmp_path / name, *words)).rows()
        ]

    with_it = rows("with")
    monkeypatch.setattr("kvexp.evaluate.evaluate_run.warm_up", lambda *_: None)
    assert rows("without") == with_it


def test_a_budget_that_so_few_tokens_cannot_hold(tmp_path, calls):
    """0.03 of 128 tokens are three slots, fewer than the sinks; of the whole prompt they are enough."""
    record = evaluate_run(settings(tmp_path, "limit=1", "method=streaming_llm", "kv_ratio=0.03"))
    assert [method for _, method, _ in calls] == ["full", "full", "streaming_llm", "full", "streaming_llm"]
    assert record.rows()[0]["receipt"]["first_eviction_step"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("something else")])
def test_what_goes_wrong_is_left_to_the_run(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("kvexp.evaluate.evaluate_run._generate_few", fails)
    assert evaluate_run(settings(tmp_path, "limit=1")).finished


def test_choices_hold_no_times_and_need_none(tmp_path, calls):
    words = composed("model=testbed_rope", "task=testbed_choice", "limit=1", f"outputs_dir={tmp_path}")
    assert evaluate_run(settings_of(*words)).finished
    assert calls == []
