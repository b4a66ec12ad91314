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
