"""What the table needs of a run folder, and which folders it is asked for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record import Run, runs

Row = dict[str, Any]

BASELINE = "full"


@dataclass(frozen=True)
class Folder:
    """A run as it lies on disk now. status: done, partial (unfinished, perhaps still going) or failed."""

    run: Run
    rows: list[Row]
    status: str
    problem: str  # what is wrong with a run that is not done, else ""

    @property
    def labels(self) -> dict[str, Any]:
        return self.run.labels

    @property
    def is_baseline(self) -> bool:
        return bool(self.labels.get("method") == BASELINE)

    @cached_property
    def scored(self) -> dict[str, Row]:
        """The rows that have a score, by example; every other row counts as skipped."""
        return {row["example"]: row for row in self.rows if not row.get("skipped") and row.get("metrics")}

    @cached_property
    def metrics(self) -> list[str]:
        """In the order in which the task wrote them: the first one is the headline."""
        return list(dict.fromkeys(name for row in self.scored.values() for name in row["metrics"]))

    @property
    def void(self) -> bool:
        """Whether eviction was asked for and no example ever evicted: its quality says nothing about the method."""
        return not self.is_baseline and bool(self.scored) and not any(evicted(row) for row in self.scored.values())


def evicted(row: Row) -> bool:
    return (row.get("receipt") or {}).get("first_eviction_step") is not None


def number(value: Any) -> float:
    """A finite number as a float, else NaN."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else math.nan


def folders(outputs_dir: str | Path) -> list[Folder]:
    if not Path(outputs_dir).is_dir():
        raise ConfigError(f"no folder {outputs_dir}; name the outputs_dir of your runs, or run: python run.py")
    return [_folder(run) for run in runs(outputs_dir)]


def _folder(run: Run) -> Folder:
    rows, finished, failure = run.rows(), run.finished, run.failure()
    if finished:
        return Folder(run, rows, "done", "")
    if failure is not None:
        message = str(failure.get("message", "")).strip().split("\n")[0]
        return Folder(run, rows, "failed", f"failed: {failure.get('error', 'error')}: {message}")
    return Folder(run, rows, "partial", f"partial: {len(rows)} rows so far; run it again to go on")


def chosen(folders: list[Folder], where: Mapping[str, Any]) -> list[Folder]:
    """Those whose labels, hash or status have the values asked for; a list of values means any of them."""
    names = {name for folder in folders for name in folder.labels} | {"hash", "status"}
    for name in where:
        if folders and name not in names:
            raise ConfigError(f"cannot choose runs by {name}; their labels are {', '.join(sorted(names))}")
    return [folder for folder in folders if all(_matches(folder, *item) for item in where.items())]


def _matches(folder: Folder, name: str, wanted: Any) -> bool:
    own = {"hash": folder.run.hash, "status": folder.status}
    found = own.get(name, folder.labels.get(name))
    return any(_same(found, value) for value in (wanted if isinstance(wanted, list | tuple | set) else [wanted]))


def _same(found: Any, wanted: Any) -> bool:
    """Equal as numbers if both are numbers (0.5 is 0.50), else as text; null and none are None."""
    if found is None or wanted is None:
        return str(found).lower() == str(wanted).lower().replace("null", "none")
    try:
        return float(found) == float(wanted)
    except (TypeError, ValueError):
        return str(found) == str(wanted)
