"""What a window of newest queries looks at: rows of attention, means over neighbours, and the defensive clamp."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvexp.core.attention import attention_probs
from kvexp.core.method import EvictionContext

LAST = torch.iinfo(torch.int64).max


def older(ctx: EvictionContext, window: int) -> Tensor:
    """[B, H, S] bool: the slots of held tokens before the newest `window`."""
    return ctx.held() & (ctx.age() >= window)


def window_rows(ctx: EvictionContext, window: int, *, among_older: bool = False) -> tuple[Tensor, Tensor]:
    """The attention [B, H, G, n, S] float64 of the newest n queries to older slots, 0 elsewhere; how many count, [B].

    A query that is padding looks at nothing and does not count. among_older: the softmax is over the older slots alone.
    """
    assert ctx.last_logits is not None
    outside = older(ctx, window)[:, :, None, None]
    seen = outside if among_older else ctx.held()[:, :, None, None]
    logits = ctx.last_logits.masked_fill(~seen, -torch.inf)
    blind = logits.amax(-1, keepdim=True) == -torch.inf  # queries that see none of these slots: their softmax is NaN
    number = (~blind[:, 0, 0]).sum((1, 2)).clamp_min(1)
    rows = attention_probs(logits, None if among_older else ctx.sinks, torch.float64)
    # A softmax over the older slots alone is 0 at all others already.
    return rows.masked_fill_(blind if among_older else ~outside | blind, 0.0), number


def oldest_first(ctx: EvictionContext) -> Tensor:
    """Slots [B, H, S] in the order of their positions, which no eviction leaves them in; those not held come last."""
    return ctx.positions.masked_fill(~ctx.held(), LAST).argsort(dim=-1, stable=True)


def by_neighbours(x: Tensor, ctx: EvictionContext, kernel: int, pool: Literal["max", "avg"]) -> Tensor:
    """The largest or mean value x [B, H, ..., S] of every slot and its neighbours, `kernel` in all, by position."""
    order = oldest_first(ctx)
    order = order.view(*order.shape[:2], *[1] * (x.ndim - 3), -1).expand_as(x)
    taken = (max_pool1d if pool == "max" else avg_pool1d)(
        x.gather(-1, order).flatten(0, -2), kernel, stride=1, padding=kernel // 2
    )
    return torch.empty_like(x).scatter_(-1, order, taken.view(x.shape))


def defended(rows: Tensor, ctx: EvictionContext, window: int, kernel: int) -> Tensor:
    """The worst case of every older slot, [B, H, S]: its largest attention in a row, at least the mean of all such.

    rows [B, H, G, n, S] of `window_rows`; each is first averaged over `kernel` neighbours and brought to its former
    sum. Source: Feng et al., DefensiveKV (arXiv:2510.13334), steps 2 and 3 of its code.
    """
    outside = older(ctx, window)
    tiny = torch.finfo(torch.float32).tiny
    smooth = by_neighbours(rows, ctx, kernel, "avg").masked_fill(~outside[:, :, None, None], 0.0)
    smooth = smooth * (rows.sum(-1, keepdim=True) / smooth.sum(-1, keepdim=True).clamp_min(tiny))
    most = smooth.amax((2, 3))
    floor = most.sum(-1, keepdim=True) / outside.sum(-1, keepdim=True).clamp_min(1)
    return torch.maximum(most, floor).masked_fill(~outside, 0.0)
