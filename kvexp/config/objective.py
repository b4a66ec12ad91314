"""The one number of a job that a search goes by: the mean of a metric over the examples that have a score."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvexp.errors import ConfigError
from kvexp.record import Run


def objective(made: Sequence[Run], metric: str | None) -> float | None:
    """Of a job's runs, each counting once; None where nothing has a score. metric: None is the first one of rows."""
    means = [mean for run in made if (mean := _mean(run, metric)) is not None]
    return fmean(means) if means else None


def _mean(run: Run, metric: str | None) -> float | None:
    scored = [row["metrics"] for row in run.rows() if row.get("metrics") and not row.get("skipped")]
    if not scored:
        return None
    name = metric or next(iter(scored[0]))
    if name not in scored[0]:
        raise ConfigError(f"objective must be one of {', '.join(scored[0])} or null for the first, got {name!r}")
    return fmean(metrics[name] for metrics in scored if name in metrics)
