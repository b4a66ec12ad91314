"""The life of a context: turns, many questions, prompts in chunks, long answers, instructions; tables and charts."""

from collections.abc import Iterator
from typing import Any

from kvexp.figures.style import DASHES
from kvexp.report.look import look
from kvexp.report.section import Section
from kvexp.report.source import ReportSource
from kvexp.results.context_life import VIEWS, LifeView, Line, chart_of
from kvexp.results.seen_and_hidden import Block


def data(source: ReportSource) -> list[dict[str, Any]] | None:
    """A part for each kind of run that is there, with the tables that its command prints and a chart of each."""
    parts, shown = [], list(source.frame["hash"])
    there = [source.folders[key] for key in shown if key in source.folders and not source.folders[key].refused]
    for name, view in VIEWS.items():
        if not any(map(view.has, there)):
            continue
        frame = view.read(source.outputs, {"hash": shown})
        blocks = [_block(view, block) for block in view.blocks(frame)] if len(frame) else []
        if blocks:
            said = {"name": name, "title": view.title, "command": f"kvexp {view.command}", "legend": view.legend}
            parts.append({**said, "blocks": blocks})
    return parts or None


def _block(view: LifeView, block: Block) -> dict[str, Any]:
    """One table, and its chart: places along the axis, and lines with points (place, hash, values and their ends)."""
    title, rows, columns, _ = block
    places, lines = chart_of(view, rows)
    return {
        "title": title,
        "heads": [column.head for column in columns],
        "right": [column.right for column in columns],
        "rows": [[row["hash"], *(column.cell(row) for column in columns)] for row in rows],
        "x": view.x,
        "places": places,
        "sides": [{"title": side.title, "log": side.log, "level": side.level} for side in view.sides],
        "lines": list(_looks(lines)),
    }


def _looks(lines: list[Line]) -> Iterator[dict[str, Any]]:
    """The lines with colour, marker and dashes, which tell those of one method apart."""
    seen: dict[str, int] = {}
    for line in lines:
        dash = DASHES[seen.setdefault(line.method, 0) % len(DASHES)]
        seen[line.method] += 1
        yield {"label": line.label, "points": line.points, **look(line.method, dash)}


SECTION = Section(
    "life",
    "The life of a context",
    "One cache used more than once: questions, turns, prompts in chunks, long answers, instructions. Each table is "
    "what its command prints; bars are 95 % intervals, and points without one are hollow. Black: the full cache.",
    data,
)
