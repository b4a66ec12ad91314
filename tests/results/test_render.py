"""What every row of a table has in common stands above it; what names the rows never squeezes out the numbers."""

from __future__ import annotations

import io
import math

import pytest
from report_runs import write
from rich.console import Console

from kvexp.results.blocks import Block, Column, interval, plain, print_columns
from kvexp.results.table import print_table, table, to_markdown
from kvexp.results.views import main
from kvexp.run.store import refuse
from kvexp.util.errors import ConfigError
from kvexp.util.output import size


def record(folder, method, setting, kv_ratio=0.5, baseline=None, slots=8.0, changes=None, **more):
    scores = [{"rouge1": 50.0 + number, "rouge2": 40.0, "rougeL": 40.0} for number in range(6)]
    changes = {"receipt": {"slots": slots, "batch_size": 1}, "finish_reason": "length"} | (changes or {})
    return write(folder, method, scores, baseline, changes=changes, kv_ratio=kv_ratio, setting=setting, **more).hash


def printed(folder, width):
    out = io.StringIO()
    print_table(table(folder), Console(file=out, width=width))
    return out.getvalue()


SHARED = "task.data_files=some_folder_of_texts.jsonl task.max_prompt_tokens=2048 task.size=120"


@pytest.fixture
def outputs(tmp_path):
    full = record(tmp_path, "full", SHARED, None)
    for share in ("0.2", "0.5"):
        record(tmp_path, "h2o", f"method.recent_ratio={share} {SHARED}", baseline=full)
    return tmp_path


def test_settings_of_all_rows_stand_in_the_title(outputs):
    text = printed(outputs, 300)
    title, *rest = text.splitlines()
    assert title == f"tiny / xsum, {', '.join(SHARED.split())}"
    assert "task.size" not in "".join(rest)
    assert "method.recent_ratio=0.2" in text and "method.recent_ratio=0.5" in text
    assert to_markdown(table(outputs)).startswith(f"**{title}**")


def test_a_setting_of_some_rows_alone_stays_with_them(outputs):
    record(outputs, "window", "task.size=7")
    text = printed(outputs, 300)
    assert text.splitlines()[0] == "tiny / xsum"
    assert "task.size=120" in text and "task.size=7" in text


def test_a_chat_template_and_weights_of_a_gguf_file_stand_in_the_title(tmp_path):
    record(tmp_path, "h2o", "", chat=True, weights="Q4_1")
    record(tmp_path, "window", "", chat=True, weights="Q4_1")
    refuse(tmp_path, ["method=keyformer"], {"model": "tiny", "task": "xsum", "method": "keyformer"}, ConfigError("no"))
    text = printed(tmp_path, 300)
    assert text.splitlines()[0] == "tiny / xsum, Q4_1 weights, chat template"
    heads = text.splitlines()[1:3]
    assert "ended" in heads[0] + heads[1] and "chat" not in heads[0] + heads[1]  # ended: of chat models always
    record(tmp_path, "tova", "", weights="Q4_1")
    title, *rest = printed(tmp_path, 300).splitlines()
    assert title == "tiny / xsum, Q4_1 weights" and " chat " in rest[0] + rest[1]


def test_without_a_template_nothing_is_said_of_it(outputs):
    heads = "".join(printed(outputs, 300).splitlines()[:3])
    assert "template" not in heads and "ended" not in heads


def test_a_value_with_spaces_is_one_word(tmp_path):
    for letter in "ab":
        record(tmp_path, "h2o", f"task.frame={letter} and the rest task.size=3")
    title = printed(tmp_path, 300).splitlines()[0]
    assert title == "tiny / xsum, task.size=3"


@pytest.mark.parametrize("width", [80, 120])
def test_long_settings_fold_and_leave_room_for_numbers(tmp_path, width):
    for number in range(3):
        record(tmp_path, "h2o", " ".join(f"cache.some_long_option_{i}={number}" for i in range(4)))
    text = printed(tmp_path, width)
    parts = text.count("method ")
    assert parts <= (4 if width == 80 else 3), text
    tables = text.partition("% of full and its")[0]  # notes fold on a terminal alone
    assert max(len(line) for line in tables.splitlines() if not line.startswith("tiny / xsum:")) <= width
    assert "cache.some_long_option_3=2" in text  # folds between overrides, not inside one


def test_a_budget_of_a_handful_of_slots_is_said(tmp_path):
    """As of lm-eval's zero-shot items at a fifth, of whatever task."""
    full = record(tmp_path, "full", "", None, slots=3.0)
    record(tmp_path, "h2o", "", baseline=full)
    assert "hardly a choice" not in printed(tmp_path, 300)
    few = record(tmp_path, "window", "", baseline=full, slots=1.4)
    said = f"tiny / xsum: window 0.5 ({few[:6]}): under 8 slots per layer and head, where a budget is hardly a choice"
    assert said in printed(tmp_path, 300) and said in to_markdown(table(tmp_path))


def test_answers_without_a_reference_have_no_rouge(tmp_path):
    full = record(tmp_path, "full", "", None, changes={"reference": ""})
    record(tmp_path, "h2o", "", baseline=full, changes={"reference": ""})
    text = printed(tmp_path, 300)
    assert "h2o" in text and "R-1" not in text and "rouge" not in text.lower()
    assert "h2o 0.5" in text and "no references to compare with: KL and equal tokens are the distance" in text
    assert main([str(tmp_path), "--plot", str(tmp_path / "x.png")]) == 2


def test_a_cell_sorts_by_its_value_and_not_by_its_words() -> None:
    row = {"bytes": 1536.0, "low": 12.5, "high": 14.0, "few": math.nan, "verdict": "fail (R-2)", "none": None, "": "-"}
    columns = [Column("", "bytes", size), interval("", "low", "high", 1), interval("", "few", "few", 1)]
    columns += [Column("", lambda row: ((20.0, 31.0), (40.0, 50.0)), str), plain("verdict", ""), plain("none", "")]
    found = Block("", [{**row, "hash": "a"}], [*columns, Column("", lambda row: "-")], 1).cells()
    assert found["sort"] == [[1536, 12.5, "too few", 20, "fail (R-2)", None, None]]
    assert found["rows"][0][:4] == ["a", "1.5 KiB", "12.5..14.0", "too few"]


def test_one_grid_takes_further_columns_by_their_rank_and_folds_its_widest_name():
    row = {"method": "a b c d e f g h i j k l", "one": 1.25, "two": 22222.5, "three": 3.5}
    further = [Column("three", "three", rank=2), Column("two", "two", rank=1)]

    def heads(width):
        out = io.StringIO()
        print_columns(
            [row],
            [plain("method", "method", right=False), plain("one", "one"), *further],
            1,
            Console(file=out, width=width),
        )
        return out.getvalue().splitlines()[0].split(), len(out.getvalue().strip().splitlines())

    assert heads(80) == (["method", "one", "three", "two"], 2)
    assert heads(41) == (["method", "one", "two"], 2), "the least rank first, in the columns' order"
    assert heads(31) == (["method", "one"], 2)
    assert heads(24) == (["method", "one"], 3), "the name folds"
