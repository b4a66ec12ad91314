"""What never leaves the device: the first tokens and the newest ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor


class Near:
    """sinks [B, H, s, *] and ring [B, H, W, *], each keys and values; position p of a row at p % W of its ring.

    locals: past tokens of the recent window, per row; W holds the longest and the newest token on top.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int], sinks: int, local: list[int]) -> None:
        """keys [B, H, S, D], values: a prompt in columns, padding on the left; lengths: real tokens per row."""
        self.locals, width = local, max(local) + 1
        ends = torch.tensor(lengths, device=keys.device)[:, None]
        place = torch.arange(width, device=keys.device)
        newest = ends - 1 - (ends - 1 - place) % width  # the newest position that belongs at each place
        first = torch.arange(sinks, device=keys.device).expand(len(lengths), -1)
        pads = keys.shape[2] - ends
        self.sinks = _columns(keys, pads + first), _columns(values, pads + first)
        self.ring = _columns(keys, pads + newest), _columns(values, pads + newest)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.sinks, *self.ring))

    def add(self, key: Tensor, value: Tensor, at: list[int]) -> None:
        """The token of position at[i] for every row i: key [B, H, 1, D], value [B, H, 1, Dv]."""
        width, device = self.ring[0].shape[2], key.device
        rows, place = torch.arange(len(at), device=device), torch.tensor([p % width for p in at], device=device)
        for ring, sinks, new in zip(self.ring, self.sinks, (key, value), strict=True):
            ring[rows, :, place] = new[:, :, 0]
            for row, p in enumerate(at):
                if p < sinks.shape[2]:
                    sinks[row, :, p] = new[row, :, 0]

    def read(self, lengths: list[int]) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Sinks, then window in order of position: keys, values, positions [B, N] (-1: not there)."""
        device, width, sinks = self.ring[0].device, self.ring[0].shape[2], self.sinks[0].shape[2]
        ends = torch.tensor(lengths, device=device)[:, None]
        first = torch.arange(sinks, device=device).expand(len(lengths), -1)
        window = ends - width + torch.arange(width, device=device)
        oldest = ends - 1 - torch.tensor(self.locals, device=device)[:, None]
        keys, values = (_columns(x, window % width) for x in self.ring)
        window = window.masked_fill((window < oldest) | (window < sinks), -1)
        return (*self.sinks, first.masked_fill(first >= ends, -1)), (keys, values, window)

    def picked(self, rows: Tensor) -> Near:
        """These rows, which may repeat, in buffers of their own."""
        other, chosen = copy.copy(self), rows.to(self.ring[0].device)
        other.locals = [self.locals[i] for i in rows.tolist()]
        other.sinks = self.sinks[0].index_select(0, chosen), self.sinks[1].index_select(0, chosen)
        other.ring = self.ring[0].index_select(0, chosen), self.ring[1].index_select(0, chosen)
        return other


def _columns(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, S, D] at columns index [B, N], the same for all heads; what is out of range is some other token."""
    index = index.clamp(min=0, max=x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
