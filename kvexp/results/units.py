"""Numbers the way people read them; what is missing is a dash."""

import math
from typing import Any

import pandas as pd

TOO_FEW = "too few"  # examples for a percentage or an interval to mean anything
# Tasks whose metric `exact` asks whether the reference stands in the answer, not whether it is the answer.
CONTAINS = ("context_qa", "dialogue", "needle", "needle_multi", "news_needle", "news_qa", "passkey")
FEW_SLOTS = 8.0  # slots per layer and head: with fewer, what a method always keeps is most of what it keeps
FEW_SLOTS_WORDS = f"under {FEW_SLOTS:g} slots per layer and head, where a budget is hardly a choice"


def absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def fixed(value: Any, digits: int) -> str:
    return "-" if absent(value) else f"{value:.{digits}f}"


def called(metric: str, task: Any) -> str:
    """What a metric is called for people: rows of CONTAINS say `exact` of an answer that holds the reference."""
    return "contains" if metric == "exact" and str(task).split(" ")[0] in CONTAINS else metric


def short(metric: str, task: Any = None) -> str:
    """`called`, as narrow as a column."""
    name = called(metric, task)
    return name.replace("rouge", "R-") if name.startswith("rouge") else name


def count(value: float) -> str:
    """1234 -> 1234, 56789 -> 57k, 3.4e6 -> 3.4M; never more than five characters."""
    if absent(value):
        return "-"
    if math.isinf(value) or value >= 1e9:
        return ">1G"
    if value < 10_000:
        return f"{value:.0f}"
    return f"{value / 1e3:.0f}k" if value < 999_500 else f"{value / 1e6:.3g}M" if value < 999.5e6 else "1G"


def size(value: float) -> str:
    """Bytes in binary units: 1536 -> 1.50 KiB."""
    if absent(value):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return (
                f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
            )
        value /= 1024
    return f"{value:.3g} TiB"


def seconds(value: float) -> str:
    if absent(value):
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"
