"""A run beside its baseline: the examples both scored, percentages with intervals, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvexp.results import intervals, stats
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
    means: list[Floats] = field(default_factory=list)  # of each metric's `_moments`, resampled: (resamples, 2 or 5)

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
        columns = [_moments(each, index) for each in same for index in range(len(each.metrics))]
        finest = max(fail_level(each, level) for each in same)
        blocks = iter(stats.resampled_blocks(columns, stats.resamples_for(finest)))
        for each in same:
            each.means = [next(blocks) for _ in each.metrics]


def _moments(comparison: Comparison, index: int) -> Floats:
    """The columns of one metric whose resampled means its interval is made of."""
    scores, base = comparison.scores[:, index], comparison.base[:, index]
    if stats.lower_is_better(comparison.metrics[index]):
        return intervals.mean_moments(base - scores)
    return intervals.ratio_moments(scores, base)


def percent_interval(comparison: Comparison, index: int, level: float) -> tuple[float, float]:
    """Of a metric's percentage of the baseline; NaN without enough pairs.

    From as many of the draws as the level takes: how many more a table's other runs need moves nothing.
    """
    scores, base = comparison.scores[:, index], comparison.base[:, index]
    if not comparison.means:
        return intervals.NONE
    means = comparison.means[index][: stats.resamples_for(level)]
    if stats.lower_is_better(comparison.metrics[index]):
        low, high = intervals.mean_interval(base - scores, means, level)
        return 100.0 * math.exp(low), 100.0 * math.exp(high)
    if intervals.is_all_or_nothing(scores, base):
        low, high = intervals.share_ratio_interval(scores, base, level)
    else:
        low, high = intervals.ratio_interval(scores, base, means, level)
    return 100.0 * low, 100.0 * high


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
        row |= {needed: math.nan, f"{needed}_low": math.nan, f"{needed}_high": math.nan}
        if row[f"verdict{ending}"] == "undecided" and decidable:
            still = [name for name, verdict in zip(comparison.metrics, verdicts, strict=True) if verdict == "undecided"]
            wanted = {name: _needed(comparison, name, row[f"{name}_of_full"], mark, level) for name in still}
            most = max(wanted, key=lambda name: -1.0 if math.isnan(wanted[name]) else wanted[name])
            row[needed] = wanted[most]
            row[f"{needed}_low"], row[f"{needed}_high"] = _range(comparison, most, mark, level)
    return row


def fail_level(comparison: Comparison, level: float) -> float:
    """The level at which a metric fails: any one of several makes a run fail, so each has its share of the errors.

    To pass, every metric has to: no correction is needed there (an intersection-union test).
    """
    return stats.corrected_level(len(comparison.metrics), level)


def _metric(comparison: Comparison, index: int, level: float, decidable: bool) -> dict[str, Any]:
    """Columns of one metric; its corrected low end is of the interval that passes, the high end of that which fails."""
    name, low, high, floor, ceiling = comparison.metrics[index], math.nan, math.nan, math.nan, math.nan
    at = float(stats.percent(name, comparison.scores[:, index].mean(), comparison.base[:, index].mean()))
    if math.isfinite(at):
        low, high = percent_interval(comparison, index, stats.LEVEL)
        floor, _ = percent_interval(comparison, index, level)
        _, ceiling = percent_interval(comparison, index, fail_level(comparison, level))
    row: dict[str, Any] = {f"{name}_of_full": at, f"{name}_low": low, f"{name}_high": high}
    row |= {f"{name}_low_corrected": floor, f"{name}_high_corrected": ceiling}
    for mark, ending in SUFFIX.items():
        row[f"{name}_verdict{ending}"] = stats.decide(floor, ceiling, mark) if decidable else "undecided"
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


def _range(comparison: Comparison, name: str, mark: float, level: float) -> tuple[float, float]:
    """What `_needed` is likely to be, by what these examples tell of gap and spread."""
    index = comparison.metrics.index(name)
    low, high = stats.n_range(name, comparison.scores[:, index], comparison.base[:, index], mark, level)
    least = comparison.pairs + 1.0
    return (low, high) if math.isnan(low) else (max(low, least), max(high, least))
