"""Column sums of attention probabilities: what methods observe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core import triton_ops
from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.method import AttentionScoreSpec
from kvexp.core.noise import POOL_OVERLAP, Noise, hash_draws, pool, stream_id
from kvexp.core.sequence import SequenceState

# Column sums of a prompt by (sums_key, observe, block), so that caches sharing the prefill share them too.
PromptSums = dict[tuple[AttentionScoreSpec, str, int | None], Tensor]


@dataclass(frozen=True)
class ObservedRows:
    """How the query rows of one forward are observed.

    weights [B, Q]: of `row_weights`; taus [Q]: temperature of each row; seeds [B]: of the noise zeta; layer: its
    number; rows_left: rows of the prompt still to come before its eviction, None for decode rows.
    """

    spec: AttentionScoreSpec
    weights: Tensor
    taus: Tensor
    seeds: Tensor
    layer: int
    rows_left: int | None = None

    @classmethod
    def of(
        cls, spec: AttentionScoreSpec, query_positions: Tensor, sequence: SequenceState, layer: int, left: int | None
    ) -> ObservedRows:
        """The rows of the forward in progress; query_positions [B, Q]: -1 for padding; left: `rows_left`."""
        weights = row_weights(spec, query_positions, left)
        taus = spec.taus(sequence.query_steps, sequence.max_new_tokens, weights.device)
        return cls(spec, weights, taus, sequence.seeds.to(weights.device), layer, left)


def naive_column_sums(inputs: AttentionInputs, observed: ObservedRows) -> Tensor:
    """Column sums [B, H, S] float32: over heads g and rows q, of weights[q] * softmax((x[g, q] + zeta) / tau[q]).

    The definition, all query rows at once, which every other way is tested against: the column sum of a slot is what
    the queries of a forward attended to it, the one number per slot that accumulating methods remember. Memory is
    O(query rows * slots); `column_sums` gives the same numbers in blocks.
    """
    rows, slots = slice(0, inputs.query.shape[3]), inputs.keys.shape[2]
    return weighted_column_sums(observed_probs(inputs, observed, rows, slots), observed.weights)


def row_weights(spec: AttentionScoreSpec, query_positions: Tensor, rows_left: int | None) -> Tensor:
    """The weight [B, Q] float32 of every query row: decay^(real rows after it), 0 for padding and outside `last_rows`.

    query_positions [B, Q]: -1 for padding. rows_left: rows of the prompt still to come after this forward (0 in its
    last), or None for decode rows, which `last_rows` does not limit.
    """
    real = query_positions >= 0
    after = real.flip(1).cumsum(1).flip(1) - real.long()
    weights = torch.pow(torch.full((), spec.decay, device=real.device), after.float())
    if spec.last_rows is not None and rows_left is not None:
        to_end = torch.arange(real.shape[1] - 1, -1, -1, device=real.device) + rows_left
        real = real & (to_end < spec.last_rows)
    return torch.where(real, weights, 0.0)


def observed_probs(inputs: AttentionInputs, observed: ObservedRows, rows: slice, slots: int) -> Tensor:
    """softmax((x + zeta) / tau) of query rows `rows` over the first `slots` slots: [B, H, G, rows, slots] float32."""
    spec = observed.spec
    x = inputs.logits(rows, slots, include_evicted=spec.over == "full")
    if spec.noise is not None:
        h, g = x.shape[1:3]
        query_positions, positions = inputs.query_positions[:, rows], inputs.positions[:, :, :slots]
        zeta = spec.noise.draw(observed.seeds, observed.layer, h * g, query_positions, positions)
        x = x + (zeta if zeta.ndim == 0 else zeta.unflatten(1, (h, g)))
    if spec.tau != (1.0, 1.0):
        x = x / observed.taus[rows, None]
    return torch.softmax(x, dim=-1)


def weighted_column_sums(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Probabilities [B, H, G, Q, S] summed over query heads and rows, with row weights [B, Q]: [B, H, S] float32."""
    b, h, g, q, s = probabilities.shape
    row = weights[:, None, None, :].expand(b, h, g, q).reshape(b * h, 1, g * q).to(probabilities.dtype)
    return torch.bmm(row, probabilities.reshape(b * h, g * q, s)).view(b, h, s).to(torch.float32)


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

    def add_column_sums(self, total: Tensor, block: int | None) -> None:
        """Add the column sums to total [H, S], in place; block: query rows per tile."""
        (h, g), window = self.query.shape[:2], self.params.sliding_window
        tiles = list(self.tiles(block))
        room = total.new_empty(max(h * g * (r.stop - r.start) * (s.stop - s.start) for r, s in tiles))
        above = torch.ones(*[max(r.stop - r.start for r, _ in tiles)] * 2, dtype=torch.bool).triu(1)
        for rows, seen in tiles:
            q, slots = rows.stop - rows.start, seen.stop - seen.start
            x = self.logits(rows, seen, room[: h * g * q * slots].view(h, g, q, slots))
            x[..., slots - q :].masked_fill_(above[:q, :q], -torch.inf)
            if window is not None and self.num_past + rows.stop > window:
                # Only the first q slots are too old for some row.
                too_old = torch.arange(seen.start, seen.start + q) <= self._own_slots(rows) - window
                x[..., :q].masked_fill_(too_old, -torch.inf)
            if self.taus is not None:
                x /= self.taus[rows]
            torch.softmax(x, dim=-1, out=x)
            weights = self.weights[rows].expand(h, g, q).reshape(h, 1, g * q)
            total[:, seen] += torch.bmm(weights, x.view(h, g * q, slots))[:, 0]

    def logits(self, rows: slice, seen: slice, out: Tensor) -> Tensor:
        """Logits plus noise of a tile, unmasked, written to out [H, G, rows, seen]; rows, seen: as of `tiles`."""
        query, keys_t, scale = self.query[:, :, rows], self.keys_t[:, :, seen], self.params.scale
        product = out.view(out.shape[0], -1, out.shape[3])
        if self.pool_offsets is not None and self.draws is not None:
            runs = self.draws[seen.start :].unfold(0, out.shape[3], 1)
            places = self.pool_offsets[:, :, rows].flatten()
            torch.index_select(runs, 0, places, out=product.view(-1, out.shape[3]))
        noised = float(self.pool_offsets is not None)
        if query.dtype == out.dtype:
            torch.baddbmm(product, (query * scale).flatten(1, 2), keys_t, beta=noised, out=product)
        else:  # half precision: rounded to the model's dtype before it is scaled, as in `AttentionInputs.logits`
            half = torch.bmm(query.flatten(1, 2), keys_t)
            torch.add(product if noised else out.new_zeros(()), half.float(), alpha=scale, out=product)
        if self.slopes is not None:
            distance = torch.arange(seen.start, seen.stop) - self._own_slots(rows)
            out.addcmul_(self.slopes, distance.to(out))
        if self.per_key is not None:
            out += self.per_key[..., seen]
        return out

    def _own_slots(self, rows: slice) -> Tensor:
        """The slot [rows, 1] of each query row's own token."""
        return torch.arange(self.num_past + rows.start, self.num_past + rows.stop)[:, None]


