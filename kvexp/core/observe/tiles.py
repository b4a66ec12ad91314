"""Column sums of a prompt on a processor, tile by tile, in one buffer that stays in its cache.

A tile is some query rows of one or several kv heads against all the slots they can see. Slots that stand in the order
of their columns need no mask but on the diagonal, and a row's left padding is cut off instead of masked. What is left
per logit is one product, one softmax in place, one weighted sum and, for noise, one copy out of its pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.observe.noise import SPAN, Noise, hashed, pool, stream
from kvexp.core.score_spec import AttentionScoreSpec

TILE = 1 << 21  # logits: 8 MiB in float32
WHOLE = 1 << 17  # logits of a prompt so short that all of it at once is quicker than tiles
MOST = 128  # rows per tile: more waste time above the diagonal
LEAST = 64  # rows of one product, over the query heads of a kv head: fewer make it slow


def suited(sight: AttentionInputs, view: AttentionScoreSpec) -> bool:
    """Can these rows be observed in tiles? Not in float64, which is for truths; recorded noise knows whole batches."""
    straight = sight.in_order and sight.visible is None and sight.places is None
    straight = straight and sight.query.dtype != torch.float64
    known = view.noise is None or (type(view.noise) is Noise and sight.keys.shape[2] <= SPAN)
    return straight and known and sight.keys.device.type == "cpu"


@dataclass(frozen=True)
class Piece:
    """Some kv heads of one batch row without its left padding and without rows that weigh nothing.

    query [H, G, Q, D]; keys_t [H, D, S]; weights, taus [Q] (taus None: all are 1); slopes [H, G, 1, 1] of ALiBi.
    places [H, G, Q]: where in `draws` each row's noise starts; per_key [H, G, 1, S]: noise all rows share.
    """

    query: Tensor
    keys_t: Tensor
    geometry: AttentionParams
    weights: Tensor
    taus: Tensor | None
    slopes: Tensor | None
    places: Tensor | None = None
    draws: Tensor | None = None
    per_key: Tensor | None = None

    @property
    def ahead(self) -> int:
        """Slots that stand before the first query's own."""
        return self.keys_t.shape[2] - self.query.shape[2]

    def cut(self, block: int | None) -> Iterator[tuple[slice, slice]]:
        """(query rows, slots they can see) of every tile."""
        (h, g, count, _), window = self.query.shape, self.geometry.sliding_window
        start = 0
        while start < count:
            own = self.ahead + start
            width = own + MOST if window is None else min(own, window) + MOST
            rows = block or max(1, LEAST // g, min(MOST, TILE // (h * g * width)))
            stop = min(start + rows, count)
            yield slice(start, stop), slice(0 if window is None else max(0, own + 1 - window), self.ahead + stop)
            start = stop


def columns(
    sight: AttentionInputs,
    view: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    block: int | None,
) -> Tensor:
    """[B, H, S] float32: see `kvexp.core.observe.blocked.column_sums`. block: rows per tile, None: as fit into TILE."""
    b, h, g, count, _ = sight.query.shape
    slots = sight.keys.shape[2]
    dtype = torch.float32 if sight.geometry.upcast else sight.query.dtype
    total = torch.zeros(b, h, slots)
    together = min(h, max(1, TILE // (g * min(block or MOST, count) * slots)))
    tempered = None if bool((taus == 1).all()) else taus
    for row in range(b):
        observing = weights[row].nonzero()
        if not len(observing):
            continue
        rows = slice(int(observing[0]), count)
        pad = int((sight.positions[row, 0] < 0).sum())
        for first in range(0, h, together):
            heads = slice(first, min(first + together, h))
            slopes = sight.geometry.alibi
            piece = Piece(
                query=sight.query[row, heads, :, rows].to(dtype),
                keys_t=sight.keys[row, heads, pad:].to(dtype).transpose(1, 2),
                geometry=sight.geometry,
                weights=weights[row, rows],
                taus=None if tempered is None else tempered[rows, None],
                slopes=None if slopes is None else slopes.to(total).view(h, g, 1, 1)[heads],
                **_noise(sight, view.noise, seeds, layer, row, rows, heads, pad),
            )
            _add(total[row, heads, pad:], piece, block)
    return total


def _noise(
    sight: AttentionInputs,
    noise: Noise | None,
    seeds: Tensor,
    layer: int,
    row: int,
    rows: slice,
    heads: slice,
    pad: int,
) -> dict[str, Tensor]:
    """The fields of a piece that give its noise; none where a softmax would not see it."""
    if noise is None or noise.constant:
        return {}
    g = sight.query.shape[2]
    of, count, first = seeds[row : row + 1], (heads.stop - heads.start) * g, heads.start * g
    positions = sight.positions[row, 0, pad:]
    if not noise.fresh:
        per_key = hashed(noise.kind, stream(of, layer, count, first), positions.expand(1, count, -1))
        return {"per_key": per_key.view(-1, g, 1, len(positions))}
    places = noise.places(of, layer, count, sight.query_positions[row : row + 1, rows], first)
    return {
        "places": places.view(-1, g, places.shape[2]),
        "draws": pool(noise.kind, places.device)[int(positions[0]) :],
    }


def _add(total: Tensor, piece: Piece, block: int | None) -> None:
    """Add a piece's column sums to total [H, S]."""
    h, g = piece.query.shape[:2]
    tiles = list(piece.cut(block))
    room = total.new_empty(max(h * g * (r.stop - r.start) * (s.stop - s.start) for r, s in tiles))
    above = torch.ones(*[max(r.stop - r.start for r, _ in tiles)] * 2, dtype=torch.bool).triu(1)
    for rows, seen in tiles:
        q, slots = rows.stop - rows.start, seen.stop - seen.start
        x = _logits(piece, rows, seen, room[: h * g * q * slots].view(h, g, q, slots))
        x[..., slots - q :].masked_fill_(above[:q, :q], -torch.inf)
        window = piece.geometry.sliding_window
        if window is not None and piece.ahead + rows.stop > window:  # only the first q slots are too old for some row
            own = torch.arange(piece.ahead + rows.start, piece.ahead + rows.stop)[:, None]
            x[..., :q].masked_fill_(torch.arange(seen.start, seen.start + q) <= own - window, -torch.inf)
        if piece.taus is not None:
            x /= piece.taus[rows]
        torch.softmax(x, dim=-1, out=x)
        weights = piece.weights[rows].expand(h, g, q).reshape(h, 1, g * q)
        total[:, seen] += torch.bmm(weights, x.view(h, g * q, slots))[:, 0]


def _logits(piece: Piece, rows: slice, seen: slice, out: Tensor) -> Tensor:
    """Logits with noise, not masked yet, into out [H, G, rows, seen]."""
    query, keys_t, scale = piece.query[:, :, rows], piece.keys_t[:, :, seen], piece.geometry.scale
    product = out.view(out.shape[0], -1, out.shape[3])
    if piece.places is not None and piece.draws is not None:
        runs = piece.draws[seen.start :].unfold(0, out.shape[3], 1)
        torch.index_select(runs, 0, piece.places[:, :, rows].flatten(), out=product.view(-1, out.shape[3]))
    noised = float(piece.places is not None)
    if query.dtype == out.dtype:
        torch.baddbmm(product, (query * scale).flatten(1, 2), keys_t, beta=noised, out=product)
    else:  # half precision: rounded to the model's dtype before it is scaled, as in `AttentionInputs.logits`
        half = torch.bmm(query.flatten(1, 2), keys_t)
        torch.add(product if noised else out.new_zeros(()), half.float(), alpha=scale, out=product)
    if piece.slopes is not None:
        key = torch.arange(seen.start, seen.stop)
        own = torch.arange(piece.ahead + rows.start, piece.ahead + rows.stop)[:, None]
        out.addcmul_(piece.slopes, (key - own).to(out))
    if piece.per_key is not None:
        out += piece.per_key[..., seen]
    return out
