"""Run folders and their rows, as the commands take them. Nothing here loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record import Run
from kvexp.results.stats import lower_is_better

Row = dict[str, Any]


def run_at(path: str | Path) -> Run:
    """The run in this folder; ConfigError says what a run's folder is."""
    folder = Path(path)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is no run; name its folder, as in outputs/HASH")
    return Run.load(folder)


def baseline_of(run: Run) -> Run:
    """The full-attention run beside it."""
    if run.baseline is None:
        raise ConfigError(f"{run.path} is a run of full attention: there is nothing to compare it with")
    return run_at(run.path.parent / run.baseline)


def rows_of(run: Run) -> dict[str, Row]:
    """The rows that were answered, by example."""
    return {row["example"]: row for row in run.rows() if not row.get("skipped")}


def chosen(rows: Mapping[str, Row], name: str) -> Row:
    """The row of this example: its id, the beginning of one id alone, or its index in the task."""
    found = [row for key, row in rows.items() if key == name]
    found = found or [row for row in rows.values() if str(row["index"]) == name]
    found = found or [row for key, row in rows.items() if key.startswith(name)]
    if len(found) != 1:
        some = ", ".join(list(rows)[:5])
        what = "no example" if not found else f"{len(found)} examples"
        raise ConfigError(f"{what} of the run named {name!r}; it has {len(rows)}: {some}, ...")
    return found[0]


def headline(row: Row) -> float:
    """Its first metric, such that more is better."""
    name, value = next(iter(row["metrics"].items()))
    return -float(value) if lower_is_better(name) else float(value)


def short_of(run: Run) -> str:
    """ "h2o 0.3 testbed_needle"."""
    labels = run.asked[-1]
    ratio = "" if labels.get("kv_ratio") is None else f" {labels['kv_ratio']:g}"
    return f"{labels['method']}{ratio} {labels['task']}"


def title_of(run: Run) -> str:
    """ "h2o 0.3 testbed_needle, testbed_rope", and what else was set by hand."""
    labels = run.asked[-1]
    return ", ".join(word for word in (short_of(run), labels["model"], labels.get("setting")) if word)
