"""Attention without a causal mask inside chunks of a prompt: what tokens get from those around them, on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class LocalChunks:
    """Chunks of `size` tokens from position `start` on; the prompt's last `end` tokens are in none."""

    size: int
    start: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a chunk must have at least 1 token, got {self.size}")
        if self.start < 0 or self.end < 0:
            raise ConfigError(f"start and end must be at least 0, got {self.start} and {self.end}")


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
        there = rows.to(self.sums.device)
        self.sums, self.query = self.sums[there], self.query[there]
        self.done = [self.done[row] for row in rows.tolist()]
