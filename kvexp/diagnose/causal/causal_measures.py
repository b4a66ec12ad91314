"""How well a score ranks tokens by the effect of removing them, from a weighted sample of tokens; plain arrays.

Every sampled token has a weight, the tokens of the prompt that it stands for, so sums estimate sums over the prompt and
ranks are weighted midranks. What sampling leaves open is the standard error over bootstrap resamples of the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 200
TOP = 0.05  # of the tokens, those of largest effect: few tokens hold nearly all of it
LEAST = 8  # sampled tokens of a group below which no rank correlation is told


@dataclass(frozen=True)
class ScoreQuality:
    """Of one score on one prompt, NaN where it is not defined.

    rho: rank correlation of score and effect; precision: of the tokens of largest effect, as many as the budget holds,
    the share that is kept; top: the same of the `TOP` share of tokens; mass: share of the summed effect that is kept;
    kept: share of tokens kept, which is what these three are of a random choice. rho_error, mass_error: standard
    errors of sampling.
    """

    rho: float
    rho_error: float
    precision: float
    top: float
    mass: float
    mass_error: float
    kept: float


def weighted_ranks(values: Floats, weights: Floats) -> Floats:
    """Weighted midranks [n]: the weight below each value and half the weight of its equals."""
    unique, place = np.unique(values, return_inverse=True)
    each = np.bincount(place, weights=weights, minlength=len(unique))
    below = np.concatenate([[0.0], np.cumsum(each)[:-1]])
    ranks: Floats = (below + each / 2)[place]
    return ranks


def rank_correlation(one: Floats, other: Floats, weights: Floats) -> float:
    """Weighted Spearman correlation of values [n]; NaN where all of one side are equal."""
    if len(one) < 2:
        return math.nan
    a, b = (weighted_ranks(each, weights) for each in (one, other))
    a, b = (each - np.average(each, weights=weights) for each in (a, b))
    spread = math.sqrt(float((weights * a * a).sum() * (weights * b * b).sum()))
    return float((weights * a * b).sum()) / spread if spread > 0 else math.nan


def mass_kept(effect: Floats, kept: Floats, weights: Floats) -> float:
    """Share of the summed effect [n] that shares `kept` [n] of the tokens hold; NaN without any effect."""
    effect = np.maximum(effect, 0)
    total = float((weights * effect).sum())
    return float((weights * effect * kept).sum()) / total if total > 0 else math.nan


def precision_at(effect: Floats, kept: Floats, weights: Floats, budget: float) -> float:
    """Share of the most needed tokens that is kept: those of largest effect, up to `budget` of all tokens' weight."""
    counted = _largest(effect, weights, budget)
    return float((counted * kept).sum() / counted.sum()) if counted.sum() > 0 else math.nan


def mass_of_top(effect: Floats, weights: Floats, share: float = TOP) -> float:
    """Share of the summed effect [n] on the tokens of largest effect, up to `share` of all; NaN without any effect."""
    return mass_kept(effect, _largest(effect, weights, share) / weights, weights)


def _largest(effect: Floats, weights: Floats, share: float) -> Floats:
    """Of each weight [n], what belongs to the tokens of largest effect that have `share` of all weight."""
    order = np.argsort(-effect, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    counted: Floats = np.empty_like(weights)
    counted[order] = np.clip(share * weights.sum() - before, 0, weights[order])  # the last one in part
    return counted


def score_quality(effect: Floats, score: Floats, kept: Floats, weights: Floats, seed: int = 0) -> ScoreQuality:
    """The quality of a score over n sampled tokens: effect in nats, score (higher is kept), share kept in [0, 1]."""
    draws = np.random.default_rng(seed)
    rhos, masses = [], []
    for _ in range(RESAMPLES):
        picked = draws.integers(0, len(effect), len(effect))
        rhos.append(rank_correlation(effect[picked], score[picked], weights[picked]))
        masses.append(mass_kept(effect[picked], kept[picked], weights[picked]))
    share = float(np.average(kept, weights=weights))
    return ScoreQuality(
        rank_correlation(effect, score, weights),
        _spread(rhos),
        precision_at(effect, kept, weights, share),
        precision_at(effect, kept, weights, TOP),
        mass_kept(effect, kept, weights),
        _spread(masses),
        share,
    )


def _spread(values: list[float]) -> float:
    """Standard deviation of the values that are defined."""
    some = [value for value in values if math.isfinite(value)]
    return float(np.std(some, ddof=1)) if len(some) > 1 else math.nan


def superiority(some: Floats, others: Floats) -> float:
    """Probability that a value of `some` exceeds one of `others`, equals counting half (area under the ROC curve)."""
    if not len(some) or not len(others):
        return math.nan
    difference = some[:, None] - others[None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())
