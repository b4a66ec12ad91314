"""Percentages of a baseline over paired examples: intervals, tests, and what an interval decides.

Examples are the units that are resampled: tokens of one answer are not independent of each other. Of several answers to
one item (samples=N) the item is the unit, by the mean of its answers.

- Means and ratios of means take the wider end of two intervals on each side: Student's t, and the bootstrap-t (Efron
  and Tibshirani, An Introduction to the Bootstrap, section 12.5), which divides every resample's deviation by its own
  standard error and so follows the skew of the scores. Ratios, and means of what cannot be negative, are treated on
  the log scale. Neither alone holds its level on both skewed and sparsely changed scores; docs/protocols.md has the
  rates that simulation found.
- Shares (scores that are all or nothing) take the hybrid interval of Bonett and Price (2006), doi:10.1002/sim.2388,
  which needs no resampling and keeps its level where next to no example changed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, stdtr, stdtrit

from kvexp.results.read import Folder, Row, number

Floats: TypeAlias = NDArray[np.float64]

SUFFIX = {99.0: "99", 99.9: "999"}  # MLPerf inference: percent of the baseline's quality -> ending of its columns
LENGTH_MARK = 90.0  # MLPerf inference: percent of the baseline's generated tokens
LEVEL = 0.95
POWER = 0.8
MIN_PAIRS = 20  # a bootstrap of fewer examples knows too little about its own width
RESAMPLES = 10_000
PILOT_RESAMPLES = 2_000  # of `n_range`, whose ends are printed with two digits
MAX_RESAMPLES = 50_000
MOST_REMEMBERED = 2000  # examples: their draws are at most 100 MB
TOGETHER = 48  # metrics that are resampled at a time: 100 MB of means
SEED = 95


def lower_is_better(metric: str) -> bool:
    return metric == "nll" or metric.endswith("_nll")


def percent(metric: str, mean: Floats | float, base: Floats | float) -> Floats:
    """Percent of the baseline, 100 = as good, NaN where the baseline scores 0.

    A score gives the ratio of the two means; a negative log-likelihood in nats gives exp(base - mean), the ratio of the
    two perplexities turned so that more is better. Both are functions of the means, so one bootstrap serves both.
    """
    top, bottom = np.asarray(mean, dtype=np.float64), np.asarray(base, dtype=np.float64)
    if lower_is_better(metric):
        return np.asarray(100.0 * np.exp(bottom - top))
    return np.asarray(100.0 * np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0))


def spread(metric: str, scores: Floats, base: Floats) -> float:
    """Standard deviation per example of `percent`, by the delta method: divided by sqrt(n) it is the standard error."""
    at = float(percent(metric, scores.mean(), base.mean()))
    if len(scores) < 2 or not math.isfinite(at):
        return math.nan
    if lower_is_better(metric):
        return at * float(np.std(scores - base, ddof=1))
    return 100.0 * float(np.std(scores - at / 100.0 * base, ddof=1)) / float(base.mean())


def normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def t_quantile(p: float, df: float) -> float:
    """Quantile of Student's t with df degrees of freedom."""
    return float(stdtrit(df, p))


def t_tail(t: float, df: int) -> float:
    """Two-sided p of Student's t."""
    return float(2 * stdtr(df, -abs(t)))


def resamples_for(level: float) -> int:
    """Enough resamples for ten of them to lie beyond each end of the interval, within reason."""
    return int(min(MAX_RESAMPLES, max(RESAMPLES, math.ceil(20 / max(1 - level, 1e-9)))))


def resampled_means(columns: Floats, resamples: int) -> Floats:
    """Means of (n, C) columns under resampling of the n examples: (resamples, C).

    All columns share every draw, which keeps pairs together. The draws are a function of n alone, so a rerun, another
    metric or another run of the same size sees the same ones; more of them begin with those that fewer are.
    """
    return resampled_blocks([columns], resamples)[0]


def resampled_blocks(blocks: Sequence[Floats], resamples: int) -> list[Floats]:
    """`resampled_means` of each block (n, C), to the last digit what it is alone; all share the draws."""
    n = len(blocks[0])
    means = [np.empty((resamples, block.shape[1])) for block in blocks]
    filled = 0
    for drawn in _draws(n):
        counts = drawn.astype(np.float64)
        rows = min(len(counts), resamples - filled)
        for mean, block in zip(means, blocks, strict=True):
            mean[filled : filled + rows] = (counts @ block / n)[:rows]
        filled += rows
        if filled == resamples:
            break
    return means


