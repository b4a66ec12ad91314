"""Printed tables: columns of the values of rows, each with its unit and digits, and what shows them.

A `Block` is one table. It is printed, written as Markdown, or handed to a page, whose cells sort by their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from rich.table import Table
from rich.text import Text

from kvexp.util.output import Console, visible

Row = Mapping[str, Any]
Record = dict[str, Any]

TOO_FEW = "too few"  # examples for a percentage or an interval to mean anything


def absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def words(value: Any) -> str:
    """A value as it is."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def fixed(value: Any, digits: int, sign: str = "") -> str:
    """A number with so many digits behind the point; sign: "+" shows that of positive numbers too."""
    return "-" if absent(value) else f"{value:{sign}.{digits}f}"


def estimate(row: Row, name: str, digits: int, times: int = 1) -> str:
    """A number of a row and its interval: "96.1 (93.0..98.9)", or "96.1 (too few)"; times: as of `numeric`."""
    if absent(row.get(name)):
        return "-"
    ends: list[Any] = [row.get(f"{name}{end}") for end in ("_low", "_high")]
    interval_words = TOO_FEW if absent(ends[0]) else "..".join(fixed(times * end, digits) for end in ends)
    return f"{fixed(times * row[name], digits)} ({interval_words})"


def count(value: float) -> str:
    """Number in at most five characters: 1234 -> 1234, 56789 -> 57k, 3.4e6 -> 3.4M."""
    if absent(value):
        return "-"
    if math.isinf(value) or value >= 1e9:
        return ">1G"
    if value < 10_000:
        return f"{value:.0f}"
    return f"{value / 1e3:.0f}k" if value < 999_500 else f"{value / 1e6:.3g}M" if value < 999.5e6 else "1G"


def seconds(value: float) -> str:
    if absent(value):
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"


@dataclass(frozen=True)
class Column:
    """One column of a printed table.

    head: its words; value: what a row has there, by its name or a function of the row; show: that value as text, a
    value that is text already stays as it is; right: whether cells stand to the right. rank: 0 on every console, others
    where there is room, the least first.
    """

    head: str
    value: str | Callable[[Row], Any]
    show: Callable[[Any], str] = words
    right: bool = True
    rank: int = 0

    def of(self, row: Row) -> Any:
        """What the row has there; None for an empty text under the name."""
        if not isinstance(self.value, str):
            return self.value(row)
        value = row.get(self.value)
        return None if isinstance(value, str) and not value else value

    def cell(self, row: Row) -> str:
        """The value as text, a dash where there is none."""
        value = self.of(row)
        return "-" if absent(value) else value if isinstance(value, str) else self.show(value)

    def sort_key(self, row: Row) -> Any:
        """What the row sorts by in this column: a number or a text; of several values the first; None where none is."""
        value = self.of(row)
        while isinstance(value, tuple):
            value = value[0]
        return None if absent(value) or value in ("", "-") else value


@dataclass(frozen=True)
class Block:
    """One printed table. keys: how many of the columns, the first ones, name a row."""

    title: str
    rows: list[Record]
    columns: list[Column]
    keys: int

    @property
    def heads(self) -> list[str]:
        """Heads in one line each."""
        return [column.head.replace("-\n", "").replace("\n", " ") for column in self.columns]

    def cells(self) -> dict[str, Any]:
        """The table for a page's script: title, heads, which columns stand to the right, rows of hash and cells, and
        what each cell sorts by.
        """
        return {
            "title": self.title,
            "heads": [column.head for column in self.columns],
            "right": [column.right for column in self.columns],
            "rows": [[row["hash"], *(column.cell(row) for column in self.columns)] for row in self.rows],
            "sort": [[column.sort_key(row) for column in self.columns] for row in self.rows],
        }


def plain(name: str, head: str, right: bool = True) -> Column:
    """Column of a value as it is."""
    return Column(head, name, right=right)


def numeric(head: str, name: str, digits: int, times: int = 1, sign: str = "") -> Column:
    """Column of a number as of `fixed`; times: 100 for a share that is shown in percent."""
    return Column(head, name, lambda value: fixed(value if times == 1 else times * value, digits, sign))


def interval(
    head: str,
    low: str,
    high: str,
    digits: int,
    times: int = 1,
    most: float = math.inf,
    of: str | None = None,
    sign: str = "",
) -> Column:
    """Column of both ends; TOO_FEW without. most: an upper end beyond is no number; of: a dash without this number."""

    def ends(row: Row) -> Any:
        if of is not None and absent(row.get(of)):
            return None
        return TOO_FEW if absent(row.get(low)) else (row[low], row[high])

    def show(value: tuple[float, float]) -> str:
        least, largest = (fixed(times * end, digits, sign) for end in value)
        return f"{least}..{f'>{most:g}' if value[1] > most else largest}"

    return Column(head, ends, show)


