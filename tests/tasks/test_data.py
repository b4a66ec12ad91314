"""Examples come from the bytes a run is known by: a file that changes before it is read, or meanwhile, is an error.

What changes is as long as before and has the time of before, which is all that a careless check would look at.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import composed, run_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvexp.run.build import build
from kvexp.run.store import runs
from kvexp.tasks import GSM8K, Example, LMEval, LongBench, Needle, Perplexity, QuestionTask, Stories
from kvexp.util.errors import ConfigError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TEXT = "Once there was a dog who ran to the hill and then came home to sleep in the sun. "


def rows(count=40):
    return [{"id": f"r{number}", "text": f"{TEXT} {number:03d} {TEXT}"} for number in range(count)]


def lines(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def whole(path):
    path.write_text(json.dumps(rows()))
    return path


def parquet(path):
    from datasets import Dataset

    Dataset.from_list(rows()).to_parquet(str(path))
    return path


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(FIXTURES / "longbench" / "qasper.jsonl", "data/qasper.jsonl")
    return path


def copied(name):
    return lambda path: Path(shutil.copytree(FIXTURES / name, path))


def stories(path, **options):
    return Stories(data_files=str(path), **options)


def qasper(path):
    return LongBench(subset="qasper", data_files=str(path))


def piqa(path):
    return LMEval(tasks=("piqa",), data_dir=str(path))


# case -> (name of the file or folder, what writes it, the task that reads it, the file in the folder)
PLACES = {
    "lines": ("rows.jsonl", lines, stories, None),
    "a few of the lines": ("rows.jsonl", lines, lambda path: stories(path, limit=3), None),
    "lines drawn": ("rows.jsonl", lines, lambda path: stories(path, limit=3, sample="shuffled"), None),
    "one long text": ("rows.jsonl", lines, lambda path: Perplexity(data_files=str(path), concatenate=True), None),
    "list": ("rows.json", whole, stories, None),
    "parquet": ("rows.parquet", parquet, stories, None),
    "zip": ("data.zip", zipped, qasper, None),
    "folder": ("data", copied("longbench"), qasper, "qasper.jsonl"),
    "lm-eval": ("data", copied("lm_eval"), piqa, "piqa.validation.jsonl"),
}


@pytest.fixture
def place(request, tmp_path):
    """(the task, the file that it reads)."""
    name, make, task, inside = PLACES[request.param]
    made = make(tmp_path / name)
    return task(made), made / inside if inside else made


def other(file):
    """Other words in the file, which keeps its size and the time of its last change. Returns what it held."""
    data, times = file.read_bytes(), file.stat()
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            words = (FIXTURES / "longbench" / "qasper.jsonl").read_bytes()
            archive.writestr("data/qasper.jsonl", words.replace(b"the ", b"tho "))
    elif file.suffix == ".parquet":
        at = data.index(b" ") + 1
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    else:
        file.write_bytes(data.replace(b"the ", b"tho ").replace(b"The ", b"Tho "))
    assert file.read_bytes() != data and file.stat().st_size == times.st_size
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return data


every = pytest.mark.parametrize("place", PLACES, indirect=True)


@every
def test_what_does_not_change_is_read(place):
    task, _ = place
    named = task.pinned
    assert list(task.examples()) == list(task.examples())
    assert task.pinned == named == task.fingerprint()


@every
def test_a_file_changed_after_it_was_fingerprinted_is_refused(place):
    task, file = place
    named = task.pinned
    other(file)
    with pytest.raises(ConfigError, match=f"{file}: changed after this run was set up"):
        list(task.examples())
    assert task.pinned == named


@pytest.mark.parametrize("place", [name for name in PLACES if name != "lm-eval"], indirect=True)
@pytest.mark.parametrize("restored", [False, True])
def test_a_file_changed_while_it_is_read_is_refused(place, restored):
    """Even where it is itself again at the end."""
    task, file = place
    examples = task.examples()
    next(examples)
    before = other(file)
    if restored:
        file.write_bytes(before)
    with pytest.raises(ConfigError, match="changed after this run was set up"):
        list(examples)


def test_files_of_lm_eval_that_change_while_they_are_loaded_are_refused(tmp_path, monkeypatch):
    from kvexp.tasks import lm_eval as definition

    folder = copied("lm_eval")(tmp_path / "data")
    task, load = LMEval(tasks=("piqa",), data_dir=str(folder)), definition.load
    file = folder / "piqa.validation.jsonl"

    def meanwhile(*names, **options):
        before = other(file)
        made = load(*names, **options)
        file.write_bytes(before)
        return made

    monkeypatch.setattr(definition, "load", meanwhile)
    with pytest.raises(ConfigError, match="changed after this run was set up"):
        list(task.examples())


def test_what_is_read_once_is_what_the_run_is_known_by(tmp_path):
    """Worked examples and a haystack are held in memory: a change on disk is another run's."""
    lesson = tmp_path / "lesson.txt"
    lesson.write_text("Question: one\nThe answer is 1.\n\nQuestion: two\nThe answer is 2.\n")
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 60)
    needle = {"needles": ("The key is {key}.",), "questions": ("What is the key?",), "answers": ("{key}",)}

    def made():
        return (
            GSM8K(data_files=str(FIXTURES / "gsm8k.jsonl"), prompt_file=str(lesson), shots=2),
            Needle(haystack=str(text), lengths=(300,), depths=(50,), **needle),
        )

    def read(tasks):
        return [(task.pinned, [example.prompt for example in task.examples()]) for task in tasks]

    tasks = made()
    before = read(tasks)
    for file in (lesson, text):
        other(file)
    assert read(tasks) == before
    for (named, prompts), (other_name, other_prompts) in zip(before, read(made()), strict=True):
        assert named != other_name and prompts != other_prompts


