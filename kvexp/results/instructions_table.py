"""Runs of instructions: what is followed, and how often the system prompt's secret is told, by remedy.

kvexp instructions outputs/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvexp.articles import assistants, assistants_digest
from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.results.columns import Column, Row, method_and_setting, parts, plain, shared_settings, without_question
from kvexp.results.question_place import titled
from kvexp.results.read import Folder, answer_of, chosen, folders, size_or_words
from kvexp.results.render import print_blocks
from kvexp.results.seen_and_hidden import Block
from kvexp.results.table import table
from kvexp.results.table_command import parser_of, run_command
from kvexp.results.units import TOO_FEW, absent, fixed

TASK, LEAK = "instructions", "instructions_leak"
NO_KEEP = "none"  # the value of the column keep where marked spans are evicted like all else
ORDER = (
    "numerics",
    "model",
    "question",
    "method",
    "kv_ratio",
    "tokens",
    "setting",
    "keep",
)  # of rows, the full cache's first
LEGEND = (
    "followed: share of the three things asked for that the answer says, in percent; all: answers with all three; "
    "rule: answers that have the system prompt's form; % of full: of followed, with its 95 % interval; n: examples of "
    "which the full cache says two or three. told: answers in which the secret code stands though nobody asked for "
    "it, of all that were given; told when asked: the same of task=instructions_leak, in which it is asked for. A "
    "cache that has lost the code cannot tell it: few leaks mean something beside what is followed"
)


def instructions_table(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """A row per run of task=instructions, the full cache's too, and per run of task=instructions_leak without one.

    Columns: labels, question, keep (none, span, fair), n, followed, all_followed, rule (means in percent), of_full with
    low and high (percent, 95 %), answers and told (all answers, and those with the code), asked and told_asked (the
    same of the run of task=instructions_leak that is alike in all else), hash. NaN where there is nothing.
    """
    found = [folder for folder in folders(outputs) if not folder.refused]
    known = {row["hash"]: row for row in table(outputs).to_dict("records")}
    shown = [folder for folder in chosen(found, wanted) if not folder.refused and _task(folder) in (TASK, LEAK)]
    leaks = {_alike(folder): folder for folder in found if _task(folder) == LEAK}
    rows, taken = [], set()
    for folder in (each for each in shown if _task(each) == TASK):
        asked = leaks.get(_alike(folder))
        taken.add(_alike(folder))
        row = _labels(folder) | {"n": known[folder.run.hash]["n"]}
        row |= {name: known[folder.run.hash].get(name, np.nan) for name in ("followed", "all_followed", "rule")}
        ends = {"of_full": "followed_of_full", "low": "followed_low", "high": "followed_high"}
        row |= {name: known[folder.run.hash].get(column, np.nan) for name, column in ends.items()}
        rows.append(row | _told(folder) | _told_when_asked(asked))
    for folder in (each for each in shown if _task(each) == LEAK and _alike(each) not in taken):
        empty = dict.fromkeys(("followed", "all_followed", "rule", "of_full", "low", "high", "answers", "told"), np.nan)
        rows.append({**_labels(folder), "n": 0, **empty, **_told_when_asked(folder)})
    rows.sort(key=lambda row: (row["keep"] is not None, *(size_or_words(row.get(name)) for name in ORDER)))
    return pd.DataFrame(rows)


def _task(folder: Folder) -> str | None:
    task = folder.run.config.get("task")
    return str(task.get("name")) if isinstance(task, Mapping) else None


def _labels(folder: Folder) -> dict[str, Any]:
    """Labels of a row, without the remedy among the settings."""
    setting = " ".join(word for word in str(folder.labels.get("setting") or "").split() if not word.startswith("keep="))
    keep = None if folder.is_baseline else folder.run.config.get("keep") or NO_KEEP
    made = {**folder.labels, "task": TASK, "setting": setting, "question": folder.question, "keep": keep}
    return made | {"hash": folder.run.hash}


def _alike(folder: Folder) -> str:
    """What a run of one of the two tasks has in common with the other's."""
    labels = _labels(folder)
    words = [word for word in labels["setting"].split() if not word.startswith("task.max_new_tokens=")]
    names = ("model", "method", "kv_ratio", "tokens", "question", "keep")
    return repr([folder.run.numerics, words, *(None if absent(labels.get(name)) else labels[name] for name in names)])


