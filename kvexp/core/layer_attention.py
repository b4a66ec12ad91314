"""The attention of one layer's forward over the slots in use: its inputs, and its output in the cheapest exact way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvexp.core.attention import (
    AttentionInputs,
    AttentionParams,
    apply_probs,
    sdpa_attention,
    with_renumbered_positions,
)
from kvexp.core.cache_config import CacheConfig
from kvexp.core.method import EvictionContext, checked
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots


def attention_inputs(
    slots: Slots,
    query: Tensor,
    positions: Tensor,
    params: AttentionParams,
    config: CacheConfig,
    sequence: SequenceState,
    *,
    has_evicted: bool,
) -> AttentionInputs:
    """The inputs of a forward's attention: query [B, H * G, Q, D] at positions [B, Q], over all slots in use."""
    b, h, s = query.shape[0], slots.positions.shape[1], slots.length
    hides_nothing = sequence.in_prompt or config.method.per_query  # mask mode, but no slot was evicted yet
    inputs = AttentionInputs(
        query=query.unflatten(1, (h, query.shape[1] // h)),
        keys=slots.keys[:, :, :s],
        values=slots.values[:, :, :s],
        positions=slots.broadcast_positions(),
        query_positions=positions,
        params=params,
        visible=None if slots.visible is None or hides_nothing else slots.visible[:, :, :s],
        in_column_order=slots.same_order,
        padded=sequence.padded or (sequence.in_prompt and not sequence.prompt_complete),
        all_visible=hides_nothing and _sees_all(slots, query, params, sequence),
    )
    if config.renumbered and has_evicted:
        inputs = with_renumbered_positions(inputs, slots.positions[:, :, :s].expand(b, h, s))
    return inputs


def _sees_all(slots: Slots, query: Tensor, params: AttentionParams, sequence: SequenceState) -> bool:
    """Whether one new token per row, query [B, H * G, 1, D], sees every slot: none is dead, hidden or padding."""
    plain = slots.same_order and not sequence.padded and params.sliding_window is None
    return plain and query.shape[2] == 1 and not sequence.in_prompt


def attend_slots(
    inputs: AttentionInputs, config: CacheConfig, *, in_prompt: bool, hide: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B, H, G, Q, Dv], and probabilities [B, H, G, Q, S] float32 of a decode step.

    None in place of the probabilities where a fused kernel computed the output, which returns none. hide: the logits
    [B, H, G, Q, S] of a decode step with slots hidden from queries, for methods that choose slots per query.
    """
    method, count = config.method, inputs.query.shape[3]
    unobserved = method.score_spec is None and not method.per_query
    # For one query on a CPU, SDPA takes longer than the two matrix products.
    if in_prompt or (unobserved and (count > 1 or inputs.query.device.type != "cpu")):
        return sdpa_attention(inputs), None
    x = inputs.logits(slice(0, count), inputs.keys.shape[2])
    if method.per_query:
        x = hide(x)
    probabilities = torch.softmax(x, dim=-1)
    return apply_probs(probabilities, inputs.values), probabilities


def hide_by_query(
    x: Tensor, config: CacheConfig, newest: Tensor, context: Callable[[Tensor], EvictionContext]
) -> Tensor:
    """Logits x [B, H, G, Q, S] of a decode step, -inf where the method's `query_mask` hides a slot from a query.

    newest [B, Q]: position ids of the queries; context: of the slots, as a query at newest [B] sees them.
    """
    method, full = config.method, torch.softmax(x, dim=-1).sum(2)
    rows = []
    for j in range(x.shape[3]):
        mask = method.query_mask(full[:, :, j], context(newest[:, j]))
        if mask is not None:
            mask = checked(mask, full[:, :, j].shape, method, "query_mask", "[B, H, S]", mask=True)
        rows.append(x[..., j, :] if mask is None else x[..., j, :].masked_fill(~mask[:, :, None], -torch.inf))
    return torch.stack(rows, dim=3)
