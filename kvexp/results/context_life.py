"""The tables of a context's life (a question seen or hidden, turns, many questions, chunks …) as charts have them.

Lines over places along one axis, for figures and for the report; the tables themselves have files of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvexp.record.run_name import run_name
from kvexp.results import instructions_table, long_answers_table, many_questions, prefill_chunks, turns
from kvexp.results.columns import Row
from kvexp.results.question_place import AFTER_EVICTION, WORDS
from kvexp.results.read import Folder, chosen, folders
from kvexp.results.seen_and_hidden import HEADS, NOTE, Block, seen_and_hidden
from kvexp.results.table import table
from kvexp.results.units import absent

Value = tuple[float, float, float]  # a number with the ends of its interval, NaN where there is none


@dataclass(frozen=True)
class Point:
    """place: on the axis, in words; order: what orders the places; hash: of the run; values: one for each side."""

    place: str
    order: float
    hash: str
    values: list[Value]


@dataclass(frozen=True)
class Side:
    """One chart of a view: title of its axis; log: a logarithmic axis (of what is above 0); level: where the full cache
    is, or None.
    """

    title: str
    log: bool = False
    level: float | None = None


@dataclass(frozen=True)
class LifeView:
    """One of the tables.

    command: that prints it; title: of a report's part; x: title of the axis; points: those of a row of the table.
    one_line: whether the rows of several runs make one line; has: whether a run may have a row; read: (folder of the
    outputs, what is wanted) -> its frame, empty without such runs; blocks: of the frame.
    """

    command: str
    title: str
    x: str
    sides: tuple[Side, ...]
    points: Callable[[Row], Iterator[Point]]
    one_line: bool
    has: Callable[[Folder], bool]
    read: Callable[[str | Path, Mapping[str, Any]], pd.DataFrame]
    blocks: Callable[[pd.DataFrame], Iterator[Block]]
    legend: str


@dataclass(frozen=True)
class Line:
    """One line of a chart: its words, method, and points in order: (place, hash of the run, a value for each side)."""

    label: str
    method: str
    points: list[tuple[int, str, list[Value]]]


def chart_of(view: LifeView, rows: Sequence[Row]) -> tuple[list[str], list[Line]]:
    """(places in order, lines) of the rows of one block of the view's table."""
    several = len({row.get("question") for row in rows}) > 1
    each = [(row, point) for row in rows for point in view.points(row)]
    order = {point.place: point.order for _, point in each}
    places = sorted(order, key=lambda place: order[place])
    found: dict[tuple[str, ...], Line] = {}
    for row, point in each:
        asked = f"({WORDS[row['question']]})" if several and row.get("question") in WORDS else ""
        label = f"{run_name(row)} {asked}".strip()
        line = found.setdefault((label, *([] if view.one_line else [row["hash"]])), Line(label, row["method"], []))
        line.points.append((places.index(point.place), point.hash, point.values))
    for line in found.values():
        line.points.sort(key=lambda point: point[0])
    return places, list(found.values())


def _along(column: str, *values: Callable[[Row], Value]) -> Callable[[Row], Iterator[Point]]:
    """A row's only point, at the number of a column."""

    def points(row: Row) -> Iterator[Point]:
        yield Point(f"{row[column]:g}", float(row[column]), row["hash"], [value(row) for value in values])

    return points


def _seen(row: Row) -> Iterator[Point]:
    """The two points of a row of `seen_and_hidden`."""
    metric = row["headline"]
    for order, (name, run) in enumerate(row["sides"].items()):
        value = [run.get(f"{metric}{ending}", math.nan) for ending in ("_of_full", "_low", "_high")]
        low, high = (math.nan if absent(end) else end for end in value[1:])
        if not absent(value[0]):
            yield Point(HEADS[name], float(order), run["hash"], [(value[0], low, high)])


def _positions(row: Row) -> Iterator[Point]:
    """A point for each bin of positions (`kl_N`)."""
    for end in sorted(int(name[3:]) for name in row if str(name).startswith("kl_")):
        if not absent(row[f"kl_{end}"]):
            yield Point(f"to {end}", float(end), row["hash"], [(row[f"kl_{end}"], math.nan, math.nan)])


