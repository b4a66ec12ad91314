"""What slots are evicted by: the method's priority, checked and in float32, and the slots that are protected."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core import spans
from kvexp.core.cache_config import CacheConfig
from kvexp.core.head_budgets import RankedSlots, union_priority
from kvexp.core.method import EvictionContext, Method, checked
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.sequence import SequenceState
from kvexp.errors import ConfigError


def rank(
    config: CacheConfig,
    ctx: EvictionContext,
    resolved: ResolvedBudget,
    sequence: SequenceState,
    sliding_window: int | None,
    output_projection: Tensor | None,
) -> RankedSlots:
    """What the slots of one layer are evicted by: the method's priority, what it protects, and marked spans spared.

    sliding_window: of the model, in tokens, None without one; output_projection: as of `SlotSelection.priorities`.
    ConfigError where the method gives a tensor of another shape, or hides slots in a mode that cannot.
    """
    method = config.method
    # Renumbered survivors stay within a sliding window whatever their age.
    priority = masked_priority(method, ctx, sliding_window if config.positions == "original" else None)
    hidden = _hidden_next_step(config, ctx)
    protected = protected_mask(method, ctx, resolved)
    keep, most = resolved.keep_t, max(resolved.keep)
    priority = config.select.priorities(
        method, ctx, priority, protected, keep, most, sequence.seq_len, output_projection
    )
    priority = resolved.by_stream(priority, ctx.positions)
    if config.is_union:
        priority = union_priority(priority, logarithmic=method.priority_kind == "log_share")
    if config.keep is not None and sequence.spans is not None:
        marked, held = sequence.spans, ctx.held()
        priority, protected = spans.spare(
            config.keep, marked, priority, protected, held, ctx.positions, resolved, method.sinks
        )
    asked = None if config.budget is None else config.budget.threshold
    threshold = None if asked is None else method.threshold_as_priority(asked)
    return RankedSlots(priority, ctx.positions, protected, hidden, threshold)


def _hidden_next_step(config: CacheConfig, ctx: EvictionContext) -> Tensor | None:
    """The slots [B, H, S] that the method hides for the next step alone; ConfigError in a mode that cannot."""
    method, hidden = config.method, config.method.hidden_next_step(ctx)
    if hidden is None:
        return None
    if config.mode != "mask":
        raise ConfigError(
            f"{type(method).__qualname__}.hidden_next_step hides slots for a step, which cache.mode="
            f"{config.mode} cannot: set cache.mode=mask, or let the method's simulation_only be True"
        )
    return checked(hidden, ctx.positions.shape, method, "hidden_next_step", "[B, H, S]", mask=True)


def protected_mask(method: Method, ctx: EvictionContext, resolved: ResolvedBudget) -> Tensor:
    """[B, H, S] bool: the slots of sinks and of the recent window, which are never evicted."""
    positions, sinks = ctx.positions, resolved.sinks_by_head(method)
    recent = positions > (ctx.newest[:, None] - resolved.recent_by_head)[..., None]
    return (positions >= 0) & (recent | (positions < (sinks if isinstance(sinks, int) else sinks[..., None])))


def float_priority(method: Method, ctx: EvictionContext) -> Tensor:
    """The method's priority [B, H, S] in float32, NaN as -inf; ConfigError where it returns no tensor of that shape."""
    priority = checked(method.priority(ctx), ctx.positions.shape, method, "priority", "[B, H, S]")
    return priority.to(torch.float32).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def masked_priority(method: Method, ctx: EvictionContext, sliding_window: int | None) -> Tensor:
    """`float_priority` [B, H, S], with slots behind the model's sliding window (in tokens; None: no window) as -inf."""
    priority = float_priority(method, ctx)
    if sliding_window is not None:
        priority = priority.masked_fill(ctx.age() + 1 >= sliding_window, -torch.inf)
    return priority
