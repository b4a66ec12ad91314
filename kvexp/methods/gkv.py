"""G-KV: R-KV's rule with a memory, so that what earlier queries looked at is given up slowly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Needs
from kvexp.core.special_methods import RenewsScores
from kvexp.core.window_attention import older, oldest_first, window_rows
from kvexp.methods.rkv import redundancy
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class GKV(RenewsScores):
    """a[j] = mean over the last `window` queries of the largest softmax(x_q)[j] in any query head; score[j] =
    max(`memory` * score[j] at the eviction before, a[j] / max a), 0 for new tokens; s = `importance` * score -
    (1 - `importance`) * R / max R, R of R-KV; both maxima over the slots before the window;
    keep = newest `window` U top of s.

    Source: Liao et al., arXiv:2512.00504, and its code at 6db3b2e with the settings of its scripts (window 16,
    memory 0.8, importance 0.5; `importance=1`: the attention alone). Departures: evicts at the end of the prompt and
    at every step over budget (the code: `cache.evict_at_prefill=false`, `cache.evict_every=128`); with fewer tokens
    than `window`, the queries there are count; a row or head without a similar key spares none, and cosines are taken
    in steps of 2^-20, as in rkv. Its other ways to remember (mean, sum) are left out.
    """

    name: ClassVar[str] = "gkv"
    reads_states: ClassVar[bool] = True
    window: Annotated[int, AtLeast(1)] = 16  # queries, and newest tokens kept
    memory: Annotated[float, Range(0, 1)] = 0.8  # of the score at the eviction before
    importance: Annotated[float, Range(0, 1)] = 0.5  # 1: no redundancy
    similar: Annotated[float, Range(0, 1)] = 0.5  # cosine

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window)

    def recent(self, budget: int) -> int:
        return self.window

    def renewed_score(self, ctx: EvictionContext) -> Tensor:
        rows, number = window_rows(ctx, self.window)
        attention = rows.amax(2).sum(-2) / number[:, None, None]
        score = torch.maximum(self.memory * ctx.score.double(), to_one(attention))
        return score.float().masked_fill(~older(ctx, self.window), 0.0)

    def priority(self, ctx: EvictionContext) -> Tensor:
        score = self.importance * ctx.score.double()
        if self.importance < 1:
            order = oldest_first(ctx)
            repeated = redundancy(ctx, order, self.similar)
            repeated = torch.empty_like(repeated).scatter_(-1, order, repeated)
            score -= (1 - self.importance) * to_one(repeated.masked_fill(~older(ctx, self.window), 0.0))
        # The window stays whole also where the budget counts the coming token as one of the recent ones.
        return score.float().masked_fill(ctx.age() < self.window, torch.inf)


def to_one(x: Tensor) -> Tensor:
    """x [B, H, S] over its largest value in each head."""
    return x / x.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
