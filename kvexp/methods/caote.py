"""CAOTE: the slots whose loss would move the attention output most are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import AttentionScoreSpec, EvictionContext, Method, Needs
from kvexp.core.attention import attention_probs
from kvexp.core.window_attention import by_neighbours
from kvexp.util.fields import AtLeast, Odd, Range

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
    `alpha="window"` is DropKV (kvpress's pull request 285): the square of each query's term, o its own output, summed
    over the last `window` queries, whose tokens stay; `kernel` neighbours averaged. Departure: 1 - alpha is at least
    1e-12 (there: 1e-6 is added to it).
    """

    name: ClassVar[str] = "caote"
    reads_states: ClassVar[bool] = True
    later: ClassVar[tuple[str, ...]] = ("window", "kernel")
    form: Literal["exact", "fast"] = "exact"  # fast: FastCAOTE, the mean value in place of the output
    alpha: Literal["newest", "accumulated", "window"] = "newest"  # accumulated: over H2O's score; window: DropKV
    recent_ratio: Annotated[float, Range(0, 1)] = 0.0  # 0.5 for CAOTE over H2O
    window: Annotated[int, AtLeast(1)] = 32  # alpha=window: queries, and newest tokens kept
    kernel: Annotated[int, Odd(1)] = 1  # alpha=window: neighbours whose mean is taken

    @property
    def needs(self) -> Needs:
        return Needs(newest_attention=self.alpha == "newest", last_queries=self.window if self.alpha == "window" else 0)

    def recent(self, budget: int) -> int:
        return self.window if self.alpha == "window" else super().recent(budget)

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        return AttentionScoreSpec() if self.alpha == "accumulated" else None

    @property
    def priority_kind(self) -> Literal["share"]:
        return "share"

    def priority(self, ctx: EvictionContext) -> Tensor:
        if self.alpha == "window":
            return self._dropped(ctx)
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

    def _dropped(self, ctx: EvictionContext) -> Tensor:
        """DropKV's priority [B, H, S]."""
        assert ctx.last_logits is not None
        held = ctx.held()[:, :, None, None]
        values = ctx.slots.values[:, :, : ctx.slots.length].double()
        logits = ctx.last_logits.masked_fill(~held, -torch.inf)
        alpha = attention_probs(logits, ctx.sinks, torch.float64).nan_to_num(0.0)
        outputs = (alpha @ values[:, :, None]).flatten(2, 3)  # [B, H, G * n, Dv]
        if self.form == "fast":
            outputs = (held[:, :, 0].double() / held[:, :, 0].sum(-1, keepdim=True) @ values).expand_as(outputs)
        term = (alpha / (1 - alpha).clamp_min(EPS)).flatten(2, 3) * _distances(outputs, values)
        priority = by_neighbours(term.square().sum(2), ctx, self.kernel, "avg") / alpha.shape[2]
        # The window stays whole also where the budget counts the coming token as one of the recent ones.
        return priority.float().masked_fill(ctx.age() < self.window, torch.inf)


def _distances(outputs: Tensor, values: Tensor) -> Tensor:
    """||o - v_j||_2 [B, H, n, S] of outputs [B, H, n, Dv] and values [B, H, S, Dv], without a difference of squares."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist")
