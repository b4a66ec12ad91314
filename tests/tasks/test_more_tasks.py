"""GovReport, SODA, GSM8K and perplexity: prompts to the letter, scores by hand, mistakes before a model loads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import SHARED
from test_conf import composed

from kvexp.run.batches import evaluate_run
from kvexp.run.model_spec import load
from kvexp.run.settings import settings_of
from kvexp.tasks import GSM8K, GovReport, Perplexity, Soda
from kvexp.tasks.qa import last_number
from kvexp.util import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"
REPORTS = GovReport(data_files=str(FIXTURES / "govreport.jsonl"))
TALK = Soda(data_files=str(FIXTURES / "soda.jsonl"))
SUMS = GSM8K(data_files=str(FIXTURES / "gsm8k.jsonl"))
TEXTS = Perplexity(data_files=str(FIXTURES / "perplexity.jsonl"), prefill_tokens=20, total_tokens=60, bucket_tokens=16)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# ---- GovReport


def test_govreport_prompt():
    REPORTS.check()
    first, second, _ = REPORTS.examples()
    assert first.prefix.endswith(
        "### Instruction:\nYou are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "### Input:\n"
    )
    assert first.suffix == "\n\n### Response:" and first.body.startswith("The Office of Harbors")
    assert first.reference.startswith("The office runs 41") and "{silos}" in second.prompt
    assert (REPORTS.max_new_tokens, REPORTS.max_prompt_tokens, REPORTS.split) == (512, 8192, "test")
    assert set(REPORTS.score(first.reference, first.reference, first).values()) == {100.0}


def test_longbenchs_rows_make_the_same_prompts(tmp_path):
    rows = [json.loads(line) for line in (FIXTURES / "govreport.jsonl").read_text().splitlines()]
    rows = [{"context": row["report"], "answers": [row["summary"], "another"], "_id": "a"} for row in rows]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "gov_report.jsonl", *rows)
    fields = {"input_field": "context", "reference_field": "answers"}
    task = GovReport(data_files=str(tmp_path), **fields)  # a folder, as the unpacked data.zip
    task.check()
    assert [(e.prompt, e.reference) for e in task.examples()] == [(e.prompt, e.reference) for e in REPORTS.examples()]
    write(tmp_path / "gov_report.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"2 times \(data/gov_report.jsonl, gov_report.jsonl\); name one of them"):
        GovReport(data_files=str(tmp_path), **fields).check()
    (tmp_path / "gov_report.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"'report'.*it has: context, answers"):
        GovReport(data_files=str(tmp_path)).check()
    with pytest.raises(ConfigError, match=r"cannot fetch zai-org/LongBench/data.zip"):
        GovReport(hub_id="zai-org/LongBench", hub_file="data.zip", **fields).check()


# ---- SODA


def test_soda_prompt():
    TALK.check()
    first, second, _ = TALK.examples()
    assert first.prompt == (
        "Ines mends a kite for her neighbour. <sep> Generate a dialogue between Ines and Neighbour given above "
        "narrative. <sep> The tail was torn."
    )
    assert (first.body, first.id) == ("Ines mends a kite for her neighbour.", "7001")
    assert first.reference == "Can it fly again?\nIt can.\nThen let us try it on the hill!"
    assert second.reference == "We found three.Which one is yours?"  # line ends inside a turn go, as in the release
    glued = next(replace(TALK, turn_separator="").examples())
    assert glued.reference == "Can it fly again?It can.Then let us try it on the hill!"


def test_soda_scores():
    first = next(TALK.examples())
    good = "<turn> Can it fly again? <end>\nIt can.<sep>\nThen let us try it on the hill!"
    assert set(TALK.score(good, first.reference, first).values()) == {100.0}
    # can it | can it fly again it can then let us try it on the hill: 2 of 2 and 2 of 14
    assert TALK.score("can it", first.reference, first)["rouge1"] == pytest.approx(25.0)
    swapped = "It can.\nCan it fly again?"
    assert TALK.score(swapped, "Can it fly again?\nIt can.", first)["rougeLsum"] == 100
    assert replace(TALK, join_lines=True).score("fly\nagain", "fly again", first)["rouge1"] == 0  # flyagain


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speakers": ["Ines"]}, "row 1 of {path}: field 'speakers' must be a list of at least 2 texts, got ['Ines']"),
        ({"dialogue": ["One turn."]}, "field 'dialogue' must be a list of at least 2 texts"),
        ({"dialogue": "text"}, "field 'dialogue' must be a list of at least 2 texts, got 'text'"),
        ({"narrative": ""}, "field 'narrative' is empty"),
    ],
)
def test_bad_dialogues(tmp_path, change, words):
    row = json.loads((FIXTURES / "soda.jsonl").read_text().splitlines()[0])
    path = write(tmp_path / "rows.jsonl", {**row, **change})
    with pytest.raises(ConfigError) as caught:
        Soda(data_files=path).check()
    assert words.replace("{path}", path) in str(caught.value)


# ---- GSM8K


def test_gsm8k_prompt():
    SUMS.check()
    first, _, third = SUMS.examples()
    assert first.prompt.startswith("Question: Angelo and Melanie want to plan how many hours")
    assert first.prompt.count("\n\nQuestion: ") == 8
    assert first.prompt.endswith("\n\nQuestion: A crate holds 6 jars. How many jars are in 4 crates?\n")
    assert first.prompt.count("Let's think step by step\n") == 8 and not first.prompt.endswith("step\n")
    assert third.reference.endswith("#### -3")
    later = next(replace(SUMS, question="after_eviction").examples())
    assert later.prompt + later.question == first.prompt
    assert later.question == "\n\nQuestion: A crate holds 6 jars. How many jars are in 4 crates?\n"
    none = next(replace(SUMS, shots=0).examples())
    assert none.prompt == "Question: A crate holds 6 jars. How many jars are in 4 crates?\n"


def test_pqcaches_prompt_is_its_file():
    file = SHARED / "data" / "gsm8k" / "cot_hub_prompt_hardest.txt"
    if not file.is_file():
        pytest.skip(f"no prompt at {file}")
    task = replace(SUMS, shots=10, separator="\n")
    question = "A crate holds 6 jars. How many jars are in 4 crates?"
    assert next(task.examples()).prompt == file.read_text(encoding="utf-8") + f"\nQuestion: {question}\n"


@pytest.mark.parametrize(
    ("text", "signed", "unsigned"),
    [
        ("so 1,234 in all.", 1234, 1234),
        ("5-3 = 2, or 5-3", 3, 3),  # no minus in front of a number
        ("it is -3.5 degrees", -3.5, 3.5),
        ("$-7", -7, 7),
        (".5 of it", 0.5, 0.5),
        ("18.", 18, 18),
        ("The answer is 18.00", 18, 18),
        ("none", None, None),
    ],
)
def test_the_last_number(text, signed, unsigned):
    assert last_number(text) == signed and last_number(text, signed=False) == unsigned


def test_gsm8k_scores():
    first, second, third = SUMS.examples()
    assert SUMS.score("6*4=24\nThe answer is 24\nQuestion: next? The answer is 5", first.reference, first) == {
        "accuracy": 100.0
    }
    assert SUMS.score("24 jars of 6", first.reference, first) == {"accuracy": 0.0}
    assert SUMS.score("1300.0", second.reference, second) == {"accuracy": 100.0}
    assert SUMS.score("The answer is 3", third.reference, third) == {"accuracy": 0.0}
    assert replace(SUMS, signed=False).score("The answer is 3", third.reference, third) == {"accuracy": 100.0}
    assert SUMS.score("", first.reference, first) == {"accuracy": 0.0}


def test_the_examples_are_part_of_the_data(tmp_path):
    other = tmp_path / "own.txt"
    other.write_text("Question: 1+1?\nThe answer is 2\n\nQuestion: 2+2?\nThe answer is 4\n")
    own = replace(SUMS, prompt_file=str(other), shots=2)
    assert next(own.examples()).prompt.startswith("Question: 1+1?\nThe answer is 2\n\nQuestion: 2+2?")
    assert len({own.fingerprint(), SUMS.fingerprint(), replace(SUMS, shots=2).fingerprint()}) == 3


def test_a_solution_without_a_number(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "How many?", "answer": "Many."})
    with pytest.raises(ConfigError, match=r"row 1 of .*: field 'answer' has no number"):
        GSM8K(data_files=path).check()
    with pytest.raises(ConfigError, match=r"has no field 'question'"):
        GSM8K(data_files=write(tmp_path / "rows.jsonl", {"input": "How many?", "answer": "1"})).check()


def test_real_problems():
    path = SHARED / "data" / "gsm8k" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"no data at {path}")
    task = GSM8K(data_files=str(path))
    examples = list(task.examples())
    assert len({e.id for e in examples}) == len(examples) == 1319
    assert all(task.score(e.reference, e.reference, e)["accuracy"] == 100 for e in examples)
    assert sum(last_number(e.reference) < 0 for e in examples) == 2


# ---- perplexity


def test_a_text_is_parted_at_words_by_tokens():
    first = next(TEXTS.examples())
    made = TEXTS.fit(first, lambda text: len(text.split()), 1 << 40)
    words = first.prompt.split()
    assert made.prompt.split() == words[:20] and made.continuation.split() == words[20:60]
    assert made.continuation.startswith(" ") and first.prompt.startswith(made.prompt + made.continuation)
    assert made.info == {"prefilled": 20}
    by_three = TEXTS.fit(first, lambda text: (len(text) + 2) // 3, 1 << 40)
    assert by_three.prompt == first.prompt[: len(by_three.prompt)] and not first.prompt[len(by_three.prompt)].strip()
    assert 17 <= by_three.info["prefilled"] <= 20


def test_buckets_by_hand():
    made = replace(next(TEXTS.examples()), info={"prefilled": 20})
    logprobs = [-1.0] * 12 + [-2.0] * 16 + [-4.0] * 3  # positions 20-31, 32-47, 48-50
    metrics, info = TEXTS.score_nll(logprobs, made)
    assert metrics == {"nll": pytest.approx((12 + 32 + 12) / 31)}
    assert info["buckets"] == [
        {"from": 20, "to": 32, "nll": 1.0},
        {"from": 32, "to": 48, "nll": 2.0},
        {"from": 48, "to": 51, "nll": 4.0},
    ]
    small = TEXTS.score_nll([-1.0, -3.0], replace(made, info={"prefilled": 21}))[1]
    assert small["buckets"] == [{"from": 21, "to": 23, "nll": 2.0}]
    edge = TEXTS.score_nll([-1.0] * 16, replace(made, info={"prefilled": 16}))[1]
    assert edge["buckets"] == [{"from": 16, "to": 32, "nll": 1.0}]


def test_concatenated_texts():
    rows = [json.loads(line)["text"] for line in (FIXTURES / "perplexity.jsonl").read_text().splitlines()]
    (only,) = replace(TEXTS, concatenate=True).examples()
    assert only.prompt == "\n\n".join(rows)
    (two,) = replace(TEXTS, concatenate=True, limit=2).examples()
    assert two.prompt == "\n\n".join(rows[:2]) and two.id != only.id


def test_lengths_that_cannot_be():
    third = list(TEXTS.examples())[2]
    short = replace(TEXTS, prefill_tokens=21).fit(third, lambda text: len(text.split()), 1 << 40)
    assert short.skipped.startswith("too short to prefill task.prefill_tokens=21 and judge some tokens; lower it")
    with pytest.raises(ConfigError, match=r"task.total_tokens=60, but the model holds 59 positions"):
        TEXTS.fit(third, lambda text: len(text.split()), 59)


OWN = ["task=perplexity", "task.prefill_tokens=40", "task.total_tokens=150", "task.bucket_tokens=50", "limit=1"]


def settings(folder, *overrides):
    """A run of the first text on the tiny byte model."""
    return settings_of(*composed(*OWN, f"outputs_dir={folder}", f"task.data_files={TEXTS.data_files}", *overrides))


def perplexity(folder, *overrides):
    (row,) = evaluate_run(settings(folder, *overrides)).rows()
    return row


def test_full_attention_gives_the_models_own_likelihoods(tmp_path):
    """Token by token through the cache is one forward over the whole text, judged at every position."""
    one = settings(tmp_path, "method=full")
    (row,) = evaluate_run(one).rows()
    model, tokenizer = load(one.model)
    text = json.loads((FIXTURES / "perplexity.jsonl").read_text().splitlines()[0])["text"]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : row["prompt_tokens"] + row["info"]["nll_tokens"]]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    nll = -logits.gather(1, ids[0, 1:, None])[row["prompt_tokens"] - 1 :, 0]
    assert row["metrics"]["nll"] == pytest.approx(nll.mean().item(), abs=1e-5)
    start = row["prompt_tokens"]
    for bucket in row["info"]["buckets"]:
        part = nll[bucket["from"] - start : bucket["to"] - start]
        assert bucket["nll"] == pytest.approx(part.mean().item(), abs=1e-5)
    assert [b["to"] for b in row["info"]["buckets"][:-1]] == [50, 100]
    assert 36 < row["prompt_tokens"] == row["info"]["prefilled"] <= 40
    assert row["output"] == "" and row["receipt"]["slots"] == ids.shape[1] - 1
    assert row["new_tokens"] == row["info"]["nll_tokens"] == len(nll)


def test_eviction_goes_on_while_the_text_is_fed(tmp_path):
    evicted = perplexity(tmp_path, "budget=tokens", "budget.tokens=16", "method=window")
    assert evicted["receipt"]["slots"] == 15
    full = perplexity(tmp_path, "method=full")
    assert evicted["metrics"]["nll"] != pytest.approx(full["metrics"]["nll"], abs=1e-3)
    roomy = perplexity(tmp_path, "budget=tokens", "budget.tokens=200", "method=window")
    assert roomy["metrics"]["nll"] == pytest.approx(full["metrics"]["nll"], abs=1e-6)


def test_beyond_the_models_own_context(tmp_path):
    small = "model.config.max_position_embeddings=64"
    with pytest.raises(ConfigError, match=r"task.total_tokens=150, but the model holds 64 positions"):
        perplexity(tmp_path, small)
    row = perplexity(tmp_path, small, "cache.beyond_context=true", "budget=tokens", "budget.tokens=32")
    assert row["info"]["buckets"][-1]["to"] > 140 and math.isfinite(row["metrics"]["nll"])
