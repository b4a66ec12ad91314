"""What a report is made of: the run folders, and their table."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvexp.errors import ConfigError
from kvexp.results import table
from kvexp.results.read import Folder, folders, unmatched
from kvexp.results.render import groups


@dataclass(frozen=True)
class RunGroup:
    """The runs of one table; setting: of each row, without the overrides that all of them share.

    panel: model and task, and NUMERICS where the page has several.
    """

    panel: str
    model: str
    task: str
    title: str
    rows: list[dict[str, Any]]
    columns: list[Any]


@dataclass(frozen=True)
class ReportSource:
    """folders: by hash, baselines included; frame: `kvexp.results.table` of those shown; samples: per run."""

    outputs: Path
    folders: dict[str, Folder]
    frame: pd.DataFrame
    samples: int

    @property
    def groups(self) -> list[RunGroup]:
        several = self.frame.loc[self.frame["status"] != "refused", "numerics"].nunique() > 1
        found = []
        for title, rows, columns, _ in groups(self.frame, "kv_ratio"):
            model, task = (_label(rows[0], name) for name in ("model", "task"))
            panel = f"{model} / {task}" + (f", NUMERICS {rows[0]['numerics']}" if several else "")
            found.append(RunGroup(panel, model, task, title, rows, columns))
        return found


def read(outputs: str | Path, where: Mapping[str, Any] | None = None, samples: int = 20) -> ReportSource:
    """Everything under the folder; ConfigError if there is no such folder, or no run that `where` leaves."""
    if samples < 0:
        raise ConfigError(f"--samples must be 0 or more, got {samples}")
    frame = table(outputs, where)
    if frame.empty:
        raise ConfigError(unmatched(outputs, where or {}))
    return ReportSource(Path(outputs), {folder.run.hash: folder for folder in folders(outputs)}, frame, samples)


def _label(row: Mapping[str, Any], name: str) -> str:
    """A job refused before its labels were known has none."""
    return "-" if pd.isna(value := row.get(name)) else str(value)
