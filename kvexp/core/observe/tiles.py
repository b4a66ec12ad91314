"""Column sums of a prompt on a CPU, tile by tile, in one buffer that stays in the CPU's cache.

A tile is some query rows of one or several kv heads against all the slots they can see. Slots in column order need a
mask on the diagonal only, and a row's left padding is cut off instead of masked. Per logit this leaves one product, one
softmax in place, one weighted sum and, for noise, one copy out of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.observe.noise import POOL_OVERLAP, Noise, hash_draws, pool, stream_id
from kvexp.core.score_spec import AttentionScoreSpec

MAX_TILE_LOGITS = 1 << 21  # logits: 8 MiB in float32
MIN_TILED_LOGITS = 1 << 17  # up to so many logits the whole prompt at once is quicker than tiles
MAX_TILE_ROWS = 128  # query rows per tile: more would waste time above the diagonal
MIN_PRODUCT_ROWS = 64  # rows of one matrix product, query heads of a kv head included: fewer make it slow


def supports(inputs: AttentionInputs, spec: AttentionScoreSpec) -> bool:
    """Whether these inputs can be observed in tiles: on a CPU, in column order, not float64, with kvexp's own noise."""
    straight = inputs.in_column_order and inputs.visible is None and inputs.rope_positions is None
    straight = straight and inputs.query.dtype != torch.float64
    known = spec.noise is None or (type(spec.noise) is Noise and inputs.keys.shape[2] <= POOL_OVERLAP)
    return straight and known and inputs.keys.device.type == "cpu"


