"""A question and what may be used to answer it: the one argument of every choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams
from kvexp.core.select import best
from kvexp.errors import ConfigError
from kvexp.retrieval.kv_index import Index
from kvexp.retrieval.offload import Memory

COMBINE = ("softmax_sum", "raw_sum", "max")


@dataclass(frozen=True)
class RetrievalQuery:
    """One query per row, and everything a method may use to answer it.

    query [B, H, G, D]; positions [B]: its position id; candidates [B, 1, S] bool: slots that may be chosen, neither
    sinks nor recent window nor the future (slot = position); counts: how many to choose in each row, at most `widest`.
    """

    query: Tensor
    positions: Tensor
    candidates: Tensor
    counts: list[int]
    index: Index
    memory: Memory
    geometry: AttentionParams

    @classmethod
    def of(
        cls, query: Tensor, positions: Tensor, most: list[int], index: Index, memory: Memory, geometry: AttentionParams
    ) -> RetrievalQuery:
        """The question of the newest token of every row; most: slots to choose in each, where there are as many."""
        sinks = memory.layout.sinks
        ends = [length - 1 - local for length, local in zip(memory.lengths, memory.layout.local, strict=True)]
        counts = [min(count, max(0, end - sinks)) for count, end in zip(most, ends, strict=True)]
        slots = torch.arange(memory.used, device=query.device)
        candidates = (slots >= sinks) & (slots < torch.tensor(ends, device=query.device)[:, None])
        if geometry.sliding_window is not None:
            candidates = candidates & (slots > positions[:, None] - geometry.sliding_window)
        return cls(query, positions, candidates[:, None], counts, index, memory, geometry)

    @property
    def widest(self) -> int:
        return max(self.counts)

    def everything(self) -> Tensor | None:
        """All candidates as `Chosen.slots`, if every row may choose all of its own."""
        sinks, local = self.memory.layout.sinks, self.memory.layout.local
        pairs = zip(self.counts, self.memory.lengths, local, strict=True)
        if any(count < length - 1 - past - sinks for count, length, past in pairs):
            return None
        slots = torch.arange(self.memory.used, device=self.query.device).expand(*self.query.shape[:2], -1)
        return slots.masked_fill(~self.candidates, -1)[:, :, sinks : sinks + self.widest]

    def logits(self, dots: Tensor, *, past: bool = False) -> Tensor:
        """Dot products [B, H, G, S] to float32 logits: scaled, ALiBi added, -inf outside the candidates.

        past: everything up to the query itself counts, not only the candidates.
        """
        x = dots.float() * self.geometry.scale
        slots = torch.arange(x.shape[-1], device=x.device)
        if self.geometry.alibi is not None:
            slopes = self.geometry.alibi.to(x.device).view(1, *x.shape[1:3], 1)
            x = x + slopes * (slots - self.positions[:, None]).float()[:, None, None]
        seen = self.candidates
        if past:
            seen = (slots <= self.positions[:, None])[:, None]
            if self.geometry.sliding_window is not None:
                seen = seen & (slots > self.positions[:, None] - self.geometry.sliding_window)[:, None]
        return x.masked_fill(~seen[:, :, None], -torch.inf)

    def against(self, keys: Tensor, *, past: bool = False) -> Tensor:
        """Exact logits [B, H, G, S] of keys [B, H, S, D]."""
        query = self.query
        if self.geometry.upcast:
            query, keys = query.float(), keys.float()
        return self.logits(torch.matmul(query, keys.transpose(-1, -2)), past=past)

    def exact(self, *, past: bool = False) -> Tensor:
        """Exact logits [B, H, G, S] of every key, all of which are fetched for it."""
        return self.against(self.memory.all_keys(), past=past)

    def top(self, relevance: Tensor) -> Tensor:
        """The slots [B, H, N] of the highest relevance [B, H, S] among the candidates, ascending; -1: none."""
        counts = torch.tensor(self.counts, device=relevance.device)
        return best(relevance, self.candidates, counts, min(self.widest, relevance.shape[-1]))


def combined(logits: Tensor, how: str) -> Tensor:
    """One relevance [B, H, S] from the logits [B, H, G, S] of the query heads that share a kv head."""
    if how not in COMBINE:
        raise ConfigError(f"combine must be one of {', '.join(COMBINE)}, got {how!r}")
    if logits.shape[2] == 1:
        return logits[:, :, 0]  # a softmax keeps the order but may round neighbours into ties
    if how == "softmax_sum":
        return torch.softmax(logits, dim=-1).sum(2)
    return logits.sum(2) if how == "raw_sum" else logits.amax(2)


@dataclass(frozen=True)
class Chosen:
    """slots [B, H, N]: candidates to attend to, no slot twice in a head; -1: none. carry: for `attend`."""

    slots: Tensor
    carry: Any = None
