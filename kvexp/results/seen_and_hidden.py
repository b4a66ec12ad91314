"""The same runs with the question in the prompt and after the eviction, beside each other: percent of full in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from kvexp.results.columns import Column, Record, Row, few, parts, plain, shared_settings, without_question
from kvexp.results.question_place import AFTER_EVICTION, IN_PROMPT
from kvexp.results.units import TOO_FEW, absent, fixed, short

HEADS = {IN_PROMPT: "question in prompt", AFTER_EVICTION: "after eviction"}
NOTE = (
    "question in prompt: eviction has seen what is asked; after eviction: it has not. Each is in percent of a full "
    "cache that was asked in the same place."
)
ALIKE = ("method", "kv_ratio", "tokens", "setting")
Block = tuple[str, list[Record], list[Column], int]


def seen_and_hidden(df: pd.DataFrame) -> Iterator[Block]:
    """(title, rows, columns, how many of them name the row) per model and task with a run of both kinds.

    df: of `kvexp.results.table`. A row holds the columns of its run with the question in the prompt, under their own
    names, and both runs by place of the question under "sides"; they are alike in method, budget and all else.
    """
    if "question" not in df or not {IN_PROMPT, AFTER_EVICTION} <= set(df["question"]):
        return
    ran = df[df["status"].ne("refused") & df["verdict99"].ne("baseline") & df["question"].isin(HEADS)]
    for title, _, part in parts(ran):
        rows = _pairs([{str(name): value for name, value in row.items()} for row in part.to_dict("records")])
        if rows:
            shared, rows = shared_settings(rows)
            metric = str(rows[0]["headline"])
            words = f"{title}: {short(metric, rows[0].get('task'))} in percent of full by place of the question"
            keys = _keys(rows)
            yield ", ".join([words, *shared]), rows, [*keys, *_columns(metric)], len(keys)


def _pairs(runs: list[Record]) -> list[Record]:
    """The runs that exist once with the question in either place."""
    found: dict[str, dict[str, list[Record]]] = {}
    for run in without_question(runs):
        key = repr([None if absent(run.get(name)) else run[name] for name in ALIKE])
        found.setdefault(key, {name: [] for name in HEADS})[run["question"]].append(run)
    return [
        {**sides[IN_PROMPT][0], "sides": {name: side[0] for name, side in sides.items()}}
        for sides in found.values()
        if all(len(side) == 1 for side in sides.values())
    ]


def _keys(rows: list[Record]) -> list[Column]:
    """What names a row: method and budget, and the settings where they differ."""
    more = ["tokens"] * any(not absent(row.get("tokens")) for row in rows)
    more += ["setting"] * any(row.get("setting") for row in rows)
    names = [plain(name, name, right=name == "tokens") for name in more]
    return [plain("method", "method", right=False), plain("kv_ratio", "kv_ratio"), *names]


def _columns(metric: str) -> list[Column]:
    columns = []
    for name, head in HEADS.items():
        columns += [
            Column(f"{head}:\n% of full", _cell(name, lambda row: fixed(row.get(f"{metric}_of_full"), 1))),
            Column("95 %\ninterval", _cell(name, lambda row: _interval(row, metric))),
            Column("paired", lambda row, name=name: str(row["sides"][name]["paired"])),  # type: ignore[misc]
        ]
    return columns


def _cell(side: str, of: Callable[[Row], str]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        run: Any = row["sides"][side]
        return "-" if absent(run["paired"]) else TOO_FEW if few(run) else of(run)

    return cell


def _interval(row: Row, metric: str) -> str:
    low, high = row.get(f"{metric}_low"), row.get(f"{metric}_high")
    return "-" if absent(low) else f"{low:.1f}..{high:.1f}"
