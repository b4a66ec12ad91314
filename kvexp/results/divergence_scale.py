"""The scale of divergences that `python -m kvexp.divergence.scale RUN` leaves in the run's folder: read and written."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable
from typing import Any

import pandas as pd

from kvexp.record import Run
from kvexp.record.files import explained, locked, replace

NAME = "divergence_scale.json"
NUMBERS = ("kl", "top1")


def write_scale(run: Run, frame: pd.DataFrame) -> None:
    """Keep a frame of `kvexp.divergence.scale.scale_table` in the run's folder; what stood there goes."""
    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    with explained(run.path / NAME), locked(run.path):
        replace(run.path / NAME, json.dumps({"changes": rows}, indent=1).encode() + b"\n")


def read_scale(run: Run) -> list[dict[str, Any]]:
    """Its rows: change, n, tokens, kl, top1 and their intervals; none without a file. A wrong file is a warning."""
    file = run.path / NAME
    try:
        rows = json.loads(file.read_bytes())["changes"]
        if not isinstance(rows, list) or not all(_right(row) for row in rows):
            raise ValueError("changes must be a list of groups with a text change and numbers kl and top1")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{file}: left out: {error}; python -m kvexp.divergence.scale makes it again", stacklevel=2)
        return []
    return rows


def scale_of(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The scale of the run, of these, that was measured on the most examples; none where none has one."""
    found = [rows for run in runs if (rows := read_scale(run))]
    return max(found, key=lambda rows: rows[0].get("n") or 0, default=[])


def _right(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("change"), str) and all(map(_finite, map(row.get, NUMBERS)))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
