"""Column sums of observed attention, block of query rows by block: what `naive` defines, in O(block * slots) memory.

On a CPU long prompts go in tiles (kvexp.core.observe.tiles). The numbers are those of `naive` up to float32 rounding:
another order of summation, and in tiles the scale of the logits is multiplied into the query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.observe import tiles
from kvexp.core.observe.naive import observed_probs, weighted_column_sums
from kvexp.core.score_spec import AttentionScoreSpec

BLOCK_ELEMENTS = 1 << 24  # logits per block: 64 MiB in float32


@torch.no_grad()
def column_sums(
    inputs: AttentionInputs,
    spec: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    rows_left: int | None = None,
    block: int | None = None,
) -> Tensor:
    """Column sums [B, H, S] float32, as `naive.column_sums`, in blocks of query rows.

    rows_left: as of `row_weights`. block: query rows per block; None: as many as keep a block's logits under 64 MiB, or
    in a tile. Whether a prompt goes in tiles on a CPU is decided by its own length, never by the batch it is in.
    """
    b, h, g, count, _ = inputs.query.shape
    slots = inputs.keys.shape[2]
    if tiles.supports(inputs, spec) and (block is not None or h * g * count * slots > tiles.MIN_TILED_LOGITS):
        return tiles.tiled_column_sums(inputs, spec, weights, taus, seeds, layer, block)
    block = block or max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    total = torch.zeros(b, h, slots, device=inputs.keys.device)
    for rows in query_blocks(spec, count, block, rows_left):
        kv_len = inputs.kv_len(rows)
        seen = observed_probs(inputs, spec, rows, kv_len, taus, seeds, layer)
        total[..., :kv_len] += weighted_column_sums(seen, weights[:, rows])
    return total


def query_blocks(spec: AttentionScoreSpec, count: int, block: int, rows_left: int | None) -> list[slice]:
    """Blocks of query rows as slices, oldest first, from the first row of weight above 0 on."""
    return [slice(a, min(a + block, count)) for a in range(first_weighted_row(spec, count, rows_left), count, block)]


def first_weighted_row(spec: AttentionScoreSpec, count: int, rows_left: int | None) -> int:
    """The first of `count` query rows that weighs more than 0, taking no row for padding (padding is on the left).

    Reads no tensor, so that nothing waits for the device.
    """
    start = 0
    if spec.decay < 1:
        after = torch.arange(count - 1, -1, -1, dtype=torch.float32)
        start = int((torch.pow(torch.tensor(spec.decay), after) == 0).sum())
    if spec.last_rows is not None and rows_left is not None:
        start = max(start, min(count, count + rows_left - spec.last_rows))
    return start
