"""What decides an eviction: each slot's priority and whether it is protected (ties: `kvexp.core.slot_order`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvexp.core.budget import Budget
from kvexp.core.budget_resolution import LayerSlots
from kvexp.core.budget_shares import slots_by_head, union_priority
from kvexp.core.config import CacheConfig, Keep
from kvexp.core.method import EvictionContext, Method, check_priorities, checked, is_users, nan_error, undeclared
from kvexp.core.sequence import MarkedSpans, SequenceState
from kvexp.core.slot_order import kept_mask
from kvexp.core.slots import Rewritten
from kvexp.core.special_methods import ChoosesSlots, JoinsLayers, Simulated
from kvexp.util.errors import ConfigError


@dataclass(frozen=True)
class RankedSlots:
    """What one layer's slots are evicted by, all [B, H, S]; hidden: see `Simulated.hidden_next_step`.

    threshold: what a priority must reach where slots are shared out by `Budget.threshold`, else None. kept: the slots
    that stay, where the method chooses them itself (`ChoosesSlots.kept`), else None. rewrite: what they are given,
    where the method rewrites them (`Rewrites.rewrite`, of index and keep), else None.
    """

    priority: Tensor
    positions: Tensor
    protected: Tensor
    hidden: Tensor | None
    threshold: float | None = None
    kept: Tensor | None = None
    rewrite: Callable[[Tensor, Tensor], Rewritten] | None = None

    def share(self, kept: list[int], budget: Budget) -> Tensor:
        """How many slots each head keeps, [B, H], where a row's heads keep kept[b] on average; or by a threshold."""
        if self.threshold is None:
            return slots_by_head(self.priority, self.candidates, self.protected, kept, budget.floor)
        return ((self.candidates >= 0) & ((self.priority >= self.threshold) | self.protected)).sum(-1)

    @property
    def candidates(self) -> Tensor:
        """The positions that may stay, -1 for others."""
        return self.positions if self.hidden is None else self.positions.masked_fill(self.hidden, -1)


def rank(
    config: CacheConfig,
    ctx: EvictionContext,
    allowed: LayerSlots,
    sequence: SequenceState,
    sliding_window: int | None,
    output_projection: Tensor | None,
) -> RankedSlots:
    """What the slots of one layer are evicted by: the method's priority, what it protects, and what `keep` spares.

    sliding_window: of the model, in tokens, None without one; output_projection: as of `SlotSelection.priorities`.
    ConfigError where the method gives a tensor of another shape, or hides slots in a mode that cannot.
    """
    method, positions = config.method, ctx.positions
    priority = float_priority(method, ctx)
    if sequence.in_prompt or positions.device.type == "cpu":  # elsewhere the run's end looks
        check_priorities(method, ctx)
    # Renumbered survivors stay within a sliding window whatever their age.
    if sliding_window is not None and config.positions == "original":
        priority = priority.masked_fill(ctx.age() + 1 >= sliding_window, -torch.inf)
    hidden = method.hidden_next_step(ctx) if isinstance(method, Simulated) else None
    if hidden is not None:
        if config.mode != "mask":
            raise ConfigError(
                f"{type(method).__qualname__}.hidden_next_step hides slots for a step, which cache.mode="
                f"{config.mode} cannot: set cache.mode=mask, or let the method's simulation_only be True"
            )
        hidden = checked(hidden, positions.shape, method, "hidden_next_step", "[B, H, S]", mask=True)
    sinks = allowed.sinks_by_head(method)
    recent = positions > (ctx.newest[:, None] - allowed.recent_by_head)[..., None]
    protected = (positions >= 0) & (recent | (positions < (sinks if isinstance(sinks, int) else sinks[..., None])))
    priority = config.select.priorities(method, ctx, priority, protected, allowed, sequence.seq_len, output_projection)
    priority = among_heads(config, allowed, priority, positions)
    if ctx.kept_prompt is not None:
        protected = protected | (ctx.held() & (positions < ctx.kept_prompt[:, None, None]))
    elif config.keep is not None and sequence.spans is not None:
        priority, protected = spare(config.keep, sequence.spans, ctx, priority, protected, allowed, method.sinks)
    budget_threshold = None if config.budget is None else config.budget.threshold
    threshold = None if budget_threshold is None else method.threshold_as_priority(budget_threshold)
    kept = None
    if isinstance(method, ChoosesSlots):
        kept = checked(method.kept(ctx, priority), positions.shape, method, "kept", "[B, H, S]", mask=True)
    return RankedSlots(priority, positions, protected, hidden, threshold, kept)