def tiled_column_sums(inputs: AttentionInputs, observed: ObservedRows, block: int | None) -> Tensor:
    """Column sums [B, H, S] float32 of a prompt on a CPU, in one buffer that stays in the CPU's cache.

    A tile is some query rows of one or several kv heads against all the slots they can see. Slots in column order need
    a mask on the diagonal only, and a row's left padding is cut off instead of masked. Per logit this leaves one
    product, one softmax in place, one weighted sum and, for noise, one copy out of the pool. block: query rows per
    tile; None: as many as MAX_TILE_LOGITS and MAX_TILE_ROWS allow.
    """
    weights, taus = observed.weights, observed.taus
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
            held = HeadBlock(
                query=inputs.query[row, heads, :, rows].to(dtype),
                keys_t=inputs.keys[row, heads, pad:].to(dtype).transpose(1, 2),
                params=inputs.params,
                weights=weights[row, rows],
                taus=None if tempered is None else tempered[rows, None],
                slopes=None if slopes is None else slopes.to(total).view(h, g, 1, 1)[heads],
                **_noise(inputs, observed, row, rows, heads, pad),
            )
            held.add_column_sums(total[row, heads, pad:], block)
    return total


def _noise(
    inputs: AttentionInputs, observed: ObservedRows, row: int, rows: slice, heads: slice, pad: int
) -> dict[str, Tensor]:
    """The fields of a `HeadBlock` that give its noise; empty for no or constant noise.

    row: the batch row; rows: its query rows; heads: its kv heads; pad: columns of padding on its left.
    """
    noise, layer = observed.spec.noise, observed.layer
    if noise is None or noise.constant:
        return {}
    g = inputs.query.shape[2]
    of, count, first = observed.seeds[row : row + 1], (heads.stop - heads.start) * g, heads.start * g
    positions = inputs.positions[row, 0, pad:]
    if not noise.fresh:
        per_key = hash_draws(noise.kind, stream_id(of, layer, count, first), positions.expand(1, count, -1))
        return {"per_key": per_key.view(-1, g, 1, len(positions))}
    pool_offsets = noise.pool_offsets(of, layer, count, inputs.query_positions[row : row + 1, rows], first)
    return {
        "pool_offsets": pool_offsets.view(-1, g, pool_offsets.shape[2]),
        "draws": pool(noise.kind, pool_offsets.device)[int(positions[0]) :],
    }


