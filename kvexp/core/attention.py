"""Attention over slots: logits, masks, probabilities, output.

Position ids are the mask: a query sees a slot iff 0 <= slot position <= query position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvexp.core.slot_order import INT64_MAX
from kvexp.util.errors import CacheError
from kvexp.util.fields import AtLeast, check_fields

QUERY_BLOCK = 256  # query rows attended at a time when a mask has to be materialised
MAX_TILE_LOGITS = 1 << 21  # of `blocked_attention`: 8 MiB in float32
MAX_TILE_ROWS = 64  # query rows per tile: more would waste time above the diagonal
MIN_TILE_ROWS = 64  # query rows times query heads of a kv head: fewer make a product slow
# MKL splits a sum over so many slots and more at places that depend on their number, once a group has so many heads.
SPLIT_SLOTS, SPLIT_MIN_GROUP = 192, 4
SUMMED_TOGETHER = 8  # slots; on some processors MKL sums so many side by side, and what is left behind them otherwise
SWAP_MAX_QUERIES, SWAP_MIN_HEAD_DIM = 8, 128  # `qk_matmul` swaps its factors up to so many queries, from this width on


@dataclass(frozen=True)
class RoPE:
    """A model's rotary position embedding (RoPE): what it takes to move a cached key to another position.

    inv_freq [n]: inverse frequencies, over the first 2n of a head's D dimensions. interleaved: dimensions are paired as
    (0, 1), (2, 3) … (GPT-J); else as (0, n), (1, n + 1) … (Llama).
    """

    inv_freq: Tensor
    interleaved: bool

    def rotate_by(self, keys: Tensor, delta: Tensor) -> Tensor:
        """Keys [B, H, S, D] rotated as if their positions had grown by delta [B, H, S], which may be negative."""
        angle = delta.to(torch.float32)[..., None] * self.inv_freq.to(keys.device, torch.float32)
        cos, sin = angle.cos(), angle.sin()
        width = 2 * angle.shape[-1]
        turned, rest = keys[..., :width].float(), keys[..., width:]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned.to(keys.dtype), rest), dim=-1)

    def pairs(self, vectors: Tensor) -> Tensor:
        """The pairs of dimensions that are turned, [..., n, 2], of vectors [..., D]."""
        turned = vectors[..., : 2 * len(self.inv_freq)]
        return turned.unflatten(-1, (-1, 2)) if self.interleaved else torch.stack(turned.chunk(2, dim=-1), dim=-1)


Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Index(Protocol):
    """What chooses the slots that each query of a forward attends to, in models of sparse attention (DeepSeek V3.2)."""

    def choose(self, states: Tensor, visible: Tensor) -> Tensor:
        """The chosen of the slots, [B, Q, S] bool, from what they hold as values [B, S, r], and what queries see.

        visible [B, Q, S] bool; a slot that is not visible may be among the chosen.
        """

    def split(self, sizes: Sequence[int]) -> Sequence[Index]:
        """Parts of it for parts of the batch, of so many rows each."""


@dataclass(frozen=True)
class AttentionParams:
    """How a layer computes its logits: x = scale * q.k (+ slope * (slot position - query position) for ALiBi).

    sliding_window: a query sees the slots of the newest `sliding_window` positions, its own included; None: all. alibi:
    the slopes, [H * G]; None: no ALiBi. upcast: logits in float32 whatever the model's dtype (GPT-J). rope: the model's
    RoPE, needed only where positions are renumbered. softcap: c of `softcapped`; None: none. sinks: of
    `attention_probs`, a logit for every query head, [H * G]; None: none. (What methods keep as sinks are first tokens.)
    expand: where slots hold latents (multi-head latent attention), from rotary keys [B, 1, S, d] and latents
    [B, 1, S, r] to keys [B, G, S, D] and values [B, G, S, Dv] of all query heads; None: they hold keys and values.
    index: by which queries attend to a few slots alone; None: to all that they see.
    """

    scale: float
    sliding_window: int | None = None
    alibi: Tensor | None = None
    upcast: bool = False
    rope: RoPE | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    expand: Expand | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        if self.sinks is not None and self.sinks.ndim != 1:
            raise CacheError(
                f"attention sinks must be one number for every query head, [heads], got {list(self.sinks.shape)}: "
                "sinks that differ from query to query are not supported"
            )

    def states_of(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that attention takes, of what slots hold as such."""
        return (keys, values) if self.expand is None else self.expand(keys, values)

    def split(self, sizes: Sequence[int]) -> list[AttentionParams]:
        """Parts of it for parts of the batch, of so many rows each."""
        if self.index is None:
            return [self] * len(sizes)
        return [replace(self, index=index) for index in self.index.split(sizes)]


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """Logits x as cap * tanh(x / cap), so that none is beyond +-cap (Gemma 2, arXiv:2408.00118); None: as they are.

    In place, except where gradients are wanted.
    """
    if cap is None:
        return x
    return torch.tanh(x / cap) * cap if x.requires_grad else x.div_(cap).tanh_().mul_(cap)