@dataclass(frozen=True)
class HeadBlock:
    """Some kv heads of one batch row, without its left padding and without query rows of weight 0.

    query [H, G, Q, D]; keys_t [H, D, S]; weights, taus [Q] (taus None: all are 1); slopes [H, G, 1, 1] of ALiBi.
    pool_offsets [H, G, Q]: where in `draws` each row's noise starts; per_key [H, G, 1, S]: noise that all rows share.
    """

    query: Tensor
    keys_t: Tensor
    params: AttentionParams
    weights: Tensor
    taus: Tensor | None
    slopes: Tensor | None
    pool_offsets: Tensor | None = None
    draws: Tensor | None = None
    per_key: Tensor | None = None

    @property
    def num_past(self) -> int:
        """Slots before the first query's own slot."""
        return self.keys_t.shape[2] - self.query.shape[2]

    def tiles(self, block: int | None) -> Iterator[tuple[slice, slice]]:
        """The tiles as pairs (query rows, slots that these rows can see). block: query rows per tile."""
        (h, g, count, _), window = self.query.shape, self.params.sliding_window
        start = 0
        while start < count:
            own = self.num_past + start
            width = own + MAX_TILE_ROWS if window is None else min(own, window) + MAX_TILE_ROWS
            rows = block or max(1, MIN_PRODUCT_ROWS // g, min(MAX_TILE_ROWS, MAX_TILE_LOGITS // (h * g * width)))
            stop = min(start + rows, count)
            yield slice(start, stop), slice(0 if window is None else max(0, own + 1 - window), self.num_past + stop)
            start = stop


def tiled_column_sums(
    inputs: AttentionInputs,
    spec: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    block: int | None,
) -> Tensor:
    """Column sums [B, H, S] float32 as of `kvexp.core.observe.blocked.column_sums`, computed in tiles.

    block: query rows per tile; None: as many as MAX_TILE_LOGITS and MAX_TILE_ROWS allow.
    """
    b, h, g, count, _ = inputs.query.shape
    slots = inputs.keys.shape[2]
    dtype = torch.float32 if inputs.params.upcast else inputs.query.dtype
    total = torch.zeros(b, h, slots)
    together = min(h, max(1, MAX_TILE_LOGITS // (g * min(block or MAX_TILE_ROWS, count) * slots)))
    tempered = None if bool((taus == 1).all()) else taus
    for row in range(b):
        observing = weights[row].nonzero()
        if not len(observing):
            continue
        rows = slice(int(observing[0]), count)
        pad = int((inputs.positions[row, 0] < 0).sum())
        for first in range(0, h, together):
            heads = slice(first, min(first + together, h))
            slopes = inputs.params.alibi
            block_of_heads = HeadBlock(
                query=inputs.query[row, heads, :, rows].to(dtype),
                keys_t=inputs.keys[row, heads, pad:].to(dtype).transpose(1, 2),
                params=inputs.params,
                weights=weights[row, rows],
                taus=None if tempered is None else tempered[rows, None],
                slopes=None if slopes is None else slopes.to(total).view(h, g, 1, 1)[heads],
                **_noise(inputs, spec.noise, seeds, layer, row, rows, heads, pad),
            )
            _accumulate(total[row, heads, pad:], block_of_heads, block)
    return total


def _noise(
    inputs: AttentionInputs,
    noise: Noise | None,
    seeds: Tensor,
    layer: int,
    row: int,
    rows: slice,
    heads: slice,
    pad: int,
) -> dict[str, Tensor]:
    """The fields of a `HeadBlock` that give its noise; empty for no or constant noise.

    row: the batch row; rows: its query rows; heads: its kv heads; pad: columns of padding on its left.
    """
    if noise is None or noise.constant:
        return {}
    g = inputs.query.shape[2]
    of, count, first = seeds[row : row + 1], (heads.stop - heads.start) * g, heads.start * g
    positions = inputs.positions[row, 0, pad:]
    if not noise.fresh:
        per_key = hash_draws(noise.kind, stream_id(of, layer, count, first), positions.expand(1, count, -1))
        return {"per_key": per_key.view(-1, g, 1, len(positions))}
    pool_offsets = noise.pool_offsets(of, layer, count, inputs.query_positions[row : row + 1, rows], first)
    return {
        "pool_offsets": pool_offsets.view(-1, g, pool_offsets.shape[2]),
        "draws": pool(noise.kind, pool_offsets.device)[int(positions[0]) :],
    }


def _accumulate(total: Tensor, block_of_heads: HeadBlock, block: int | None) -> None:
    """Add the column sums of a block of heads to total [H, S], in place; block: query rows per tile."""
    h, g = block_of_heads.query.shape[:2]
    tiles = list(block_of_heads.tiles(block))
    room = total.new_empty(max(h * g * (r.stop - r.start) * (s.stop - s.start) for r, s in tiles))
    above = torch.ones(*[max(r.stop - r.start for r, _ in tiles)] * 2, dtype=torch.bool).triu(1)
    for rows, seen in tiles:
        q, slots = rows.stop - rows.start, seen.stop - seen.start
        x = _logits(block_of_heads, rows, seen, room[: h * g * q * slots].view(h, g, q, slots))
        x[..., slots - q :].masked_fill_(above[:q, :q], -torch.inf)
        window = block_of_heads.params.sliding_window
        if (
            window is not None and block_of_heads.num_past + rows.stop > window
        ):  # only the first q slots are too old for some row
            own = torch.arange(block_of_heads.num_past + rows.start, block_of_heads.num_past + rows.stop)[:, None]
            x[..., :q].masked_fill_(torch.arange(seen.start, seen.start + q) <= own - window, -torch.inf)
        if block_of_heads.taus is not None:
            x /= block_of_heads.taus[rows]
        torch.softmax(x, dim=-1, out=x)
        weights = block_of_heads.weights[rows].expand(h, g, q).reshape(h, 1, g * q)
        total[:, seen] += torch.bmm(weights, x.view(h, g * q, slots))[:, 0]


def _logits(block_of_heads: HeadBlock, rows: slice, seen: slice, out: Tensor) -> Tensor:
    """Logits plus noise of the tile (query rows `rows`, slots `seen`), unmasked, written to out [H, G, rows, seen]."""
    query, keys_t, scale = (
        block_of_heads.query[:, :, rows],
        block_of_heads.keys_t[:, :, seen],
        block_of_heads.params.scale,
    )
    product = out.view(out.shape[0], -1, out.shape[3])
    if block_of_heads.pool_offsets is not None and block_of_heads.draws is not None:
        runs = block_of_heads.draws[seen.start :].unfold(0, out.shape[3], 1)
        torch.index_select(
            runs, 0, block_of_heads.pool_offsets[:, :, rows].flatten(), out=product.view(-1, out.shape[3])
        )
    noised = float(block_of_heads.pool_offsets is not None)
    if query.dtype == out.dtype:
        torch.baddbmm(product, (query * scale).flatten(1, 2), keys_t, beta=noised, out=product)
    else:  # half precision: rounded to the model's dtype before it is scaled, as in `AttentionInputs.logits`
        half = torch.bmm(query.flatten(1, 2), keys_t)
        torch.add(product if noised else out.new_zeros(()), half.float(), alpha=scale, out=product)
    if block_of_heads.slopes is not None:
        key = torch.arange(seen.start, seen.stop)
        own = torch.arange(block_of_heads.num_past + rows.start, block_of_heads.num_past + rows.stop)[:, None]
        out.addcmul_(block_of_heads.slopes, (key - own).to(out))
    if block_of_heads.per_key is not None:
        out += block_of_heads.per_key[..., seen]
    return out