BLOCK_ELEMENTS = 1 << 24  # logits per block: 64 MiB in float32


@torch.no_grad()
def column_sums(inputs: AttentionInputs, observed: ObservedRows, block: int | None = None) -> Tensor:
    """Column sums [B, H, S] float32, as `naive_column_sums`, in blocks of query rows: O(block * slots) memory.

    Up to float32 rounding: the order of summation is another, and in tiles the scale of the logits is multiplied into
    the query. block: query rows per block; None: as many as keep a block's logits under 64 MiB, or in a tile. Whether a
    prompt goes in tiles on a CPU is decided by its own length, never by the batch it is in.
    """
    spec = observed.spec
    b, h, g, count, _ = inputs.query.shape
    slots = inputs.keys.shape[2]
    if supports(inputs, spec) and (block is not None or h * g * count * slots > MIN_TILED_LOGITS):
        return tiled_column_sums(inputs, observed, block)
    block = block or max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    total = torch.zeros(b, h, slots, device=inputs.keys.device)
    for start in range(first_weighted_row(spec, count, observed.rows_left), count, block):
        rows = slice(start, min(start + block, count))
        kv_len = inputs.kv_len(rows)
        seen = observed_probs(inputs, observed, rows, kv_len)
        total[..., :kv_len] += weighted_column_sums(seen, observed.weights[:, rows])
    return total


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


class CrossLayerScore:
    """The score of every position, summed over layers (Keyformer's shared score, SpAtten's): [B, H, positions + 1].

    The last entry is for dead slots; the buffer lies on the first layer's device. In every forward (the whole prompt is
    one) the layers take their turn from the first to the last: a layer adds its column sums to the buffer and then
    evicts by what the buffer holds. So it knows the layers below it from this forward, and all layers from earlier
    ones. The papers do not state an order; this one is our choice.
    """

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self.reset()

    def reset(self) -> None:
        """Set all scores to 0."""
        self.buffer: Tensor | None = None
        self._decayed_at = -1

    def update(self, positions: Tensor, sums: Tensor, factor: Tensor | None) -> Tensor:
        """Add a layer's sums [B, H, S] of the slots at positions [B, H, S]; return the slots' shared scores [B, H, S].

        factor [B, 1, 1]: decay, applied once per forward; None: no decay.
        """
        buffer = self._room(sums)
        if self._decayed_at != self.sequence.seq_len:
            self._decayed_at = self.sequence.seq_len
            if factor is not None:
                buffer *= factor.to(buffer.device)
        trash = buffer.shape[-1] - 1
        index = torch.where(positions < 0, trash, positions).to(buffer.device)
        buffer.scatter_add_(-1, index, sums.to(buffer.device))
        buffer[..., trash] = 0
        return buffer.gather(-1, index).to(sums.device)

    def _room(self, sums: Tensor) -> Tensor:
        """The buffer, grown to the sequence's length."""
        need = self.sequence.seq_len + 1
        if self.buffer is None or self.buffer.shape[-1] < need:
            device = sums.device if self.buffer is None else self.buffer.device
            grown = torch.zeros(*sums.shape[:2], need + 64, device=device)
            if self.buffer is not None:
                grown[..., : self.buffer.shape[-1]] = self.buffer
            self.buffer = grown
        return self.buffer

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(0, rows.to(self.buffer.device))


def column_sums_by(how: str, inputs: AttentionInputs, observed: ObservedRows, block: int | None) -> Tensor:
    """Column sums [B, H, S] float32, computed as `how` says: naive, blocked (of `block` query rows) or triton.

    The Triton kernels observe prompts only; decode rows are few and are observed in blocks.
    """
    if how == "naive":
        return naive_column_sums(inputs, observed)
    if how == "triton" and observed.rows_left is not None:
        first = first_weighted_row(observed.spec, inputs.query.shape[3], observed.rows_left)
        return triton_ops.triton_column_sums(inputs, observed, first)
    return column_sums(inputs, observed, block)


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
