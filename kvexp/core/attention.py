"""Attention over slots. Position ids are the mask: a query sees a slot iff 0 <= slot position <= query position."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvexp.core.select import LAST

ROWS = 256  # query rows attended at a time when a mask has to be materialised
FEW, WIDE = 8, 128  # queries up to which, and widths of a head from which, `products` exchanges its factors


@dataclass(frozen=True)
class RoPE:
    """A model's RoPE, enough to move a cached key: inv_freq [R] over the first 2R dims, interleaved or in halves."""

    inv_freq: Tensor
    interleaved: bool

    def shift(self, keys: Tensor, by: Tensor) -> Tensor:
        """Rotate keys [B, H, S, D] as if their positions had grown by `by` [B, H, S] (may be negative)."""
        angle = by.to(torch.float32)[..., None] * self.inv_freq.to(keys.device, torch.float32)
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


@dataclass(frozen=True)
class AttentionParams:
    """How a layer's logits are made: x = scale * q.k (+ slope * (slot position - query position) for ALiBi).

    sliding_window: a query sees only this many newest positions. upcast: logits in float32 whatever the model's dtype
    (GPT-J). rotation: the model's RoPE, needed only where positions are renumbered.
    """

    scale: float
    sliding_window: int | None = None
    alibi: Tensor | None = None  # [H * G] slopes
    upcast: bool = False
    rotation: RoPE | None = None


@dataclass(frozen=True)
class AttentionInputs:
    """One forward's view of the slots.

    query [B, H, G, Q, D]; keys, values [B, H, S, D]; positions [B, H or 1, S]; query_positions [B, Q];
    visible [B, H, S] bool or None (mask mode); places: positions that ALiBi and RoPE see, if renumbered;
    in_order: slots are the columns 0..S-1 in order, so row i of a prompt needs only the first S - Q + i + 1.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    query_positions: Tensor
    geometry: AttentionParams
    visible: Tensor | None = None
    places: tuple[Tensor, Tensor] | None = None  # slots [B, H, S], queries [B, H, Q]
    in_order: bool = False
    padded: bool = True

    def allowed(self, rows: slice, slots: int, *, everything: bool = False) -> Tensor:
        """[B, H or 1, rows, slots] bool. A padded query row may see all (its output is unused but must be finite)."""
        query, key = self.query_positions[:, None, rows, None], self.positions[:, :, None, :slots]
        ok = (key >= 0) & (key <= query)
        if self.geometry.sliding_window is not None:
            if self.places is None:
                ok = ok & (key > query - self.geometry.sliding_window)
            else:  # renumbered survivors are as near as their places
                ok = ok & (
                    self.places[0][:, :, None, :slots] > self.places[1][:, :, rows, None] - self.geometry.sliding_window
                )
        if self.visible is not None and not everything:
            ok = ok & self.visible[:, :, None, :slots]
        return ok | (query < 0)

    def bias(self, rows: slice, slots: int) -> Tensor | None:
        """ALiBi term [B, H, G, rows, slots] or None."""
        slopes = self.geometry.alibi
        if slopes is None:
            return None
        if self.places is None:
            key, query = self.positions[:, :, None, :slots], self.query_positions[:, None, rows, None]
        else:
            key, query = self.places[0][:, :, None, :slots], self.places[1][:, :, rows, None]
        heads, groups = self.query.shape[1:3]
        return slopes.view(1, heads, groups, 1, 1).to(key.device) * (key - query)[:, :, None].to(
            torch.float32
        )  # whole numbers: exact

    def logits(self, rows: slice, slots: int, *, everything: bool = False) -> Tensor:
        """Masked logits [B, H, G, rows, slots] in float32 (or float64), -inf where a row does not look."""
        query, keys = self.query[..., rows, :], self.keys[:, :, :slots]
        if self.geometry.upcast:
            query, keys = query.float(), keys.float()
        b, h, g, q, d = query.shape
        x = products(query.reshape(b, h, g * q, d), keys).view(b, h, g, q, slots)
        x = (x if x.dtype == torch.float64 else x.float()) * self.geometry.scale
        bias = self.bias(rows, slots)
        x = x if bias is None else x + bias
        return x.masked_fill_(~self.allowed(rows, slots, everything=everything)[:, :, None], -torch.inf)

    def reach(self, rows: slice) -> int:
        """How many slots the last of these rows can possibly see."""
        total, count = self.keys.shape[2], self.query.shape[3]
        return total - count + rows.stop if self.in_order else total


def attend_prompt(sight: AttentionInputs) -> Tensor:
    """Attention output [B, H, G, Q, D] through SDPA: whole when causality is all there is, else in blocks of rows."""
    count, geometry = sight.query.shape[3], sight.geometry
    whole = sight.in_order and not sight.padded and sight.keys.shape[2] == count and sight.visible is None
    if whole and geometry.alibi is None and (geometry.sliding_window or count) >= count:
        return _sdpa(sight, slice(0, count), count, causal=True)
    blocks = (slice(a, min(a + ROWS, count)) for a in range(0, count, ROWS))
    return torch.cat([_sdpa(sight, rows, sight.reach(rows)) for rows in blocks], dim=3)


def _sdpa(sight: AttentionInputs, rows: slice, slots: int, *, causal: bool = False) -> Tensor:
    query, keys, values = sight.query[..., rows, :], sight.keys[:, :, :slots], sight.values[:, :, :slots]
    b, h, g, q, d = query.shape
    if sight.geometry.upcast:
        query, keys, values = query.float(), keys.float(), values.float()
    mask: Tensor | None = None
    if not causal:
        mask = sight.allowed(rows, slots)[:, :, None]
        bias = sight.bias(rows, slots)
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
        scale=sight.geometry.scale,
        enable_gqa=g > 1,
    )
    return out.view(b, h, g, q, values.shape[-1]).to(sight.values.dtype)


def products(query: Tensor, keys: Tensor) -> Tensor:
    """[B, H, N, D] x [B, H, S, D] -> [B, H, N, S].

    On a CPU the product of few queries with wide heads is not bound by memory; with the factors exchanged it is, and
    takes half the time (measured: docs/decisions/speed.md).
    """
    count, width = query.shape[-2:]
    if query.device.type == "cpu" and count <= FEW and width >= WIDE:
        return torch.matmul(keys, query.transpose(-1, -2)).transpose(-1, -2).contiguous()
    return torch.matmul(query, keys.transpose(-1, -2))


def attend_with(probabilities: Tensor, values: Tensor) -> Tensor:
    """[B, H, G, Q, S] float32 probabilities x values [B, H, S, D] -> [B, H, G, Q, D] in the values' dtype."""
    b, h, g, q, s = probabilities.shape
    out = torch.matmul(probabilities.to(values.dtype).reshape(b, h, g * q, s), values)
    return out.view(b, h, g, q, values.shape[-1])