def among_heads(config: CacheConfig, allowed: LayerSlots, priority: Tensor, positions: Tensor) -> Tensor:
    """The priority [B, H, S] after what the budget says of heads: recency in streaming ones, one order for all."""
    priority = allowed.by_stream(priority, positions)
    if not config.is_union:
        return priority
    return union_priority(priority, logarithmic=config.method.priority_kind == "log_share")


def joined(method: JoinsLayers, ranked: Sequence[RankedSlots]) -> list[RankedSlots]:
    """What all layers' slots are evicted by where the method joins their priorities (`JoinsLayers.join_layers`).

    Slots stand in any order; what a layer evicts first whatever the method says (-inf) stays so.
    """
    home = ranked[0].priority.device
    orders = [layer.positions.argsort(dim=-1, stable=True) for layer in ranked]
    by_position = [layer.priority.gather(-1, order).to(home) for layer, order in zip(ranked, orders, strict=True)]
    joined_priority = method.join_layers(torch.stack(by_position))
    if is_users(type(method)) and bool(joined_priority.isnan().any()):
        raise nan_error(type(method), "join_layers")
    parts = []
    for layer, order, layer_priority in zip(ranked, orders, joined_priority.to(torch.float32), strict=True):
        priority = torch.empty_like(layer.priority).scatter_(-1, order, layer_priority.to(order.device))
        parts.append(replace(layer, priority=priority.masked_fill(layer.priority == -torch.inf, -torch.inf)))
    return parts


def float_priority(method: Method, ctx: EvictionContext) -> Tensor:
    """The method's priority [B, H, S] in float32, NaN as -inf; ConfigError where it returns no tensor of that shape.

    A NaN for a held slot sets the context's flag; the host does not wait for it.
    """
    try:
        returned = method.priority(ctx)
    except (AttributeError, TypeError) as error:  # None was read, where an input is not declared
        if (missing := undeclared(method, ctx)) is None:
            raise
        raise ConfigError(missing) from error
    priority = checked(returned, ctx.positions.shape, method, "priority", "[B, H, S]")
    if ctx.nan_flag is not None:
        held = (ctx.positions >= 0) & (ctx.score != -torch.inf)  # also where the score itself is NaN
        ctx.nan_flag.logical_or_((priority.isnan() & held).any())
    return priority.to(torch.float32).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def spare(
    keep: Keep,
    spans: MarkedSpans,
    ctx: EvictionContext,
    priority: Tensor,
    protected: Tensor,
    allowed: LayerSlots,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """Change the method's priority and protected slots [B, H, S] so that an eviction spares the spans.

    sinks: of the method. "span" protects every slot of a span. "fair" gives a span of n of a prompt's T tokens
    floor((kept - recent - sinks) * n / T) slots, the best by the method's priority, and takes its other slots first: so
    all parts of the prompt lose the same share. What sinks and recent window protect anyway is not counted. The share
    stays while the answer grows.
    """
    number, held = spans.of_slots(ctx.positions), ctx.held()
    if keep == "span":
        return priority, protected | ((number >= 0) & held)
    chosen = torch.zeros_like(protected)
    free = [max(0, kept - recent - sinks) for kept, recent in zip(allowed.kept, allowed.recent, strict=True)]
    for place in range(max(map(len, spans.lengths))):
        members = (number == place) & held & ~protected
        shares = [
            count * lengths[place] // prompt if place < len(lengths) else 0
            for count, lengths, prompt in zip(free, spans.lengths, spans.prompts, strict=True)
        ]
        most = min(max(shares), priority.shape[-1])
        if most:
            share = torch.tensor(shares, device=priority.device)
            eligible = ctx.positions.masked_fill(~members, -1)
            chosen |= kept_mask(priority, eligible, torch.zeros_like(protected), share, most) & members
    rest = (number >= 0) & ~chosen & ~protected
    return priority.masked_fill(rest, -torch.inf), protected | chosen
