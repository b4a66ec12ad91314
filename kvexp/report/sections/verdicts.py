"""The terminal's tables, to be sorted."""

import re
from collections.abc import Sequence
from typing import Any

from kvexp.report.section import Section
from kvexp.report.source import ReportSource, RunGroup
from kvexp.results.columns import Column
from kvexp.results.render import notes

VERDICT = re.compile(r"99(\.9)? %\n|.* %\nof full$|95 %\ninterval$")  # heads of the columns that decide


def data(source: ReportSource) -> dict[str, Any]:
    """Tables with heads and cells as the terminal prints them, and the notes below them."""
    return {"tables": [_table(group) for group in source.groups], "notes": notes(source.frame)}


def _table(group: RunGroup) -> dict[str, Any]:
    columns = _verdicts_first(group.columns)
    return {
        **{"model": group.model, "task": group.task, "title": group.title},
        "heads": [column.head for column in columns],
        "right": [column.right for column in columns],
        "rows": [[row["hash"], *(column.cell(row) for column in columns)] for row in group.rows],
    }


def _verdicts_first(columns: Sequence[Column]) -> list[Column]:
    """Method and budget, then what became of them: a narrow window shows little more without scrolling."""
    verdicts = sorted(filter(_decides, columns), key=lambda column: not column.head.startswith("99"))
    others = [column for column in columns if not _decides(column)]
    return [*others[:2], *verdicts, *others[2:]]


def _decides(column: Column) -> bool:
    return VERDICT.match(column.head) is not None


SECTION = Section(
    "verdicts",
    "Verdicts",
    "Whether a run reaches 99 % and 99.9 % of the full cache in every metric (MLPerf's marks), as in the terminal's "
    "table. Choose a column's head to sort by it.",
    data,
)