def renumbered(sight: AttentionInputs, positions: Tensor) -> AttentionInputs:
    """Give survivors the positions 0..n-1 in their order, for RoPE (by turning keys) and ALiBi."""
    live = positions >= 0 if sight.visible is None else (positions >= 0) & sight.visible
    place = positions.masked_fill(~live, LAST).argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    query = sight.query_positions[:, None, :, None]
    query_place = (live[:, :, None] & (positions[:, :, None] < query)).sum(-1)
    keys = sight.keys
    rotation = sight.geometry.rotation
    if rotation is not None:
        # Only differences matter: move each key by its own change of place less the query's.
        # The last query is never padding.
        moved = query_place[:, :, -1:] - sight.query_positions[:, None, -1:]
        keys = rotation.shift(keys, torch.where(live, place - positions - moved, 0))
    return replace(sight, keys=keys, places=(place, query_place))


def newest_logits(query: Tensor, keys: Tensor, where: Tensor, newest: Tensor, geometry: AttentionParams) -> Tensor:
    """Of one newest query per row [R, H, G, 1, D]: [R, H, G, 1, S] float32 (or float64), nothing masked."""
    if geometry.upcast:
        query, keys = query.float(), keys.float()
    x = products(query[..., 0, :], keys)
    x = (x if x.dtype == torch.float64 else x.float()) * geometry.scale
    if geometry.alibi is not None:
        slopes = geometry.alibi.view(1, *x.shape[1:3], 1).to(x.device)
        x = x + slopes * (where - newest)[:, :, None].to(torch.float32)
    return x[..., None, :]