@pytest.mark.parametrize("when", ["checked", "read"])
def test_a_run_whose_data_change_has_no_rows(tmp_path, monkeypatch, capsys, when):
    file = lines(tmp_path / "rows.jsonl")
    real = Stories.check if when == "checked" else Stories.example
    seen = []

    def meanwhile(self, *given):
        if not seen:
            seen.append(other(file))
        return real(self, *given)

    monkeypatch.setattr(Stories, "check" if when == "checked" else "example", meanwhile)
    words = ("model=tiny", "task=stories", f"task.data_files={file}", "limit=2", "task.max_new_tokens=2")
    code, out, err = run_py(monkeypatch, capsys, *words, "method=h2o", "kv_ratio=0.5", f"outputs_dir={tmp_path / 'o'}")
    assert code == 1 and "Traceback" not in err + out
    assert err.startswith("error: ") and "changed after this run was set up" in err
    assert not any(run.rows() for run in runs(tmp_path / "o"))


def test_code_and_parts_of_an_own_definition_count(tmp_path):
    def made():
        return LMEval(tasks=(str(tmp_path / "own.yaml"),)).pinned

    (tmp_path / "base.yaml").write_text("output_type: generate_until\n")
    (tmp_path / "words.py").write_text("def text(row):\n    return row['a']\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": "b"}\n')
    own = {"task": "own", "include": "base.yaml", "dataset_path": "json", "test_split": "test"}
    own |= {"dataset_kwargs": {"data_files": {"test": str(rows)}}, "doc_to_target": "{{a}}"}
    body = "".join(f"{key}: {json.dumps(value)}\n" for key, value in own.items())
    (tmp_path / "own.yaml").write_text(body + "doc_to_text: !function words.text\n")
    seen = {made()}
    for name, words in (
        ("base.yaml", "output_type: loglikelihood\n"),
        ("words.py", "def text(row):\n    return row['a'] * 2\n"),
        ("rows.jsonl", '{"a": "c"}\n'),
        ("own.yaml", body + "doc_to_text: '{{a}}?'\n"),
    ):
        (tmp_path / name).write_text(words)
        seen.add(made())
    assert len(seen) == 5


# Examples with a question or choices, tasks whose rows are made: what every runner may rely on.


ROWS = [{"text": "A cat sat.", "asked": f"\nWho sat {n}?", "answer": "cat"} for n in (1, 2, 1)]


@dataclass(frozen=True, kw_only=True)
class Pairs(QuestionTask):
    """Rows made here: a text, a question, two answers to choose from."""

    name: ClassVar[str] = "pairs"
    metrics: ClassVar[tuple[str, ...]] = ("acc",)
    generated: ClassVar[bool] = True

    data: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, row in enumerate(ROWS[: self.limit], start=1):
            yield f"made row {number}", row

    def fingerprint(self) -> str:
        return "made:pairs"

    def example(self, row: dict[str, Any], where: str) -> Example:
        if not row["answer"]:
            raise ConfigError(f"{where} has no answer")
        return self.ask("same", ("Read: ", row["text"], "\n"), row["asked"], "cat", choices=(" cat", " dog"))


def test_a_question_is_in_the_prompt_or_after_it_with_the_same_characters() -> None:
    within, after = next(Pairs().examples()), next(Pairs(question="after_eviction").examples())
    assert (within.prefix, within.body, within.suffix) == ("Read: ", "A cat sat.", "\n\nWho sat 1?")
    assert within.question == ""
    assert (after.prefix, after.body, after.suffix) == ("Read: ", "A cat sat.", "\n")
    assert after.question == "\nWho sat 1?"
    assert within.prompt == after.prompt + after.question
    assert within.choices == after.choices == (" cat", " dog")


def test_examples_keep_question_and_choices_under_their_new_names() -> None:
    made = list(Pairs(question="after_eviction").examples())
    assert [example.id for example in made] == ["same", "same#2", "same#3"]
    assert [example.question for example in made] == [row["asked"] for row in ROWS]
    assert all(example.choices == (" cat", " dog") for example in made)


def test_every_row_that_is_made_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    Pairs().check()
    monkeypatch.setitem(ROWS[2], "answer", "")
    with pytest.raises(ConfigError, match="made row 3 has no answer"):
        Pairs().check()
    Pairs(limit=2).check()
    monkeypatch.setattr(Pairs, "rows", lambda self: iter(()))
    with pytest.raises(ConfigError, match=r"task\.name=pairs: found no rows"):
        Pairs().check()