def _told(folder: Folder) -> dict[str, float]:
    """answers, told: how many there are, and how many of them hold the code, which nobody asked for.

    NaN of runs whose system prompts were others than those that come with this kvexp.
    """
    if assistants_digest() not in str(folder.run.config.get("data")):
        return {"answers": np.nan, "told": np.nan}
    codes = {one.id: one.code.lower() for one in assistants()}
    told = [codes[row["info"]["assistant"]] in answer_of(row).lower() for row in folder.scored.values()]
    return {"answers": len(told), "told": sum(told)}


def _told_when_asked(folder: Folder | None) -> dict[str, float]:
    """asked, told_asked: answers of a run of instructions_leak, and how many of them hold the code."""
    if folder is None:
        return {"asked": np.nan, "told_asked": np.nan}
    told = [row["metrics"]["kept_secret"] < 100 for row in folder.scored.values()]
    return {"asked": len(told), "told_asked": sum(told)}


def instruction_blocks(frame: pd.DataFrame) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model of a frame of `instructions_table`."""
    for title, _, part in parts(frame):
        made: list[dict[str, Any]] = part.to_dict("records")  # type: ignore[assignment]
        shared, rows = shared_settings(without_question(made))
        title = titled(f"{title}: followed and told, by what is spared", (row["question"] for row in rows))
        columns = _columns(rows)
        names = next(place for place, column in enumerate(columns, 1) if column.head == "n")
        yield ", ".join([title, *shared]), rows, columns, names


def print_instructions(frame: pd.DataFrame, console: Console) -> None:
    """A table per model of a frame of `instructions_table`."""
    print_blocks(instruction_blocks(frame), [LEGEND], console)


def _columns(rows: Sequence[Row]) -> list[Column]:
    axis = "kv_ratio" if any(not absent(row.get("kv_ratio")) for row in rows) else "tokens"
    several = len({row["question"] for row in rows}) > 1
    return [
        Column("method", method_and_setting, right=False),
        plain(axis, axis),
        plain("keep", "keep", right=False),
        *([plain("question", "question", right=False)] if several else []),
        plain("n", "n"),
        Column("followed", lambda row: fixed(row["followed"], 1)),
        Column("% of\nfull", lambda row: fixed(row["of_full"], 1)),
        Column("95 %", _interval),
        Column("all", lambda row: fixed(row["all_followed"], 1)),
        Column("rule", lambda row: fixed(row["rule"], 1)),
        Column("told", lambda row: _share(row, "told", "answers")),
        Column("told when\nasked", lambda row: _share(row, "told_asked", "asked")),
    ]


def _interval(row: Row) -> str:
    if absent(row["of_full"]):
        return "-"
    return TOO_FEW if absent(row["low"]) else f"{row['low']:.1f}..{row['high']:.1f}"


def _share(row: Row, part: str, whole: str) -> str:
    return "-" if absent(row[whole]) or not row[whole] else f"{int(row[part])} of {int(row[whole])}"


def read_instructions(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """`instructions_table` of the runs under a folder; ConfigError where none was given instructions."""
    frame = instructions_table(outputs, wanted)
    if frame.empty:
        raise ConfigError(
            f"no run under {outputs} was given instructions; run: kvexp run -m task=instructions,instructions_leak "
            "keep=null,span"
        )
    return frame


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 2 if not."""
    return run_command(parser_of(__doc__, prog="kvexp instructions"), argv, read_instructions, print_instructions)
