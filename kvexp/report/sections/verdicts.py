"""The terminal's tables, to be sorted."""

from typing import Any

from kvexp.results.render import notes

from ..section import Section
from ..source import Source


def data(source: Source) -> dict[str, Any]:
    """Tables with heads and cells as the terminal prints them, and the notes below them."""
    tables = [
        {
            **{"model": group.model, "task": group.task, "title": group.title},
            "heads": [column.head.replace("-\n", "").replace("\n", " ") for column in group.columns],
            "right": [column.right for column in group.columns],
            "rows": [[row["hash"], *(column.cell(row) for column in group.columns)] for row in group.rows],
        }
        for group in source.groups
    ]
    return {"tables": tables, "notes": notes(source.frame)}


SECTION = Section(
    "verdicts",
    "Verdicts",
    "Whether a run reaches 99 % and 99.9 % of the full cache in every metric (MLPerf's marks), as in the terminal's "
    "table. Choose a column's head to sort by it.",
    data,
)
