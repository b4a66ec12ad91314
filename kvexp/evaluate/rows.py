"""What holds of every row that is written, and of all rows of a run: numbers, one commit, one number of threads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvexp.config.model_spec import ModelSpec
from kvexp.errors import ConfigError
from kvexp.models.half_precision import alone
from kvexp.record import Run


def recordable(row: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """The row as it is written; one with a metric that is no number counts as skipped, with that as its reason.

    The other examples go on. The table counts it, says why, and gives no verdict to a run that lost examples its
    baseline has.
    """
    metrics = row["metrics"]
    wrong = [f"metric {name} is {value}" for name, value in metrics.items() if not _finite(value)]
    chances = (row.get("choices") or {}).get("logprobs", [])
    wrong += [f"log-probability of choice {i} is {value}" for i, value in enumerate(chances) if not _finite(value)]
    made: dict[str, Any] = {**_writable(row), "revision": commit}
    if wrong:
        made["metrics"] = {name: value for name, value in metrics.items() if _finite(value)}
        made["skipped"] = ", ".join(wrong)
    return made


def check_commit(record: Run, commit: str | None) -> None:
    """Rows of two commits of a model are two runs: ConfigError if this run was begun with another one."""
    before = {row["revision"] for row in record.rows() if row.get("revision")} - {commit}
    if before:
        raise ConfigError(
            f"{record.path} has rows of commit {before.pop()} of the model, the hub's revision is {commit} now: set "
            "model.revision to the commit you want, or remove that folder and its baseline's"
        )


def check_threads(record: Run, model: ModelSpec, threads: int) -> None:
    """Half-precision products on a CPU are summed by the number of threads: one run has one number of them."""
    before = record.env.get("threads", threads)
    if alone(model.dtype, model.resolved_device()) and record.rows() and before != threads:
        raise ConfigError(
            f"{record.path} has rows made with {before} threads, and in {model.dtype} on a CPU {threads} would make "
            f"others: set OMP_NUM_THREADS={before}, or remove that folder"
        )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _writable(value: Any) -> Any:
    """What JSON cannot say becomes null, wherever it stands."""
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
