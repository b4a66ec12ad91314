"""The marked text, in a terminal and as a page, of a log made by hand; the token texts it is made of."""

from __future__ import annotations

import dataclasses
import io
import json

import pandas as pd
import pytest
from rich.console import Console

from kvexp.diagnose.show import show
from kvexp.hf.cache import mark, texts_of
from kvexp.hf.load import byte_tokenizer
from kvexp.run.evictions import ExampleLog, read_example_log, view_of, write_example_log
from kvexp.run.store import Run
from kvexp.util.errors import ConfigError

TEXTS = ["a", " <b>", " c\n", "d", " \u65e5\u672c", " ?", " yes", "&"]  # 5 of the prompt, 1 asked, 2 answered
LOG = ExampleLog("ex", 5, 1, list(range(8)), TEXTS, heads=[3, 3], same_output=True, same_kept=True)
GONE = pd.DataFrame(
    [(0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 2, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 1), (0, 1, 2, 3), (1, 0, 0, 2)],
    columns=["step", "layer", "head", "position"],
)


def printed(view, width=40):
    out = io.StringIO()
    show(view, Console(file=out, width=width, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_counts_by_hand():
    at_prompt, later = view_of(LOG, GONE), view_of(LOG, GONE, step=1)
    assert at_prompt.kept.tolist() == [[3, 0, 3, 3, 3, 0, 0, 0], [3, 0, 3, 2, 3, 0, 0, 0]]
    assert at_prompt.counts.tolist() == [6, 0, 6, 5, 6, 0, 0, 0] and at_prompt.present == 5
    assert later.counts.tolist() == [6, 0, 5, 5, 6, 6, 0, 0] and later.present == 6
    assert view_of(LOG, GONE, layer=1).counts.tolist() == [3, 0, 3, 2, 3, 0, 0, 0]
    assert later.kept[:, 2].tolist() == [2, 3]


@pytest.mark.parametrize(("asked", "reason"), [({"step": 3}, "from 0 .* to 2"), ({"layer": 2}, "from 0 to 1")])
def test_what_is_not_there(asked, reason):
    with pytest.raises(ConfigError, match=reason):
        view_of(LOG, GONE, **asked)


@pytest.mark.parametrize(
    "table",
    [
        GONE.drop(columns="layer"),
        GONE.assign(position=8),
        GONE.assign(layer=-1),
        GONE.assign(position=["x"] * len(GONE)),
        GONE.assign(step="now"),
    ],
)
def test_a_damaged_log_is_one_line(table):
    with pytest.raises(ConfigError, match=r"the log of evictions of example ex is damaged: .*remove it and run"):
        view_of(LOG, table)


WHOLE = dataclasses.asdict(LOG)
WRONG = [{name: value} for name in ("ids", "heads", "texts", "prompt_tokens") for value in (None, "5", [[]])]
DAMAGED = ["{", "[]", "[" * 99999, json.dumps({name: value for name, value in WHOLE.items() if name != "ids"})]
DAMAGED += [json.dumps(WHOLE | one) for one in (*WRONG, {"prompt_tokens": 99}, {"more": 1})]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_description_of_a_log_is_one_line(tmp_path, text):
    run = Run.open(tmp_path, {"a": 1}, {"method": "h2o"})
    write_example_log(run, LOG)
    assert read_example_log(run, "ex") == LOG
    (file,) = (run.path / "diagnose").glob("ex*.json")
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"ex.*\.json: .*; remove the file and run the same command again"):
        read_example_log(run, "ex")


def test_every_token_has_its_mark_below_it():
    lines = printed(view_of(LOG, GONE), width=90)
    assert lines[1:5] == ["a <b> c\u21b5", "#....###", "d \u65e5\u672c ? yes&", "8#####"]
    assert "of 5 tokens 3 are held by all heads, 1 by some, 1 by none" in lines[-1]
    narrow = printed(view_of(LOG, GONE), width=6)
    assert narrow[narrow.index("a <b>") + 1] == "#...."


def test_marks_never_say_none_or_all_of_some():
    assert [mark(n, 16) for n in (0, 1, 8, 15, 16)] == [".", "1", "5", "9", "#"]
    assert mark(1, 1024) == "1" and mark(1023, 1024) == "9"


def test_texts_of_tokens_join_to_the_text():
    words = byte_tokenizer()
    for text in ("h\u00e9llo w\u00f6rld \u2026 \u65e5\u672c", "plain", "\U0001f600\n\n x"):
        ids = words(text).input_ids
        texts = texts_of(words, ids)
        assert "".join(texts) == words.decode(ids) and len(texts) == len(ids)
    broken = [*words("a").input_ids, *words("\u65e5").input_ids[1:3], *words("b").input_ids[1:]]
    assert texts_of(words, broken)[-1].endswith("b")
