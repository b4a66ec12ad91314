"""The keys and values that stay on the device: sinks and the recent window."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvexp.retrieval.step_layout import step_layout


class ResidentKV:
    """Sinks [B, H, n, *] and a ring buffer [B, H, W, *] of the newest tokens, each as a pair of keys and values.

    Position p of a row is at p % W of its ring. recent_lens: past tokens of the recent window, per row; W is the
    largest of them plus 1 for the newest token.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int], sinks: int, recent_lens: list[int]) -> None:
        """Take the sinks and the recent window out of a prompt.

        keys [B, H, S, D], values [B, H, S, Dv]: of the prompt, padded on the left; lengths: real tokens per row.
        """
        self.recent_lens, width = recent_lens, max(recent_lens) + 1
        ends = torch.tensor(lengths, device=keys.device)[:, None]
        place = torch.arange(width, device=keys.device)
        newest = ends - 1 - (ends - 1 - place) % width  # the newest position that belongs at each place
        first = torch.arange(sinks, device=keys.device).expand(len(lengths), -1)
        pads = keys.shape[2] - ends
        self.sinks = _gather_positions(keys, pads + first), _gather_positions(values, pads + first)
        self.recent_ring = _gather_positions(keys, pads + newest), _gather_positions(values, pads + newest)

    @property
    def nbytes(self) -> int:
        """Bytes of sinks and ring."""
        return sum(x.nbytes for x in (*self.sinks, *self.recent_ring))

    def add(self, key: Tensor, value: Tensor, positions: list[int]) -> None:
        """Write the token at positions[i] of every row i: key [B, H, 1, D], value [B, H, 1, Dv]."""
        width = self.recent_ring[0].shape[2]
        for ring, sinks, new in zip(self.recent_ring, self.sinks, (key, value), strict=True):
            write_token(ring, [p % width for p in positions], new[:, :, 0])
            for row, p in enumerate(positions):
                if p < sinks.shape[2]:
                    sinks[row, :, p] = new[row, :, 0]

    def read(self, lengths: list[int]) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """(Keys, values, positions) of the sinks, then of the window in order of position.

        lengths: tokens per row; positions [B, n], -1: none.
        """
        device, width, sinks = self.recent_ring[0].device, self.recent_ring[0].shape[2], self.sinks[0].shape[2]
        window = torch.tensor(lengths, device=device)[:, None] - width + torch.arange(width, device=device)
        keys, values = (_gather_positions(x, window % width) for x in self.recent_ring)
        layout = step_layout(lengths, self.recent_lens, sinks, device)
        return (*self.sinks, layout.first), (keys, values, layout.last)

    def index_rows(self, rows: Tensor) -> ResidentKV:
        """A copy for batch rows `rows` [n], which may repeat."""
        other, chosen = copy.copy(self), rows.to(self.recent_ring[0].device)
        other.recent_lens = [self.recent_lens[i] for i in rows.tolist()]
        other.sinks = self.sinks[0].index_select(0, chosen), self.sinks[1].index_select(0, chosen)
        other.recent_ring = self.recent_ring[0].index_select(0, chosen), self.recent_ring[1].index_select(0, chosen)
        return other


def write_token(buffer: Tensor, places: list[int], new: Tensor) -> None:
    """Write new [B, H, *] to place places[i] of axis 2 of every row i of the buffer [B, H, C, *], on its device."""
    if min(places) == max(places):
        buffer[:, :, places[0]] = new
        return
    rows, place = torch.arange(len(places), device=buffer.device), torch.tensor(places, device=buffer.device)
    buffer[rows, :, place] = new


def _gather_positions(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, S, D] gathered at columns index [B, n], the same for all heads; indices out of range are clamped."""
    index = index.clamp(min=0, max=x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