def telling(rows: Sequence[Row], *columns: Column) -> list[Column]:
    """The columns in which a row has something else than a dash or 0."""
    return [column for column in columns if any(column.cell(row) not in ("-", "0") for row in rows)]


def records(frame: pd.DataFrame) -> list[Record]:
    """The rows of a frame, by name of column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


STYLES = {"pass": "green", "fail": "bold red", "undecided": "yellow", "void": "dim", "baseline": "dim"}
STYLES |= {"equivalent": "green", "worse": "bold red"}
STYLES |= {"failed": "bold red", "refused": "bold red", "partial": "yellow"}
WIDEST = 3  # in several grids a column that names the rows takes a third of the width at most, for the numbers' sake
LEAST_NAME = 16  # columns of letters that a name which folds must have in one grid


def print_blocks(blocks: Iterable[Block], below: Iterable[str], console: Console) -> None:
    """Each table below its title, and the lines `below` them all."""
    for block in blocks:
        console.print(Text(block.title, style="bold"))
        print_columns(block.rows, block.columns, block.keys, console)
    print_lines(below, console, "dim")


def folded(phrases: Iterable[str], width: int) -> list[str]:
    """Lines of phrases with dots between them; only between phrases does a line end, where they are wider than this."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + len(phrase) + 3 <= width:
            lines[-1] += f" · {phrase}"
        else:
            lines.append(phrase)
    return lines


def print_lines(lines: Iterable[str], console: Console, style: str = "") -> None:
    """Lines that fold on a terminal alone."""
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def print_columns(rows: Sequence[Row], columns: Sequence[Column], keys: int, console: Console) -> None:
    """Rows in one grid whose widest name folds, or in as few as the width allows, each beginning with the names.

    keys: how many columns, the first ones, name a row.
    """
    letters = [_letters(column, rows) for column in columns]
    places = [place for place, column in enumerate(columns) if not column.rank]

    def beyond(places: Sequence[int], gap: int) -> int:
        return sum(letters[place] + gap for place in places) - console.width

    gap = 1 if beyond(places, 2) > 0 else 2
    lacking, widest = max(0, beyond(places, gap)), max(range(keys), key=lambda place: letters[place])
    if lacking and letters[widest] - lacking < LEAST_NAME:
        gap, limits = 2, dict.fromkeys(range(keys), console.width // WIDEST)
        wide = [gap + min(number, limits.get(place, number)) for place, number in enumerate(letters)]
        grids = list(_fit(places, keys, wide, console.width))
    else:
        limits = {widest: letters[widest] - lacking}
        for rank in sorted({column.rank for column in columns} - {0}):
            more = [place for place, column in enumerate(columns) if place in places or column.rank == rank]
            places = more if beyond(more, gap) <= 0 else places
        grids = [places]
    for grid in grids:
        _print_grid(rows, [(columns[place], limits.get(place)) for place in grid], gap, console)


def _letters(column: Column, rows: Sequence[Row]) -> int:
    """Letters of the widest line of a column."""
    return max(len(line) for text in (column.head, *map(column.cell, rows)) for line in text.split("\n"))


def _fit(places: Sequence[int], keys: int, wide: Sequence[int], width: int) -> Iterator[list[int]]:
    """The columns in as few groups as the width allows, each beginning with those that name the row."""
    group, room = list(places[:keys]), width + 1 - sum(wide[:keys])
    for place in places[keys:]:
        if wide[place] > room and len(group) > keys:
            yield group
            group, room = list(places[:keys]), width + 1 - sum(wide[:keys])
        group.append(place)
        room -= wide[place]
    yield group


def _print_grid(rows: Sequence[Row], columns: Sequence[tuple[Column, int | None]], gap: int, console: Console) -> None:
    """One grid, and an empty line. columns: with how wide each may be."""
    grid = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="")
    for column, most in columns:
        side: Literal["left", "right"] = "right" if column.right else "left"
        grid.add_column(Text(column.head), justify=side, overflow="fold", max_width=most)
    for row in rows:
        cells = [column.cell(row) for column, _ in columns]
        style = "dim" if row.get("verdict99") == "void" else ""
        grid.add_row(*(Text(cell, style=STYLES.get(cell.split(" ")[0], "")) for cell in cells), style=style)
    console.print(grid)
    console.print()


def markdown_of(blocks: Iterable[Block], below: Iterable[str]) -> str:
    """What `print_blocks` prints as GitHub-flavoured Markdown."""
    lines = []
    for block in blocks:
        sides = ("---:" if column.right else "---" for column in block.columns)
        lines += [f"**{block.title}**", "", _line(block.heads), _line(sides)]
        lines += [*(_line(column.cell(row) for column in block.columns) for row in block.rows), ""]
    return visible("\n".join([*lines, *(f"- {line}" for line in below), ""]))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
