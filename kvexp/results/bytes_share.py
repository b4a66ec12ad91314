"""What a run's cache holds as a share of its full cache's bytes, at 16 bits per number whatever dtype ran."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvexp.results.read import Folder, Row, number

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # by model.dtype


def bytes_share(folder: Folder, baseline: Folder | None) -> float:
    """Mean bytes at the end of the rows over the baseline's, over the examples that both scored; NaN without any.

    Numbers in full precision count as 16 bits on both sides, so that codes of 4 bits weigh the same beside float32.
    """
    if baseline is None:
        return math.nan
    names = [name for name in folder.scored if name in baseline.scored]
    mine, full = (_total(side, (side.scored[name] for name in names)) for side in (folder, baseline))
    return mine / full if full > 0 else math.nan


def _total(folder: Folder, rows: Iterable[Row]) -> float:
    """Bytes at 16 bits of these rows together; NaN where one does not say, 0 for none."""
    model = folder.run.config.get("model")
    itemsize = ITEMSIZE.get(str(model.get("dtype")) if isinstance(model, dict) else "", math.nan)
    return sum((_at_16(row, itemsize) for row in rows), 0.0)


def _at_16(row: Row, itemsize: float) -> float:
    receipt = row.get("receipt") or {}
    known = receipt.get("kv_bytes_at_16")
    return number(known) if known is not None else number(receipt.get("kv_bytes")) * 2 / itemsize
