"""divergence.jsonl as a table: a row per run and kind of text, with intervals by example and verdicts.

Means are over tokens; examples are what an interval resamples, since the tokens of one answer are not independent. A
first token that the full prefill predicts is the same for every method and counts apart (`first_kl`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvexp.record.divergence_lines import EPSILON_KL, EPSILON_TOP1, TEXTS, Line, read
from kvexp.results import intervals, stats
from kvexp.results.read import Folder, check_pair, number
from kvexp.results.stats import Floats
from kvexp.results.units import FEW_SLOTS

QUANTILES = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p95": 0.95, "kl_p99": 0.99}
# Mean divergences are skewed so far that 20 to 50 examples miss the tail: their intervals are made at a fifth of the
# error asked for, which in simulation (tests/test_divergence_table.py) keeps the false verdicts at the nominal rate.
TAIL = 5

FAMILY = ("model", "task", "numerics")  # labels of the runs that are compared with each other
EQUIVALENT, WORSE, UNDECIDED = "equivalent", "worse", "undecided"


@dataclass(frozen=True)
class PerExample:
    """Of one run and kind of text, an entry per example [n]: sums over its tokens, and how many there were."""

    names: list[str]
    tokens: Floats
    kl: Floats
    differs: Floats
    change: Floats  # log-probability of the forced token, variant less full
    change_squared: Floats
    each_kl: Floats  # every token's, [tokens.sum()]
    first_kl: Floats  # of first tokens that the prefill predicts

    @classmethod
    def of(cls, lines: Sequence[Line]) -> PerExample | None:
        """None where no line has a token that was predicted after the eviction."""
        names, columns, each, first = [], [], [], []
        for line in sorted(lines, key=lambda line: line["index"]):
            skip = int(line["first_by_prefill"])
            kl, same = np.array(line["kl"]), np.array(line["same_top1"], dtype=np.float64)
            change = np.array(line["logprob"]) - np.array(line["full_logprob"])
            first += kl[:skip].tolist()
            if len(kl) == skip:
                continue
            kl, same, change = np.maximum(kl[skip:], 0), same[skip:], change[skip:]
            names.append(line["example"])
            each.append(kl)
            columns.append([len(kl), kl.sum(), (1 - same).sum(), change.sum(), (change * change).sum()])
        if not names:
            return None
        tokens, sums, differs, changes, squares = np.array(columns, dtype=np.float64).T
        return cls(names, tokens, sums, differs, changes, squares, np.concatenate(each), np.array(first))


def divergence_table(
    folders: Iterable[Folder],
    epsilon_kl: float | None = None,
    epsilon_top1: float | None = None,
    first: int | None = None,
) -> pd.DataFrame:
    """Rows for the runs that have lines; verdicts are corrected for the runs of one model, task, NUMERICS and text.

    epsilon_kl, epsilon_top1: None takes what each run was asked for with (`epsilon_kl` of its configuration). first: of
    the task's first examples alone.
    """
    families: dict[tuple[str, str], list[tuple[Folder, PerExample]]] = defaultdict(list)
    for folder in folders:
        lines = list(read(folder.run).values()) if folder.run.baseline is not None else []
        lines = [line for line in lines if first is None or line["index"] < first]
        for text in TEXTS:
            found = PerExample.of([line for line in lines if line["text"] == text])
            if found is not None:
                names = repr([folder.labels.get(name) for name in FAMILY])
                families[names, text].append((folder, found))
    rows = []
    for (_, text), family in families.items():
        level = stats.corrected_level(len(family))
        for folder, found in family:
            asked = asked_epsilons(folder)
            epsilons = (epsilon_kl or asked[0], epsilon_top1 or asked[1])
            rows.append(_row(folder, found, text, level, *epsilons))
    return pd.DataFrame(rows)


def asked_epsilons(folder: Folder) -> tuple[float, float]:
    """What a run's configuration names: of KL and of the share of other top tokens; the defaults for older runs."""
    config = (folder.run.command or {}).get("config") or {}
    return float(config.get("epsilon_kl") or EPSILON_KL), float(config.get("epsilon_top1") or EPSILON_TOP1)


def _row(
    folder: Folder, found: PerExample, text: str, level: float, epsilon_kl: float, epsilon_top1: float
) -> dict[str, Any]:
    total = found.tokens.sum()
    kl = share_interval(found.kl, found.tokens, stats.LEVEL)
    top1 = share_interval(found.differs, found.tokens, stats.LEVEL)
    same_top1 = np.clip((1 - top1[1], 1 - top1[0]), 0, 1)  # a share; NaN stays
    change = float(found.change.sum() / total)
    row: dict[str, Any] = {
        **folder.labels,
        "question": folder.question,
        "text": text,
        "n": len(found.names),
        "tokens": int(total),
    }
    row |= {"kl": float(found.kl.sum() / total), "kl_low": kl[0], "kl_high": kl[1]}
    row |= {name: float(np.quantile(found.each_kl, q)) for name, q in QUANTILES.items()}
    row |= {"kl_max": float(found.each_kl.max()), "first_kl": _mean(found.first_kl)}
    row |= {"top1": 1 - float(found.differs.sum() / total), "top1_low": same_top1[0], "top1_high": same_top1[1]}
    row |= {"dlogprob": change, "dlogprob_rms": math.sqrt(found.change_squared.sum() / total)}
    row |= {"ppl_ratio": math.exp(-change), "epsilon": epsilon_kl, "epsilon_top1": epsilon_top1}
    row["verdict_kl"] = decide(share_interval(found.kl, found.tokens, level), epsilon_kl)
    row["verdict_top1"] = decide(share_interval(found.differs, found.tokens, level), epsilon_top1)
    row |= _sizes(folder)
    return row | {"hash": folder.run.hash}


