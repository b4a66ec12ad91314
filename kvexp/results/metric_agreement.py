"""Whether the divergence from the full cache orders runs as a task's own metric does, and how much each decides.

Per model and task, over the examples that all its runs have: Kendall's tau-b between the runs' mean KL and their mean
score, and every two runs compared on both, paired by example (Student's t, Holm's correction over all pairs).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvexp.record.divergence_lines import OWN, read
from kvexp.results import stats
from kvexp.results.answer_changes import choice_kl
from kvexp.results.divergence_table import UNDECIDED, PerExample, decide, holm_corrected, share_interval
from kvexp.results.read import Folder, baseline_of, check_pair, number
from kvexp.results.stats import Floats

PREFERRED = "rouge2"  # where a task has it; else its first metric
FACTORS = (0.25, 1.0, 4.0)  # of epsilon
RESAMPLES = 2_000


@dataclass(frozen=True)
class Measured:
    """Of one run: example -> (sum of KL, tokens), and example -> score."""

    folder: Folder
    kl: dict[str, tuple[float, float]]
    score: dict[str, float]


def agreement(folders: Iterable[Folder], epsilon: float, metric: str | None = None) -> pd.DataFrame:
    """A row per model, task and NUMERICS with three runs or more that have both; `contradicted` names pairs of runs.

    folders: runs and their baselines. tau, low, high: Kendall's tau-b, 1 where less KL is always the better score, and
    the middle 95 % of it over resampled examples (which add their own noise: it lies nearer to 0 than tau does).
    pairs, by_kl, by_metric, by_both: pairs of runs, and those that KL, the metric and both decide. contradicted: of
    those that both decide, one against the other, the run with less KL and the run with the better score. hashes: of
    all runs. kl_0.25, kl_1, kl_4: runs with a decided verdict on KL at these multiples of epsilon, corrected for the
    number of runs.
    """
    found = list(folders)
    by_hash = {folder.run.hash: folder for folder in found}
    families: dict[tuple[str, str, int], list[Folder]] = defaultdict(list)
    for folder in found:
        if folder.run.baseline is not None and not folder.refused:
            labels = folder.labels
            families[str(labels.get("model")), str(labels.get("task")), folder.run.numerics].append(folder)
    rows = []
    for (model, task, numerics), family in families.items():
        name = metric or _metric_of(family)
        pairs = [(folder, baseline_of(folder, by_hash)) for folder in family]
        counted = [(folder.of_answered(full), full) for folder, full in pairs]
        measured = [one for pair in counted if (one := _measured(*pair, name)) is not None]
        for one in measured[1:]:
            check_pair(measured[0].folder, one.folder)
        shared = sorted(set.intersection(*(set(one.kl) & set(one.score) for one in measured))) if measured else []
        if len(measured) > 2 and shared:
            rows.append(
                {
                    "numerics": numerics,
                    "model": model,
                    "task": task,
                    "metric": name,
                    **_row(measured, shared, name, epsilon),
                }
            )
    return pd.DataFrame(rows)


def _metric_of(family: Sequence[Folder]) -> str:
    names = [name for folder in family for name in folder.metrics]
    return PREFERRED if PREFERRED in names else next(iter(names), "")


def _measured(folder: Folder, baseline: Folder | None, metric: str) -> Measured | None:
    """None where the run has no divergence or no score."""
    score = {name: number(row["metrics"].get(metric)) for name, row in folder.scored.items()}
    score = {name: value for name, value in score.items() if math.isfinite(value)}
    one = PerExample.of([line for (_, text), line in read(folder.run).items() if text == OWN])
    if one is not None:
        kl = dict(zip(one.names, zip(one.kl.tolist(), one.tokens.tolist(), strict=True), strict=True))
    else:
        kl = _of_choices(folder, baseline)
    return Measured(folder, kl, score) if kl and score else None


def _of_choices(folder: Folder, baseline: Folder | None) -> dict[str, tuple[float, float]]:
    if baseline is None:
        return {}
    found: dict[str, tuple[float, float]] = {}
    for name, row in folder.scored.items():
        full = baseline.scored.get(name)
        if full is not None and row.get("choices") and full.get("choices"):
            value = choice_kl(row["choices"], full["choices"])
            found |= {} if value is None else {name: (value, 1.0)}
    return found


def _row(runs: Sequence[Measured], shared: Sequence[str], metric: str, epsilon: float) -> dict[str, Any]:
    kl = np.array([[run.kl[name][0] for name in shared] for run in runs])
    tokens = np.array([[run.kl[name][1] for name in shared] for run in runs])
    score = np.array([[run.score[name] for name in shared] for run in runs])
    if stats.lower_is_better(metric):
        score = -score
    draws = stats.resampled_means(np.concatenate([kl, tokens, score]).T, RESAMPLES)
    many = len(runs)
    resampled = _tau(-draws[:, :many] / draws[:, many : 2 * many], draws[:, 2 * many :])
    low, high = np.nanquantile(resampled, (0.025, 0.975)) if len(shared) >= stats.MIN_PAIRS else (math.nan, math.nan)
    row: dict[str, Any] = {"n": len(shared), "runs": many, "hashes": [run.folder.run.hash for run in runs]}
    row["tau"] = float(_tau(-kl.mean(axis=1, keepdims=True).T / tokens.mean(axis=1), score.mean(axis=1)[None])[0])
    row |= {"low": float(low), "high": float(high), **_pairs(runs, kl / tokens, score)}
    level = stats.corrected_level(many)
    ends = [share_interval(sums, count, level) for sums, count in zip(kl, tokens, strict=True)]
    for factor in FACTORS:
        row[f"kl_{factor:g}"] = sum(decide(end, factor * epsilon) != UNDECIDED for end in ends)
    return row


def _tau(one: Floats, other: Floats) -> Floats:
    """Kendall's tau-b of each row [B, R] of one with that of the other; NaN where either ties all."""
    first, second = (np.sign(each[:, :, None] - each[:, None, :]) for each in (one, other))
    both = np.sqrt((first**2).sum(axis=(1, 2)) * (second**2).sum(axis=(1, 2)))
    with np.errstate(invalid="ignore"):
        made: Floats = (first * second).sum(axis=(1, 2)) / both
    return made


