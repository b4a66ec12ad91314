"""Which slots go: protection, priorities, ties."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.budget_resolution import ResolvedBudget
from kvexp.core.budget_shares import RankedSlots, union_priority
from kvexp.core.config import CacheConfig, Keep
from kvexp.core.method import EvictionContext, Method, Needs, checked, newest_attention
from kvexp.core.sequence import MarkedSpans, SequenceState
from kvexp.core.slots import Slots, keep_mask
from kvexp.util import ConfigError

# What slots are evicted by: the method's priority, checked and in float32, and the slots that are protected.


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
        priority, protected = spare(
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


# How much attention survives the eviction at the end of the prompt: `attention_kept` in every row of results.


@dataclass(frozen=True)
class RetainedAttention:
    """The last prompt query's attention by position: table [B, H, positions + 1], the last entry for dead slots."""

    table: Tensor

    @classmethod
    def before(cls, inputs: AttentionInputs, slots: Slots) -> RetainedAttention:
        """The attention before the eviction: the last query row's softmax, mean over a kv head's query heads."""
        count = inputs.query.shape[3]
        row = torch.softmax(inputs.logits(slice(count - 1, count), inputs.keys.shape[2]), dim=-1)[..., 0, :].mean(2)
        positions = slots.positions[:, :, : slots.length]
        table = torch.zeros(*row.shape[:2], slots.length + 1, device=row.device)
        return cls(table.scatter_add_(-1, torch.where(positions < 0, slots.length, positions), row.float()))

    def after(self, slots: Slots) -> Tensor:
        """After the eviction: the share [B] of that attention whose slots survived, mean over kv heads."""
        positions = slots.positions[:, :, : slots.length]
        if slots.visible is not None:
            positions = positions.masked_fill(~slots.visible[:, :, : slots.length], -1)
        last = self.table.shape[-1] - 1
        held = self.table.gather(-1, torch.where(positions < 0, last, positions))
        return held.masked_fill(positions < 0, 0.0).sum(-1).mean(-1)


# An eviction that is due, with what it goes by besides the slots.


@dataclass(frozen=True)
class DueEviction:
    """What an eviction goes by besides the slots: tensors of the forward that it follows, None where not needed.

    params: of that forward; newest_attention, last_logits: as in `EvictionContext`; before: None while decoding.
    """

    params: AttentionParams
    newest_attention: Tensor | None
    last_logits: Tensor | None
    before: RetainedAttention | None

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        probabilities: Tensor | None,
        needs: Needs,
        logits: Tensor | None,
        before: RetainedAttention | None,
    ) -> DueEviction:
        """After a forward with these inputs, as its method needs; logits: of the newest queries, at least `needs`'.

        probabilities: as of `newest_attention`.
        """
        return cls(
            inputs.params,
            newest_attention(inputs, probabilities) if needs.newest_attention else None,
            None if logits is None or not needs.last_queries else logits[..., -needs.last_queries :, :],
            before,
        )


def spare(
    keep: Keep,
    spans: MarkedSpans,
    priority: Tensor,
    protected: Tensor,
    held: Tensor,
    positions: Tensor,
    resolved: ResolvedBudget,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """Priority and protected slots [B, H, S] of an eviction that spares the spans, from those of the method.

    held [B, H, S] bool: slots that hold a token; positions [B, H, S]; sinks: of the method. "span" protects every slot
    of a span. "fair" gives a span of n of a prompt's T tokens floor((kept - recent - sinks) * n / T) slots, the best by
    the method's priority, and takes its other slots first: so all parts of the prompt lose the same share. What sinks
    and recent window protect anyway is not counted. The share stays while the answer grows.
    """
    number = spans.of_slots(positions)
    if keep == "span":
        return priority, protected | ((number >= 0) & held)
    chosen = torch.zeros_like(protected)
    for place in range(max(map(len, spans.lengths))):
        members = (number == place) & held & ~protected
        shares = [
            max(0, kept - recent - sinks) * lengths[place] // prompt if place < len(lengths) else 0
            for kept, recent, lengths, prompt in zip(
                resolved.keep, resolved.recent, spans.lengths, spans.prompts, strict=True
            )
        ]
        most = min(max(shares), priority.shape[-1])
        if most:
            share = torch.tensor(shares, device=priority.device)
            eligible = positions.masked_fill(~members, -1)
            chosen |= keep_mask(priority, eligible, torch.zeros_like(protected), share, most) & members
    rest = (number >= 0) & ~chosen & ~protected
    return priority.masked_fill(rest, -torch.inf), protected | chosen
