"""Verdicts as declarations: what each panel, or each row, of a table of `lib.data.points` has to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.lib.draw import panels_of
from experiments.lib.stats import above, all_hold, better, ends, estimate

Judge = Callable[[pd.DataFrame], tuple[bool | None, str]]
MARK = 99.0  # percent of full attention's score that count as reaching it


@dataclass(frozen=True)
class Part:
    """One method at one budget in each panel: its column "of_full" (percent) or "ahead" (points over the rival).

    of_interval: what the interval's ends decide; None: the number is told and is no part of the verdict.
    """

    method: str
    kv_ratio: float
    column: str = "of_full"
    of_interval: Callable[[float, float], bool | None] | None = None

    def row(self, panel: pd.DataFrame) -> Any:
        """The run of this method and budget, or None where it was not made."""
        found = panel[panel["method"].eq(self.method) & panel["kv_ratio"].eq(self.kv_ratio)]
        return found.iloc[0] if len(found) else None


def reaches(method: str, kv_ratio: float) -> Part:
    """At least MARK percent of full attention."""
    return Part(method, kv_ratio, of_interval=lambda low, high: above(low, high, MARK))


def stays_below(method: str, kv_ratio: float) -> Part:
    """Less than MARK percent of full attention."""
    return Part(method, kv_ratio, of_interval=below_mark)


def beats_rival(method: str, kv_ratio: float) -> Part:
    """A paired difference to the rival of the table's points above 0."""
    return Part(method, kv_ratio, "ahead", better)


def below_mark(low: float, high: float) -> bool | None:
    """Whether an interval in percent of full attention lies below MARK."""
    reached = above(low, high, MARK)
    return None if reached is None else not reached


def each_panel(
    sentence: str,
    *parts: Part,
    before: str = "",
    between: str = "; ",
    after: Callable[[pd.DataFrame], str] = lambda table: "",
) -> Judge:
    """Every part holds in every panel (model and task).

    sentence: of one panel, with {model}, {task} and the parts' numbers as {0}, {1}, …; those of all panels are joined
    by `between`, after the words `before`; after: what is told of the whole table.
    """

    def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
        verdicts, found = [], []
        for model, task in panels_of(table):
            panel = table[table["model"].eq(model) & table["task"].eq(task)]
            numbers = []
            for part in parts:
                row = part.row(panel)
                if row is None:
                    return None, f"{part.method} at {part.kv_ratio} was not run"
                number = ends(row, part.column)
                numbers.append(estimate(*number, sign=part.column == "ahead"))
                if part.of_interval is not None:
                    verdicts.append(part.of_interval(*number[1:]))
            found.append(sentence.format(*numbers, model=model, task=task))
        return all_hold(verdicts), before + between.join(found) + after(table)

    return holds


def each_row(
    rows: Callable[[pd.DataFrame], pd.DataFrame],
    column: str,
    of_interval: Callable[[float, float], bool | None],
    cell: str,
    sentence: str = "{}",
) -> Judge:
    """The same of every chosen row. cell: a row in words, with its columns and {number}; sentence: around all cells."""

    def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
        verdicts, cells = [], []
        for _, row in rows(table).iterrows():
            number = ends(row, column)
            verdicts.append(of_interval(*number[1:]))
            cells.append(cell.format(number=estimate(*number, sign=column == "ahead"), **row))
        return all_hold(verdicts), sentence.format("; ".join(cells))

    return holds


def leads(method: str, rival: str) -> Callable[[pd.DataFrame], str]:
    """How often a method's paired difference to the rival leaves out 0, over all panels and budgets: only told."""

    def said(table: pd.DataFrame) -> str:
        rows = table[table["method"].eq(method)]
        ahead, behind = int((rows["ahead_low"] > 0).sum()), int((rows["ahead_high"] < 0).sum())
        return (
            f" {method.capitalize()} against {rival.upper()} (not part of the verdict): better at {ahead}, worse at "
            f"{behind}, open at {len(rows) - ahead - behind} of {len(rows)} points."
        )

    return said
