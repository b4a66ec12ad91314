"""What a causal measurement says example by example: scores beside each other, and what goes with a divergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from kvexp.diagnose.causal.causal_measures import Floats, rank_correlation
from kvexp.diagnose.causal.removal_effects import ANSWER_SCORES
from kvexp.results import intervals, stats

LEAST_EXAMPLES = 5  # below it no interval is told: Student's t of fewer is wider than what it is of
LEAST_METHODS = 5  # of an example, below which no correlation across methods is told
YARDSTICK = ANSWER_SCORES[0]


def mean_with_interval(values: Floats) -> tuple[float, float, float]:
    """Mean over the examples that are defined, and its 95 % interval.

    The interval is that of `kvexp.results.intervals` from `stats.MIN_PAIRS` examples on, of fewer Student's t, of fewer
    than `LEAST_EXAMPLES` NaN.
    """
    values = values[np.isfinite(values)]
    n = len(values)
    if n < LEAST_EXAMPLES:
        return (float(values.mean()) if n else math.nan), math.nan, math.nan
    mean = float(values.mean())
    if n < stats.MIN_PAIRS:
        half = stats.t_quantile((1 + stats.LEVEL) / 2, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
        return mean, mean - half, mean + half
    means = stats.resampled_means(intervals.mean_moments(values), stats.resamples_for(stats.LEVEL))
    return mean, *intervals.mean_interval(values, means, stats.LEVEL)


def pair_rows(quality: pd.DataFrame) -> list[dict[str, Any]]:
    """Per score, means of differences within an example, each with its interval: keys *, *_low, *_high.

    behind: rank correlation of `YARDSTICK` less the score's; mass, precision, top: less the share of tokens kept,
    which is what a random choice has. quality: `CausalTables.quality`.
    """
    best = quality[quality["method"] == YARDSTICK].set_index("example")["rho"]
    rows: list[dict[str, Any]] = []
    for name, part in quality.groupby("method", sort=False):
        row: dict[str, Any] = {"method": name, "n": len(part)}
        differences = {
            "behind": part["example"].map(best) - part["rho"],
            "mass": part["mass"] - part["kept"],
            "precision": part["precision"] - part["kept"],
            "top": part["top"] - part["kept"],
        }
        for key, values in differences.items():
            found = mean_with_interval(values.to_numpy(dtype=np.float64))
            row[key], row[f"{key}_low"], row[f"{key}_high"] = found
        rows.append(row)
    return sorted(rows, key=lambda row: row["behind"] if math.isfinite(row["behind"]) else math.inf)


def company_rows(quality: pd.DataFrame, joint: pd.DataFrame) -> list[dict[str, Any]]:
    """What goes with the KL of all that a method evicts: rank correlations across methods, within an example.

    One row for each of: the share of tokens that no head holds, the effect on those, the effect on whatever is evicted,
    and the score's rank correlation with the effect; means over examples, with intervals. An example on which fewer
    than `LEAST_METHODS` methods were measured is left out. quality, joint: of `CausalTables`.
    """
    keys = ["example", "method"]
    both = joint[[*keys, "kl", "gone", "gone_mass"]].merge(quality[[*keys, "rho", "mass"]], on=keys)
    both = both.assign(evicted=1 - both["mass"])
    rows: list[dict[str, Any]] = []
    for key in ("gone", "gone_mass", "evicted", "rho"):
        each = []
        for _, part in both.groupby("example"):
            part = part[np.isfinite(part[key].to_numpy(dtype=np.float64))]
            if len(part) >= LEAST_METHODS:
                values, kl = (part[name].to_numpy(dtype=np.float64) for name in (key, "kl"))
                each.append(rank_correlation(values, kl, np.ones(len(part))))
        mean, low, high = mean_with_interval(np.array(each, dtype=np.float64))
        rows.append({"what": key, "n": len(each), "rho": mean, "rho_low": low, "rho_high": high})
    return [row for row in rows if row["n"]]
