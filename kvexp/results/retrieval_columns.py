"""What attending to few of everything cost a run: means over its rows, and what fell back on something else."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvexp.results.read import number

MEANS = ("offloaded_bytes", "moved_bytes", "cache_hit_rate", "search_share", "kmeans_iterations")
NAMES = (*MEANS, "fell_back")


def cost(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of what receipts say of retrieval (NaN for other methods), and the notes of rows that fell back on less."""
    found = [(row.get("receipt") or {}).get("retrieval") or {} for row in rows]
    result: dict[str, Any] = {}
    for name in MEANS:
        values = [value for value in (number(one.get(name)) for one in found) if math.isfinite(value)]
        result[name] = sum(values) / len(values) if values else math.nan
    told = Counter(note for one in found for note in one.get("notes", []))
    result["fell_back"] = "; ".join(f"{count} of {len(found)} rows: {note}" for note, count in told.items())
    return result
