"""Tasks of long texts: RULER's rows equal to its generator's, lengths in tokens, facts, sessions, metrics, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvexp.tasks import (
    BABILong,
    InfiniteBench,
    LongBenchV2,
    Retrieval,
    RetrievalTurns,
    Ruler,
    RulerQA,
    SCBench,
    SCBenchTurns,
)
from kvexp.tasks.babilong import KINDS
from kvexp.tasks.base import with_shared_context
from kvexp.tasks.ruler import MAKERS, Draws, Material, _hotpot, _shuffled, _squad, pairs_of
from kvexp.tasks.scbench import MADE
from kvexp.util.errors import ConfigError

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


# BABILong: rows of its files.


def test_files_are_asked_in_the_official_form(tmp_path):
    path = tmp_path / "qa7.jsonl"
    path.write_text(json.dumps({"input": "A. B.", "question": "How many objects is John carrying?", "target": "two"}))
    task = BABILong(subset="qa7", data_files=str(path))
    task.check()
    (row,) = task.examples()
    assert row.prompt.endswith("<context>\nA. B.\n</context>\n\nQuestion: How many objects is John carrying?\nAnswer:")
    assert [task.score(said, "two", row)["accuracy"] for said in (" Two.", "two or one", "3")] == [100, 0, 0]
    assert task.answered("two", row) and task.for_model(chat=True).answer_prefix == ""
    assert replace(task, counted="answered").only_answered and not task.only_answered
    with pytest.raises(ConfigError, match=r"the target 'two' is no answer of qa1, which has bathroom"):
        replace(task, subset="qa1").check()
    assert KINDS["qa7"].labels == ["none", "one", "three", "two"]
    with pytest.raises(ConfigError, match="must be one of qa1, qa2, qa3, qa6, qa7, got 'qa4'"):
        replace(task, subset="qa4").check_options()


# Sessions, generated and from SCBench's files; LongBench v2 and InfiniteBench: rows, lengths, refusals.


def session_of(task) -> list:
    """The examples at their length, as the runner makes them."""
    return [
        replace(task.fit(example, count, 1 << 30), questions=example.questions, number=example.number)
        for example in task.examples()
    ]


@pytest.mark.parametrize("subset", MADE)
def test_questions_of_a_session_share_one_text_of_the_length(subset):
    task = with_shared_context(Retrieval(subset=subset, lengths=(1000, 2000), size=2, turns=3), "retrieval")
    rows = session_of(task)
    assert len(rows) == 12 and len({row.prompt for row in rows}) == 4 and len({row.question for row in rows}) == 12
    for row in rows:
        longest = max(count(f"{row.prompt}{asked}") for asked in row.questions) + task.max_new_tokens
        assert row.info["length"] - 40 <= longest == row.info["length_measured"] <= row.info["length"]
        assert all(row.prompt.count(answer) >= 1 for answer in row.info["answers"])
        assert 0 <= row.info["depth_measured"] <= 100 and task.answered(row.reference, row)
        assert task.score("", row.reference, row) == {"score": 0.0}
    assert rows == session_of(task)


@pytest.mark.parametrize("subset", MADE)
def test_a_conversation_holds_all_its_turns_in_the_length(subset):
    task = RetrievalTurns(subset=subset, lengths=(1000,), size=2, turns=3)
    rows = session_of(task)
    assert [row.number for row in rows] == [0, 1, 2] * 2 and len({row.prompt for row in rows}) == 2
    for row in rows:
        assert row.turns[0].message == row.prompt and len(row.turns) == 3
        assert [turn.reference for turn in row.turns][row.number] == row.reference
        assert 950 <= task.tokens(row.turns, count) == row.info["length_measured"] <= 1000
        assert row.info["distance"] == row.info["turn"] == row.number
    assert session_of(replace(task, size=1)) == rows[:3]


def test_a_value_is_found_under_its_key_and_a_string_by_both_ends():
    (kv,) = session_of(Retrieval(lengths=(1000,), size=1, turns=1))
    pairs = json.loads(kv.prompt.partition("JSON data:\n")[2])
    key = kv.question.split('"')[1]
    assert pairs[key] == kv.reference and len(pairs) > 5
    (one,) = session_of(Retrieval(subset="prefix_suffix", lengths=(1000,), size=1, turns=1))
    begin, end = one.question.split('"')[1::2]
    found = [line for line in one.prompt.split("\n") if line.startswith(begin) and line.endswith(end)]
    assert found == [one.reference]
    assert sum(line.startswith(begin) for line in one.prompt.split("\n")) > 3  # others that begin so
    (vt,) = session_of(Retrieval(subset="vt", lengths=(1000,), size=1, turns=1))
    value = vt.question.split("value ")[1].split(" ")[0]
    known = {value}
    for line in vt.prompt.split("\n"):
        if line.startswith("VAR "):
            _, name, _, *rest = line.split(" ")
            known |= {name} if rest[-1] in known else set()
    assert known - {value} == set(vt.info["answers"])


def test_generated_sessions_that_do_not_fit_are_refused():
    with pytest.raises(
        ConfigError, match=r"300 tokens does not hold 5 turns of kv, which have \d+: raise task.lengths"
    ):
        session_of(RetrievalTurns(lengths=(300,), size=1))
    with pytest.raises(ConfigError, match="must be one of kv, prefix_suffix, vt, got 'mf'"):
        Retrieval(subset="mf")
    (row, *_) = Retrieval(lengths=(4096,), size=1).examples()
    assert Retrieval().fit(row, count, 4000).skipped == "too long"


def test_scbench_says_what_it_needs_and_leaves_out(tmp_path):
    row = {"id": 3, "context": "A book.", "multi_turns": [{"input": "Who?", "answer": ["Ann", "Bob"]}] * 3}
    (tmp_path / "scbench_qa_eng.jsonl").write_text(json.dumps(row))
    task = SCBench(subset="scbench_qa_eng", data_files=str(tmp_path))
    task.check()
    rows = list(with_shared_context(replace(task, max_turns=2), "scbench").examples())
    assert [row.id for row in rows] == ["3 turn 0", "3 turn 1"] and rows[0].questions == (rows[0].question,) * 2
    assert [task.score(said, "", rows[0])["score"] for said in ("It was BOB.", "Cid")] == [100, 0]
    turns = list(SCBenchTurns(subset="scbench_qa_eng", data_files=str(tmp_path)).examples())
    assert [one.number for one in turns] == [0, 1, 2] and turns[0].turns[1].reference == "Ann"
    with pytest.raises(ConfigError, match=r"microsoft/SCBench is read at one commit: name it with task.revision"):
        SCBench().check()
    with pytest.raises(ConfigError, match=r"scbench_repoqa: the official grader parses code .* not covered here"):
        SCBench(subset="scbench_repoqa")
    (tmp_path / "scbench_qa_eng.jsonl").write_text(json.dumps({"context": "A book.", "multi_turns": []}))
    with pytest.raises(ConfigError, match="field 'multi_turns' must be a list of objects"):
        task.check()


def test_parts_of_a_mixed_task_are_graded_apart(tmp_path):
    turns = [
        {"input": "The key?", "answer": "71432", "task": "scbench_passkey"},
        {"input": "Sum up.", "answer": "a b c", "task": "scbench_summary"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": 1, "context": "A book.", "multi_turns": turns}))
    task = SCBench(subset="scbench_summary_with_needles", data_files=str(path))
    one, other = task.examples()
    assert task.score("It is 71432", "", one)["score"] == 100 and task.score("a b", "", other)["score"] == 80


V2 = {
    "_id": "x",
    "context": "A book. " * 40,
    "question": "Who?",
    "answer": "B",
    "difficulty": "easy",
    "length": "short",
}
V2 |= {f"choice_{letter}": f"Choice {letter}" for letter in "ABCD"}


def test_longbench_v2_asks_no_row_of_which_more_than_half_is_cut(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([V2]))
    task = LongBenchV2(data_files=str(path))
    task.check()
    (row,) = task.examples()
    assert row.info == {"difficulty": "easy", "length_class": "short"} and row.reference == "B"
    tokens = count(row.prompt)
    assert task.fit(row, count, tokens + 128) == row and task.fit(row, count, tokens // 2 + 129) == row
    skipped = task.fit(row, count, tokens // 2 + 127).skipped
    assert skipped.startswith(f"{tokens} tokens, of which {tokens // 2 - 1} would be left: task.cut=any")
    assert replace(task, cut="any").fit(row, count, 200) == row
    scores = [task.score(said, "", row) for said in ("The correct answer is (B).", "B", "The correct answer is C. B")]
    assert [(each["accuracy"], each["or_letter"]) for each in scores] == [(100, 100), (0, 100), (0, 0)]
    path.write_text(json.dumps([{**V2, "answer": "E"}]))
    with pytest.raises(ConfigError, match="field 'answer' must be A, B, C or D, got 'E'"):
        task.check()


def test_infinitebench_reads_a_folder_and_names_what_is_wrong(tmp_path):
    path = tmp_path / "data" / "code_debug.jsonl"
    path.parent.mkdir()
    row = {"id": 1, "context": "def f(): {}", "input": "", "answer": ["g"], "options": ["f", "g", "h", "i"]}
    path.write_text(json.dumps(row))
    task = InfiniteBench(subset="code_debug", data_files=str(tmp_path))
    task.check()
    (example,) = task.examples()
    assert example.info["answers"] == ["g", "B"] and "B. g\n" in example.prompt and "def f(): {}" in example.prompt
    assert task.score("B.", "", example)["score"] == 100 and task.max_new_tokens == 5
    path.write_text(json.dumps({**row, "answer": ["z"]}))
    with pytest.raises(ConfigError, match="the answer 'z' is none of the options"):
        task.check()
    with pytest.raises(ConfigError, match="names no code_run problem"):
        InfiniteBench(subset="code_run").example({**row, "input": "What?"}, "row 1")
    with pytest.raises(ConfigError, match=r"task.subset must be one of passkey, number_string"):
        InfiniteBench(subset="vt")


def test_a_file_of_the_hub_is_read_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "passkey.jsonl"
    path.write_text(json.dumps({"id": 0, "context": "The key is 71432.", "input": "Which?", "answer": ["71432"]}))
    asked = []

    def fetched(hub_id, name, **options):
        asked.append((hub_id, name, options["revision"]))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched)
    task = InfiniteBench(subset="passkey")
    (example,) = task.examples()
    assert example.info["answers"] == ["71432"] and example.id == "0"
    assert asked[0] == ("xinrongzhang2022/InfiniteBench", "passkey.jsonl", task.revision)
    assert task.fingerprint().startswith("hub:xinrongzhang2022/InfiniteBench/passkey.jsonl")
