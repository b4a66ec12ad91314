"""Column sums of observed attention: the one number per slot that accumulating methods remember.

`naive` materialises every query row (the truth); `blocked` walks over blocks of query rows in O(rows x slots) memory;
`triton` does so in two kernels (kvexp.core.observe.triton_observe).
All return the same numbers up to float32 rounding: another order of summation, and in tiles the scale of the logits is
multiplied into the query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.observe import tiles, triton_observe
from kvexp.core.score_spec import AttentionScoreSpec

BLOCK_ELEMENTS = 1 << 24  # logits per block: 64 MiB in float32


def row_weights(view: AttentionScoreSpec, query_positions: Tensor, rows_left: int | None) -> Tensor:
    """[B, Q] float32: decay^(real rows after this one), 0 for padding and for rows outside `last_rows`.

    rows_left: rows of the prompt still to come after this forward (0 in its last), or None for decode rows, which
    `last_rows` does not limit.
    """
    real = query_positions >= 0
    after = real.flip(1).cumsum(1).flip(1) - real.long()
    weights = torch.pow(torch.full((), view.decay, device=real.device), after.float())
    if view.last_rows is not None and rows_left is not None:
        to_end = torch.arange(real.shape[1] - 1, -1, -1, device=real.device) + rows_left
        real = real & (to_end < view.last_rows)
    return torch.where(real, weights, 0.0)


def observed(
    sight: AttentionInputs, view: AttentionScoreSpec, rows: slice, slots: int, taus: Tensor, seeds: Tensor, layer: int
) -> Tensor:
    """softmax((x + zeta) / tau) of these query rows: [B, H, G, rows, slots] float32."""
    x = sight.logits(rows, slots, everything=view.over == "full")
    if view.noise is not None:
        h, g = x.shape[1:3]
        zeta = view.noise.draw(seeds, layer, h * g, sight.query_positions[:, rows], sight.positions[:, :, :slots])
        x = x + (zeta if zeta.ndim == 0 else zeta.unflatten(1, (h, g)))
    if view.tau != (1.0, 1.0):
        x = x / taus[rows, None]
    return torch.softmax(x, dim=-1)


def weighted_columns(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Sum [B, H, G, Q, S] over group and query rows with row weights [B, Q]: [B, H, S]."""
    b, h, g, q, s = probabilities.shape
    row = weights[:, None, None, :].expand(b, h, g, q).reshape(b * h, 1, g * q).to(probabilities.dtype)
    return torch.bmm(row, probabilities.reshape(b * h, g * q, s)).view(b, h, s).to(torch.float32)


def columns(
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
    """[B, H, S] float32 in the way that was asked for; the kernels observe prompts, decode rows are few."""
    if how == "naive":
        return naive(sight, view, weights, taus, seeds, layer)
    if how == "triton" and rows_left is not None:
        start = first_row(view, sight.query.shape[3], rows_left)
        return triton_observe.columns(sight, view, weights, taus, seeds, layer, start)
    return blocked(sight, view, weights, taus, seeds, layer, rows_left, block)


def naive(
    sight: AttentionInputs, view: AttentionScoreSpec, weights: Tensor, taus: Tensor, seeds: Tensor, layer: int
) -> Tensor:
    """All rows at once: [B, H, S]."""
    rows, slots = slice(0, sight.query.shape[3]), sight.keys.shape[2]
    return weighted_columns(observed(sight, view, rows, slots, taus, seeds, layer), weights)


@torch.no_grad()
def blocked(
    sight: AttentionInputs,
    view: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    rows_left: int | None = None,
    block: int | None = None,
) -> Tensor:
    """The same in blocks of `block` query rows (default: as many as keep a block's logits under 64 MiB, or in a tile).

    Which way a prompt is observed on a processor goes by its own length, never by the batch it is in.
    """
    b, h, g, count, _ = sight.query.shape
    slots = sight.keys.shape[2]
    if tiles.suited(sight, view) and (block is not None or h * g * count * slots > tiles.WHOLE):
        return tiles.columns(sight, view, weights, taus, seeds, layer, block)
    block = block or max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    total = torch.zeros(b, h, slots, device=sight.keys.device)
    for rows in row_blocks(view, count, block, rows_left):
        reach = sight.reach(rows)
        seen = observed(sight, view, rows, reach, taus, seeds, layer)
        total[..., :reach] += weighted_columns(seen, weights[:, rows])
    return total


def row_blocks(view: AttentionScoreSpec, count: int, block: int, rows_left: int | None) -> list[slice]:
    """Blocks of rows, oldest first, from the first that weighs anything on."""
    return [slice(a, min(a + block, count)) for a in range(first_row(view, count, rows_left), count, block)]


def first_row(view: AttentionScoreSpec, count: int, rows_left: int | None) -> int:
    """Rows before it weigh exactly 0, whatever the padding, which is on the left only. Asks no device."""
    start = 0
    if view.decay < 1:
        after = torch.arange(count - 1, -1, -1, dtype=torch.float32)
        start = int((torch.pow(torch.tensor(view.decay), after) == 0).sum())
    if view.last_rows is not None and rows_left is not None:
        start = max(start, min(count, count + rows_left - view.last_rows))
    return start
