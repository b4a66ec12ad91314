"""Options that no task can work with: refused before a model loads, by a message that names the setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvexp.tasks import (
    GSM8K,
    CNNDailyMail,
    ContextQA,
    Dialogue,
    GovReport,
    Instructions,
    InstructionsLeak,
    LMEval,
    LongAnswers,
    LongBench,
    Needle,
    News,
    NewsNeedle,
    NewsQA,
    Perplexity,
    Soda,
    SodaTurns,
    Stories,
    Task,
    TestbedChoice,
    TestbedDialogue,
    TestbedNeedle,
    TestbedQA,
    TestbedSummary,
    XSum,
)
from kvexp.util.errors import ConfigError
from kvexp.util.fields import field_types

FIXTURES = Path(__file__).parents[1] / "fixtures"
CNN = CNNDailyMail(data_files=str(FIXTURES / "cnn_dailymail.jsonl"))
TALES = Stories(data_files=str(FIXTURES / "stories.jsonl"))
SUMS = GSM8K(data_files=str(FIXTURES / "gsm8k.jsonl"))
TEXTS = Perplexity(data_files=str(FIXTURES / "perplexity.jsonl"), prefill_tokens=20, total_tokens=60)
BENCH = LongBench(subset="qasper", data_files=str(FIXTURES / "longbench"))
HAY = Needle(
    haystack=str(FIXTURES / "haystack"),
    lengths=(300,),
    needles=("The best cheese in Ghent is blue.",),
    questions=("What is the best cheese in Ghent?",),
    answers=("The blue cheese",),
)
HARNESS = LMEval(tasks=("piqa",), data_dir=str(FIXTURES / "lm_eval"))

REFUSED: list[tuple[Task, dict[str, Any], str]] = [
    (CNN, {"limit": 0}, "task.limit must be at least 1"),
    (CNN, {"limit": "ten"}, "task.limit must be a whole number or null"),
    (CNN, {"limit": True}, "task.limit must be a whole number or null"),
    (CNN, {"truncate": "left"}, "task.truncate must be one of middle, halves, right, skip"),
    (CNN, {"sample": "random"}, "task.sample must be one of first, shuffled, with_replacement"),
    (CNN, {"sample": "with_replacement"}, "set task.limit"),
    (CNN, {"seed": -1}, "task.seed"),
    (CNN, {"max_new_tokens": None}, "task.max_new_tokens must be a whole number"),
    (CNN, {"min_new_tokens": 129}, "task.min_new_tokens=129 is above task.max_new_tokens=128"),
    (CNN, {"max_prompt_tokens": -5}, "task.max_prompt_tokens must be at least 1"),
    (CNN, {"pad_to": 4096}, "task.pad_to=4096 is above task.max_prompt_tokens=1920"),
    (CNN, {"streaming": "no"}, "task.streaming must be true or false"),
    (CNN, {"split": None}, "task.split must be a text"),
    (CNN, {"template": "alpacca"}, "task.template must be null, one of alpaca, helm, plain, alpaca_last, plain_last"),
    (CNN, {"template": "{input} {input}"}, "task.template"),
    (CNN, {"template": "{instruction} {input} {instruction_after}"}, "task.template"),
    (CNN, {"template": "plain", "question": "after_eviction"}, "task.template with the instruction behind {input}"),
    (CNN, {"template": "Now: {input} ", "question": "after_eviction"}, "task.template"),
    (CNN, {"stop": ""}, "task.stop"),
    (CNN, {"rouge_tokenizer": "words"}, "task.rouge_tokenizer must be one of default, unicode"),
    (TALES, {"prompt_share": 0}, "task.prompt_share"),
    (TALES, {"prompt_share": float("nan")}, "task.prompt_share"),
    (TALES, {"continuation_words": 0}, "task.continuation_words"),
    (TALES, {"truncate": "middle"}, "task.truncate must be skip for stories"),
    (TEXTS, {"prefill_tokens": 0}, "task.prefill_tokens"),
    (TEXTS, {"bucket_tokens": 0}, "task.bucket_tokens"),
    (TEXTS, {"total_tokens": 20}, "task.total_tokens=20 must be above task.prefill_tokens=20"),
    (SUMS, {"shots": 11}, "task.shots=11, but task.prompt_file=kvexp/conf/task/gsm8k_cot.txt has 10"),
    (SUMS, {"shots": -1}, "task.shots must be at least 0"),
    (SUMS, {"shots": 0, "question": "after_eviction"}, "set task.shots to 1 or more"),
    (SUMS, {"prompt_file": "nowhere.txt"}, "task.prompt_file=nowhere.txt: cannot read it"),
    (BENCH, {"extended": True, "subset": "musique"}, "LongBench-E has no musique"),
    (BENCH, {"chat_wrap": "yes"}, "task.chat_wrap must be one of official, always, never"),
    (BENCH, {"chat_frame": "[INST]"}, "task.chat_frame"),
    (HAY, {"haystack": None}, "set one of task.haystack=FOLDER"),
    (HAY, {"filler": "x"}, "set one of task.haystack=FOLDER"),
    (HAY, {"haystack": None, "filler": " "}, "task.filler is empty"),
    (HAY, {"haystack": "nowhere"}, "task.haystack=nowhere: there is no such folder or file"),
    (HAY, {"lengths": ()}, "task.lengths is empty"),
    (HAY, {"lengths": ("a",)}, "task.lengths[0] must be a whole number"),
    (HAY, {"lengths": (300, 0)}, "task.lengths[1] must be at least 1"),
    (HAY, {"lengths": 5}, "task.lengths must be a list"),
    (HAY, {"lengths": (100000,)}, "characters, which cannot be 100000 tokens"),
    (HAY, {"depths": (101,)}, "task.depths[0]"),
    (HAY, {"answers": ("a", "b")}, "task.answers"),
    (HAY, {"questions": ("a", "b")}, "task.questions"),
    (HAY, {"after": "now"}, "task.after must hold {question} once"),
    (HAY, {"repeats": 0}, "task.repeats"),
    (HAY, {"sample": "shuffled", "limit": 3}, "task.sample must be first for needle"),
    (NewsNeedle(), {"depths": ()}, "task.depths is empty"),
    (NewsNeedle(shared_context=True, question="after_eviction"), {"depths": (0, 24)}, "hide a needle twice"),
    (NewsQA(), {"question": "later"}, "task.question must be one of in_prompt, after_eviction"),
    (NewsQA(), {"shared_context": True, "question": "in_prompt"}, "set task.question=after_eviction, or"),
    (News(), {"sample": "shuffled", "limit": 1}, "task.sample must be first for news"),
    (Instructions(), {"note_words": 0}, "task.note_words"),
    (InstructionsLeak(), {"sample": "shuffled", "limit": 2}, "must be first for instructions_leak"),
    (LongAnswers(), {"kinds": ("poem",)}, "task.kinds[0] must be one of story, facts"),
    (LongAnswers(), {"kinds": ("story", "story")}, "task.kinds"),
    (ContextQA(), {}, "set task.data_files=PATH"),
    (TestbedSummary(), {"marked": 0}, "task.marked"),
    (TestbedSummary(), {"marked": 10, "facts": 9}, "task.facts=9 must be at least task.marked=10"),
    (TestbedSummary(), {"facts": 41}, "task.facts"),
    (TestbedSummary(), {"split": "dev"}, "task.split must be one of train, validation, test"),
    (TestbedSummary(), {"data_files": "x.json"}, "makes its own rows"),
    (TestbedSummary(), {"tokens": 64}, "task.tokens must be at least 112 to hold task.facts=14"),
    (TestbedSummary(), {"tokens": 1_000_001}, "task.tokens"),
    (TestbedDialogue(), {"recalls": 5}, "task.recalls"),
    (TestbedDialogue(), {"per_recall": 9}, "task.per_recall"),
    (TestbedDialogue(), {"facts": 0, "updated": 0}, "task.facts"),
    (TestbedNeedle(), {"lengths": ()}, "task.lengths"),
    (TestbedNeedle(), {"lengths": (41,)}, "task.lengths"),
    (TestbedNeedle(), {"depths": ()}, "task.depths"),
    (TestbedNeedle(), {"tokens": 512}, "task.lengths instead"),
    (TestbedQA(), {"per_document": 20}, "task.facts"),
    (TestbedChoice(), {"options": 7}, "task.options"),
    (TestbedChoice(), {"num_fewshot": 14}, "task.num_fewshot=14 needs"),
    (TestbedChoice(), {"num_fewshot": 16, "facts": 20}, "task.num_fewshot must be in [0, 15]"),
    (HARNESS, {"tasks": ()}, "task.tasks is empty"),
    (HARNESS, {"tasks": ("nowhere/own.yaml",)}, "task.tasks: nowhere/own.yaml"),
    (HARNESS, {"data_dir": "/nowhere"}, "task.data_dir=/nowhere is no folder"),
    (HARNESS, {"tasks": ("openbookqa",), "num_fewshot": 3}, "split train of openbookqa holds 2 rows"),
    (HARNESS, {"num_fewshot": 4, "fewshot_split": "validation"}, "holds 4 rows, of which the item asked about may be"),
    (HARNESS, {"num_fewshot": -1}, "task.num_fewshot"),
    (HARNESS, {"protocol": "rowmask"}, "task.protocol must be one of prefill_then_step, row_mask, a2sf, h2o"),
    (HARNESS, {"question": "after_eviction"}, "set task.num_fewshot to 1 or more"),
    (HARNESS, {"question": "after_eviction", "num_fewshot": 1, "protocol": "h2o"}, "set task.protocol=prefill_then"),
    (HARNESS, {"mask": "global"}, "task.mask=global belongs to protocol=row_mask"),
    (HARNESS, {"protocol": "row_mask", "mask": "middle"}, "task.mask must be one of local, global"),
    (HARNESS, {"protocol": "a2sf", "padded_batch": 0}, "task.padded_batch"),
    (HARNESS, {"truncate": "middle"}, "task.truncate must be one of left, skip"),
    (HARNESS, {"max_new_tokens": 9}, "task.max_new_tokens"),
]


@pytest.mark.parametrize(("task", "options", "words"), REFUSED, ids=[f"{t.name} {o}" for t, o, _ in REFUSED])
def test_a_bad_option_is_refused_by_its_name(task: Task, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(task, **options).check()
    assert words in str(caught.value)


def first(file: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((FIXTURES / file).read_text("utf-8").splitlines()[0])
    return row


TREC, TALK, WHO = first("longbench/trec.jsonl"), first("soda.jsonl"), {"question": "Where is Ann?", "answers": ["Rome"]}
BAD_ROWS: list[tuple[Task, dict[str, Any], str]] = [
    (LongBench(subset="trec"), TREC | {"dataset": "hotpotqa_e"}, "set task.subset=hotpotqa task.extended=true"),
    (LongBench(subset="trec"), TREC | {"answers": "Date"}, "field 'answers' must be a list of texts, got 'Date'"),
    (LongBench(subset="trec"), TREC | {"answers": []}, "field 'answers' must be a list of texts, got []"),
    (LongBench(subset="trec"), {k: v for k, v in TREC.items() if k != "answers"}, "it has: input, context, length"),
    (LongBench(subset="trec"), TREC | {"all_classes": None}, "field 'all_classes' must list the class names"),
    (LongBench(subset="trec"), TREC | {"context": None}, "has no field 'context' (or null there)"),
    (LongBench(subset="trec"), TREC | {"input": None}, "name the field that holds it with task.input_field"),
    (Soda(), TALK | {"speakers": ["Ines"]}, "field 'speakers' must be a list of at least 2 texts, got ['Ines']"),
    (Soda(), TALK | {"dialogue": "text"}, "field 'dialogue' must be a list of at least 2 texts, got 'text'"),
    (Soda(), TALK | {"narrative": ""}, "field 'narrative' is empty"),
    (GSM8K(), {"question": "How many?", "answer": "Many."}, "field 'answer' has no number"),
    (GSM8K(), {"input": "How many?", "answer": "1"}, "has no field 'question'"),
    (ContextQA(), {"context": "T"}, "field 'questions' must be a list of objects"),
    (ContextQA(), {"context": "T", "questions": []}, "field 'questions' must be a list of objects"),
    (ContextQA(), {"questions": [WHO]}, "has no field 'context'"),
    (ContextQA(), {"context": "T", "questions": [{"question": "Q?"}]}, "field 'answers' must be a text or a list of"),
    (ContextQA(), {"context": "T", "questions": [WHO | {"answers": ["", "x"]}]}, "none of them empty, got"),
    (ContextQA(), {"context": "T", "questions": [{"answers": "x"}]}, "has no field 'question'"),
]


@pytest.mark.parametrize(("task", "row", "words"), BAD_ROWS, ids=[f"{t.name} {w}" for t, _, w in BAD_ROWS])
def test_a_bad_row_is_named(tmp_path: Path, task: Task, row: dict[str, Any], words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        replace(task, data_files=str(file)).check()
    assert f"row 1 of {file}" in str(caught.value) and words in str(caught.value)


def test_an_unknown_data_set_of_longbench_is_refused_when_it_is_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.subset must be one of narrativeqa, qasper"):
        LongBench(subset="gov")


def test_a_class_with_another_default_keeps_the_range_of_the_option() -> None:
    ranged = [name for name, hint in field_types(Task).items() if "Annotated" in str(hint) or "Literal" in str(hint)]
    for task in {type(task) for task, _, _ in REFUSED} | {GovReport, Soda, SodaTurns, Dialogue, XSum}:
        assert [name for name in ranged if field_types(task)[name] in (int, int | None, str)] == [], task