def _draws(n: int) -> Iterator[NDArray[Any]]:
    """How often each of n examples is drawn, [some resamples, n], one block of resamples after the other."""
    rng, known = _known_draws(n)
    step = max(1, min(RESAMPLES, 1_000_000 // n))
    for block in itertools.count():
        if block < len(known):
            yield known[block]
            continue
        draws = rng.integers(n, size=(step, n)) + n * np.arange(step)[:, None]
        counts = np.bincount(draws.ravel(), minlength=step * n).reshape(step, n)
        counts = counts.astype(np.min_scalar_type(counts.max()))
        if n <= MOST_REMEMBERED:
            known.append(counts)
        yield counts


def _known_draws(n: int) -> tuple[np.random.Generator, list[NDArray[Any]]]:
    """The generator of n examples' draws, and those it has made; of more than MOST_REMEMBERED none are remembered."""
    return _remembered(n) if n <= MOST_REMEMBERED else _remembered.__wrapped__(n)


@functools.lru_cache(maxsize=2)
def _remembered(n: int) -> tuple[np.random.Generator, list[NDArray[Any]]]:
    return np.random.default_rng([SEED, n]), []


def corrected_level(comparisons: int, level: float = LEVEL) -> float:
    """Bonferroni: with every interval at this level, all of them hold together at `level`."""
    return 1 - (1 - level) / max(1, comparisons)


def decide(low: float, high: float, mark: float) -> str:
    """Verdict on an interval: pass, fail, or undecided where it straddles the mark (or there is none)."""
    if low >= mark:
        return "pass"
    return "fail" if high < mark else "undecided"


def n_needed(gap: float, sd: float, level: float = LEVEL) -> float:
    """Examples after which the interval leaves out the mark with probability POWER, if the estimate is the truth.

    gap: |percent - mark|; sd: `spread`, same unit; level: of the (corrected) interval. Infinite where gap is 0.
    """
    if math.isnan(gap) or math.isnan(sd):
        return math.nan
    if gap == 0:
        return math.inf if sd else float(MIN_PAIRS)
    z = normal_quantile(1 - (1 - level) / 2) + normal_quantile(POWER)
    return float(max(MIN_PAIRS, math.ceil((z * sd / gap) ** 2)))


def n_range(metric: str, scores: Floats, base: Floats, mark: float, level: float = LEVEL) -> tuple[float, float]:
    """The middle 80 % of `n_needed` over resamples of these examples: what a pilot of this size knows of it."""
    n = len(scores)
    if n < MIN_PAIRS or not math.isfinite(float(percent(metric, scores.mean(), base.mean()))):
        return math.nan, math.nan
    columns = np.stack([scores, base, scores * scores, base * base, scores * base], axis=1)
    top, bottom, square, base_square, product = resampled_means(columns, PILOT_RESAMPLES).T
    at = percent(metric, top, bottom)
    slope = np.ones_like(at) if lower_is_better(metric) else at / 100.0
    offset = top - slope * bottom  # of the residual scores - slope * base, whose variance is that of one example
    variance = square - 2 * slope * product + slope * slope * base_square - offset * offset
    unit = at if lower_is_better(metric) else 100.0 / np.where(bottom > 0, bottom, np.nan)
    sd = unit * np.sqrt(np.maximum(variance, 0) * n / (n - 1))
    z = normal_quantile(1 - (1 - level) / 2) + normal_quantile(POWER)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.maximum(np.ceil((z * sd / np.abs(at - mark)) ** 2), MIN_PAIRS)
    wanted = np.where(np.isnan(wanted), np.inf, wanted)
    low, high = np.quantile(wanted, (0.1, 0.9), method="nearest")
    return float(low), float(high)


LEAST_ERROR = 0.4  # a resample's standard error counts as at least this share of the sample's: one near 0 explodes t
LARGEST_LOG = 50.0  # an end of a ratio beyond exp(+-50) is 0 or infinity

Interval = tuple[float, float]
Level = tuple[float, int]  # of an interval, and how many of the resamples, from the first, it is made of
NONE: Interval = (math.nan, math.nan)


def mean_moments(values: Floats) -> Floats:
    """values [n] -> columns [n, 2] whose resampled means `mean_interval` takes."""
    return np.stack([values, values * values], axis=1)


def mean_interval(values: Floats, resampled: Floats, level: float) -> Interval:
    """Interval of the mean of values [n], which may have either sign; resampled [R, 2]: means of `mean_moments`."""
    return mean_intervals(values, resampled, [(level, len(resampled))])[0]


def mean_intervals(values: Floats, resampled: Floats, levels: Sequence[Level]) -> list[Interval]:
    """`mean_interval` at each level."""
    n = len(values)
    if n < 2:
        return [NONE for _ in levels]
    at, error = _mean_error(mean_moments(values).mean(axis=0), n)
    if not error > 0:
        return [(float(at), float(at)) for _ in levels]
    centers, errors = _mean_error(resampled, n)
    t = (centers - at) / np.maximum(errors, LEAST_ERROR * error)
    reached = _quantiles(t, n, levels)
    return [(float(at - above * error), float(at + below * error)) for below, above in reached]


def interval_of_mean(values: Floats, least: int = MIN_PAIRS) -> Interval:
    """95 % interval of the mean of values [n], resampled here; NaN of fewer than `least`."""
    if len(values) < least:
        return NONE
    return mean_interval(values, resampled_means(mean_moments(values), RESAMPLES), LEVEL)


def mean_columns(name: str, values: Floats) -> dict[str, float]:
    """Columns NAME, NAME_low and NAME_high: a mean, NaN of none, and its `interval_of_mean`."""
    low, high = interval_of_mean(values)
    return {name: float(values.mean()) if len(values) else math.nan, f"{name}_low": low, f"{name}_high": high}


def _mean_error(moments: Floats, n: int) -> tuple[Floats, Floats]:
    """Mean and standard error from moments [..., 2]."""
    mean = moments[..., 0]
    return mean, np.sqrt(np.maximum(moments[..., 1] - mean * mean, 0) / (n - 1))


def ratio_moments(top: Floats, bottom: Floats) -> Floats:
    """Two columns [n] -> columns [n, 5] whose resampled means `ratio_interval` takes."""
    return np.stack([top, bottom, top * top, bottom * bottom, top * bottom], axis=1)


def ratio_interval(top: Floats, bottom: Floats, resampled: Floats, level: float) -> Interval:
    """Interval of mean(top) / mean(bottom), both >= 0 and paired [n]; resampled [R, 5]: means of `ratio_moments`.

    bottom of ones gives the interval of a mean that cannot be negative. Where bottom scores in every resample, but so
    few examples of top are not 0 that resamples without them leave the upper end infinite, it is what top would give if
    as many examples were not 0 as n draws allow (Clopper and Pearson 1934), each as large as the largest seen.
    """
    return ratio_intervals(top, bottom, resampled, [(level, len(resampled))])[0]


def ratio_intervals(top: Floats, bottom: Floats, resampled: Floats, levels: Sequence[Level]) -> list[Interval]:
    """`ratio_interval` at each level."""
    n = len(top)
    if n < 2 or not bottom.mean() > 0:
        return [NONE for _ in levels]
    k = int((top > 0).sum())
    # The upper ends of Clopper and Pearson.
    shares = [1.0 if k == n else float(betaincinv(k + 1, n - k, (1 + level) / 2)) for level, _ in levels]
    at_most = [float(share * max(top.max(), bottom.max()) / bottom.mean()) for share in shares]
    if not top.any():
        return [(0.0, most) for most in at_most]
    at, error = _ratio_error(ratio_moments(top, bottom).mean(axis=0), n)
    spread = float(error / at)
    if not spread > 0:
        return [(float(at), float(at)) for _ in levels]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios, errors = _ratio_error(resampled, n)
        t = np.log(ratios / at) / np.maximum(errors / ratios, LEAST_ERROR * spread)
    intervals = []
    for (_, count), most, (below, above) in zip(levels, at_most, _quantiles(t, n, levels), strict=True):
        high = _times_exp(at, below * spread)
        if math.isinf(high) and resampled[:count, 1].min() > 0:
            high = most
        intervals.append((_times_exp(at, -above * spread), high))
    return intervals


def _ratio_error(moments: Floats, n: int) -> tuple[Floats, Floats]:
    """Ratio of means and its standard error (delta method) from moments [..., 5]."""
    ratio = moments[..., 0] / moments[..., 1]
    variance = moments[..., 2] - 2 * ratio * moments[..., 4] + ratio * ratio * moments[..., 3]
    return ratio, np.sqrt(np.maximum(variance, 0) / (n - 1)) / moments[..., 1]


def _quantiles(t: Floats, n: int, levels: Sequence[Level]) -> list[tuple[float, float]]:
    """How many standard errors above and below the estimate the interval reaches: (up, down), each at least Student's.

    A resample without a ratio (its baseline scored 0, or the run did) may lie anywhere: it counts on both sides.
    """
    unknown = np.isnan(t)
    lowest, highest = (np.where(unknown, end, t) for end in (-np.inf, np.inf)) if unknown.any() else (t, t)
    reached: dict[Level, tuple[float, float]] = {}
    for count in {count for _, count in levels}:
        tails = {(level, count): (1 - level) / 2 for level, of in levels if of == count}
        low = np.quantile(lowest[:count], list(tails.values()), method="lower")
        high = np.quantile(highest[:count], [1 - tail for tail in tails.values()], method="higher")
        for (level, tail), down, up in zip(tails.items(), low, high, strict=True):
            student = t_quantile(1 - tail, n - 1)
            reached[level] = max(float(-down), student), max(float(up), student)
    return [reached[level] for level in levels]


def _times_exp(at: Floats | float, power: float) -> float:
    if abs(power) > LARGEST_LOG:
        return math.inf if power > 0 else 0.0
    return float(at * math.exp(power))


def percent_of_sums(metric: str, top: Floats, bottom: Floats) -> Interval:
    """95 % interval of sum(top) / sum(bottom) in percent; an entry per unit that is drawn [n], such as a conversation.

    NaN for fewer than MIN_PAIRS units, and for a metric of which less is better.
    """
    if len(top) < MIN_PAIRS or lower_is_better(metric):
        return NONE
    resampled = resampled_means(ratio_moments(top, bottom), resamples_for(LEVEL))
    ((low, high),) = _score_ratios(top, bottom, resampled, [(LEVEL, len(resampled))])
    return 100 * low, 100 * high


def _score_ratios(top: Floats, bottom: Floats, resampled: Floats, levels: Sequence[Level]) -> list[Interval]:
    """Intervals of mean(top) / mean(bottom); where every score is all or nothing, of two shares."""
    if is_all_or_nothing(top, bottom):
        return [share_ratio_interval(top, bottom, level) for level, _ in levels]
    return ratio_intervals(top, bottom, resampled, levels)


def is_all_or_nothing(*columns: Floats) -> bool:
    """Whether scores, in percent, are shares of examples that are right: every one 0 or 100."""
    return all(bool(np.isin(column, (0.0, 100.0)).all()) for column in columns)


def share_ratio_interval(top: Floats, bottom: Floats, level: float) -> Interval:
    """Interval of share(top > 0) / share(bottom > 0), paired [n] (Bonett and Price 2006, hybrid, equation 7)."""
    first, other = top > 0, bottom > 0
    both, n_one, n_other = int((first & other).sum()), int(first.sum()), int(other.sum())
    seen = n_one + n_other - both  # examples that either has right
    if not n_other:
        return NONE
    z = normal_quantile(1 - (1 - level) / 2)
    apart = math.sqrt((seen - both + 2) / ((n_one + 1) * (n_other + 1)))
    alone = sum(math.sqrt((1 - (k + 1) / (seen + 2)) / (k + 1)) for k in (n_one, n_other))
    low_one, high_one = _wilson(n_one, seen, z * apart / alone)
    low_other, high_other = _wilson(n_other, seen, z * apart / alone)
    return low_one / high_other, high_one / low_other if low_other > 0 else math.inf


def _wilson(k: int, n: int, z: float) -> Interval:
    """Wilson's score interval of k of n, z standard errors wide on each side."""
    share, more = k / n, z * z / n
    half = z * math.sqrt(share * (1 - share) / n + more / (4 * n))
    return (share + more / 2 - half) / (1 + more), (share + more / 2 + half) / (1 + more)


@dataclass
class Comparison:
    """Scores of a run and of its baseline, in two arrays (pairs, metrics) with the same examples in the same order.

    Of several answers to an item, a pair is the means of the item's answers.
    """

    metrics: list[str]
    scores: Floats
    base: Floats
    length: float  # generated tokens, percent of the baseline's
    intervals: list[dict[float, Interval]] = field(default_factory=list)  # of each metric: level -> its percentage's

    @property
    def pairs(self) -> int:
        return len(self.scores)

    @property
    def without_percent(self) -> list[str]:
        """Metrics in which the baseline scores nothing."""
        means = zip(self.metrics, self.scores.mean(axis=0), self.base.mean(axis=0), strict=True)
        return [name for name, mean, base in means if not np.isfinite(percent(name, mean, base))]


def compare(folder: Folder, baseline: Folder | None) -> Comparison | None:
    """Scores of a run and its baseline, paired by example; None where one of them has none to compare (void)."""
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
    items = [item_of(sides[0][place]) for place in np.flatnonzero(whole)]
    scores, base = (by_item(items, values[whole]) for values in (scores, base))
    return Comparison(metrics, scores, base, float(100.0 * new / of) if of else math.nan)


def item_of(row: Row) -> str:
    """What a row is an answer to: of several answers to one item (samples=N) the item, else the example itself."""
    return str((row.get("info") or {}).get("item", row["example"]))


def by_item(items: Sequence[str], values: Floats) -> Floats:
    """Means of values [n, C] over the rows of each item [items, C], in the order in which items first come.

    Answers to one item are not independent of each other. The spread of the items' means holds that of the answers too
    (Miller, arXiv:2411.00640).
    """
    places = {item: place for place, item in enumerate(dict.fromkeys(items))}
    if len(places) == len(items):
        return values
    of = np.array([places[item] for item in items])
    sums = np.zeros((len(places), values.shape[1]))
    np.add.at(sums, of, values)
    return np.asarray(sums / np.bincount(of)[:, None])


def _scores(rows: Sequence[Row], metrics: Sequence[str]) -> Floats:
    values = [[number(row["metrics"].get(name)) for name in metrics] for row in rows]
    return np.array(values, dtype=np.float64).reshape(len(rows), len(metrics))


def resample(comparisons: Sequence[Comparison], level: float) -> None:
    """Bootstrap the comparisons that have enough pairs for it: their intervals at 95 %, at `level` and `fail_level`.

    Equal sizes share the draws, and as many of them count as a level takes: how many more a table's other runs need
    moves nothing.
    """
    sizes: dict[int, list[tuple[Comparison, int]]] = {}
    for comparison in comparisons:
        if comparison.pairs >= MIN_PAIRS:
            comparison.intervals = [{} for _ in comparison.metrics]
            sizes.setdefault(comparison.pairs, []).extend(
                (comparison, index) for index in range(len(comparison.metrics))
            )
    for alike in sizes.values():
        for start in range(0, len(alike), TOGETHER):
            together = alike[start : start + TOGETHER]
            levels = [sorted({LEVEL, level, fail_level(comparison, level)}) for comparison, _ in together]
            blocks = resampled_blocks([_moments(*item) for item in together], resamples_for(max(map(max, levels))))
            for (comparison, index), wanted, means in zip(together, levels, blocks, strict=True):
                made_of = [(wanted_level, resamples_for(wanted_level)) for wanted_level in wanted]
                intervals = _percent_intervals(comparison, index, means, made_of)
                comparison.intervals[index] = dict(zip(wanted, intervals, strict=True))


def _moments(comparison: Comparison, index: int) -> Floats:
    """The columns of one metric whose resampled means its interval is made of."""
    scores, base = comparison.scores[:, index], comparison.base[:, index]
    if lower_is_better(comparison.metrics[index]):
        return mean_moments(base - scores)
    return ratio_moments(scores, base)


def _percent_intervals(comparison: Comparison, index: int, means: Floats, levels: Sequence[Level]) -> list[Interval]:
    """Intervals of a metric's percentage of the baseline; means: of its `_moments`, resampled."""
    scores, base = comparison.scores[:, index], comparison.base[:, index]
    if lower_is_better(comparison.metrics[index]):
        intervals = mean_intervals(base - scores, means, levels)
        return [(100.0 * math.exp(low), 100.0 * math.exp(high)) for low, high in intervals]
    return [(100.0 * low, 100.0 * high) for low, high in _score_ratios(scores, base, means, levels)]


def percent_interval(comparison: Comparison, index: int, level: float) -> Interval:
    """Interval of a metric's percentage of the baseline, at a level of `resample`; NaN without enough pairs."""
    return comparison.intervals[index][level] if comparison.intervals else NONE


def quality(comparison: Comparison, level: float, decidable: bool) -> Row:
    """Columns of percentages, 95 percent intervals and verdicts at `level`; undecided throughout if not decidable.

    Fewer than MIN_PAIRS pairs have no interval, and nothing is foretold from them.
    """
    row: Row = {
        "paired": comparison.pairs,
        "changed": int((comparison.scores != comparison.base).any(axis=1).sum()),
        "length_of_full": comparison.length,
        "length_ok": bool(comparison.length >= LENGTH_MARK),
    }
    for index in range(len(comparison.metrics)):
        row |= _metric(comparison, index, level, decidable)
    for mark, ending in SUFFIX.items():
        verdicts = [row[f"{name}_verdict{ending}"] for name in comparison.metrics]
        row[f"verdict{ending}"] = _together(verdicts, row["length_ok"]) if decidable else "undecided"
        needed = "needed" if mark == 99.0 else f"needed{ending}"
        row |= {needed: math.nan, f"{needed}_low": math.nan, f"{needed}_high": math.nan}
        if row[f"verdict{ending}"] == "undecided" and decidable:
            open_metrics = [index for index, verdict in enumerate(verdicts) if verdict == "undecided"]
            wanted = {index: _needed(comparison, index, mark, level) for index in open_metrics}
            most = max(wanted, key=lambda index: -1.0 if math.isnan(wanted[index]) else wanted[index])
            metric, scores, base = comparison.metrics[most], comparison.scores[:, most], comparison.base[:, most]
            ends = (_more_than(comparison, end) for end in n_range(metric, scores, base, mark, level))
            row |= dict(zip((needed, f"{needed}_low", f"{needed}_high"), (wanted[most], *ends), strict=True))
    return row


def fail_level(comparison: Comparison, level: float) -> float:
    """The level at which a metric fails: any one of several makes a run fail, so each has its share of the errors.

    To pass, every metric has to: no correction is needed there (an intersection-union test).
    """
    return corrected_level(len(comparison.metrics), level)


def _metric(comparison: Comparison, index: int, level: float, decidable: bool) -> dict[str, Any]:
    """Columns of one metric; its corrected low end is of the interval that passes, the high end of that which fails."""
    name, low, high, floor, ceiling = comparison.metrics[index], math.nan, math.nan, math.nan, math.nan
    at = float(percent(name, comparison.scores[:, index].mean(), comparison.base[:, index].mean()))
    if math.isfinite(at):
        low, high = percent_interval(comparison, index, LEVEL)
        floor, _ = percent_interval(comparison, index, level)
        _, ceiling = percent_interval(comparison, index, fail_level(comparison, level))
    row: dict[str, Any] = {f"{name}_of_full": at, f"{name}_low": low, f"{name}_high": high}
    row |= {f"{name}_low_corrected": floor, f"{name}_high_corrected": ceiling}
    for mark, ending in SUFFIX.items():
        row[f"{name}_verdict{ending}"] = decide(floor, ceiling, mark) if decidable else "undecided"
    return row


def _together(verdicts: Sequence[str], length_ok: bool) -> str:
    """MLPerf's rule: every metric reaches the mark, and the generated length reaches 90 percent."""
    if "fail" in verdicts or not length_ok:
        return "fail"
    return "pass" if set(verdicts) == {"pass"} else "undecided"


def _needed(comparison: Comparison, index: int, mark: float, level: float) -> float:
    name, scores, base = comparison.metrics[index], comparison.scores[:, index], comparison.base[:, index]
    at = float(percent(name, scores.mean(), base.mean()))
    return _more_than(comparison, n_needed(abs(at - mark), spread(name, scores, base), level))


def _more_than(comparison: Comparison, wanted: float) -> float:
    """At least one example more than there are, also where the bootstrap is wider than its normal approximation."""
    return wanted if math.isnan(wanted) else max(wanted, comparison.pairs + 1.0)
