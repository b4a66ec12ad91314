"""Sessions, generated and from SCBench's files; LongBench v2 and InfiniteBench: rows, lengths, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvexp.tasks import InfiniteBench, LongBenchV2, Retrieval, RetrievalTurns, SCBench, SCBenchTurns
from kvexp.tasks.base import with_shared_context
from kvexp.tasks.scbench import MADE
from kvexp.util import ConfigError


def count(words: str, opening: str = "") -> int:
    return 7 + -(-len(words + opening) // 4)


def fitted(task) -> list:
    """The examples at their length, as the runner makes them."""
    return [
        replace(task.fit(example, count, 1 << 30), questions=example.questions, number=example.number)
        for example in task.examples()
    ]


@pytest.mark.parametrize("subset", MADE)
def test_questions_of_a_session_share_one_text_of_the_length(subset):
    task = with_shared_context(Retrieval(subset=subset, lengths=(1000, 2000), size=2, turns=3), "retrieval")
    rows = fitted(task)
    assert len(rows) == 12 and len({row.prompt for row in rows}) == 4 and len({row.question for row in rows}) == 12
    for row in rows:
        longest = max(count(f"{row.prompt}{asked}") for asked in row.questions) + task.max_new_tokens
        assert row.info["length"] - 40 <= longest == row.info["length_measured"] <= row.info["length"]
        assert all(row.prompt.count(answer) >= 1 for answer in row.info["answers"])
        assert 0 <= row.info["depth_measured"] <= 100 and task.answered(row.reference, row)
        assert task.score("", row.reference, row) == {"score": 0.0}
    assert rows == fitted(task)


@pytest.mark.parametrize("subset", MADE)
def test_a_conversation_holds_all_its_turns_in_the_length(subset):
    task = RetrievalTurns(subset=subset, lengths=(1000,), size=2, turns=3)
    rows = fitted(task)
    assert [row.number for row in rows] == [0, 1, 2] * 2 and len({row.prompt for row in rows}) == 2
    for row in rows:
        assert row.turns[0].message == row.prompt and len(row.turns) == 3
        assert [turn.reference for turn in row.turns][row.number] == row.reference
        assert 950 <= task.tokens(row.turns, count) == row.info["length_measured"] <= 1000
        assert row.info["distance"] == row.info["turn"] == row.number
    assert fitted(replace(task, size=1)) == rows[:3]


def test_a_value_is_found_under_its_key_and_a_string_by_both_ends():
    (kv,) = fitted(Retrieval(lengths=(1000,), size=1, turns=1))
    pairs = json.loads(kv.prompt.partition("JSON data:\n")[2])
    key = kv.question.split('"')[1]
    assert pairs[key] == kv.reference and len(pairs) > 5
    (one,) = fitted(Retrieval(subset="prefix_suffix", lengths=(1000,), size=1, turns=1))
    begin, end = one.question.split('"')[1::2]
    found = [line for line in one.prompt.split("\n") if line.startswith(begin) and line.endswith(end)]
    assert found == [one.reference]
    assert sum(line.startswith(begin) for line in one.prompt.split("\n")) > 3  # others that begin so
    (vt,) = fitted(Retrieval(subset="vt", lengths=(1000,), size=1, turns=1))
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
        fitted(RetrievalTurns(lengths=(300,), size=1))
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
