"""Questions and choices through the runner: rows that depend on nothing but their example, prefills that are shared."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass

import pandas as pd
import pytest
from commands import admit_in_test, composed
from commands import settings as composed_settings

import kvexp.generate
from kvexp.core import Budget
from kvexp.generate import continuation_logprobs
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import H2O, Keyformer
from kvexp.results.read import chosen, folders, question_of, titled
from kvexp.results.table import table, to_markdown
from kvexp.run.batches import evaluate_run
from kvexp.run.model_spec import load
from kvexp.run.prompts import continuation, tokenize
from kvexp.run.settings import settings_of
from kvexp.tasks import (
    CNNDailyMail,
    Example,
    GovReport,
    News,
    QuestionTask,
    Soda,
    TestbedDialogue,
    TestbedSummary,
    XSum,
)
from kvexp.util.errors import ConfigError

TEXTS = ("The quick brown fox jumps over the lazy dog and runs on into the wood. ", "A crow stole a piece of cheese. ")
QUESTIONS = ("A?", "To?", "B?", "Who?", "When?")  # a forward per letter
EXAMPLES = [(TEXTS[i > 2] * 2, f"\n{asked}\n") for i, asked in enumerate(QUESTIONS)]


@dataclass(frozen=True, kw_only=True)
class Reading(QuestionTask):
    """Five questions about two texts; rows made here."""

    name = "reading"
    metrics = ("hit",)
    generated = True

    kind: str = "answer"

    @property
    def needs_nll(self):
        return self.kind == "nll"

    def rows(self):
        for number, (text, asked) in enumerate(EXAMPLES[: self.limit]):
            yield f"row {number}", {"id": f"r{number}", "text": text, "asked": asked}

    def fingerprint(self):
        return "made:reading"

    def example(self, row, where):
        extra = {"choices": {"choices": (" fox", " the crow", " it")}, "nll": {"continuation": " the fox."}}
        return self.ask(row["id"], ("Text: ", row["text"], ""), row["asked"], " fox", **extra.get(self.kind, {}))

    def score(self, output, reference, example):
        return {"hit": 100.0 * (reference in output)}

    def score_choices(self, logprobs, tokens, example):
        assert len(logprobs) == len(tokens) == len(example.choices)
        return {"hit": 100.0 * (example.choices[logprobs.index(max(logprobs))] == example.reference)}


@pytest.fixture(autouse=True)
def named(monkeypatch):
    admit_in_test(monkeypatch, Reading)


def settings(outputs, task, *overrides, **changes):
    made = composed_settings("kv_ratio=0.3", "generation.max_new_tokens=4", f"outputs_dir={outputs}", *overrides)
    cache = dataclasses.replace(made.cache, **changes)
    return dataclasses.replace(made, task=task, cache=cache).identified(made.labels)


def rows_of(record, *without):
    return [
        {k: v for k, v in row.items() if k not in ("seconds", *without)}
        | {"receipt": {k: v for k, v in row["receipt"].items() if k not in ("attention_kept", *without)}}
        for row in record.rows()
    ]


AFTER = Reading(question="after_eviction")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"method": Keyformer()}, id="kf"),
        pytest.param({"budget": Budget(kv_ratio=0.3, of="sequence")}, id="seq"),
    ],
)
def test_questions_of_one_context_share_a_prefill_and_no_row_can_tell(tmp_path, prefills, monkeypatch, changes):
    import kvexp.run.batches as module

    shared = evaluate_run(settings(tmp_path / "shared", AFTER, **changes))
    counts_ahead = changes.get("budget", Budget(kv_ratio=0.3)).of == "sequence"
    assert prefills["contexts"] == 2 + (4 if counts_ahead else 2)  # the baseline has no budget that could matter
    wide = evaluate_run(settings(tmp_path / "wide", AFTER, "batch_size=3", **changes))
    monkeypatch.setattr(module, "MAX_QUESTIONS_PER_CONTEXT", 1)
    prefills.clear()
    alone = evaluate_run(settings(tmp_path / "alone", AFTER, **changes))
    assert prefills["contexts"] == 10
    assert rows_of(shared) == rows_of(alone)
    assert {row["receipt"]["batch_size"] for row in wide.rows()} == {1, 2}  # two questions have one length
    padding = ("kv_bytes", "peak_kv_bytes", "batch_size")  # padding is memory too
    assert rows_of(wide, *padding) == rows_of(alone, *padding)
    for row in shared.rows():
        assert row["receipt"]["first_eviction_step"] == 0
        assert row["seconds"]["ttft"] > 0
        assert row["prompt_tokens"] + row["question_tokens"] > row["prompt_tokens"] > 60


def test_with_full_attention_both_settings_answer_alike_and_with_eviction_not(tmp_path):
    after, within = (evaluate_run(settings(tmp_path, Reading(question=q))) for q in ("after_eviction", "in_prompt"))
    assert after.hash != within.hash
    assert [r["output"] for r in after.rows()] != [r["output"] for r in within.rows()]
    full = [{r.hash: r for r in kvexp.run.store.runs(tmp_path)}[record.baseline] for record in (after, within)]
    assert [r["output"] for r in full[0].rows()] == [r["output"] for r in full[1].rows()]
    assert [r["prompt_tokens"] + r["question_tokens"] for r in full[0].rows()] == [
        r["prompt_tokens"] for r in full[1].rows()
    ]


def test_sampled_and_beamed_answers_do_not_know_their_company(tmp_path):
    sampled, beamed = ["generation.sample=true", "generation.temperature=0.9"], ["generation.num_beams=3"]
    for kind, words in (("sampled", sampled), ("beamed", beamed)):
        made = [evaluate_run(settings(tmp_path / f"{kind}{b}", AFTER, f"batch_size={b}", *words)) for b in (1, 4)]
        outputs = [[row["output"] for row in record.rows()] for record in made]
        assert outputs[0] == outputs[1]
        assert len(set(outputs[0])) > 1


def test_a_run_that_was_cut_short_goes_on_to_the_same_rows(tmp_path):
    method = {"method": Keyformer()}
    evaluate_run(settings(tmp_path, dataclasses.replace(AFTER, limit=2), **method))
    assert rows_of(evaluate_run(settings(tmp_path, AFTER, **method))) == rows_of(
        evaluate_run(settings(tmp_path / "b", AFTER, **method))
    )


def test_a_method_that_adds_up_the_batch_shares_nothing(tmp_path, prefills):
    record = evaluate_run(settings(tmp_path, AFTER, method=H2O(score_batch="sum_all")))
    assert prefills["contexts"] == 2 + 5
    plain = evaluate_run(settings(tmp_path / "plain", AFTER))
    assert rows_of(record) == rows_of(plain)  # a batch of one adds up nothing


# -- choices


@pytest.mark.parametrize("question", [pytest.param("in_prompt", marks=pytest.mark.slow), "after_eviction"])
def test_choices_are_compared_by_their_log_probability(tmp_path, question, prefills):
    task = Reading(question=question, kind="choices")
    one, three = (evaluate_run(settings(tmp_path / str(b), task, f"batch_size={b}")) for b in (1, 3))
    model, tokenizer = load(settings(tmp_path, task).model)
    for row, other, example in zip(one.rows(), three.rows(), task.examples(), strict=True):
        prompt = tokenize(example, task, tokenizer, 999, chat=False)
        words = [continuation(prompt, tokenizer, chat=False, words=choice) for choice in example.choices]
        judged = [
            continuation_logprobs(
                *(model, [prompt.ids], [ids], H2O(), Budget(kv_ratio=0.3)),
                questions=[prompt.question_ids] if prompt.question_ids else None,
            )[0]
            for ids in words
        ]
        sums = [sum(steps) for steps in judged]
        assert row["choices"]["tokens"] == [len(ids) for ids in words] == [4, 9, 3]
        assert row["choices"]["logprobs"] == pytest.approx(sums, abs=1e-4)
        assert other["choices"]["logprobs"] == pytest.approx(sums, abs=1e-4)
        assert row["output"] == example.choices[sums.index(max(sums))]
        assert row["metrics"] == {"hit": 100.0 * (row["output"] == " fox")}
        assert row["new_tokens"] == 16
        assert row["seconds"] == {"ttft": None, "tt2t": None, "tpot": None}
        assert row["receipt"]["first_eviction_step"] == 0


def test_a_continuation_may_follow_a_question(tmp_path):
    task = Reading(question="after_eviction", kind="nll")
    record = evaluate_run(settings(tmp_path, task))
    model, tokenizer = load(settings(tmp_path, task).model)
    for row, example in zip(record.rows(), task.examples(), strict=True):
        prompt = tokenize(example, task, tokenizer, 999, chat=False)
        words = continuation(prompt, tokenizer, chat=False)
        (steps,) = continuation_logprobs(
            *(model, [prompt.ids], [words], H2O(), Budget(kv_ratio=0.3)), questions=[prompt.question_ids]
        )
        assert row["metrics"]["nll"] == pytest.approx(-sum(steps) / len(steps), abs=1e-6)
        assert math.isfinite(row["metrics"]["hit"])


# -- tokens


def test_a_context_is_cut_and_its_question_never():
    tokenizer = byte_tokenizer()
    example = Example("a", "do: one two three.", "x", "", "do: ", "one two three", ".", question=" Now?")
    whole = tokenize(example, XSum(), tokenizer, 99, chat=False)
    count = len(tokenizer("do: one two three. Now?").input_ids)
    assert (whole.size, whole.tokens, whole.truncated) == (count, count, False)
    assert whole.ids + whole.question_ids == tokenizer("do: one two three. Now?").input_ids
    assert len(whole.question_ids) == 5
    cut = tokenize(example, XSum(), tokenizer, count - 3, chat=False)
    assert (cut.text, cut.question_text, cut.truncated) == ("do: one two th.", " Now?", True)
    assert (cut.size, cut.tokens) == (count - 3, count)
    right = tokenize(example, XSum(truncate="right"), tokenizer, count - 3, chat=False)
    assert (right.ids, right.question_ids) == (whole.ids[:-3], whole.question_ids)
    assert tokenize(example, XSum(truncate="right"), tokenizer, 5, chat=False).skipped == "too long"
    assert tokenize(example, XSum(truncate="skip"), tokenizer, count - 1, chat=False).skipped == "too long"
    assert tokenize(example, XSum(), tokenizer, 10, chat=False).skipped == "too long"


def test_choices_that_do_not_fit_are_a_row_that_says_so(tmp_path):
    task = Reading(question="after_eviction", kind="choices", max_prompt_tokens=20, truncate="skip")
    with pytest.raises(ConfigError, match="none of the 5 examples can be run: too long"):
        evaluate_run(settings(tmp_path, task))


def test_a_question_and_a_choice_are_tokenised_where_they_stand(stories260k):
    from kvexp.hf import load_tokenizer

    tokenizer = load_tokenizer(stories260k)
    example = Example("a", "Lily had a dog.", "x", question=" What did Lily have?", choices=(" A dog.", " A cat."))
    prompt = tokenize(example, XSum(), tokenizer, 99, chat=False)
    assert prompt.ids == tokenizer("Lily had a dog.").input_ids
    assert prompt.ids + prompt.question_ids == tokenizer("Lily had a dog. What did Lily have?").input_ids
    words = continuation(prompt, tokenizer, chat=False, words=" A dog.")
    assert prompt.ids + prompt.question_ids + words == tokenizer("Lily had a dog. What did Lily have? A dog.").input_ids


class Chat:
    """A template that strips, as many do, and one that changes what it is given."""

    def __init__(self, change=str.strip):
        self.change = change

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **_):
        return f"[INST] {self.change(messages[0]['content'])} [/INST]"

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return type("Encoding", (), {"input_ids": list(text)})


def test_a_chat_template_is_parted_where_the_question_starts():
    example = Example("a", "Why? is asked here.", "x", question="\nWhy? \n")
    prompt = tokenize(example, XSum(), Chat(), 99, chat=True)
    assert (prompt.text, prompt.question_text) == ("[INST] Why? is asked here.\n", "Why? [/INST]")
    assert "".join(prompt.ids + prompt.question_ids) == "[INST] Why? is asked here.\nWhy? [/INST]"
    with pytest.raises(ConfigError, match="example a: the tokenizer's chat template changes the words"):
        tokenize(example, XSum(), Chat(str.upper), 99, chat=True)


# Questions and instructions in the prompt or after the eviction: the same words, older hashes, and what tables say.


QUESTION_PLACE_AFTER = "after_eviction"
SODA = {"narrative": "Ann met Ben.", "speakers": ["Ann", "Ben"], "dialogue": ["Hi Ben.", "Hi Ann."]}


def first(task):
    return next(task.examples())


@pytest.mark.parametrize("template", ["alpaca_last", "plain_last", "helm", "{input} -- {instruction}"])
def test_an_instruction_behind_the_article_is_the_same_text_in_both_places(template: str) -> None:
    seen, hidden = (first(News(template=template, question=asked)) for asked in ("in_prompt", QUESTION_PLACE_AFTER))
    assert seen.question == "" and hidden.question.strip()
    assert seen.prompt == hidden.prompt + hidden.question
    assert hidden.prompt.endswith(hidden.body)  # nothing of the instruction is evicted with the article
    assert seen.reference == hidden.reference


@pytest.mark.parametrize("task", [News, CNNDailyMail, XSum, GovReport])
@pytest.mark.parametrize("chat", [False, True])
def test_a_hidden_instruction_follows_the_article_in_its_own_words(task, chat: bool) -> None:
    made = task(question=QUESTION_PLACE_AFTER).for_model(chat=chat)
    made.check_options()
    example = made.summary_of("one", "THE ARTICLE", "")
    assert example.prompt.endswith("THE ARTICLE") and made.instruction_after in example.question
    assert made.instruction not in example.prompt + example.question
    assert "{" not in example.prompt + example.question


def test_other_tasks_with_an_instruction_feed_all_of_it_after_the_eviction() -> None:
    soda = Soda(question=QUESTION_PLACE_AFTER).example(SODA, "row 1")
    assert soda.prompt == "Ann met Ben." and soda.question.startswith(" <sep> Generate a dialogue between Ann and Ben")
    assert soda.prompt + soda.question == Soda().example(SODA, "row 1").prompt
    summary = first(TestbedSummary(question=QUESTION_PLACE_AFTER))
    assert summary.question == " summary :" and summary.prompt + summary.question == first(TestbedSummary()).prompt
    said, whole = (
        first(TestbedDialogue(question=QUESTION_PLACE_AFTER, recalls=3)),
        first(TestbedDialogue(recalls=3)).prompt,
    )
    assert said.prompt + said.question == whole
    assert said.question.count(" recall ") == 1 and said.question.lstrip().split()[0] in ("ann", "ben")
    assert said.question.endswith(" :")


@pytest.mark.parametrize("template", ["alpaca", "plain", "{instruction} {input}", "{input} "])
def test_a_hidden_instruction_cannot_stand_in_front(template: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.template with the instruction behind \{input\}"):
        News(template=template, question=QUESTION_PLACE_AFTER).check_options()


# What an identity said of these tasks on 2026-11-22, before they had the option.
COMMON = {"name", "sample", "seed", "max_prompt_tokens", "truncate", "pad_to"}
BEFORE = {
    "news": COMMON | {"instruction", "template", "stop", "join_lines"},
    "testbed_summary": COMMON | {"tokens", "facts", "marked", "updated"},
}


@pytest.mark.parametrize("task", BEFORE)
def test_runs_of_before_keep_their_hash_and_hidden_ones_get_another(task: str) -> None:
    seen, hidden = (
        settings_of(*composed(f"task={task}", f"task.question={asked}"))
        for asked in ("in_prompt", QUESTION_PLACE_AFTER)
    )
    assert set(seen.identity["task"]) == BEFORE[task]
    assert hidden.identity["task"]["question"] == QUESTION_PLACE_AFTER
    assert seen.baseline().identity["task"] != hidden.baseline().identity["task"]
    assert question_of(seen.identity) == "in_prompt" and question_of(hidden.identity) == QUESTION_PLACE_AFTER


def test_a_changed_instruction_is_another_run() -> None:
    words = ["task=news", f"task.question={QUESTION_PLACE_AFTER}"]
    one, other = (settings_of(*composed(*words, *more)) for more in ((), ("task.instruction_after='Shorten it.'",)))
    assert one.identity != other.identity


def test_titles_say_it_once() -> None:
    assert titled("m / t", ["in_prompt", "in_prompt"]) == "m / t, question in prompt"
    assert titled("m / t", [QUESTION_PLACE_AFTER, None]) == "m / t, question after eviction"
    assert titled("m / t", [QUESTION_PLACE_AFTER, "in_prompt"]) == "m / t, question in prompt and after eviction"
    assert titled("m / t", [None, float("nan")]) == "m / t"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Twenty summaries of the testbed under h2o, with the instruction in either place."""
    folder = tmp_path_factory.mktemp("outputs")
    words = ("model=testbed_rope", "task=testbed_summary", "task.tokens=120", "task.facts=4", "task.marked=2")
    words += (
        "task.updated=0",
        "task.max_new_tokens=8",
        "limit=20",
        "batch_size=10",
        "kv_ratio=0.5",
        f"outputs_dir={folder}",
    )
    for asked in ("in_prompt", QUESTION_PLACE_AFTER):
        overrides = [*words, f"task.question={asked}"]
        config, choices = composed(*overrides)
        evaluate_run(settings_of(config, choices, overrides))
    return folder


