"""DefensiveKV: slots are kept by the most that any late query looked at them, never by less than the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method, Needs
from kvexp.core.selection import projected_sizes
from kvexp.core.slot_order import best_first
from kvexp.core.window_attention import defended, older, window_rows
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, Odd, Range


@dataclass(frozen=True)
class DefensiveKV(Method):
    """s[j] = max(m[j], mean of m) * n[j], m[j] = largest share of j in any of the last `window` prompt queries and
    query heads, each row averaged over `kernel` neighbours and brought to its sum; n[j] = mean over query heads of
    ||W v_j||_1, over its sum over the layer's kv heads. The slots with the most mean attention, up to `mass` less the
    mean attention to the last `window` tokens before the window, get the layer's largest s. keep = those last `window`
    tokens U top of s. Chosen once.

    Source: Feng et al., arXiv:2510.13334, and the authors' code, in which heads of a layer share their slots:
    `budget.heads=adaptive` with `budget.head_floor=0`; Layer-DefensiveKV: `budget.heads=global`. Departures: that mean
    attention is of each row (theirs: of the batch); the first stage's limit of slots comes from the budget in whole
    slots (theirs: from the ratio); equal slots go by age. snapkv, pyramidkv, rkv and vase can take the first factor
    alone.
    """

    name: ClassVar[str] = "defensivekv"
    evicts_while_decoding: ClassVar[bool] = False
    window: Annotated[int, AtLeast(1)] = 32  # queries, and newest tokens kept
    kernel: Annotated[int, Odd(1)] = 5
    mass: Annotated[float, Range(0, 1)] = 0.9  # of the attention that the first stage keeps

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, output_projection=True)

    def recent(self, budget: int) -> int:
        return self.window

    @property
    def priority_kind(self) -> Literal["share"]:
        return "share"

    def priority(self, ctx: EvictionContext) -> Tensor:
        if ctx.output_projection is None:
            raise ConfigError(
                "method defensivekv needs the model's output projection: make the cache with kvexp.hf.EvictionCache"
            )
        outside = older(ctx, self.window)
        rows, number = window_rows(ctx, self.window)
        tiny = torch.finfo(torch.float32).tiny
        sizes = projected_sizes(ctx.slots.values[:, :, : ctx.slots.length], ctx.output_projection)
        score = defended(rows, ctx, self.window, self.kernel) * sizes / sizes.sum(1, keepdim=True).clamp_min(tiny)
        # The first stage: slots in the order of their mean attention, until its sum reaches what is left of `mass`.
        before = outside & (ctx.age() < 2 * self.window)
        counted = number * rows.shape[1] * rows.shape[2]
        bias = rows.masked_fill(~before[:, :, None, None], 0.0).sum((1, 2, 3, 4)) / counted
        mean = rows.sum((2, 3)) / rows.sum((2, 3, 4))[..., None].clamp_min(tiny)
        order = best_first(mean, ctx.positions)
        reached = mean.gather(-1, order).cumsum(-1) >= (self.mass - bias)[:, None, None]
        tokens = ctx.newest + 1
        most = ((tokens - self.window) * ctx.budget / tokens - self.window + 1e-9).floor().clamp_min(0)[:, None, None]
        place = torch.arange(order.shape[-1], device=order.device)
        first = (place < reached.int().argmax(-1, keepdim=True)) & (place < most)
        first = torch.zeros_like(outside).scatter_(-1, order, first) & outside
        largest = score.masked_fill(~outside, 0.0).amax((1, 2), keepdim=True)
        return torch.where(first, largest, score).float().masked_fill(ctx.age() < self.window, torch.inf)
