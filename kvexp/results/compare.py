"""A run beside its baseline: the examples both scored, percentages with intervals, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvexp.results import stats
from kvexp.results.read import Folder, Row, number
from kvexp.results.stats import Floats

SUFFIX = {99.0: "99", 99.9: "999"}  # mark -> ending of its columns


@dataclass
class Comparison:
    """Scores of a run and of its baseline, in two arrays (pairs, metrics) with the same examples in the same order."""

    metrics: list[str]
    scores: Floats
    base: Floats
    length: float  # generated tokens, percent of the baseline's
    means: Floats = field(default_factory=lambda: np.empty((0, 0)))  # (resamples, 2 * metrics): of scores, then of base

    @property
    def pairs(self) -> int:
        return len(self.scores)

    @property
    def without_percent(self) -> list[str]:
        """Metrics in which the baseline scores nothing."""
        means = zip(self.metrics, self.scores.mean(axis=0), self.base.mean(axis=0), strict=True)
        return [name for name, mean, base in means if not np.isfinite(stats.percent(name, mean, base))]


def compare(folder: Folder, baseline: Folder | None) -> Comparison | None:
    """Pair by example id; None where there is nothing to compare with, or nothing to compare (void)."""
    if folder.is_baseline or folder.void or baseline is None or baseline.run.numerics != folder.run.numerics:
        return None
    metrics = [name for name in folder.metrics if name in baseline.metrics]
    names = [name for name in folder.scored if name in baseline.scored]
    sides = [[side.scored[name] for name in names] for side in (folder, baseline)]
    scores, base = (_scores(rows, metrics) for rows in sides)
    whole = np.isfinite(scores).all(axis=1) & np.isfinite(base).all(axis=1)
    if not metrics or not whole.any():
        return None
    new, of = (np.array([number(row.get("new_tokens")) for row in rows])[whole].sum() for rows in sides)
    return Comparison(metrics, scores[whole], base[whole], float(100.0 * new / of) if of else math.nan)


def _scores(rows: Sequence[Row], metrics: Sequence[str]) -> Floats:
    values = [[number(row["metrics"].get(name)) for name in metrics] for row in rows]
    return np.array(values, dtype=np.float64).reshape(len(rows), len(metrics))


def resample(comparisons: Sequence[Comparison], level: float) -> None:
    """Bootstrap the comparisons that have enough pairs for it; those of equal size share the draws."""
    for n in {comparison.pairs for comparison in comparisons if comparison.pairs >= stats.MIN_PAIRS}:
        same = [comparison for comparison in comparisons if comparison.pairs == n]
        columns = np.hstack([block for each in same for block in (each.scores, each.base)])
        means = stats.resampled_means(columns, stats.resamples_for(level, n))
        ends = np.cumsum([2 * len(each.metrics) for each in same])
        for each, block in zip(same, np.split(means, ends[:-1], axis=1), strict=True):
            each.means = block


def quality(comparison: Comparison, level: float, decidable: bool) -> Row:
    """Columns of percentages, 95 percent intervals and verdicts at `level`; undecided throughout if not decidable.

    Fewer than MIN_PAIRS pairs have no interval, and nothing is foretold from them.
    """
    row: Row = {
        "paired": comparison.pairs,
        "changed": int((comparison.scores != comparison.base).any(axis=1).sum()),
        "length_of_full": comparison.length,
        "length_ok": bool(comparison.length >= stats.LENGTH_MARK),
    }
    for index in range(len(comparison.metrics)):
        row |= _metric(comparison, index, level, decidable)
    for mark, ending in SUFFIX.items():
        verdicts = [row[f"{name}_verdict{ending}"] for name in comparison.metrics]
        row[f"verdict{ending}"] = _together(verdicts, row["length_ok"]) if decidable else "undecided"
        needed = "needed" if mark == 99.0 else f"needed{ending}"
        row[needed] = math.nan
        if row[f"verdict{ending}"] == "undecided" and decidable:
            still = [name for name, verdict in zip(comparison.metrics, verdicts, strict=True) if verdict == "undecided"]
            wanted = [_needed(comparison, name, row[f"{name}_of_full"], mark, level) for name in still]
            row[needed] = float(np.max(wanted))
    return row


def _metric(comparison: Comparison, index: int, level: float, decidable: bool) -> dict[str, Any]:
    name, low, high, wide = comparison.metrics[index], math.nan, math.nan, (math.nan, math.nan)
    at = float(stats.percent(name, comparison.scores[:, index].mean(), comparison.base[:, index].mean()))
    if len(comparison.means) and math.isfinite(at):
        scores, base = comparison.means[:, index], comparison.means[:, len(comparison.metrics) + index]
        values = stats.percent(name, scores, base)
        low, high = stats.interval(values, comparison.pairs, stats.LEVEL)
        wide = stats.interval(values, comparison.pairs, level)
    row: dict[str, Any] = {f"{name}_of_full": at, f"{name}_low": low, f"{name}_high": high}
    row |= {f"{name}_low_corrected": wide[0], f"{name}_high_corrected": wide[1]}
    for mark, ending in SUFFIX.items():
        row[f"{name}_verdict{ending}"] = stats.decide(*wide, mark) if decidable else "undecided"
    return row


def _together(verdicts: Sequence[str], length_ok: bool) -> str:
    """MLPerf's rule: every metric reaches the mark, and the generated length reaches 90 percent."""
    if "fail" in verdicts or not length_ok:
        return "fail"
    return "pass" if set(verdicts) == {"pass"} else "undecided"


def _needed(comparison: Comparison, name: str, at: float, mark: float, level: float) -> float:
    """More examples than there are, even where the bootstrap is a little wider than its normal approximation."""
    index = comparison.metrics.index(name)
    sd = stats.spread(name, comparison.scores[:, index], comparison.base[:, index])
    wanted = stats.n_needed(abs(at - mark), sd, level)
    return wanted if math.isnan(wanted) else max(wanted, comparison.pairs + 1.0)
