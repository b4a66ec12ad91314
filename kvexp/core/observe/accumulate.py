"""Accumulation of a layer's scores: column sums of a forward, pooled over rows and heads, added to the old scores."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core import bounded_prefill
from kvexp.core.attention import AttentionInputs
from kvexp.core.cache_config import CacheConfig
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.observe import blocked, naive, triton_observe
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots

# Column sums of a prompt by (sums_key, observe, block), so that caches sharing the prefill share them too.
PromptSums = dict[tuple[AttentionScoreSpec, str, int | None], Tensor]


def shared_column_sums(
    config: CacheConfig,
    spec: AttentionScoreSpec,
    inputs: AttentionInputs,
    probabilities: Tensor | None,
    sequence: SequenceState,
    layer: int,
    seen: PromptSums,
) -> Tensor:
    """As `forward_column_sums`, of a prompt only where `seen` lacks them, to which they are then added."""
    if not sequence.in_prompt:
        return forward_column_sums(config, spec, inputs, probabilities, sequence, layer)
    key = (spec.sums_key, config.observe, config.block)
    if key not in seen:
        seen[key] = forward_column_sums(config, spec, inputs, probabilities, sequence, layer)
    return seen[key]


def forward_column_sums(
    config: CacheConfig,
    spec: AttentionScoreSpec,
    inputs: AttentionInputs,
    probabilities: Tensor | None,
    sequence: SequenceState,
    layer: int,
) -> Tensor:
    """Column sums [B, H, S] float32 of one forward's query rows.

    probabilities [B, H, G, Q, S]: attention of a decode step, if at hand; None: computed as config.observe says.
    """
    rows_left = bounded_prefill.rows_to_chunk_end(config, sequence)
    weights = naive.row_weights(spec, inputs.query_positions, rows_left)
    if probabilities is not None and spec.is_plain:
        return naive.weighted_column_sums(probabilities, weights)
    taus = spec.taus(sequence.query_steps, sequence.max_new_tokens, weights.device)
    seeds = sequence.seeds.to(weights.device)
    return column_sums_by(config.observe, inputs, spec, weights, taus, seeds, layer, rows_left, config.block)


def column_sums_by(
    how: str,
    inputs: AttentionInputs,
    spec: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    rows_left: int | None,
    block: int | None,
) -> Tensor:
    """Column sums [B, H, S] float32, computed as `how` says: naive, blocked or triton.

    The Triton kernels observe prompts only; decode rows are few and are observed in blocks. Arguments as of
    `naive.column_sums`; rows_left as of `naive.row_weights`; block: query rows per block.
    """
    if how == "naive":
        return naive.column_sums(inputs, spec, weights, taus, seeds, layer)
    if how == "triton" and rows_left is not None:
        first = blocked.first_weighted_row(spec, inputs.query.shape[3], rows_left)
        return triton_observe.triton_column_sums(inputs, spec, weights, taus, seeds, layer, first)
    return blocked.column_sums(inputs, spec, weights, taus, seeds, layer, rows_left, block)


def pool_sums(spec: AttentionScoreSpec, sums: Tensor, sequence: SequenceState) -> Tensor:
    """Column sums [B, H, S] added up over the heads and the batch rows that share a score; same shape."""
    b, h, s = sums.shape
    if spec.pool_heads:
        sums = sums.sum(1, keepdim=True).expand(b, h, s)
    group = {"per_beam": 1, "per_sample": sequence.num_beams, "sum_all": b}[spec.batch]
    if group > 1:
        spec.check_lengths(sequence.prompt_lengths)
        sums = sums.view(b // group, group, h, s).sum(1, keepdim=True).expand(-1, group, -1, -1)
        sums = sums.reshape(b, h, s)
    return sums


def add_to_score(
    slots: Slots,
    spec: AttentionScoreSpec,
    sums: Tensor,
    query_positions: Tensor,
    sequence: SequenceState,
    shared: CrossLayerScore | None,
) -> None:
    """Decay the slots' scores and add sums [B, H, S], in place.

    query_positions [B, Q]: position ids of the rows observed, -1 for padding: real rows decide how often to decay.
    shared: one score for all layers, to which the sums are added and from which the slots' scores are read; None: none.
    """
    score = slots.score[:, :, : slots.length]
    factor: Tensor | None = None
    if spec.decay < 1:
        new = (query_positions >= 0).sum(1).float()
        factor = torch.pow(torch.full((), spec.decay, device=new.device), new)[:, None, None]
    if shared is None or sequence.in_prompt:
        result = sums + (score if factor is None else score.masked_fill(score == -torch.inf, 0) * factor)
        sums = result
    if shared is not None and (not sequence.in_prompt or sequence.prompt_complete):
        # A prompt is added whole, at its end: else the chunks it came in would decide what a layer can know.
        result = shared.update(slots.positions[:, :, : slots.length], sums, None if sequence.in_prompt else factor)
    # In mask mode -inf marks an evicted slot and must survive decay and addition.
    score.copy_(result if slots.visible is None else torch.where(score == -torch.inf, score, result))