def _chunk(row: Row) -> Iterator[Point]:
    whole = absent(row["chunk"])
    values = [_percent(row), _share(row, "peak_kv_bytes", "full_peak_kv_bytes")]
    yield Point(
        "whole" if whole else f"{row['chunk']:g}", math.inf if whole else float(row["chunk"]), row["hash"], values
    )


def _keep(row: Row) -> Iterator[Point]:
    keeps = (instructions_table.NO_KEEP, "span", "fair")
    if row["keep"] in keeps:
        values = [_percent(row), _share(row, "told_asked", "asked")]
        yield Point(str(row["keep"]), float(keeps.index(row["keep"])), row["hash"], values)


def _percent(row: Row) -> Value:
    return row["of_full"], row["low"], row["high"]


def _alone(column: str) -> Callable[[Row], Value]:
    """A column that has no interval."""
    return lambda row: (row[column], math.nan, math.nan)


def _share(row: Row, part: str, whole: str) -> Value:
    """One column in percent of another."""
    known = not (absent(row[part]) or absent(row[whole])) and row[whole]
    return (100 * row[part] / row[whole] if known else math.nan, math.nan, math.nan)


def _task(folder: Folder) -> Any:
    return (folder.run.config.get("task") or {}).get("name")


FolderTable = Callable[[Sequence[Folder], Mapping[str, Folder]], pd.DataFrame]


def _reader(made: FolderTable) -> Callable[[str | Path, Mapping[str, Any]], pd.DataFrame]:
    """`read` of a table that is made of folders and all that are known, by hash."""

    def read(outputs: str | Path, wanted: Mapping[str, Any]) -> pd.DataFrame:
        found = folders(outputs)
        return made(chosen(found, wanted), {folder.run.hash: folder for folder in found})

    return read


QUALITY, KL = Side("% of full", level=100.0), Side("KL, nats per token", log=True)


def _turns(by: str, title: str, x: str) -> LifeView:
    return LifeView(
        "turns" if by == "turn" else "turns --by distance",
        title,
        x,
        (QUALITY, KL),
        _along(by, _percent, _alone("kl")),
        False,
        lambda folder: any("turn" in (row.get("info") or {}) for row in folder.rows[:1]),
        _reader(lambda runs, known: turns.turns_table(runs, known, by)),
        lambda frame: turns.turn_blocks(frame, by),
        turns.LEGEND,
    )


VIEWS: dict[str, LifeView] = {
    "seen": LifeView(
        "results",
        "Question seen or hidden",
        "what eviction knows of the question",
        (QUALITY,),
        _seen,
        True,
        lambda folder: folder.question == AFTER_EVICTION,
        table,
        seen_and_hidden,
        NOTE,
    ),
    "questions": LifeView(
        "many-questions",
        "Many questions of one cache",
        "questions asked of one evicted cache",
        (QUALITY, Side("% of contexts with no answer lost", level=100.0)),
        _along("asked", _percent, _alone("none_lost")),
        False,
        lambda folder: any(row.get("context") for row in folder.rows[:1]),
        _reader(many_questions.questions_table),
        many_questions.question_blocks,
        many_questions.LEGEND,
    ),
    "turns": _turns("turn", "Turns", "turn of the conversation, from 0"),
    "distance": _turns("distance", "Turns by distance of the fact", "turns since the fact asked for was told"),
    "chunks": LifeView(
        "prefill-chunks",
        "Prompts that never fit",
        "tokens between two evictions of the prompt",
        (QUALITY, Side("peak KV bytes, % of full's", level=100.0)),
        _chunk,
        True,
        lambda folder: "prefill" in folder.run.config,
        prefill_chunks.chunks_table,
        prefill_chunks.chunk_blocks,
        prefill_chunks.LEGEND,
    ),
    "long": LifeView(
        "long-answers",
        "Long answers",
        "place of the token in the answer",
        (KL,),
        _positions,
        False,
        lambda folder: _task(folder) == "long_answers",
        _reader(long_answers_table.long_table),
        long_answers_table.long_blocks,
        long_answers_table.LEGEND,
    ),
    "instructions": LifeView(
        "instructions",
        "Instructions and a secret",
        "what is spared of the marked spans",
        (QUALITY, Side("% of answers that tell the secret when asked")),
        _keep,
        True,
        lambda folder: _task(folder) in (instructions_table.TASK, instructions_table.LEAK),
        instructions_table.instructions_table,
        instructions_table.instruction_blocks,
        instructions_table.LEGEND,
    ),
}
