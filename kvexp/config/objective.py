"""The one number of a job that a search goes by: the mean of a metric over the examples that have a score and count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvexp.build import build, typed
from kvexp.errors import ConfigError
from kvexp.record import Run

if TYPE_CHECKING:
    from kvexp.tasks import Task


def objective(made: Sequence[Run], metric: str | None) -> float | None:
    """Of a job's runs, each counting once; None where nothing has a score. metric: None is the first one of rows."""
    means = [mean for run in made if (mean := _mean(run, metric)) is not None]
    return fmean(means) if means else None


def check_objective(task: Task, metric: Any) -> None:
    """ConfigError, before anything runs, for a metric that no row of the task will hold."""
    if typed(metric, str | None, "objective") is None:
        return
    from kvexp.tasks import LMEval  # late: a command without an objective does not wait for it

    for part in task.parts() if isinstance(task, LMEval) else [task]:
        if metric not in (known := part.metric_names()):
            raise ConfigError(
                f"objective must be one of {', '.join(known)} (the metrics of task={part.name}) or null for the first, "
                f"got {metric!r}"
            )


def check_objective_of(node: Mapping[str, Any], metric: Any) -> None:
    """`check_objective`, of the task that a resolved configuration's node makes."""
    check_objective(build(node, "task", within="kvexp.tasks"), metric)


def _mean(run: Run, metric: str | None) -> float | None:
    scored = [row["metrics"] for row in _counting(run) if row.get("metrics") and not row.get("skipped")]
    if not scored:
        return None
    name = metric or next(iter(scored[0]))
    values = [metrics[name] for metrics in scored if name in metrics]
    return fmean(values) if values else None


def _counting(run: Run) -> list[dict[str, Any]]:
    """The rows; of a task that counts the questions alone that the full cache answers, those of such questions."""
    rows = run.rows()
    if run.baseline is None or all(row.get("answered") is None for row in rows):
        return rows
    right = {row["example"] for row in Run.load(run.path.parent / run.baseline).rows() if row.get("answered")}
    return [row for row in rows if row["example"] in right]
