"""What holds of every row that is written: its metrics are numbers, and it names the commit of a hub model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvexp.errors import ConfigError
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


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _writable(value: Any) -> Any:
    """What JSON cannot say becomes null, wherever it stands."""
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
