"""Questions and instructions in the prompt or after the eviction: the same words, older hashes, and what tables say."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from test_conf import composed

from kvexp.config.settings import settings_of
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.results import table, to_markdown
from kvexp.results.question_place import question_of, titled
from kvexp.results.read import chosen, folders
from kvexp.tasks import CNNDailyMail, GovReport, News, Soda, TestbedDialogue, TestbedSummary, XSum

AFTER = "after_eviction"
SODA = {"narrative": "Ann met Ben.", "speakers": ["Ann", "Ben"], "dialogue": ["Hi Ben.", "Hi Ann."]}


def first(task):
    return next(task.examples())


@pytest.mark.parametrize("template", ["alpaca_last", "plain_last", "helm", "{input} -- {instruction}"])
def test_an_instruction_behind_the_article_is_the_same_text_in_both_places(template: str) -> None:
    seen, hidden = (first(News(template=template, question=asked)) for asked in ("in_prompt", AFTER))
    assert seen.question == "" and hidden.question.strip()
    assert seen.prompt == hidden.prompt + hidden.question
    assert hidden.prompt.endswith(hidden.body)  # nothing of the instruction is evicted with the article
    assert seen.reference == hidden.reference


@pytest.mark.parametrize("task", [News, CNNDailyMail, XSum, GovReport])
@pytest.mark.parametrize("chat", [False, True])
def test_a_hidden_instruction_follows_the_article_in_its_own_words(task, chat: bool) -> None:
    made = task(question=AFTER).for_model(chat=chat)
    made.check_options()
    example = made.summary_of("one", "THE ARTICLE", "")
    assert example.prompt.endswith("THE ARTICLE") and made.instruction_after in example.question
    assert made.instruction not in example.prompt + example.question
    assert "{" not in example.prompt + example.question


def test_other_tasks_with_an_instruction_feed_all_of_it_after_the_eviction() -> None:
    soda = Soda(question=AFTER).example(SODA, "row 1")
    assert soda.prompt == "Ann met Ben." and soda.question.startswith(" <sep> Generate a dialogue between Ann and Ben")
    assert soda.prompt + soda.question == Soda().example(SODA, "row 1").prompt
    summary = first(TestbedSummary(question=AFTER))
    assert summary.question == " summary :" and summary.prompt + summary.question == first(TestbedSummary()).prompt
    said, whole = first(TestbedDialogue(question=AFTER, recalls=3)), first(TestbedDialogue(recalls=3)).prompt
    assert said.prompt + said.question == whole
    assert said.question.count(" recall ") == 1 and said.question.lstrip().split()[0] in ("ann", "ben")
    assert said.question.endswith(" :")


@pytest.mark.parametrize(
    ("template", "where"),
    [("alpaca", "in front"), ("plain", "in front"), ("{instruction} {input}", "in front"), ("{input} ", "nowhere")],
)
def test_a_hidden_instruction_cannot_stand_in_front(template: str, where: str) -> None:
    with pytest.raises(ConfigError, match=f"instruction behind {{input}}, and .* has it {where}: set it to null"):
        News(template=template, question=AFTER).check_options()


# What an identity said of these tasks on 2026-11-22, before they had the option.
COMMON = {"name", "sample", "seed", "max_prompt_tokens", "truncate", "pad_to"}
BEFORE = {
    "news": COMMON | {"instruction", "template", "stop", "join_lines"},
    "testbed_summary": COMMON | {"tokens", "facts", "marked", "updated"},
}


@pytest.mark.parametrize("task", BEFORE)
def test_runs_of_before_keep_their_hash_and_hidden_ones_get_another(task: str) -> None:
    seen, hidden = (settings_of(*composed(f"task={task}", f"task.question={asked}")) for asked in ("in_prompt", AFTER))
    assert set(seen.identity["task"]) == BEFORE[task]
    assert hidden.identity["task"]["question"] == AFTER
    assert seen.baseline().identity["task"] != hidden.baseline().identity["task"]
    assert question_of(seen.identity) == "in_prompt" and question_of(hidden.identity) == AFTER


def test_a_changed_instruction_is_another_run() -> None:
    words = ["task=news", f"task.question={AFTER}"]
    one, other = (settings_of(*composed(*words, *more)) for more in ((), ("task.instruction_after='Shorten it.'",)))
    assert one.identity != other.identity


def test_titles_say_it_once() -> None:
    assert titled("m / t", ["in_prompt", "in_prompt"]) == "m / t, question in prompt"
    assert titled("m / t", [AFTER, None]) == "m / t, question after eviction"
    assert titled("m / t", [AFTER, "in_prompt"]) == "m / t, question in prompt and after eviction"
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
    for asked in ("in_prompt", AFTER):
        overrides = [*words, f"task.question={asked}"]
        config, choices = composed(*overrides)
        evaluate_run(settings_of(config, choices, overrides))
    return folder


def test_rows_and_tables_say_where_the_question_was(outputs) -> None:
    df = table(outputs)
    assert sorted(df["question"]) == [AFTER, AFTER, "in_prompt", "in_prompt"]
    for folder in folders(outputs):
        assert {row["question"] for row in folder.rows} == {folder.question}
        assert all(bool(row["question_tokens"]) == (folder.question == AFTER) for row in folder.rows)
    assert {folder.question for folder in chosen(folders(outputs), {"question": AFTER})} == {AFTER}
    alone = to_markdown(table(outputs, {"question": AFTER}))
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
    assert [row[2], row[5]] == [f"{df.loc[('h2o', asked), f'{metric}_of_full']:.1f}" for asked in ("in_prompt", AFTER)]
    assert [row[4], row[7]] == ["20", "20"]


def test_a_run_that_was_kept_before_rows_said_it_is_shown_alike(outputs, tmp_path) -> None:
    shutil.copytree(outputs, tmp_path / "old")
    for file in (tmp_path / "old").glob("*/examples.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(row.pop("question") for row in rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.testing.assert_frame_equal(table(tmp_path / "old"), table(outputs))