def test_rows_and_tables_say_where_the_question_was(outputs) -> None:
    df = table(outputs)
    assert sorted(df["question"]) == [QUESTION_PLACE_AFTER, QUESTION_PLACE_AFTER, "in_prompt", "in_prompt"]
    for folder in folders(outputs):
        assert {row["question"] for row in folder.rows} == {folder.question}
        assert all(bool(row["question_tokens"]) == (folder.question == QUESTION_PLACE_AFTER) for row in folder.rows)
    assert {folder.question for folder in chosen(folders(outputs), {"question": QUESTION_PLACE_AFTER})} == {
        QUESTION_PLACE_AFTER
    }
    alone = to_markdown(table(outputs, {"question": QUESTION_PLACE_AFTER}))
    assert "/ testbed_summary, question after eviction" in alone and "task.question" not in alone
    assert "in prompt" not in alone


def test_both_places_stand_beside_each_other(outputs) -> None:
    shown = to_markdown(table(outputs))
    assert "in percent of full by place of the question" in shown
    lines = shown.split("by place of the question")[1].splitlines()
    head = next(line for line in lines if line.startswith("| method"))
    row = [cell.strip() for cell in next(line for line in lines if line.startswith("| h2o")).strip("|").split("|")]
    assert head.count("% of full") == 2
    df = table(outputs).set_index(["method", "question"])
    metric = df["headline"].iloc[0]
    assert [row[2], row[5]] == [
        f"{df.loc[('h2o', asked), f'{metric}_of_full']:.1f}" for asked in ("in_prompt", QUESTION_PLACE_AFTER)
    ]
    assert [row[4], row[7]] == ["20", "20"]


def test_a_run_that_was_kept_before_rows_said_it_is_shown_alike(outputs, tmp_path) -> None:
    shutil.copytree(outputs, tmp_path / "old")
    for file in (tmp_path / "old").glob("*/examples.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(row.pop("question") for row in rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.testing.assert_frame_equal(table(tmp_path / "old"), table(outputs))
