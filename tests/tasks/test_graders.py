"""Prompts and graders of four benchmarks against what their own code makes.

The script that recorded it: tests/peers/record_graders.py of commit 17b4c173.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvexp.tasks import (
    BABILong,
    InfiniteBench,
    LongBench,
    LongBenchV2,
    SCBench,
    SCBenchTurns,
    babilong,
    infinitebench,
    longbench_v2,
    scbench,
)
from kvexp.util.errors import ConfigError

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "graders.json").read_text(encoding="utf-8"))
GRADERS = {
    name: (scbench if name.startswith("scbench") else infinitebench).SUBSETS[name].grader
    for name in RECORDED
    if name not in ("facts", "longbench_v2", "prompts")
}


@pytest.mark.parametrize("name", GRADERS)
def test_answers_get_the_official_score(name):
    for said, right, score in RECORDED[name]:
        given = right if isinstance(right, list) else [right]
        assert GRADERS[name](said, given) == pytest.approx(score), said
    assert len({score for *_, score in RECORDED[name]}) > 1  # both kinds are there


def test_facts_are_graded_as_babilong_does():
    for said, (target, question, labels), right in RECORDED["facts"]:
        assert babilong.is_right(said, target, question, labels) == right, (said, target)
    assert {right for *_, right in RECORDED["facts"]} == {True, False}
    assert ["none", ["none", "How many objects is John carrying?", ["none", "one", "three", "two"]], False] in RECORDED[
        "facts"
    ]


def test_the_letter_is_the_one_that_longbench_v2_reads():
    for said, _, letter in RECORDED["longbench_v2"]:
        assert longbench_v2.chosen(said) == letter, said
    assert longbench_v2.last_letter("A or B? It is C.") == "C" and longbench_v2.last_letter("Because") is None
    assert longbench_v2.last_letter("A's") is None and longbench_v2.last_letter("(D)") == "D"


def test_rouge_has_no_stemmer_and_takes_the_best_reference():
    assert infinitebench.rouge_lsum("the cats sleep", ["no words", "the cats sleep"]) == 1.0
    assert infinitebench.rouge_lsum("the cat sleeps", ["the cats sleep"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("recorded", RECORDED["prompts"], ids=lambda one: one["task"])
def test_prompts_are_the_official_ones(recorded):
    name, row = recorded["task"], recorded["row"]
    if name.startswith("scbench"):
        apart = SCBench(subset=name, data_files="x")
        each = [apart.example(part, "") for _, part in apart.split_row(row, "row 1")]
        assert [each[0].prompt, *(one.question.removeprefix("\n\n") for one in each)] == recorded["apart"]
        if "turns" in recorded:
            task = SCBenchTurns(subset=name, data_files="x")
            for number, (_, part) in enumerate(task.split_row(row, "row 1")):
                made = task.example(part, "")
                assert [turn.message for turn in made.turns] == recorded["turns"] and made.number == number
        return
    if name in babilong.KINDS:
        row = {**row, "target": babilong.KINDS[name].labels[0]}
        task = BABILong(subset=name, answer_prefix="")
    else:
        task = LongBenchV2() if name == "longbench_v2" else InfiniteBench(subset=name)
    made = task.example(row, "row 1")
    assert made.prompt == recorded["prompt"]
    # A chat template gets the words that are to be completed as the beginning of the answer.
    turn = made.for_chat_template()
    assert made.prompt in (turn.prompt, turn.prompt + "\n\n" + turn.opening, turn.prompt + " " + turn.opening)
    assert bool(turn.opening) == (name in ("passkey", "number_string", "longbook_choice_eng", "code_run", "code_debug"))


def test_only_the_corrected_subset_of_infinitebench_says_so():
    touched = [name for name in infinitebench.SUBSETS if InfiniteBench(subset=name).corrected()]
    assert touched == ["longdialogue_qa_eng"]


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        (InfiniteBench(subset="longbook_qa_eng"), {"answer": ["The", "..."]}),
        (InfiniteBench(subset="longbook_qa_chn"), {"answer": "。"}),
        (InfiniteBench(subset="longbook_sum_eng"), {"answer": "-"}),
        (InfiniteBench(subset="longdialogue_qa_eng"), {"answer": " "}),
        (LongBench(subset="qasper"), {"answers": ["a", "-"]}),
        (LongBench(subset="passage_retrieval_en"), {"answers": ["page 7"]}),
        (LongBench(subset="passage_count"), {"answers": ["seven"]}),
        (LongBench(subset="trec"), {"answers": ["Place"], "all_classes": ["City", "State"]}),
        (SCBench(subset="scbench_qa_chn"), {"multi_turns": [{"input": "谁?", "answer": "。"}]}),
        (SCBench(subset="scbench_qa_eng"), {"multi_turns": [{"input": "Who?", "answer": " "}]}),
    ],
    ids=lambda part: part.subset if hasattr(part, "subset") else "",
)
def test_a_row_that_no_answer_could_be_right_for_is_refused(task, changes):
    row = {"context": "A book.", "input": "Who?", "answer": "Ann", "answers": ["Ann"]}

    def example() -> None:
        (_, part), *_ = task.split_row({**row, **changes}, "row 1")
        task.example(part, "row 1")

    with pytest.raises(ConfigError, match=r"^(turn 0 of )?row 1"):
        example()


def test_one_answer_of_several_is_enough():
    row = {"context": "A book.", "input": "Who?", "answers": ["The", "Ann"]}
    assert LongBench(subset="qasper").example(row, "row 1").info["answers"] == ["The", "Ann"]