def token_share(x: Tensor, sinks: Tensor) -> Tensor:
    """The share of a query's attention that goes to tokens, [.., H, G, q, 1]; the rest goes to the head's sink.

    It is sum(exp(x_i)) / (sum(exp(x_i)) + exp(s)) of masked logits x [.., H, G, q, S] and sinks s, one per query head.
    """
    sink_logits = sinks.to(x).reshape(*x.shape[-4:-2], 1, 1)
    return torch.sigmoid(x.logsumexp(dim=-1, keepdim=True) - sink_logits)


def attention_probs(x: Tensor, sinks: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Probabilities p_j = exp(x_j) / (sum(exp(x_i)) + exp(s)) of masked logits x [.., H, G, q, S]; same shape.

    sinks: s, one per query head, which takes a share of the attention and has no value (gpt-oss, arXiv:2508.10925): a
    row's sum is its `token_share`, below 1. None: without s, the softmax. dtype: to compute in; None: that of x.
    """
    probabilities = torch.softmax(x, dim=-1, dtype=dtype)
    return probabilities if sinks is None else probabilities * token_share(x.to(probabilities.dtype), sinks)


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, keys, values and position ids of one forward, from which its logits and masks follow.

    query [B, H, G, Q, D]; keys [B, H, S, D]; values [B, H, S, Dv]. Of slots that hold latents H is 1, and keys and
        values belong to the G query heads, [B, G, S, *] (`expanded`).
    positions [B, H or 1, S], query_positions [B, Q]: position ids, -1 for dead slots and padding.
    visible [B, H, S] bool: slots that a simulation (mask mode) has not evicted; None: all.
    chosen [B, Q, S] bool: slots that an index has chosen for each query; None: all.
    rope_positions: where survivors are renumbered, the positions that RoPE and ALiBi see, of slots [B, H, S] and of
        queries [B, H, Q]; None: the position ids.
    in_column_order: slot i holds column i, so query row i of a prompt needs only the first S - Q + i + 1 slots.
    padded: whether some row has padding; False spares the mask.
    all_visible: whether every query row is known to see every slot, which spares the mask as well.
    bias [B, H, S]: added to the logits of each slot, as of `Slots`; None: none.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    query_positions: Tensor
    params: AttentionParams
    visible: Tensor | None = None
    chosen: Tensor | None = None
    rope_positions: tuple[Tensor, Tensor] | None = None
    in_column_order: bool = False
    padded: bool = True
    all_visible: bool = False
    bias: Tensor | None = None

    def mask(self, rows: slice, slots: int, *, include_evicted: bool = False) -> Tensor:
        """Which of the first `slots` slots the query rows `rows` see: bool [B, H or 1, rows, slots].

        include_evicted: also slots that a simulation has evicted. A padded query row sees every slot: its output is
        unused but must be finite.
        """
        query, key = self.query_positions[:, None, rows, None], self.positions[:, :, None, :slots]
        ok = (key >= 0) & (key <= query)
        if self.params.sliding_window is not None:  # renumbered survivors are as near as their places
            place, query_place = self._places(rows, slots)
            ok = ok & (place > query_place - self.params.sliding_window)
        if self.visible is not None and not include_evicted:
            ok = ok & self.visible[:, :, None, :slots]
        if self.chosen is not None:
            ok = ok & self.chosen[:, None, rows, :slots]
        return ok | (query < 0)

    def alibi_bias(self, rows: slice, slots: int) -> Tensor | None:
        """ALiBi's term of the logits, [B, H, G, rows, slots] float32; None for models without ALiBi."""
        slopes = self.params.alibi
        if slopes is None:
            return None
        heads, groups = self.query.shape[1:3]
        place, query_place = self._places(rows, slots)
        distance = (place - query_place)[:, :, None].to(torch.float32)  # whole numbers: exact
        return slopes.view(1, heads, groups, 1, 1).to(distance.device) * distance

    def _places(self, rows: slice, slots: int) -> tuple[Tensor, Tensor]:
        """Positions that RoPE and ALiBi see: of slots [B, H or 1, 1, slots], and of queries [B, H or 1, rows, 1]."""
        key, query = self.rope_positions or (self.positions, self.query_positions[:, None])
        return key[:, :, None, :slots], query[:, :, rows, None]

    def logits(self, rows: slice, slots: int, *, include_evicted: bool = False) -> Tensor:
        """Logits [B, H, G, rows, slots] in float32 (float64 for a float64 model), -inf where `mask` is False."""
        query, keys = self.query[..., rows, :], self.keys[:, :, :slots]
        if self.params.upcast:
            query, keys = query.float(), keys.float()
        b, h, g, q, d = query.shape
        x = qk_matmul(query.reshape(b, keys.shape[1], h * g * q // keys.shape[1], d), keys).view(b, h, g, q, slots)
        x = softcapped((x if x.dtype == torch.float64 else x.float()) * self.params.scale, self.params.softcap)
        alibi = self.alibi_bias(rows, slots)
        x = x if alibi is None else x + alibi
        x = x if self.bias is None else x + self.bias[:, :, None, None, :slots]
        if self.all_visible:
            return x
        return x.masked_fill_(~self.mask(rows, slots, include_evicted=include_evicted)[:, :, None], -torch.inf)

    def kv_len(self, rows: slice) -> int:
        """The number of slots, from the first on, that suffices for the query rows `rows`: they see none behind."""
        total, count = self.keys.shape[2], self.query.shape[3]
        return total - count + rows.stop if self.in_column_order else total


def expanded(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs with keys and values of query heads in place of latents (`AttentionParams.expand`); else as they are.

    With the choice of the index, where there is one.
    """
    params = inputs.params
    if params.expand is None:
        return inputs
    if params.index is not None:
        seen = inputs.mask(slice(0, inputs.query.shape[3]), inputs.keys.shape[2])[:, 0]
        inputs = replace(inputs, chosen=params.index.choose(inputs.values[:, 0], seen), all_visible=False)
    keys, values = params.states_of(inputs.keys, inputs.values)
    return replace(inputs, keys=keys, values=values)


class Observer(Protocol):
    """What is computed from a prompt's attention while its logits or probabilities are there (`blocked_attention`).

    takes: masked logits; their softmax, over tokens alone; or the attention itself, as it weighs the values, which
    differs from the softmax where heads have sinks.
    """

    takes: Literal["logits", "softmax", "attention"]

    def add(self, tile: Tile, x: Tensor) -> None:
        """Take in one tile's x [heads, G, rows, seen], which must stay as it is."""


@dataclass(frozen=True)
class Tile:
    """Some query rows of some kv heads of one batch row, and the slots that they may see, as slices of a forward.

    consecutive: whether the slots' position ids are consecutive numbers.
    """

    row: int
    heads: slice
    rows: slice
    seen: slice
    consecutive: bool


def compute_attention(inputs: AttentionInputs, observers: Sequence[Observer] = ()) -> Tensor:
    """Attention output [B, H, G, Q, Dv]: on a CPU, of several queries, by `blocked_attention`, else by torch's SDPA.

    So it is where gradients are wanted. observers: on a CPU alone. SDPA is called once where a causal mask suffices:
    for a whole prompt without padding, ALiBi, and a sliding window shorter than it. Else in blocks of QUERY_BLOCK query
    rows, each with its mask; so are softcaps, sinks and biases, which SDPA does not know, from the logits.
    """
    count, params = inputs.query.shape[3], inputs.params
    states = (inputs.query, inputs.keys, inputs.values, *(() if params.sinks is None else (params.sinks,)))
    wants_gradients = torch.is_grad_enabled() and any(state.requires_grad for state in states)
    if observers or (inputs.query.device.type == "cpu" and count > 1 and not wants_gradients):
        out = blocked_attention(inputs, observers)
        if not wants_gradients:
            return out
    whole = inputs.in_column_order and not inputs.padded and inputs.keys.shape[2] == count
    whole &= inputs.visible is None and inputs.chosen is None
    known = params.softcap is None and params.sinks is None and inputs.bias is None
    if known and whole and params.alibi is None and (params.sliding_window or count) >= count:
        return _sdpa(inputs, slice(0, count), count, causal=True)
    blocks = (slice(a, min(a + QUERY_BLOCK, count)) for a in range(0, count, QUERY_BLOCK))
    attend = _sdpa if known else _from_logits
    return torch.cat([attend(inputs, rows, inputs.kv_len(rows)) for rows in blocks], dim=3)


def _from_logits(inputs: AttentionInputs, rows: slice, slots: int) -> Tensor:
    """As `_sdpa`, by logits and probabilities in full."""
    return apply_probs(attention_probs(inputs.logits(rows, slots), inputs.params.sinks), inputs.values[:, :, :slots])


@torch.no_grad()
def blocked_attention(inputs: AttentionInputs, observers: Sequence[Observer] = ()) -> Tensor:
    """Attention output [B, H, G, Q, Dv] on a CPU, tile by tile, shown to observers as it is computed.

    A tile's logits, their softmax and its product with the values stay in the CPU's cache, and nothing is computed
    again for an observer. Each batch row is computed by itself and without its left padding (whose output is 0), so
    that its numbers do not depend on the batch. Tokens in column order need a mask on the diagonal only.
    """
    b, h, g, count, _ = inputs.query.shape
    out = inputs.values.new_zeros(b, h, g, count, inputs.values.shape[-1])
    sinks = None if inputs.params.sinks is None else inputs.params.sinks.view(h, g)

    def show(stage: str, tile: Tile, x: Tensor) -> None:
        for observer in observers:
            if observer.takes == stage:
                observer.add(tile, x)

    for row in range(b):
        unpadded = _without_padding(inputs, row)
        if unpadded is None:
            continue
        row_inputs, pads, cut, consecutive = unpadded
        tiles = list(_tiles(row_inputs, consecutive))
        size = max(g * (hs.stop - hs.start) * (r.stop - r.start) * (s.stop - s.start) for hs, r, s in tiles)
        room = torch.empty(size, dtype=torch.float64 if inputs.query.dtype == torch.float64 else torch.float32)
        for heads, rows, seen in tiles:
            x = _tile_logits(row_inputs, heads, rows, seen, room, diagonal=consecutive)
            place = (slice(rows.start + cut, rows.stop + cut), slice(seen.start + pads, seen.stop + pads))
            tile = Tile(row, heads, *place, consecutive)
            share = None if sinks is None else token_share(x, sinks[heads])
            show("logits", tile, x)
            torch.softmax(x, dim=-1, out=x)
            show("softmax", tile, x)
            if share is not None:
                x *= share
            show("attention", tile, x)
            values = row_inputs.values[0, _held_by(heads, h), seen]
            out[row, heads, :, tile.rows] = grouped_matmul(x.to(out.dtype), values)
    return out


def _without_padding(inputs: AttentionInputs, row: int) -> tuple[AttentionInputs, int, int, bool] | None:
    """One batch row without its left padding; None where it is nothing else.

    With the slots and query rows that were cut off, and whether query row i sees just the slots up to its own.
    """
    at, positions = slice(row, row + 1), inputs.positions
    slots, count, pads, cut = inputs.keys.shape[2], inputs.query.shape[3], 0, 0
    in_order = inputs.in_column_order and positions.shape[1] == 1
    if in_order:
        places = positions[row, 0]
        if int(places[0]) < 0:
            real = places >= 0
            if not bool(real.any()):
                return None
            pads = int(real.int().argmax())
            cut = max(0, pads - (slots - count))
            places = places[pads:]
        straight = inputs.visible is None and inputs.rope_positions is None and inputs.chosen is None
        consecutive = straight and bool((places.diff() == 1).all())
    place = inputs.rope_positions
    row_inputs = replace(
        inputs,
        query=inputs.query[at, :, :, cut:],
        keys=inputs.keys[at, :, pads:],
        values=inputs.values[at, :, pads:],
        positions=positions[at, :, pads:],
        query_positions=inputs.query_positions[at, cut:],
        visible=None if inputs.visible is None else inputs.visible[at, :, pads:],
        chosen=None if inputs.chosen is None else inputs.chosen[at, cut:, pads:],
        bias=None if inputs.bias is None else inputs.bias[at, :, pads:],
        rope_positions=None if place is None else (place[0][at, :, pads:], place[1][at, :, cut:]),
    )
    return row_inputs, pads, cut, in_order and consecutive


def _tiles(inputs: AttentionInputs, consecutive: bool) -> Iterator[tuple[slice, slice, slice]]:
    """The tiles of one batch row: (kv heads, query rows, slots); consecutive: as of `Tile`."""
    _, h, g, count, _ = inputs.query.shape
    slots = inputs.keys.shape[2]
    past, window = slots - count, inputs.params.sliding_window if consecutive else None
    together = min(h, max(1, MAX_TILE_LOGITS // (g * min(MAX_TILE_ROWS, count) * slots)))
    for first in range(0, h, together):
        heads, start = slice(first, min(first + together, h)), 0
        while start < count:
            query_slot = past + start if inputs.in_column_order else slots
            oldest = max(0, query_slot + 1 - window) if window is not None else 0
            fit = MAX_TILE_LOGITS // (g * together * (query_slot - oldest + MAX_TILE_ROWS))
            rows = slice(start, min(count, start + max(1, MIN_TILE_ROWS // g, min(MAX_TILE_ROWS, fit))))
            yield heads, rows, slice(oldest, inputs.kv_len(rows))
            start = rows.stop


def _tile_logits(
    inputs: AttentionInputs, heads: slice, rows: slice, seen: slice, room: Tensor, *, diagonal: bool
) -> Tensor:
    """Masked logits [heads, G, rows, seen] of a tile, in `room`; diagonal: whether no query sees a slot behind its own.

    The scale is multiplied into the query; in half precision products are rounded before they are scaled, as in
    `AttentionInputs.logits`.
    """
    query, params = inputs.query[0, heads, :, rows], inputs.params
    keys = inputs.keys[0, _held_by(heads, inputs.query.shape[1]), seen]
    if params.upcast:
        query, keys = query.float(), keys.float()
    h, g, q, _ = query.shape
    slots = seen.stop - seen.start
    x = room[: h * g * q * slots].view(h, g, q, slots)
    if query.dtype == room.dtype:
        grouped_matmul(query * params.scale, keys.transpose(1, 2), out=x)
    else:
        torch.mul(grouped_matmul(query, keys.transpose(1, 2)).float(), params.scale, out=x)
    softcapped(x, params.softcap)
    if params.alibi is not None:
        bias = inputs.alibi_bias(rows, seen.stop)
        assert bias is not None
        x += bias[0, heads, :, :, seen.start :]
    if inputs.bias is not None:
        x += inputs.bias[0, heads, None, None, seen]
    if inputs.all_visible:
        return x
    if not diagonal:
        mask = inputs.mask(rows, seen.stop)[0, :, :, seen.start :]
        x.masked_fill_(~mask[heads if mask.shape[0] > 1 else slice(None), None], -torch.inf)
        return x
    x[..., slots - q :].masked_fill_(torch.ones(q, q, dtype=torch.bool).triu(1), -torch.inf)
    window = params.sliding_window
    if window is not None and inputs.keys.shape[2] - inputs.query.shape[3] + rows.stop > window:
        query_slots = torch.arange(rows.start, rows.stop) + inputs.keys.shape[2] - inputs.query.shape[3]
        # Only the first q slots are too old for some row.
        too_old = torch.arange(seen.start, seen.start + q) <= query_slots[:, None] - window
        x[..., :q].masked_fill_(too_old, -torch.inf)
    return x


def _held_by(heads: slice, among: int) -> slice:
    """Which keys and values are of the kv heads `heads`: all of a head that is alone, which may hold several."""
    return slice(None) if among == 1 else heads


def grouped_matmul(x: Tensor, of_heads: Tensor, out: Tensor | None = None) -> Tensor:
    """Product [H, G, q, n] of x [H, G, q, m], of query heads, with one matrix per kv head, of_heads [H, m, n].

    For H = 1 it may be one per query head, [G, m, n].

    A single product would be split among threads where they are many, and its sums with it; several are not.
    """
    h, g, q, m = x.shape
    n = of_heads.shape[-1]
    if h == 1:
        into = None if out is None else out.view(g, q, n)
        return torch.bmm(x.reshape(g, q, m), of_heads.expand(g, m, n), out=into).view(h, g, q, n)
    into = None if out is None else out.view(h, g * q, n)
    return torch.bmm(x.reshape(h, g * q, m), of_heads, out=into).view(h, g, q, n)


def _sdpa(inputs: AttentionInputs, rows: slice, slots: int, *, causal: bool = False) -> Tensor:
    """Attention output [B, H, G, rows, Dv] of query rows `rows` over the first `slots` slots.

    causal: by torch's own causal mask, without one made from the position ids.
    """
    query, keys, values = inputs.query[..., rows, :], inputs.keys[:, :, :slots], inputs.values[:, :, :slots]
    b, h, g, q, d = query.shape
    if inputs.params.upcast:
        query, keys, values = query.float(), keys.float(), values.float()
    mask: Tensor | None = None
    # Without a mask a GPU may take another kernel, which rounds otherwise; on a CPU the sums are the same to the bit.
    unmasked = inputs.all_visible and inputs.params.alibi is None and query.device.type == "cpu"
    if not causal and not unmasked:
        mask = inputs.mask(rows, slots)[:, :, None]
        bias = inputs.alibi_bias(rows, slots)
        if bias is not None:
            mask = bias.masked_fill(~mask, -torch.inf).to(query.dtype)
        if mask.shape[1] != 1 or bias is not None:
            mask = mask.expand(-1, h, g, -1, -1).reshape(mask.shape[0], h * g, q, slots)
        else:
            mask = mask[:, :, 0]
    out = scaled_dot_product_attention(
        query.reshape(b, h * g, q, d),
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=inputs.params.scale,
        enable_gqa=h * g > keys.shape[1],
    )
    return out.view(b, h, g, q, values.shape[-1]).to(inputs.values.dtype)


def qk_matmul(query: Tensor, keys: Tensor) -> Tensor:
    """Dot products of queries [B, H, n, D] and keys [B, H, S, D]: [B, H, n, S].

    On a CPU the product of few queries with wide heads takes half the time with its factors swapped (measured).
    """
    count, width = query.shape[-2:]
    if query.device.type == "cpu" and count <= SWAP_MAX_QUERIES and width >= SWAP_MIN_HEAD_DIM:
        return torch.matmul(keys, query.transpose(-1, -2)).transpose(-1, -2).contiguous()
    return torch.matmul(query, keys.transpose(-1, -2))


def apply_probs(probabilities: Tensor, values: Tensor) -> Tensor:
    """The attention output [B, H, G, Q, Dv], in the dtype of the values.

    probabilities [B, H, G, Q, S] float32, values [B, H, S, Dv] or, of latents, [B, G, S, Dv].
    """
    b, h, g, q, s = probabilities.shape
    n = values.shape[1]
    out = torch.matmul(probabilities.to(values.dtype).reshape(b, n, h * g * q // n, s), values)
    return out.view(b, h, g, q, values.shape[-1])


@functools.cache
def _sums_go_by_width(groups: int, width: int, dtype: torch.dtype) -> bool:
    """Whether zeros behind the slots change a product with values [.., S, width] on this processor, S a multiple of 4.

    MKL has kernels of its own for each kind of processor, and does not say how they sum: so they are asked.
    """
    draw = torch.Generator().manual_seed(0)
    for slots, more in ((20, 4), (28, 4), (100, 132), (388, 4), (388, 388), (704, 516)):
        probabilities = torch.rand(3, 2, groups, 1, slots + more, generator=draw)
        values = torch.randn(3, 2, slots + more, width, generator=draw).to(dtype)
        probabilities[..., slots:], values[:, :, slots:] = 0, 0
        alone = apply_probs(probabilities[..., :slots].contiguous(), values[:, :, :slots].contiguous())
        if not torch.equal(alone, apply_probs(probabilities, values)):
            return True
    return False


def apply_probs_any_width(probabilities: Tensor, values: Tensor) -> Tensor:
    """`apply_probs` of one query per head, on a CPU the same to the bit whatever dead slots stand behind.

    probabilities [R, H, G, 1, S] float32, values [R, H, S, Dv] (as of `apply_probs`) -> [R, H, G, 1, Dv]. SPLIT_SLOTS
    slots at a time where a product over all of them is not the same.
    """
    groups, slots = probabilities.shape[1] * probabilities.shape[2] // values.shape[1], values.shape[2]
    few = groups < SPLIT_MIN_GROUP
    if values.device.type != "cpu" or (few and not _sums_go_by_width(groups, values.shape[-1], values.dtype)):
        return apply_probs(probabilities, values)
    parts = list(zip(probabilities.split(SPLIT_SLOTS, dim=-1), values.split(SPLIT_SLOTS, dim=2), strict=True))
    behind = -slots % SUMMED_TOGETHER
    if few and behind:
        parts[-1] = pad(parts[-1][0], (0, behind)), pad(parts[-1][1], (0, 0, 0, behind))
    first, *others = (apply_probs(*chunk) for chunk in parts)
    for other in others:
        first += other
    return first


def with_renumbered_positions(inputs: AttentionInputs, positions: Tensor) -> AttentionInputs:
    """Put survivors at positions 0, 1, 2 … in their order, for RoPE and ALiBi; all else of the inputs stays.

    positions [B, H, S]: original position ids, -1 for dead slots. For RoPE the query stays as the model rotated it, and
    each key is rotated by the change of its distance to the query.
    """
    live = positions >= 0 if inputs.visible is None else (positions >= 0) & inputs.visible
    new_positions = positions.masked_fill(~live, INT64_MAX).argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    query = inputs.query_positions[:, None, :, None]
    new_query_positions = (live[:, :, None] & (positions[:, :, None] < query)).sum(-1)
    keys = inputs.keys
    rope = inputs.params.rope
    if rope is not None:
        # Only differences matter: move each key by its own change of place less the query's.
        # The last query is never padding.
        moved = new_query_positions[:, :, -1:] - inputs.query_positions[:, None, -1:]
        keys = rope.rotate_by(keys, torch.where(live, new_positions - positions - moved, 0))
    return replace(inputs, keys=keys, rope_positions=(new_positions, new_query_positions))


def decode_logits(query: Tensor, keys: Tensor, positions: Tensor, newest: Tensor, params: AttentionParams) -> Tensor:
    """Logits of one new token per row, unmasked: query [R, H, G, 1, D], keys [R, H, S, D] -> [R, H, G, 1, S] float32.

    Keys may be one per query head, as of `AttentionInputs`.
    positions [R, H, S] and newest [R, 1, 1]: position ids of slots and queries, for ALiBi. Float64 stays float64.
    """
    if params.upcast:
        query, keys = query.float(), keys.float()
    r, h, g, _, d = query.shape
    x = qk_matmul(query.reshape(r, keys.shape[1], h * g // keys.shape[1], d), keys).view(r, h, g, keys.shape[2])
    x = softcapped((x if x.dtype == torch.float64 else x.float()) * params.scale, params.softcap)
    if params.alibi is not None:
        slopes = params.alibi.view(1, *x.shape[1:3], 1).to(x.device)
        x = x + slopes * (positions - newest)[:, :, None].to(torch.float32)
    return x[..., None, :]


@dataclass(frozen=True)
class LocalChunks:
    """Chunks of `size` tokens from position `start` on; the prompt's last `end` tokens are in none."""

    size: Annotated[int, AtLeast(1)]
    start: Annotated[int, AtLeast(0)] = 0
    end: Annotated[int, AtLeast(0)] = 0

    def __post_init__(self) -> None:
        """ConfigError for a chunk without tokens, or a negative start or end."""
        check_fields(self)


class LocalAttention:
    """Column sums of the softmax of q.k, unscaled, over the keys of the query's own chunk, forward by forward.

    sums [B, H, S] float32: over the chunk's queries, mean over query heads; 0 for tokens in no chunk (yet). Queries
    wait until their chunk is complete, so that it does not matter in which pieces the prompt comes.
    """

    def __init__(self, chunks: LocalChunks, first: AttentionInputs) -> None:
        """No token yet; first: the inputs of the prompt's first forward, for shapes."""
        self.chunks = chunks
        self.sums = torch.zeros(*first.keys.shape[:2], 0, device=first.keys.device)
        self.query, self.first_column = first.query[..., :0, :], 0  # queries that wait, and the column of the first
        self.done = [chunks.start] * first.query.shape[0]  # by row: the position at which the next chunk begins

    def add(self, inputs: AttentionInputs, *, complete: bool) -> None:
        """Take in one forward of the prompt; complete: the prompt ends with it, and so does the last chunk."""
        slots = inputs.keys.shape[2]
        self.query = torch.cat([self.query, inputs.query], dim=3)
        self.sums = torch.nn.functional.pad(self.sums, (0, slots - self.sums.shape[-1]))
        for row, last in enumerate(inputs.query_positions[:, -1].tolist()):
            pads, end = slots - 1 - last, last + 1 - self.chunks.end
            if last < 0:
                continue  # the row's tokens come in a later piece
            while self.done[row] + self.chunks.size <= end or (complete and self.done[row] < end):
                start, stop = self.done[row], min(self.done[row] + self.chunks.size, end)
                self._add_chunk(inputs.keys, row, slice(start + pads, stop + pads))
                self.done[row] = stop
        # Of rows that have not begun every query waits, so no column before the first of any row's chunk is dropped.
        waiting = [
            done + slots - 1 - last if last >= 0 else slots
            for done, last in zip(self.done, inputs.query_positions[:, -1].tolist(), strict=True)
        ]
        keep = slots if complete else min(slots, *waiting)
        self.query = self.query[..., max(0, keep - self.first_column) :, :].clone()
        self.first_column = max(self.first_column, keep)

    def _add_chunk(self, keys: Tensor, row: int, columns: slice) -> None:
        """Add up one chunk of one row; keys [B, H, S, D], columns: of the chunk."""
        at = slice(columns.start - self.first_column, columns.stop - self.first_column)
        query, key = self.query[row, :, :, at].float(), keys[row, :, columns].float()
        logits = query @ key[:, None].transpose(-1, -2)  # [H, G, n, n]
        self.sums[row, :, columns] = logits.softmax(-1).sum(-2).mean(1)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        index = rows.to(self.sums.device)
        self.sums, self.query = self.sums[index], self.query[index]
        self.done = [self.done[row] for row in rows.tolist()]