def test_invariants_of_an_example() -> None:
    example = Example("a", "context", "r", question=" why?", choices=(" x", " y"))
    assert (example.prefix, example.body, example.suffix) == ("", "context", "")
    assert replace(example, id="b").choices == (" x", " y")
    with pytest.raises(ValueError, match="example a: the question is white space"):
        Example("a", "context", "r", question="\n")
    with pytest.raises(ValueError, match="example a: choice 1 is empty"):
        Example("a", "context", "r", choices=(" x", ""))
    with pytest.raises(ValueError, match="has choices and a continuation"):
        Example("a", "context", "r", " went on", choices=(" x", " y"))


# Rows of any content: an example whose prompt and numbers are right, or a ConfigError that names the row.


# task -> the fields a row has, in the hub's schema
FIELDS = {
    "cnn_dailymail": ("article", "highlights", "id"),
    "xsum": ("document", "summary", "id"),
    "govreport": ("report", "summary", "id"),
    "soda": ("dialogue", "original_index", "speakers", "narrative"),
    "sample": ("text", "id"),
    "gsm8k_cot": ("question", "answer"),
    "longbench": ("context", "input", "answers", "all_classes", "_id", "length", "dataset"),
    "perplexity": ("text",),
}
GOOD = {
    "dialogue": ["Hi there.", "How are you?", "Fine."],
    "speakers": ["A", "B", "A"],
    "answers": ["yes"],
    "all_classes": None,
    "answer": "So 1 + 1 = 2.\n#### 2",
    "length": 12,
    "original_index": 3,
    "text": "Once there was a dog. It ran to the hill and slept there all day long.",
}
ODD = ("", " ", "\n", "\x00", "\u202e", "\ufeff", "é", "日本語。", "🐕" * 50, "NaN", "####", "{prompt}", "{input}")
WORDS = st.one_of(st.text(max_size=40), st.sampled_from(ODD))
VALUES = st.one_of(
    *(WORDS, st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False)),
    *(st.lists(WORDS, max_size=3), st.dictionaries(st.sampled_from("ab"), WORDS, max_size=2)),
)
OUTPUTS = ("", "2", "yes", "\x00 é 🐕", "#### -1e400", "1" * 5000)


@cache
def task_of(name):
    made = build({**composed(f"task={name}")[0]["task"], "limit": None}, "task", within="kvexp.tasks")
    return replace(made, streaming=True)


def good(name):
    return {field: GOOD.get(field, f"Some words for {field}. And more of them here.") for field in FIELDS[name]}


def check(task, row, where="row 7 of rows.jsonl", outputs=OUTPUTS):
    """An example that can be asked and scored, or an error in words that names the row."""
    try:
        example = task.example(row, where)
    except ConfigError as error:
        if where not in str(error):
            raise
        return
    assert isinstance(example, Example) and isinstance(example.id, str)
    assert bool(example.prompt.strip()) != bool(example.skipped)
    assert isinstance(example.reference, str)
    if not task.only_nll:
        for output in outputs:
            for name, value in task.score(output, example.reference, example).items():
                assert math.isfinite(value) and 0 <= value <= 100, (name, value, row, output)
    json.dumps(dict(example.info), allow_nan=False)


@pytest.mark.parametrize("name", FIELDS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_value_of_a_field(name, data):
    row, field = good(name), data.draw(st.sampled_from(FIELDS[name]))
    check(task_of(name), row | {field: data.draw(VALUES)})


@pytest.mark.parametrize("name", FIELDS)
def test_missing_fields_and_long_texts(name):
    task, row = task_of(name), good(name)
    check(task, row)
    for field in FIELDS[name]:
        check(task, {key: value for key, value in row.items() if key != field})
        if isinstance(row[field], str):
            check(task, row | {field: "word " * 200_000}, outputs=["a word"])
            check(task, row | {field: "x" * 1_000_000}, outputs=["a word"])
    check(task, {})


def test_rows_are_read_as_they_are_written(tmp_path):
    """Texts that look like dates or numbers stay texts, and no row lends another its fields."""
    from kvexp.tasks.data import DataSource

    rows = [{"text": "2026-11-21", "id": 1}, {"text": "12", "more": [1, "a", None]}, {"text": "é\u2028 x", "id": "b"}]
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    whole.write_text(json.dumps(rows, indent=1))
    for file in (lines, whole):
        assert [row for _, row in DataSource(data_files=str(file)).rows()] == rows


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": "\xff"}\n', "is not UTF-8 text"),
        (b'{"text": "a"}\n{"text": "\\ud800 b"}\n', r"line 2 of .*half of a character, \\ud800 alone"),
        (b'{"text": "a"}\n["b"]\n', "line 2 of .* is no object with fields but of type list"),
        (b'{"text": 1e999, "b": NaN}\n', "line 1 of .* is not JSON: NaN is no JSON number"),
        (b"[" * 100_000, "line 1 of .* is not JSON"),
    ],
)
def test_what_is_no_row_is_named(tmp_path, data, message):
    from kvexp.tasks.data import DataSource

    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        list(DataSource(data_files=str(file)).rows())
