"""CAOTE: the slots whose loss would move the attention output most are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import AttentionScoreSpec, EvictionContext, Method, Needs
from kvexp.util import Range

EPS = 1e-12  # 1 - alpha is at least this


@dataclass(frozen=True)
class CAOTE(Method):
    """c[j] = sum over query heads of alpha_j / (1 - alpha_j) * ||o - v_j||_2, o = sum_i alpha_i v_i; keep = newest
    `recent_ratio` of k U top of c.

    Source: Goel et al., arXiv:2504.14051, theorem 3.2: c[j] is how far a head's output moves when j alone is
    dropped. alpha is the newest query's attention (CAOTE over TOVA); with `alpha="accumulated"` the attention
    summed over all queries, divided by its sum over slots (over H2O, with `recent_ratio=0.5`). `form="fast"` is
    FastCAOTE: the mean of all values in place of o. Our reading: c is summed over the query heads that share a kv
    head; an accumulated alpha, their sum already, counts as one head's. Departures: a whole prompt is ranked once
    (the paper: blocks of 128 tokens); where alpha rounds to 1 the distance is taken from the mean value.
    """

    name: ClassVar[str] = "caote"
    form: Literal["exact", "fast"] = "exact"  # fast: FastCAOTE, the mean value in place of the output
    alpha: Literal["newest", "accumulated"] = "newest"  # accumulated: over H2O's score
    recent_ratio: Annotated[float, Range(0, 1)] = 0.0  # 0.5 for CAOTE over H2O

    @property
    def needs(self) -> Needs:
        return Needs(newest_attention=self.alpha == "newest")

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        return None if self.alpha == "newest" else AttentionScoreSpec()

    @property
    def priority_kind(self) -> Literal["share"]:
        return "share"

    def priority(self, ctx: EvictionContext) -> Tensor:
        held = ctx.held()[:, :, None]  # [B, H, 1, S]
        # In float64: where one slot has nearly all attention, 1 - alpha and o - v are small differences.
        values = ctx.slots.values[:, :, : ctx.slots.length].double()
        alpha = ctx.score[:, :, None] if ctx.newest_attention is None else ctx.newest_attention
        alpha = alpha.double().masked_fill(~held, 0.0)
        alpha = alpha / alpha.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        from_mean = _distances(held.double() / held.sum(-1, keepdim=True) @ values, values)
        distances = from_mean
        if self.form == "exact":
            distances = torch.where(alpha > 1 - EPS, from_mean, _distances(alpha @ values, values))
        return (alpha / (1 - alpha).clamp_min(EPS) * distances).sum(2).float()


def _distances(outputs: Tensor, values: Tensor) -> Tensor:
    """||o - v_j||_2 [B, H, n, S] of outputs [B, H, n, Dv] and values [B, H, S, Dv], without a difference of squares."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist")
