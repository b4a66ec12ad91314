"""InfLLM's arithmetic: representatives of blocks, positions clamped at the window's edge, prefill block by block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, attend_with
from kvexp.core.observe.blocked import BLOCK_ELEMENTS
from kvexp.core.select import best

if TYPE_CHECKING:
    from kvexp.retrieval.infllm import InfLLM


def far_query(query: Tensor, positions: Tensor, edge: Tensor, geometry: AttentionParams) -> Tensor:
    """query [B, H, G, Q, D] of positions [B, Q], turned as if it stood at position edge [B]."""
    if geometry.rotation is None:
        return query
    b, h, g, q, _ = query.shape
    by = (edge[:, None] - positions)[:, None].expand(b, h * g, q)
    return geometry.rotation.shift(query.flatten(1, 2), by).view_as(query)


def far_keys(keys: Tensor, positions: Tensor, geometry: AttentionParams) -> Tensor:
    """keys [B, H, S, D] of positions [B, H, S], turned as if they stood at position 0."""
    return keys if geometry.rotation is None else geometry.rotation.shift(keys, -positions.clamp(min=0))


def far_sight(sight: AttentionInputs, edge: Tensor) -> AttentionInputs:
    """The same slots, all of them as far as edge [B] positions from every query."""
    positions = sight.positions.expand(sight.keys.shape[:3])
    zero = torch.zeros_like(positions)
    place = edge[:, None, None].expand(-1, sight.keys.shape[1], sight.query.shape[3])
    return replace(
        sight,
        query=far_query(sight.query, sight.query_positions, edge, sight.geometry),
        keys=far_keys(sight.keys, positions, sight.geometry),
        places=(zero, place),
    )


def banded(sight: AttentionInputs, local: list[int]) -> Tensor:
    """[B, H, S, G] float32: the attention every column gets from rows that have it in their window of local + 1."""
    b, h, g, count, _ = sight.query.shape
    slots = sight.keys.shape[2]
    past = torch.tensor(local, device=sight.keys.device)[:, None, None, None]
    total = torch.zeros(b, h, g, slots, device=sight.keys.device)
    block = max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        reach = sight.reach(rows)
        probabilities = torch.softmax(sight.logits(rows, reach), dim=-1)
        query, key = sight.query_positions[:, None, rows, None], sight.positions[:, :, None, :reach]
        near = (query >= 0) & (key >= 0) & (query - key <= past)
        total[..., :reach] += probabilities.masked_fill(~near[:, :, None], 0.0).sum(3)
    return total.transpose(2, 3)


def representatives(
    method: InfLLM, keys: Tensor, received: Tensor, start: int, geometry: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Of n blocks from position `start`: keys [B, H, n, G, D] to score by, positions [B, H, n, G] of the best token.

    keys [B, H, n * block, D] and received [B, H, n * block, G] of the blocks' tokens.
    """
    b, h, tokens, d = keys.shape
    g, size = received.shape[3], method.block
    count = tokens // size
    best_of = received.reshape(b, h, count, size, g).topk(method.repr_tokens, dim=3).indices  # [B, H, n, R, G]
    at = (best_of + torch.arange(count, device=keys.device)[:, None, None] * size).flatten(2)
    found = keys.gather(2, at[..., None].expand(-1, -1, -1, d))
    at = at + start
    if method.clamps:
        found = far_keys(found, at, geometry)
    return found.view(b, h, count, method.repr_tokens, g, d).mean(3), at.view(best_of.shape)[:, :, :, 0]


