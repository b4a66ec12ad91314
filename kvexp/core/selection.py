"""Wrappers of any method's priorities: whole chunks (ChunkKV), values (CriticalKV). The choice is `slot_order`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from kvexp.core.method import EvictionContext, Method
from kvexp.core.slot_order import INT64_MAX, kept_mask
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, check_fields

if TYPE_CHECKING:
    from kvexp.core.budget_resolution import LayerSlots

CHUNK = 10  # tokens, as in ChunkKV's paper
STAGES = 2  # in the first of which a half of the kept slots is chosen, as in CriticalKV's paper and code
EPSILON = 1e-4  # of attention, added before values weigh it, as in CriticalKV's code
BLOCK_ELEMENTS = 1 << 22  # projected values at a time: 16 MiB in float32


@dataclass(frozen=True)
class SlotSelection:
    """A wrapper around any method: its priorities [B, H, S] to other ones, by which the core then keeps slots.

    by="chunk": the priority of a slot is the mean over its chunk, `chunk` neighbouring positions, and over all kv heads
    of the layer, so that they keep the same positions; the last chunk that is kept may be kept in part, its newest
    tokens. What the method protects is kept as ever and has no part in a chunk's mean. Source: Liu et al., ChunkKV,
    arXiv:2502.00299, algorithm 1 (chunks of 10; kvpress 20). Departures: exactly the budget is kept, where the paper
    and kvpress keep whole chunks; chosen anew at every eviction; layers do not reuse each other's choice.
    values="critical": half of the kept slots have the highest priority, the other half the highest
    (a_j + 1e-4) * mean over a kv head's query heads of ||W v_j||_1, where a_j is the priority as a share of attention
    and W a query head's block of the output projection. Source: Feng et al., CriticalKV, arXiv:2502.03805, as in
    kvpress's CriticalKVPress. Departure: chosen anew at every eviction.
    chunk: tokens of a chunk; None: 10. ConfigError for both wrappers at once.
    """

    by: Literal["token", "chunk"] = "token"
    values: Literal["none", "critical"] = "none"
    chunk: Annotated[int, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.chunk is not None and self.by != "chunk":
            raise ConfigError(f"select.chunk={self.chunk} has no effect with select.by=token: set select.by=chunk")
        if self.by == "chunk" and self.values == "critical":
            raise ConfigError(
                "select.by=chunk keeps whole chunks, select.values=critical half of its slots token by token: set one "
                "of the two"
            )

    @property
    def plain(self) -> bool:
        """Whether slots are kept by the method's own priorities."""
        return self.by == "token" and self.values == "none"

    @property
    def setting(self) -> str:
        """The option that makes it not plain, as it is typed."""
        return "select.by=chunk" if self.by == "chunk" else "select.values=critical"

    def priorities(
        self,
        method: Method,
        ctx: EvictionContext,
        priority: Tensor,
        protected: Tensor,
        allowed: LayerSlots,
        positions: int,
        projection: Tensor | None,
    ) -> Tensor:
        """The priorities [B, H, S] float32 by which slots are kept.

        priority [B, H, S] float32: the method's; protected [B, H, S] bool; positions: more than any position id;
        projection [H, G, n, Dv]: blocks of the output projection.
        """
        if self.by == "chunk":
            return by_chunk(self.chunk or CHUNK, method, ctx, priority, protected, positions)
        if self.values == "critical":
            return by_values(method, ctx, priority, protected, allowed, projection)
        return priority


def attention_shares(method: Method, ctx: EvictionContext, priority: Tensor) -> Tensor:
    """The priority [B, H, S] as shares of attention, float64, 0 for slots that hold nothing.

    Priorities made of the score are divided by the sum of the kv head's scores, which is what its queries had to give.
    """
    held, shares = ctx.held(), priority.double()
    if method.priority_kind == "log_share":
        shares = shares.exp()
    elif method.priority_kind == "score":
        total = ctx.score.double().masked_fill(~held, 0.0).sum(-1, keepdim=True)
        shares = shares / total.clamp_min(torch.finfo(torch.float32).tiny)
    return shares.masked_fill(~held, 0.0)


def by_chunk(
    size: int, method: Method, ctx: EvictionContext, priority: Tensor, protected: Tensor, positions: int
) -> Tensor:
    """Every slot's priority as the mean of its chunk; arguments of `SlotSelection.priorities`."""
    counted = ctx.held() & ~protected & priority.isfinite()
    value = priority.double()
    if method.priority_kind == "log_share":  # a factor that all slots of a row share changes no order
        value = (value - value.masked_fill(~counted, -torch.inf).amax((1, 2), keepdim=True)).exp()
    # Summed in the order of positions, wherever slots lie: sums of one order are equal to the bit.
    order = ctx.positions.masked_fill(~counted, INT64_MAX).argsort(dim=-1, stable=True)
    value, chunk = value.masked_fill(~counted, 0.0), (ctx.positions // size).masked_fill(~counted, 0)
    index, sorted_values = chunk.gather(-1, order).flatten(1), value.gather(-1, order).flatten(1)
    sums = value.new_zeros(2, len(value), positions // size + 1)
    sums[0].scatter_add_(-1, index, sorted_values)
    sums[1].scatter_add_(-1, index, counted.gather(-1, order).flatten(1).double())
    mean = sums[0] / sums[1].clamp_min(1.0)
    of_slot = mean.gather(-1, chunk.flatten(1)).view(priority.shape).float()
    return torch.where(counted, of_slot, priority)


def by_values(
    method: Method,
    ctx: EvictionContext,
    priority: Tensor,
    protected: Tensor,
    allowed: LayerSlots,
    projection: Tensor | None,
) -> Tensor:
    """Infinity for the first half of the slots, else attention times values; arguments as of `priorities`."""
    if projection is None:
        raise ConfigError(
            "select.values=critical needs the model's output projection: make the cache with kvexp.hf.EvictionCache"
        )
    held = ctx.held()
    first, most = allowed.kept_t // STAGES, min(max(allowed.kept) // STAGES, priority.shape[-1])
    chosen = kept_mask(priority, ctx.positions.masked_fill(~held, -1), protected & held, first, most)
    sizes = projected_sizes(ctx.slots.values[:, :, : ctx.slots.length], projection)
    second = ((attention_shares(method, ctx, priority) + EPSILON) * sizes).float()
    new_priority = second.masked_fill(priority == torch.inf, torch.inf).masked_fill(chosen, torch.inf)
    return new_priority.masked_fill(~held | (priority == -torch.inf), -torch.inf)


def projected_sizes(values: Tensor, projection: Tensor) -> Tensor:
    """Mean over query heads of ||W v_j||_1 [B, H, S] float64 of values [B, H, S, Dv]; projection [H, G, n, Dv].

    In blocks of slots, so that no more than 16 MiB are projected at a time.
    """
    b, h, _, _ = values.shape
    g, n = projection.shape[1:3]
    size = max(1, BLOCK_ELEMENTS // (b * h * n))
    parts = []
    for tile in values.float().split(size, dim=2):
        heads = [(tile @ w.float().transpose(-1, -2)).abs().double().sum(-1) for w in projection.unbind(1)]
        parts.append(torch.stack(heads).sum(0) / g)
    return torch.cat(parts, dim=2)
