"""Rows of any content: an example whose prompt and numbers are right, or a ConfigError that names the row."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_conf import composed

from kvexp.run.build import build
from kvexp.tasks import Example
from kvexp.util import ConfigError

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
WORDS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            *(
                "",
                " ",
                "\n",
                "\x00",
                "\u202e",
                "\ufeff",
                "é",
                "日本語。",
                "🐕" * 50,
                "NaN",
                "####",
                "{prompt}",
                "{input}",
                "%s",
            )
        ]
    ),
)
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


def refused(task, row, where):
    """Why; None where it makes an example."""
    try:
        task.example(row, where)
    except ConfigError as error:
        return str(error)
    return None


def check(task, row, where="row 7 of rows.jsonl", outputs=OUTPUTS):
    """An example that can be asked and scored, or an error in words that names the row."""
    why = refused(task, row, where)
    if why is not None:
        assert where in why, why
        return
    example = task.example(row, where)
    assert isinstance(example, Example) and isinstance(example.id, str)
    assert example.prompt == "".join(example.prompt_parts) and bool(example.prompt.strip()) != bool(example.skipped)
    assert isinstance(example.reference, str)
    if not task.only_nll:
        for output in outputs:
            for name, value in task.score(output, example.reference, example).items():
                assert math.isfinite(value) and 0 <= value <= 100, (name, value, row, output)
    json.dumps(dict(example.info), allow_nan=False)


def check_a_value(name, data):
    row, field = good(name), data.draw(st.sampled_from(FIELDS[name]))
    row[field] = data.draw(VALUES)
    check(task_of(name), row)


@pytest.mark.parametrize("name", FIELDS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_value_of_a_field(name, data):
    check_a_value(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_a_hundred_values_of_a_field(name, data):
    check_a_value(name, data)


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


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    "lines",
    [
        *(["{}"], ["[]"], ["null"], ["3"], ['"text"'], ['{"a": NaN}'], ["{", "}"], ["\ufeff{}"], ["\x00"]),
        *(['{"text": 1}', '{"text": "a b c"}'], ['{"text": ["a"]}', '{"text": {"a": 1}}'], [""]),
    ],
    ids=str,
)
def test_files_that_hold_something_else(tmp_path, name, lines):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as refused:
        replace(task_of(name), data_files=str(file)).check()
    assert str(file) in str(refused.value) or "rows.jsonl" in str(refused.value)


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