def _pairs(runs: Sequence[Measured], kl: Floats, score: Floats) -> dict[str, Any]:
    """How many pairs of runs each decides, and which they decide against each other; kl, score [R, n]."""
    left, right = np.triu_indices(len(runs), 1)
    less, better = (_decided(values[left] - values[right]) for values in (-kl, score))
    signs = zip(left.tolist(), right.tolist(), less, better, strict=True)
    against = [(i, j) if one > 0 else (j, i) for i, j, one, other in signs if one * other < 0]
    return {
        "pairs": len(left),
        "by_kl": int((less != 0).sum()),
        "by_metric": int((better != 0).sum()),
        "by_both": int(((less != 0) & (better != 0)).sum()),
        "contradicted": [(runs[i].folder.run.hash, runs[j].folder.run.hash) for i, j in against],
    }


def _decided(gaps: Floats) -> Floats:
    """Sign of the mean of each pair's differences [P, n] where it is decided, else 0."""
    n = gaps.shape[1]
    if n < stats.MIN_PAIRS:
        return np.zeros(len(gaps))
    mean, error = gaps.mean(axis=1), gaps.std(axis=1, ddof=1) / math.sqrt(n)
    p = [stats.t_tail(float(m / e), n - 1) if e > 0 else float(m == 0) for m, e in zip(mean, error, strict=True)]
    made: Floats = np.where(holm_corrected(np.array(p)) < 1 - stats.LEVEL, np.sign(mean), 0.0)
    return made