def _sizes(folder: Folder) -> dict[str, Any]:
    """Slots and bytes at the end of the rows, NaN where there are none (divergence=only)."""
    receipts = [row["receipt"] for row in folder.scored.values() if row.get("receipt")]
    each = {name: np.array([number(receipt.get(name)) for receipt in receipts]) for name in ("slots", "kv_bytes")}
    means = {name: _mean(values[np.isfinite(values)]) for name, values in each.items()}
    return means | {"few_slots": bool(means["slots"] < FEW_SLOTS)}


def by_position(lines: Iterable[Line]) -> pd.DataFrame:
    """Mean KL and share of equal top tokens at each place of the text, from 1: columns position, n, kl, top1.

    lines: of one run and kind of text. A first token that the prefill predicts is left out, as of all means.
    """
    kl: dict[int, list[float]] = defaultdict(list)
    same: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        for place, (one, equal) in enumerate(zip(line["kl"], line["same_top1"], strict=True), 1):
            if place == 1 and line["first_by_prefill"]:
                continue
            kl[place].append(max(one, 0.0))
            same[place].append(float(equal))
    rows = [
        {"position": place, "n": len(kl[place]), "kl": float(np.mean(kl[place])), "top1": float(np.mean(same[place]))}
        for place in sorted(kl)
    ]
    return pd.DataFrame(rows, columns=["position", "n", "kl", "top1"])


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else math.nan


def share_interval(sums: Floats, tokens: Floats, level: float) -> tuple[float, float]:
    """Of sum(sums) / sum(tokens), examples resampled; NaN under MIN_PAIRS of them."""
    if len(sums) < stats.MIN_PAIRS:
        return intervals.NONE
    finer = 1 - (1 - level) / TAIL
    moments = stats.resampled_means(intervals.ratio_moments(sums, tokens), stats.resamples_for(finer))
    return intervals.ratio_interval(sums, tokens, moments, finer)


def decide(interval: tuple[float, float], epsilon: float) -> str:
    """Equivalent: the whole interval is below epsilon; worse: above it."""
    low, high = interval
    if high < epsilon:
        return EQUIVALENT
    return WORSE if low > epsilon else UNDECIDED


def compared(folders: Mapping[str, Folder], text: str, alike: Sequence[str] = ()) -> pd.DataFrame:
    """`compared_means` of every two runs of one model, task and NUMERICS with the same baseline.

    folders: hash -> run; alike: labels two runs have to share, such as `kv_ratio`. ConfigError where two such runs
    were sent different tokens.
    """
    found = {name: means for name, folder in folders.items() if (means := example_means(folder, text))}
    labels = {name: [folder.labels.get(k) for k in (*FAMILY, *alike)] for name, folder in folders.items()}

    def comparable(one: str, other: str) -> bool:
        first, second = folders[one], folders[other]
        if labels[one] != labels[other] or first.run.baseline != second.run.baseline:
            return False
        check_pair(first, second)
        return True

    return compared_means(found, comparable)


def example_means(folder: Folder, text: str) -> dict[str, float]:
    """Example -> mean KL per token of a run's forced text; empty where it has none."""
    one = PerExample.of([line for line in read(folder.run).values() if line["text"] == text])
    return {} if one is None else dict(zip(one.names, one.kl / one.tokens, strict=True))


def compared_means(
    found: Mapping[str, Mapping[str, float]], comparable: Callable[[str, str], bool] = lambda one, other: True
) -> pd.DataFrame:
    """Every two comparable runs: mean KL of the first less the second over the examples both have.

    found: run -> example -> mean KL per token. p is two-sided, from Student's t of the per-example means; `holm` is p
    after Holm's correction over all pairs of the table, and `better` names the run with less divergence where that is
    below 0.05.
    """
    rows = []
    for one, other in itertools.combinations(found, 2):
        if comparable(one, other):
            shared = [example for example in found[one] if example in found[other]]
            gaps = np.array([found[one][example] - found[other][example] for example in shared])
            rows.append({"one": one, "other": other, "n": len(shared), **_difference(gaps)})
    return _holm(pd.DataFrame(rows, columns=["one", "other", "n", "difference", "low", "high", "p"]))


def _difference(gaps: Floats) -> dict[str, float]:
    n = len(gaps)
    if n < stats.MIN_PAIRS:
        return {"difference": float(gaps.mean()) if n else math.nan, "low": math.nan, "high": math.nan, "p": math.nan}
    moments = stats.resampled_means(intervals.mean_moments(gaps), stats.RESAMPLES)
    low, high = intervals.mean_interval(gaps, moments, stats.LEVEL)
    error = gaps.std(ddof=1) / math.sqrt(n)
    p = stats.t_tail(abs(float(gaps.mean())) / error, n - 1) if error > 0 else float(gaps.mean() == 0)
    return {"difference": float(gaps.mean()), "low": low, "high": high, "p": p}


def holm_corrected(p: Floats) -> Floats:
    """Holm's step-down correction of p [P]: the k-th smallest times the number left, never falling; NaN stays NaN."""
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * (len(order) - np.arange(len(order)))), 1.0)
    return corrected


def _holm(frame: pd.DataFrame) -> pd.DataFrame:
    """With p corrected over all pairs, and the run with less divergence where that decides."""
    frame = frame.assign(holm=holm_corrected(frame["p"].to_numpy(dtype=np.float64)))
    ahead = np.where(frame["difference"] < 0, frame["one"], frame["other"])
    return frame.assign(better=np.where(frame["holm"] < 1 - stats.LEVEL, ahead, ""))
