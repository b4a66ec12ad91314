"""VaSE: values of wide range are kept, and others by lot, in proportion to the attention that they get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method, Needs
from kvexp.core.noise import hash_draws, lowbias32, stream_id
from kvexp.core.slot_order import best_first
from kvexp.core.window_attention import by_neighbours, defended, older, window_rows
from kvexp.util.fields import AtLeast, Odd, Range

_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit integer
ABOVE = 128.0  # of every log a + Gumbel draw, which is at most 17


@dataclass(frozen=True)
class VaSE(Method):
    """keep = newest `window` U sinks U top `large` * k of max_d v_jd - min_d v_jd, sinks counted U others by lot
    without replacement, chances in proportion to a[j] = mean over query heads of the mean over `kernel` neighbours of
    j of the mean over the last `window` queries of softmax(x_q)[j], over the slots before the window.

    Source: VaSE, arXiv:2606.03928, and its code, mode range_sink_sample_attn (256 of 1,024 slots by range). The lot is
    the top of log a[j] + Gumbel noise of (seed, layer, head, position, eviction), which draws by the same law. With
    `keep=prompt` the prompt is out of both choices, as in Random Attention's code (arXiv:2609.03430).
    `aggregate="defensive"`: DefensiveKV's worst case in place of a. Departures: evicts at the end of the prompt and at
    every step over budget (the code: `cache.evict_at_prefill=false`, `cache.evict_every=64`); sinks and neighbours are
    by position, also after evictions (there: by slot, where survivors stand as chosen: the largest ranges first, then
    as drawn, then the window); with fewer tokens than `window`, the queries there are count (there: zeros too).
    """

    name: ClassVar[str] = "vase"
    reads_states: ClassVar[bool] = True
    n_sinks: Annotated[int, AtLeast(0)] = 4
    window: Annotated[int, AtLeast(1)] = 64  # queries, and newest tokens kept
    kernel: Annotated[int, Odd(1)] = 5
    large: Annotated[float, Range(0, 1)] = 0.25  # share of the budget that is kept for its range
    aggregate: Literal["mean", "defensive"] = "mean"  # defensive: DefensiveKV's clamp

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window)

    def recent(self, budget: int) -> int:
        return self.window

    def priority(self, ctx: EvictionContext) -> Tensor:
        free = older(ctx, self.window)
        if ctx.kept_prompt is not None:
            free = free & (ctx.positions >= ctx.kept_prompt[:, None, None])
        values = ctx.slots.values[:, :, : ctx.slots.length].float()
        spread = (values.amax(-1) - values.amin(-1)).masked_fill(ctx.positions < self.n_sinks, torch.inf)
        # A slot's place in the order of ranges, of equal ones the newer first.
        order = best_first(spread.masked_fill(~free, -torch.inf), ctx.positions)
        place = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        number = (ctx.budget * self.large + 1e-9).long()[:, None, None]
        chance = self.attention(ctx).clamp_min(torch.finfo(torch.float32).tiny).log().float()
        drawn = chance + self.draws(ctx.positions, ctx.seeds, ctx.layer, spread.shape[1], ctx.newest)
        priority = torch.where(free & (place < number), ABOVE * 2 - place / ctx.slots.length, drawn)
        # The window stays whole also where the budget counts the coming token as one of the recent ones.
        return priority.masked_fill(ctx.age() < self.window, torch.inf)

    def draws(self, positions: Tensor, seeds: Tensor, layer: int, heads: int, eviction: Tensor) -> Tensor:
        """Gumbel draws [B, H, S] at positions [B, 1 or H, S]; seeds [B]; eviction [B]: its newest position."""
        base = lowbias32(stream_id(seeds, layer, heads) + eviction.int()[:, None] * _GOLDEN)
        return hash_draws("gumbel", base, positions.expand(-1, heads, -1))

    def attention(self, ctx: EvictionContext) -> Tensor:
        """a [B, H, S] float64."""
        rows, number = window_rows(ctx, self.window, among_older=True)
        if self.aggregate == "defensive":
            return defended(rows, ctx, self.window, self.kernel)
        mean = rows.sum(-2) / number[:, None, None, None]
        return by_neighbours(mean, ctx, self.kernel, "avg").mean(2).masked_fill(~older(ctx, self.window), 0.0)
