"""The one place where slots are chosen. Ties are broken by position (newer is kept), never by slot order."""

from __future__ import annotations

import torch
from torch import Tensor

LAST = torch.iinfo(torch.int64).max


def order(rank: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
    """Slot indices [B, H, S], best to keep first: protected, then by rank, then newer first; dead slots last.

    rank [B, H, S] float32; positions [B, H, S], -1 dead; protected [B, H, S] bool.
    """
    rank = rank.masked_fill(protected, torch.inf).masked_fill(positions < 0, -torch.inf)
    index = positions.argsort(dim=-1, descending=True, stable=True)
    best = rank.gather(-1, index).argsort(dim=-1, descending=True, stable=True)
    # A slot ranked -inf on purpose still goes before a dead one: dead positions (-1) sort last among equals.
    return index.gather(-1, best)


def keepers(rank: Tensor, positions: Tensor, protected: Tensor, keep: Tensor, widest: int) -> tuple[Tensor, Tensor]:
    """The best `keep` [B] slots of every row, sorted by position, padded to `widest`.

    Returns index [B, H, widest] and which of them count, [B, H, widest] bool.
    """
    index = order(rank, positions, protected)[..., :widest]
    chosen = torch.arange(index.shape[-1], device=index.device) < keep[:, None, None]
    chosen = chosen & (positions.gather(-1, index) >= 0)
    place = positions.gather(-1, index).masked_fill(~chosen, LAST).argsort(dim=-1, stable=True)
    return index.gather(-1, place), chosen.gather(-1, place)


def victims(rank: Tensor, positions: Tensor, protected: Tensor, closed: Tensor, count: int) -> Tensor:
    """The `count` slots of every head to hand to newcomers: empty ones first, then the lowest ranked, older first.

    closed [B, 1, S] bool: slots beyond a row's budget, never handed out. Returns [B, H, count].
    """
    rank = rank.masked_fill(positions < 0, -torch.inf).masked_fill(protected, torch.inf)
    rank = rank.masked_fill(closed.expand_as(rank), torch.inf)
    if count == 1:
        # argmin of (rank, position) without a sort; a closed slot can tie with a protected one at +inf, never win.
        lowest = rank == rank.amin(dim=-1, keepdim=True)
        return positions.masked_fill(~lowest, LAST).argmin(dim=-1, keepdim=True)
    index = positions.argsort(dim=-1, stable=True)
    worst = rank.gather(-1, index).argsort(dim=-1, stable=True)
    return index.gather(-1, worst)[..., :count]


def best(rank: Tensor, candidates: Tensor, counts: Tensor, widest: int) -> Tensor:
    """Slots [B, H, widest] in ascending order, of the best `counts` [B] candidates of every head; -1: none.

    rank [B, H, S] float32, NaN last; candidates [B, 1 or H, S] bool. For caches in which slot = position: among equals
    the newer is chosen. `widest` is at most S.
    """
    # One whole number per slot: the float's bits in the order of their values above, the position below.
    bits = (rank + 0.0).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    key = (ordered << 32) | torch.arange(rank.shape[-1], device=rank.device)
    none = torch.iinfo(torch.int64).min
    found = key.masked_fill_(~candidates, none).topk(widest, dim=-1).values
    chosen = (found != none) & (torch.arange(widest, device=rank.device) < counts[:, None, None])
    slots = torch.where(chosen, found & 0xFFFFFFFF, LAST).sort(dim=-1).values
    return slots.masked_fill(slots == LAST, -1)
