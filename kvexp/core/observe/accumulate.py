"""The score a layer keeps: column sums of a forward, pooled over rows and heads, added to what was there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.cache_config import CacheConfig
from kvexp.core.cross_layer_score import CrossLayerScore
from kvexp.core.observe import blocked, naive, triton_observe
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots


def columns(
    config: CacheConfig,
    view: AttentionScoreSpec,
    sight: AttentionInputs,
    probabilities: Tensor | None,
    time: SequenceState,
    layer: int,
) -> Tensor:
    """Column sums [B, H, S] of this forward's rows; probabilities: those of a decode step, where it has them anyway."""
    rows_left = time.prompt_columns - time.end if time.in_prompt and time.prompt_columns is not None else None
    weights = naive.row_weights(view, sight.query_positions, rows_left)
    if probabilities is not None and view.plain:
        return naive.weighted_column_sums(probabilities, weights)
    taus = view.taus(time.query_steps, time.max_new_tokens, weights.device)
    seeds = time.seeds.to(weights.device)
    return column_sums_by(config.observe, sight, view, weights, taus, seeds, layer, rows_left, config.block)


def column_sums_by(
    how: str,
    sight: AttentionInputs,
    view: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    rows_left: int | None,
    block: int | None,
) -> Tensor:
    """[B, H, S] float32, naive, blocked or (how="triton") by kernels: those observe prompts, decode rows are few."""
    if how == "naive":
        return naive.column_sums(sight, view, weights, taus, seeds, layer)
    if how == "triton" and rows_left is not None:
        first = blocked.first_weighted_row(view, sight.query.shape[3], rows_left)
        return triton_observe.columns(sight, view, weights, taus, seeds, layer, first)
    return blocked.column_sums(sight, view, weights, taus, seeds, layer, rows_left, block)


def pooled(view: AttentionScoreSpec, columns: Tensor, time: SequenceState) -> Tensor:
    """Sum columns [B, H, S] over heads and over the batch rows that share a score."""
    b, h, s = columns.shape
    if view.pool_heads:
        columns = columns.sum(1, keepdim=True).expand(b, h, s)
    group = {"per_beam": 1, "per_sample": time.num_beams, "sum_all": b}[view.batch]
    if group > 1:
        view.check_lengths(time.prompt_lengths)
        columns = columns.view(b // group, group, h, s).sum(1, keepdim=True).expand(-1, group, -1, -1)
        columns = columns.reshape(b, h, s)
    return columns


def accumulate(
    slots: Slots,
    view: AttentionScoreSpec,
    columns: Tensor,
    query_positions: Tensor,
    time: SequenceState,
    shared: CrossLayerScore | None,
) -> None:
    """Let the score of the slots fade and add columns [B, H, S]; with a shared score, add to that and read from it."""
    score = slots.score[:, :, : slots.used]
    factor: Tensor | None = None
    if view.decay < 1:
        new = (query_positions >= 0).sum(1).float()
        factor = torch.pow(torch.full((), view.decay, device=new.device), new)[:, None, None]
    if shared is None or time.in_prompt:
        result = columns + (score if factor is None else score.masked_fill(score == -torch.inf, 0) * factor)
        columns = result
    if shared is not None and (not time.in_prompt or time.prompt_complete):
        # A prompt is added whole, at its end: else the chunks it came in would decide what a layer can know.
        result = shared.update(slots.positions[:, :, : slots.used], columns, None if time.in_prompt else factor)
    # In mask mode -inf marks an evicted slot and must survive decay and addition.
    score.copy_(result if slots.visible is None else torch.where(score == -torch.inf, score, result))
