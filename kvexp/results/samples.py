"""Several answers to each item: avg@N and pass@k with intervals over items, and how answers that are not right went.

The unit is an item. avg@N is the mean over items of the share of their N answers that are right; its interval, from the
spread of these shares, holds the chance of drawing as well as that of choosing items (Miller, arXiv:2411.00640). pass@k
of an item is the chance that one of k of its answers is right (Chen et al., arXiv:2107.03374, equation 1); it is shown
for k up to N/2, beyond which it rests on too few draws. A method and the full cache draw with the same seeds, so their
difference is taken item by item.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvexp.results import stats
from kvexp.results.blocks import absent, interval, numeric, plain
from kvexp.results.life import Columns
from kvexp.results.read import Folder, Row, Runs, baseline_of, in_order, number
from kvexp.results.stats import Floats, item_of
from kvexp.results.table import METHOD_AND_SETTING, budget_column

GRADES = {"no box": "no_box", "truncated": "truncated", "looping": "looping"}  # as rows say, column
SAMPLES_LEGEND = (
    "avg@N: percent of answers that are right, its interval over items; full, difference: the full cache on the same "
    "items with the same seeds. pass@k: chance that one of k answers is right. no box, truncated, looping: percent of "
    "answers without a boxed answer, by what ended them. same: tokens before the first that differs from the full "
    "cache's answer with the same seed, in percent of that answer."
)


def has_samples(folder: Folder) -> bool:
    """Whether a run's rows are answers that were graded, or several answers to an item."""
    return any({"graded", "item"} & set(row.get("info") or {}) for row in folder.rows[:1])


def pass_at(k: int, right: Floats, samples: Floats) -> Floats:
    """1 - C(n - c, k) / C(n, k) of each item, c of whose n answers are right; NaN where n < k."""
    chance = np.ones(len(right))
    for draw in range(k):
        with np.errstate(divide="ignore", invalid="ignore"):
            chance = chance * np.clip(samples - right - draw, 0, None) / (samples - draw)
    return np.where(samples >= k, 1 - chance, np.nan)


def samples_table(runs: Runs) -> pd.DataFrame:
    """A row per run whose answers were graded or drawn several times, baselines too, in percent.

    Columns: labels, items, samples (answers to an item, the fewest), metric, avg with low and high, full (the full
    cache's avg on the same items), difference (points) with difference_low and _high, k, pass (pass@k of the largest k
    up to half the samples) with pass_low and _high, pass@2, pass@4, ..., no_box, truncated, looping, new_tokens (mean),
    same, hash.
    """
    wanted = in_order(folder for folder in runs.ran if has_samples(folder) and folder.metrics)
    return pd.DataFrame([_sampled(folder, baseline_of(folder, runs.known)) for folder in wanted])


def _sampled(folder: Folder, baseline: Folder | None) -> dict[str, Any]:
    metric, rows = folder.metrics[0], list(folder.scored.values())
    items = [item_of(row) for row in rows]
    counts = np.array(list(Counter(items).values()), dtype=np.float64)  # in the order of `by_item`
    avg = stats.by_item(items, _scores(metric, rows))[:, 0]
    both, same = None, math.nan
    if baseline is not None and not folder.is_baseline:
        paired = [row for row in rows if row["example"] in baseline.scored]
        full = [baseline.scored[row["example"]] for row in paired]
        if paired:
            columns = np.hstack([_scores(metric, side) for side in (paired, full)])
            both, same = stats.by_item([item_of(row) for row in paired], columns), _same(paired, full)
    least = int(counts.min())
    row = {**folder.labels, "items": len(avg), "samples": least, "metric": metric, "numerics": folder.run.numerics}
    row |= {**stats.mean_columns("avg", avg), **_differences(both), **_passes(avg, counts, least // 2)}
    grades = [(row.get("info") or {}).get("graded") for row in rows]
    if any(grades):
        row |= {column: 100 * grades.count(name) / len(grades) for name, column in GRADES.items()}
    row |= {"new_tokens": float(np.mean([number(row.get("new_tokens")) for row in rows])), "same": same}
    return row | {"hash": folder.run.hash}


def _scores(metric: str, rows: Sequence[Row]) -> Floats:
    return np.array([[number(row["metrics"].get(metric))] for row in rows], dtype=np.float64)


def _passes(avg: Floats, counts: Floats, most: int) -> dict[str, Any]:
    """Columns pass@2, pass@4, ... up to `most`; k, pass and its interval of `most`, where that is 2 or more."""
    if most < 2:
        return {"k": None, **stats.mean_columns("pass", np.array([]))}
    right = np.rint(avg / 100 * counts)
    powers = [2**power for power in range(1, most.bit_length())]
    shares = {f"pass@{k}": float(100 * pass_at(k, right, counts).mean()) for k in powers}
    return shares | {"k": most, **stats.mean_columns("pass", 100 * pass_at(most, right, counts))}


def _same(rows: Sequence[Row], full: Sequence[Row]) -> float:
    """Percent of the full cache's tokens that come before the first that differs, over all answers."""
    alike = total = 0
    for row, other in zip(rows, full, strict=True):
        mine, theirs = row.get("output_tokens") or [], other.get("output_tokens") or []
        differ = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        alike += min(len(mine), len(theirs)) if differ is None else differ
        total += len(theirs)
    return 100 * alike / total if total else math.nan


def _differences(base: Floats | None) -> dict[str, Any]:
    """Columns full and difference. base: [items, 2], percent right of a run and of the full cache."""
    if base is None:
        return {"full": math.nan, **stats.mean_columns("difference", np.array([]))}
    return {"full": float(base[:, 1].mean()), **stats.mean_columns("difference", base[:, 0] - base[:, 1])}


def samples_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Columns of the rows of one task."""
    samples, most = {row["samples"] for row in rows}, {int(row["k"]) for row in rows if not absent(row["k"])}
    powers = {int(name.partition("@")[2]) for name in rows[0] if name.startswith("pass@")} - most
    names = [METHOD_AND_SETTING, budget_column(rows), plain("items", "items")]
    largest = [numeric(f"pass@{max(most, default=0)}", "pass", 1), interval("95 %", "pass_low", "pass_high", 1)]
    return [*names, *([plain("samples", "N")] if len(samples) > 1 else [])], [
        numeric(f"avg@{'N' if len(samples) > 1 else min(samples)}", "avg", 1),
        interval("95 %", "avg_low", "avg_high", 1),
        numeric("full", "full", 1),
        numeric("difference", "difference", 1, sign="+"),
        interval("95 %", "difference_low", "difference_high", 1, of="difference"),
        *(numeric(f"pass@{k}", f"pass@{k}", 1) for k in sorted(powers)),
        *(largest if len(most) == 1 else []),
        *(numeric(f"{name}\n%", column, 1) for name, column in GRADES.items()),
        numeric("tokens", "new_tokens", 0),
        numeric("same\n%", "same", 1),
    ]
