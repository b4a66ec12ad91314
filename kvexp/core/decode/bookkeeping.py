"""What a decode step does besides attending, in rows that all are full caches: add up scores, choose what to overwrite.

Tensors are [R, H, S] of one layer's rows, or [L, R, H, S] of several layers whose rows are kept alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.eviction_backend import InPlace
from kvexp.core.select import LAST


class BatchedEviction:
    """How each row of one or several caches accumulates and gives up slots. sizes: rows of each cache."""

    def __init__(self, states: list[DecodableLayer], sizes: list[int], modes: list[InPlace]) -> None:
        self.states, self.sizes = states, sizes
        self.places = [state.held().keys.shape[2] for state in states]
        self.dense = all(mode.dense for mode in modes) and len(set(self.places)) == 1
        self.full = all(mode.full for mode in modes)  # then what is dead never changes
        closed = [mode.closed for mode in modes if mode.closed is not None]
        self.closed = None if self.dense else joined([padded(one, max(self.places), True) for one in closed])
        self.recent = joined([state.quota.recent_t for state in states if state.quota is not None])[:, None, None]
        sinks = [state.config.method.sinks for state in states]
        self.sinks: int | Tensor = sinks[0] if len(set(sinks)) == 1 else self._by_row([float(n) for n in sinks])
        self.most_sinks = max(sinks)
        self.newest_only = all(state.config.method.keeps_newest for state in states)
        self.by_score = all(state.config.method.ranks_by_score for state in states)
        decays = [1.0 if state.view is None else state.view.decay for state in states]
        uniform = decays[0] if len(set(decays)) == 1 else None
        self.decay = None if uniform == 1 else self._by_row(decays) if uniform is None else uniform

    def kept_like(self, other: BatchedEviction) -> bool:
        """Are another layer's rows of the same caches kept by the same numbers, in as many slots?"""
        same = (self.sizes, self.places, self.dense, self.full) == (other.sizes, other.places, other.dense, other.full)
        return same and all(_quota(a) == _quota(b) for a, b in zip(self.states, other.states, strict=True))

    def accumulate(self, score: Tensor, columns: Tensor) -> None:
        """Add what was observed, columns [.., r, H, S] of the first r rows, to score [.., R, H, S], after its decay."""
        if not columns.shape[-3]:
            return
        if self.decay is not None:
            score.mul_(self.decay)
        score[..., : columns.shape[-3], :, :] += columns

    def lowest(self, where: Tensor, rank: Tensor, newest: Tensor, window: int | None) -> Tensor:
        """[.., R, H, 1]: the slot of the lowest rank among those at `where` that may go, empty ones first, among equals
        the oldest. newest [R, 1, 1]; window: of a model that sees no further."""
        if self.newest_only:
            return where.masked_fill(self._kept(where), LAST).argmin(dim=-1, keepdim=True)
        if window is not None:
            rank = rank.masked_fill(where <= newest + 1 - window, -torch.inf)
        guard = where > newest - self.recent
        if self.most_sinks:
            guard |= where < self.sinks
        if self.closed is not None:
            if not self.full:
                rank = rank.masked_fill(where < 0, -torch.inf)
                guard &= where >= 0
            guard |= self.closed
        rank = rank.masked_fill(guard, torch.inf)
        higher = rank != rank.amin(dim=-1, keepdim=True)
        return where.masked_fill(higher, LAST).argmin(dim=-1, keepdim=True)

    def _kept(self, where: Tensor) -> Tensor:
        """Where all but the newest are sinks: these, and the slots that no token may take."""
        sinks = where < self.sinks if self.full else (where < self.sinks) & (where >= 0)
        return sinks if self.closed is None else sinks | self.closed

    def _by_row(self, values: list[float]) -> Tensor:
        """[R, 1, 1] float32: one value per cache."""
        each = [v for value, size in zip(values, self.sizes, strict=True) for v in [value] * size]
        return torch.tensor(each, device=self.states[0].held().keys.device)[:, None, None]


def _quota(state: DecodableLayer) -> tuple[list[int], list[int], list[int]]:
    quota = state.quota
    assert quota is not None
    return quota.slots, quota.kept, quota.recent


def padded(x: Tensor, width: int, value: float) -> Tensor:
    """x [.., n] with `value` up to [.., width]."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]), value=value)


def joined(parts: list[Tensor]) -> Tensor:
    """Rows behind rows; nothing is copied where there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
