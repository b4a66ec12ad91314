"""The command line end to end on the tiny model: rows, baselines, resuming, failures, exit codes, what a user reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import settings as composed_settings
from small import small

from kvexp.hf.load import byte_tokenizer
from kvexp.run.batches import evaluate_run
from kvexp.run.compose import options
from kvexp.run.prompts import tokenize
from kvexp.run.store import runs
from kvexp.tasks import Example, Stories

ROOT = Path(__file__).resolve().parents[2]
SMALL = small("limit=2", "task.max_new_tokens=4", "task.continuation_words=3")


def settings(outputs, *overrides):
    data = f"task.data_files={ROOT}/conf/task/sample.jsonl"
    return composed_settings(*SMALL[2:], f"outputs_dir={outputs}", data, *overrides)


def command(*arguments, cwd=ROOT, columns=200):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HYDRA_FULL_ERROR": "0", "COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "run.py", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )


def test_a_run_makes_its_baseline_and_rows(tmp_path):
    record = evaluate_run(settings(tmp_path, "kv_ratio=0.3"))
    assert record.finished
    both = {r.hash: r for r in runs(tmp_path)}
    assert set(both) == {record.hash, record.baseline}
    baseline = both[record.baseline]
    assert [r["example"] for r in record.rows()] == [r["example"] for r in baseline.rows()] == ["sample-0", "sample-1"]
    for row, full in zip(record.rows(), baseline.rows(), strict=True):
        assert row["prompt_digest"] == full["prompt_digest"] and len(row["prompt_digest"]) == 16
        assert (row["finish_reason"], row["stop_reason"]) in {("length", None), ("stop", "</s>")}
        assert row["finish_reason"] == "stop" or row["new_tokens"] == 4
        assert row["receipt"]["first_eviction_step"] == 0
        assert full["receipt"]["first_eviction_step"] is None
        assert row["receipt"]["slots"] == int(0.3 * row["prompt_tokens"]) - 1 + (row["new_tokens"] == 0)
        assert 0 < row["receipt"]["attention_kept"] < 1
        assert row["receipt"]["peak_kv_bytes"] >= row["receipt"]["kv_bytes"] > 0
        assert set(row["metrics"]) == {"rouge1", "rouge2", "rougeL", "rougeLsum", "nll"}
        assert row["seconds"]["ttft"] > 0
    assert baseline.labels["method"] == "full"
    assert record.env["transformers"]


def test_a_second_run_does_nothing_and_a_longer_one_only_the_rest(tmp_path, capsys):
    first = evaluate_run(settings(tmp_path))
    before = (first.path / "examples.jsonl").read_bytes()
    capsys.readouterr()
    evaluate_run(settings(tmp_path))
    assert "2 of 2 rows are there already" in capsys.readouterr().out
    assert (first.path / "examples.jsonl").read_bytes() == before
    more = evaluate_run(settings(tmp_path, "limit=3"))
    assert more.hash == first.hash
    assert (first.path / "examples.jsonl").read_bytes().startswith(before)
    assert len(more.rows()) == 3


def test_an_example_is_tokenised_once(tmp_path, monkeypatch):
    """For what is checked before weights load, for the baseline and for the run."""
    import kvexp.run.prompts as module

    made, good = [], module.prompt_of
    monkeypatch.setattr(module, "prompt_of", lambda *given: made.append(given[-1].id) or good(*given))
    evaluate_run(settings(tmp_path))
    assert made == ["sample-0", "sample-1"]
    evaluate_run(settings(tmp_path, "limit=3"))
    assert made[2:] == ["sample-0", "sample-1", "sample-2"], "rows that are there: whether their prompts are the same"


def without_times(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_rerun_gives_the_same_rows_whatever_the_batch_size(tmp_path):
    one, two = (evaluate_run(settings(tmp_path / b, "method=keyformer", f"batch_size={b}")) for b in ("1", "2"))
    ones, twos = without_times(one.rows()), without_times(two.rows())
    for a, b in zip(ones, twos, strict=True):
        for bytes_ in ("kv_bytes", "peak_kv_bytes"):  # padding is memory too
            a["receipt"].pop(bytes_), b["receipt"].pop(bytes_)
        assert (a["receipt"].pop("batch_size"), b["receipt"].pop("batch_size")) == (1, 2)
        assert a["receipt"].pop("attention_kept") == pytest.approx(b["receipt"].pop("attention_kept"), abs=1e-5)
        assert a["metrics"].pop("nll") == pytest.approx(b["metrics"].pop("nll"), abs=1e-4)
        assert a == b
    again = evaluate_run(settings(tmp_path / "again", "method=keyformer"))
    assert without_times(again.rows()) == without_times(one.rows())


def test_a_failure_is_recorded_and_taken_up_again(tmp_path, monkeypatch):
    import kvexp.run.batches as module

    good = module.outputs_of_batches
    calls = []

    def breaks(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of luck")
        return good(*arguments)

    monkeypatch.setattr(module, "outputs_of_batches", breaks)
    with pytest.raises(RuntimeError, match="out of luck"):
        evaluate_run(settings(tmp_path))
    failed = next(r for r in runs(tmp_path) if r.labels["method"] == "h2o")
    assert failed.failure()["message"] == "out of luck"
    assert len(failed.rows()) == 1
    record = evaluate_run(settings(tmp_path))
    assert record.failure() is None
    assert len(record.rows()) == 2


def test_prompts_are_cut_as_the_task_says():
    class Words:
        def __call__(self, text, add_special_tokens=True, verbose=True):
            words = text.split()
            return type("Encoding", (), {"input_ids": (["<s>"] if add_special_tokens else []) + words})

    example = Example("a", "do this: one two three four five so", "", "", "do this: ", "one two three four five", " so")
    base = {"prompt_share": 0.5}
    middle = tokenize(example, Stories(**base), Words(), 99, chat=False)
    assert (middle.truncated, middle.tokens) == (False, 9)
    object.__setattr__(task := Stories(**base), "truncate", "middle")
    cut = tokenize(example, task, Words(), 6, chat=False)
    assert (cut.ids, cut.truncated) == (["<s>", "do", "this:", "one", "two", "so"], True)
    assert tokenize(example, task, Words(), 4, chat=False).skipped == "too long"
    object.__setattr__(task, "truncate", "right")
    assert tokenize(example, task, Words(), 4, chat=False).ids == ["<s>", "do", "this:", "one"]
    object.__setattr__(task, "truncate", "skip")
    assert tokenize(example, task, Words(), 8, chat=False).skipped == "too long"


def test_a_continuation_is_tokenised_where_it_stands(stories260k):
    """SentencePiece gives a text that starts with a space one token more than the same words inside a text have."""
    from kvexp.hf import load_tokenizer
    from kvexp.run.prompts import TokenizedExample, continuation

    tokenizer = load_tokenizer(stories260k)
    text, words = "Once upon a time", " there was a girl named Lily."
    prompt = TokenizedExample(Example("a", text, words, words), text, tokenizer(text).input_ids)
    ids = continuation(prompt, tokenizer, chat=False)
    assert prompt.ids + ids == tokenizer(text + words).input_ids
    assert len(ids) < len(tokenizer(words, add_special_tokens=False).input_ids)


def test_a_cut_prompt_is_tokenised_as_one_text(stories260k):
    from kvexp.hf import load_tokenizer
    from kvexp.tasks import XSum

    tokenizer = load_tokenizer(stories260k)
    parts = ("Summarize:\n", "Lily went to the park. " * 30, "\nSummary:")
    example = Example("a", "".join(parts), "x", "", *parts)
    cut = tokenize(example, XSum(), tokenizer, 60, chat=False)
    assert cut.truncated
    assert cut.ids == tokenizer(cut.text).input_ids
    assert 50 < len(cut.ids) <= 60
    assert cut.text.startswith(parts[0])
    assert cut.text.endswith(parts[2])


def test_a_chat_prompt_is_what_the_template_makes():
    class Chat:
        def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
            return f"[INST] {messages[0]['content'].strip()} [/INST]"

        def __call__(self, text, add_special_tokens, verbose):
            assert not add_special_tokens
            return type("Encoding", (), {"input_ids": text.split()})

    example = Example("a", "do: so much \n", "x", "", "do: ", "so much", " \n")
    assert tokenize(example, Stories(), Chat(), 99, chat=True).text == "[INST] do: so much [/INST]"
    # An answer's opening stands behind the template, where the question is: in the prompt, or fed after the eviction.
    opened = replace(example, opening=" Much is")
    assert tokenize(opened, Stories(), Chat(), 99, chat=True).text == "[INST] do: so much [/INST] Much is"
    asked = replace(opened, question="How?")
    hidden = tokenize(asked, Stories(), Chat(), 99, chat=True)
    assert (hidden.text, hidden.question_text) == ("[INST] do: so much \n", "How? [/INST] Much is")
    assert hidden.ids + hidden.question_ids == ["[INST]", "do:", "so", "much", "How?", "[/INST]", "Much", "is"]
    # What the prompt itself begins of an answer is moved there; without a template it stays.
    begun = Example("a", "so much", "x", question=" How? Much is", questions=(" How? Much is",), begun=" Much is")
    moved = tokenize(begun, Stories(), Chat(), 99, chat=True)
    assert (moved.text, moved.question_text) == ("[INST] so much", " How? [/INST]Much is")
    whole = {"prompt": "so much How? Much is", "suffix": " How? Much is", "question": "", "questions": ()}
    shown = replace(begun, **whole)
    assert tokenize(shown, Stories(), Chat(), 99, chat=True).text == "[INST] so much How? [/INST]Much is"
    assert tokenize(shown, Stories(), byte_tokenizer(), 99, chat=False).text == shown.prompt


def test_weights_replaced_in_place_are_another_model(tmp_path):
    from tiny import stock

    from kvexp.run.model_spec import ModelSpec

    stock("gpt2").save_pretrained(tmp_path)
    node = {"kind": "pretrained", "path": str(tmp_path)}
    before = ModelSpec.of(node).identity()
    assert ModelSpec.of(node).identity() == before
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert ModelSpec.of(node).identity() != before


def test_what_was_set_by_hand_is_shown_and_the_baseline_shows_its_own():
    words = ["method.recent_ratio=0.2", "seed=3", "generation.num_beams=2", "kv_ratio=0.4", "budget=tokens"]
    made = composed_settings(*words, typed=words)
    assert made.labels["setting"] == "budget=tokens generation.num_beams=2 method.recent_ratio=0.2 seed=3"
    full = made.baseline().labels
    assert (full["setting"], full["tokens"], full["kv_ratio"]) == ("generation.num_beams=2", None, None)


def test_help_is_quick_and_complete():
    import time

    start = time.perf_counter()
    done = command("--help", columns=80)
    assert done.returncode == 0
    assert "method: a2sf" in done.stdout
    first = done.stdout.partition("== Config ==")[0]
    assert max(map(len, first.splitlines())) <= 80 and "first_look" in first and "keyformer_fig7" not in first
    named = re.findall(r"[\w.]+", re.search(r"^experiment: .*(?:\n  .*)*", first, re.M)[0])
    assert len(named) < 40 and named.count("first_look") == 1
    assert "torch" not in done.stderr
    assert time.perf_counter() - start < 20  # 2 s on an idle machine; this guards against importing torch


def test_the_shell_completes_options():
    line = "python run.py method=h2"
    env = os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(
        [sys.executable, "run.py", "-sc", "query=bash"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == [f"method={name}" for name in options("method") if name.startswith("h2")]


NAMED = (  # refused, in the name of the setting
    *("kv_ratio=0", "kv_ratio=1.5", "kv_ratio=half", "kv_ratio=null", "limit=0", "limit=two", "batch_size=0"),
    *("batch_size=1.5", "seed=x", "cache.mode=drop", "cache.positions=new", "cache.evict_every=0"),
    *("cache.evict_at_prefill=maybe", "cache.observe=all", "budget.tokens=8"),
    *("method.recent_ratio=2", "method.recent_ratio=x", "+method.alpha=1", "generation.num_beams=0"),
    *("generation.max_new_tokens=0", "generation.max_new_tokens=many", "generation.top_p=2"),
    *("generation.min_new_tokens=99", "task.prompt_share=1", "task.split=3", "+task.colour=red", "task.truncate=left"),
    *("model.dtype=int4", "model.kind=magic", "model.seed=x", "+model.colour=red", "+cache.colour=red"),
    *(f"limit={10**30}", f"seed=-{10**30}", f"generation.top_k={1 << 62}"),
    *(f"generation.eos=[1,{10**30}]", f"generation.num_beams={1 << 61}", f"cache.evict_every={1 << 61}"),
    *("kv_ratio=nan", "kv_ratio=[0.1]", "seed=-1", "cache.beyond_context=1", "generation.top_k=-1"),
    *("generation.eos=stop", "generation.prefill_chunk=0", "task.seed=-1", "task.sample=random"),
    *("task.max_prompt_tokens=0", "task.streaming=maybe", "model.device=cuda:7", "model.device=abacus"),
    *("model.chat=true", "outputs_dir=5"),
)
VALUES = {
    **{word: word.partition("=")[0].lstrip("+") for word in NAMED},
    "kv_ratio=-0.1": "got -0.1",
    "budget.of=words": "one of prompt, padded, sequence, generated, got 'words'",
    "method.impl=fast": "one of real_drop, mask, got 'fast'",
    "method._target_=os.system": "must name a class of kvexp.methods",
    "method._target_=kvexp.methods.Nothing": "there is no kvexp.methods.Nothing",
    "task.data_files=/nowhere.jsonl": "/nowhere.jsonl",
    "task.text_field=story": "row 1 of .*sample.jsonl has no field 'story'",
    "task.pad_to=400": "budget.of=prompt leaves them out: set budget.of=padded",
    "model.family=bert": "model family 'bert' is not supported: it is an encoder",
    "+model.config.hidden_sise=3": "'hidden_sise' is not a setting of a llama configuration",
    "model.config.num_attention_heads=5": "model.config cannot be that of a llama model: .*hidden size",
}


@pytest.mark.parametrize("override", VALUES)
def test_bad_values_are_said_before_a_model_loads(override, tmp_path, monkeypatch):
    import kvexp.run.batches as module
    from kvexp.util.errors import ConfigError

    monkeypatch.setattr(module, "load", lambda spec: pytest.fail("a model was loaded"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=VALUES[override]):
        evaluate_run(settings(tmp_path, override))


def folder(path, config=None, **files):
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(config)
    for name, data in files.items():
        (path / name.replace("_bin", ".bin")).write_bytes(data)


PLACES = {
    "model.path=none": "model folder .*none does not exist",
    "model.path=empty": "empty has no config.json: expected",
    "model.path=text.txt": "text.txt is a file, and no GGUF file",
    "model.path=bert": "model family 'bert' is not supported",
    "model.path=weightless": "weightless has no weights: expected",
    "model.path=pickled": r"pickled holds only pickled weights \(weights.bin\), which can run code when read",
    "model.path=broken": "cannot load the configuration in .*broken: ",
    "task.data_files=empty": "empty is a folder; name its files",
    "task.data_files=broken.jsonl": "line 1 of .*broken.jsonl is not JSON",
    "outputs_dir=text.txt": "choose another outputs_dir",
}


@pytest.mark.parametrize("place", PLACES)
def test_places_that_hold_something_else_are_said(place, tmp_path, monkeypatch):
    import kvexp.run.batches as module
    from kvexp.util.errors import ConfigError

    folder(tmp_path / "empty")
    folder(tmp_path / "bert", '{"model_type": "bert"}')
    folder(tmp_path / "weightless", '{"model_type": "llama"}')
    folder(tmp_path / "pickled", '{"model_type": "llama"}', weights_bin=b"")
    folder(tmp_path / "broken", "{")
    for name, text in {"text.txt": "x", "broken.jsonl": '{"text":\n'}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "load", lambda spec: pytest.fail("a model was loaded"))
    key, _, name = place.partition("=")
    with pytest.raises(ConfigError, match=PLACES[place]):
        evaluate_run(
            settings(tmp_path / "out", *(["model=local"] if "model" in key else []), f"{key}={tmp_path / name}")
        )