def blockwise(method: InfLLM, sight: AttentionInputs, local: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
    """Prefill in chunks: output [B, H, G, Q, Dv] and what every column received [B, H, S, G], rows one by one."""
    b, h, g, columns, _ = sight.query.shape
    out = sight.values.new_zeros(b, h, g, columns, sight.values.shape[3])
    received = torch.zeros(b, h, columns, g, device=sight.keys.device)
    for row in range(b):
        pad = columns - int((sight.query_positions[row] >= 0).sum())
        one = slice(row, row + 1)
        alone = replace(
            sight,
            query=sight.query[one, ..., pad:, :],
            keys=sight.keys[one, :, pad:],
            values=sight.values[one, :, pad:],
            positions=sight.positions[one, :, pad:],
            query_positions=sight.query_positions[one, pad:],
        )
        _one_row(method, alone, local[row], counts[row], out[one, ..., pad:, :], received[one, :, pad:])
    return out, received


def block_scores(
    method: InfLLM, query: Tensor, places: Tensor, keys: Tensor, at: Tensor, geometry: AttentionParams
) -> Tensor:
    """[B, H, n] float32: mean over the rows of query [B, H, G, Q, D] at places [B, Q] of their logits with the blocks.

    keys [B, H, n, G, D], at [B, H, n, G] from `representatives`. Summed over the heads that choose together.
    """
    x = torch.einsum("bhgd,bhngd->bhgn", query.float().mean(3), keys.float()) * geometry.scale
    if geometry.alibi is not None and not method.clamps:
        slopes = geometry.alibi.to(x.device).view(1, *x.shape[1:3], 1)
        x = x + slopes * (at.transpose(2, 3) - places.float().mean(1)[:, None, None, None])
    x = x.sum(2)
    return x.sum(1, keepdim=True).expand_as(x) if method.choice == "shared" else x


def _one_row(method: InfLLM, sight: AttentionInputs, local: int, count: int, out: Tensor, received: Tensor) -> None:
    """One unpadded row; fills out [1, H, G, T, Dv] and received [1, H, T, G]."""
    window, total = local + 1, sight.keys.shape[2]
    chunk, edge = min(method.chunk, window), torch.tensor([local], device=sight.keys.device)
    for start in range(0, total, chunk):
        rows = slice(start, min(start + chunk, total))
        blocks = max(0, start - window - method.n_sinks) // method.block
        near = torch.arange(max(0, start - local), rows.stop, device=edge.device).expand(1, sight.keys.shape[1], -1)
        far = far_slots(method, sight, rows, blocks, count, received, edge)
        logits, values = [], []
        for slots, beyond in ((near, False), (far, True)):
            part = _part(sight, rows, slots)
            values.append(part.values)
            distance = part.query_positions[:, None, :, None] - slots[:, :, None]
            turned = far_sight(part, edge) if beyond and method.clamps else part
            x = turned.logits(slice(0, rows.stop - start), slots.shape[2])
            # Clamped, all rows share what is far for the last: early ones see some of it as near, too (as released).
            hidden = torch.zeros_like(distance, dtype=torch.bool) if beyond and method.clamps else distance <= local
            logits.append(x.masked_fill((hidden if beyond else ~hidden)[:, :, None], -torch.inf))
        probabilities = torch.softmax(torch.cat(logits, dim=-1), dim=-1)
        out[..., rows, :] = attend_with(probabilities, torch.cat(values, dim=2))
        seen = probabilities[..., : near.shape[2]].sum(3).transpose(2, 3)
        received[:, :, max(0, start - local) : rows.stop] += seen


def far_slots(
    method: InfLLM, sight: AttentionInputs, rows: slice, blocks: int, count: int, received: Tensor, edge: Tensor
) -> Tensor:
    """What a chunk's rows see beyond their window, [1, H, N]: sinks, chosen blocks, and what is in no block yet."""
    heads, size, device = sight.keys.shape[1], method.block, sight.keys.device
    end = max(0, rows.stop - 1 - int(edge))
    if not blocks:
        return torch.arange(end, device=device).expand(1, heads, -1)
    inside = slice(method.n_sinks, method.n_sinks + blocks * size)
    own = sight.keys[:, :, inside], received[:, :, inside]
    keys, at = representatives(method, *own, method.n_sinks, sight.geometry)
    query, places = sight.query[..., rows, :], sight.query_positions[:, rows]
    query = far_query(query, places, edge, sight.geometry) if method.clamps else query
    score = block_scores(method, query, places, keys, at, sight.geometry)
    wanted = min(blocks, -(-count // size))
    known = torch.ones(1, 1, blocks, dtype=torch.bool, device=device)
    chosen = best(score, known, torch.tensor([wanted], device=device), wanted)
    slots = (method.n_sinks + chosen[..., None] * size + torch.arange(size, device=device)).flatten(2)
    rest = torch.arange(method.n_sinks + blocks * size, end, device=device)
    always = torch.cat([torch.arange(method.n_sinks, device=device), rest])
    return torch.cat([always.expand(1, heads, -1), slots], dim=2)


def _part(sight: AttentionInputs, rows: slice, slots: Tensor) -> AttentionInputs:
    """The query rows and the slots [1, H, N] of an unpadded row, where slot = position."""
    keys, values = (x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3])) for x in (sight.keys, sight.values))
    return replace(
        sight,
        query=sight.query[..., rows, :],
        keys=keys,
        values=values,
        positions=slots,
        query_positions=sight.query_positions[:, rows],
        in_order=False,
        padded=True,
    )
