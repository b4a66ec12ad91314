"""What a run is called among the runs of one model and task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def run_name(labels: Mapping[str, Any]) -> str:
    """Method, kv_ratio and setting, as far as there are any: h2o 0.5, h2o budget.tokens=40.

    labels: of a run's folder, or a row of a table, whose missing kv_ratio is NaN.
    """
    ratio = labels.get("kv_ratio")
    known = isinstance(ratio, int | float) and math.isfinite(ratio)
    return " ".join(filter(None, [str(labels["method"]), f"{ratio:g}" if known else "", labels.get("setting") or ""]))
