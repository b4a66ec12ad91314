"""Column sums of observed attention, block of query rows by block: what `naive` defines, in O(block * slots) memory.

On a processor long prompts go in tiles (kvexp.core.observe.tiles). The numbers are those of `naive` up to float32
rounding: another order of summation, and in tiles the scale of the logits is multiplied into the query.
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
    sight: AttentionInputs,
    view: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    rows_left: int | None = None,
    block: int | None = None,
) -> Tensor:
    """[B, H, S] float32: `naive.column_sums` in blocks of query rows.

    rows_left: as of `row_weights`. block: query rows per block; None: as many as keep a block's logits under 64 MiB, or
    in a tile. Which way a prompt is observed on a processor goes by its own length, never by the batch it is in.
    """
    b, h, g, count, _ = sight.query.shape
    slots = sight.keys.shape[2]
    if tiles.suited(sight, view) and (block is not None or h * g * count * slots > tiles.WHOLE):
        return tiles.columns(sight, view, weights, taus, seeds, layer, block)
    block = block or max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    total = torch.zeros(b, h, slots, device=sight.keys.device)
    for rows in query_blocks(view, count, block, rows_left):
        reach = sight.reach(rows)
        seen = observed_probs(sight, view, rows, reach, taus, seeds, layer)
        total[..., :reach] += weighted_column_sums(seen, weights[:, rows])
    return total


def query_blocks(view: AttentionScoreSpec, count: int, block: int, rows_left: int | None) -> list[slice]:
    """Blocks of query rows, oldest first, from the first that weighs anything on."""
    return [slice(a, min(a + block, count)) for a in range(first_weighted_row(view, count, rows_left), count, block)]


def first_weighted_row(view: AttentionScoreSpec, count: int, rows_left: int | None) -> int:
    """The first of `count` query rows that weighs more than 0, whatever the padding, which is on the left only.

    Reads no tensor of the device.
    """
    start = 0
    if view.decay < 1:
        after = torch.arange(count - 1, -1, -1, dtype=torch.float32)
        start = int((torch.pow(torch.tensor(view.decay), after) == 0).sum())
    if view.last_rows is not None and rows_left is not None:
        start = max(start, min(count, count + rows_left - view.last_rows))
    return start
