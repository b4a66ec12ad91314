"""RULER: rows equal to the official generator's, lengths met in a tokenizer's tokens, the official metric, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvexp.tasks import Ruler, RulerQA
from kvexp.tasks.ruler import MAKERS, Draws, Material, _hotpot, _shuffled, _squad, pairs_of
from kvexp.util import ConfigError

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "ruler.json").read_text())
GIVEN = FIXTURE["given"]
WORDS = GIVEN["words"]
SEED = 42


def material(subset: str, length: int) -> Material:
    """What the recording was made of."""
    if subset in ("qa_1", "qa_2"):
        made = _squad([("row 1", GIVEN["squad"])]) if subset == "qa_1" else _hotpot([("", r) for r in GIVEN["hotpot"]])
        return replace(made, seed=SEED, length=length)
    pairs = pairs_of(WORDS["adjective"], WORDS["noun"])
    words = _shuffled(sorted({word for each in WORDS.values() for word in each}), SEED)
    return Material(pairs, words, pairs, GIVEN["essay"].split(" "), seed=SEED, length=length)


@pytest.mark.parametrize(
    "recorded", FIXTURE["rows"], ids=[f"{row['subset']}-{row['units']}-{row['seed']}" for row in FIXTURE["rows"]]
)
def test_a_row_is_the_official_generators_to_the_byte(recorded):
    of, number = material(recorded["subset"], recorded["length"]), recorded["seed"]
    row = MAKERS[recorded["subset"]].make(Draws(recorded["seed"]), recorded["units"], of, number)
    assert row.before + row.context + row.after + row.opening == recorded["prompt"]
    assert list(row.answers) == recorded["answers"]
    assert row.mark in row.before and all(source in row.context for source in row.sources)


def test_all_thirteen_tasks_were_recorded():
    assert {row["subset"] for row in FIXTURE["rows"]} == set(MAKERS) - {"qa_own"} and len(MAKERS) == 14


def test_pairs_are_sorted_as_they_are_spelt():
    words = ["a", "a-b", "ab"], ["c", "b-c"]
    assert pairs_of(*words) == sorted({f"{a}-{n}" for a in words[0] for n in words[1]})


def count(words: str, opening: str = "") -> int:
    """Tokens of a tokenizer that has one for four letters, and a template of seven."""
    return 7 + -(-len(words + opening) // 4)


def fitted(task: Ruler) -> list:
    return [task.fit(example, count, 1 << 30) for example in task.examples()]


@pytest.mark.parametrize("subset", Ruler.subsets)
def test_a_row_has_its_length_and_says_where_the_answer_stands(subset):
    task = Ruler(subset=subset, lengths=(1024, 2048), size=3)
    examples = fitted(task)
    assert [example.info["length"] for example in examples] == [1024, 2048] * 3
    for example in examples:
        info = example.info
        measured = count(example.prompt, example.opening) + task.max_new_tokens
        assert info["length_measured"] == measured <= info["length"]
        assert info["length"] - measured < (250 if subset == "qa_own" else 40)  # a unit of filler
        if subset not in ("cwe", "fwe"):
            assert len(info["depths_measured"]) == len(info["answers"])
            assert all(0 <= depth <= 100 for depth in info["depths_measured"])
        if "depth" in info:
            assert info["depth"] <= info["depth_measured"] <= info["depth"] + 25
            source = next(i for i in range(len(example.prompt)) if info["answers"][0] in example.prompt[: i + 1])
            assert abs(100 * source / len(example.prompt) - info["depth_measured"]) < 8
    assert examples == fitted(task)  # seeded
    assert fitted(replace(task, seed=7)) != examples
    assert fitted(replace(task, size=1)) == examples[:2]  # more rows move none
    assert fitted(replace(task, question="after_eviction"))[0].question == examples[0].suffix


def test_vt_has_a_worked_example_of_at_most_500_tokens_with_names_of_its_own():
    first, second = fitted(Ruler(subset="vt", lengths=(2048,), size=2))
    lessons = [example.prompt[: example.prompt.rfind("Memorize and track")] for example in (first, second)]
    assert 450 < count(lessons[0]) <= 500 and lessons[0] != lessons[1] and "12345" not in lessons[0]
    assert lessons[0].count("VAR ") == 9 and lessons[0].count("\n") == lessons[1].count("\n")
    assert first.prompt.count(first.marks[0]) == 1  # not the instruction of the worked example


def test_a_length_that_holds_no_row_is_refused():
    with pytest.raises(ConfigError, match=r"512 tokens does not hold vt, whose shortest row has \d+ tokens and an"):
        fitted(Ruler(subset="vt", lengths=(512,)))
    with pytest.raises(ConfigError, match="leaves fwe 2 different words"):
        fitted(Ruler(subset="fwe", lengths=(170,)))
    with pytest.raises(ConfigError, match="does not hold niah_multikey_3"):
        fitted(Ruler(subset="niah_multikey_3", lengths=(128,)))
    (example,) = Ruler(subset="qa_own", lengths=(64,), size=1).examples()
    assert "does not hold qa_own: question, its documents" in Ruler(subset="qa_own").fit(example, count, 99).skipped
    (far,) = Ruler(lengths=(4096,), size=1).examples()
    assert Ruler().fit(far, count, 4000).skipped == "too long"


def test_the_metric_is_the_official_string_match():
    several = Ruler(subset="niah_multivalue")
    (example,) = Ruler(subset="niah_multivalue", size=1, lengths=(2048,)).examples()
    example = replace(example, info={"answers": ["1234567", "AbCd"]})
    for answer, score in (("no", 0), ("xABCDx", 50), ("abcd 12345678", 100), ("1234\x01567", 0)):
        assert several.score(answer, "", example) == {"score": score}
        assert several.answered(answer, example) == (score == 100)
    any_of = Ruler(subset="qa_own")
    assert any_of.score("It is abcd.", "", example) == {"score": 100.0}  # lm-eval's port: 50
    assert any_of.score("It is.", "", example) == {"score": 0.0}


def test_counting_answered_rows_is_an_option():
    assert not Ruler().only_answered and Ruler(counted="answered").only_answered


def test_questions_come_from_files_of_either_form(tmp_path):
    published, hub = tmp_path / "dev-v2.0.json", tmp_path / "squad.jsonl"
    published.write_text(json.dumps(GIVEN["squad"]))
    rows = [
        {"title": article["title"], "context": paragraph["context"], "question": asked["question"]}
        | {"answers": {"text": [] if asked["is_impossible"] else [one["text"] for one in asked["answers"]]}}
        for article in GIVEN["squad"]["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]
    hub.write_text("\n".join(map(json.dumps, rows)))
    one, other = (RulerQA(data_files=str(file), lengths=(300,), size=50) for file in (published, hub))
    assert [e.prompt for e in fitted(one)] == [e.prompt for e in fitted(other)] and len(fitted(one)) == 8
    one.check()
    hub = tmp_path / "hotpot.jsonl"
    (tmp_path / "hotpot.json").write_text(json.dumps(GIVEN["hotpot"]))
    hub.write_text(
        "\n".join(
            json.dumps(
                {**row, "context": dict(zip(("title", "sentences"), zip(*row["context"], strict=True), strict=True))}
            )
            for row in GIVEN["hotpot"]
        )
    )
    one, other = (
        RulerQA(subset="qa_2", data_files=str(file), lengths=(300,), size=50)
        for file in (tmp_path / "hotpot.json", hub)
    )
    assert [e.prompt for e in fitted(one)] == [e.prompt for e in fitted(other)] and len(fitted(one)) == 5
    hub.write_text('{"question": "Who?", "answer": "I", "context": 3}\n')
    with pytest.raises(ConfigError, match=r"row 1 of .*: field 'context' must be a list of .title, sentences."):
        RulerQA(subset="qa_2", data_files=str(hub)).check()


def test_unknown_subsets_are_refused_with_the_task_that_has_them():
    with pytest.raises(ConfigError, match="qa_1 and qa_2 are of task=ruler_qa"):
        Ruler(subset="qa_1")
    with pytest.raises(ConfigError, match="must be qa_1 or qa_2, got 'vt'"):
        RulerQA(subset="vt")
