"""The query of one decode step, with all that a retrieval method may use to select slots for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams
from kvexp.core.select import topk_slots
from kvexp.errors import ConfigError
from kvexp.retrieval.kv_index import KVIndex
from kvexp.retrieval.offload import OffloadedKV
from kvexp.retrieval.step_layout import step_layout

COMBINE = ("softmax_sum", "raw_sum", "max")


@dataclass(frozen=True)
class RetrievalQuery:
    """One query per row, and everything a method may use to select slots for it.

    query [B, H, G, D]; positions [B]: the queries' position ids; candidates [B, 1, S] bool: slots that may be selected,
    neither sinks nor recent window nor the future (slot = position); counts: how many to select in each row, at most
    `max_k`. index: what the method has indexed; memory: all keys and values; params: of the layer's attention.
    """

    query: Tensor
    positions: Tensor
    candidates: Tensor
    counts: list[int]
    index: KVIndex
    memory: OffloadedKV
    params: AttentionParams

    @classmethod
    def of(
        cls,
        query: Tensor,
        positions: Tensor,
        most: list[int],
        index: KVIndex,
        memory: OffloadedKV,
        params: AttentionParams,
    ) -> RetrievalQuery:
        """The query of the newest token of every row.

        query [B, H, G, D]; positions [B]; most: how many slots to select in each row, if there are as many candidates.
        """
        sinks = memory.config.sinks
        ends = [length - 1 - local for length, local in zip(memory.lengths, memory.config.local, strict=True)]
        counts = [min(count, max(0, end - sinks)) for count, end in zip(most, ends, strict=True)]
        candidates = step_layout(memory.lengths, memory.config.local, sinks, query.device).candidates
        if params.sliding_window is not None:
            slots = torch.arange(memory.length, device=query.device)
            candidates = candidates & (slots > positions[:, None] - params.sliding_window)[:, None]
        return cls(query, positions, candidates, counts, index, memory, params)

    @property
    def max_k(self) -> int:
        """The largest number of slots to select in a row."""
        return max(self.counts)

    def all_candidates(self) -> Tensor | None:
        """All candidates as `Selection.slots` [B, H, N], where every row may select all of them; else None."""
        sinks, local = self.memory.config.sinks, self.memory.config.local
        pairs = zip(self.counts, self.memory.lengths, local, strict=True)
        if any(count < length - 1 - past - sinks for count, length, past in pairs):
            return None
        slots = torch.arange(self.memory.length, device=self.query.device).expand(*self.query.shape[:2], -1)
        return slots.masked_fill(~self.candidates, -1)[:, :, sinks : sinks + self.max_k]

    def logits(self, dots: Tensor, *, past: bool = False) -> Tensor:
        """Dot products [B, H, G, S] to float32 logits: scaled, ALiBi added, -inf outside the candidates.

        past: everything up to the query itself is left unmasked, not only the candidates.
        """
        x = dots.float() * self.params.scale
        if self.params.alibi is None and not past:
            return x.masked_fill_(~self.candidates[:, :, None], -torch.inf)
        slots = torch.arange(x.shape[-1], device=x.device)
        if self.params.alibi is not None:
            slopes = self.params.alibi.to(x.device).view(1, *x.shape[1:3], 1)
            x = x + slopes * (slots - self.positions[:, None]).float()[:, None, None]
        seen = self.candidates
        if past:
            seen = (slots <= self.positions[:, None])[:, None]
            if self.params.sliding_window is not None:
                seen = seen & (slots > self.positions[:, None] - self.params.sliding_window)[:, None]
        return x.masked_fill(~seen[:, :, None], -torch.inf)

    def logits_of(self, keys: Tensor, *, past: bool = False) -> Tensor:
        """Exact logits [B, H, G, S] of the query with keys [B, H, S, D]; past: as in `logits`."""
        query = self.query
        if self.params.upcast:
            query, keys = query.float(), keys.float()
        return self.logits(torch.matmul(query, keys.transpose(-1, -2)), past=past)

    def exact_logits(self, *, past: bool = False) -> Tensor:
        """Exact logits [B, H, G, S] of the query with every key; fetches all keys to the device."""
        return self.logits_of(self.memory.all_keys(), past=past)

    def topk(self, relevance: Tensor) -> Tensor:
        """The slots [B, H, max_k] of highest relevance [B, H, S] among the candidates, ascending; -1: none."""
        return topk_slots(relevance, self.candidates, self.counts, min(self.max_k, relevance.shape[-1]))


def reduce_group(logits: Tensor, how: str) -> Tensor:
    """One relevance [B, H, S] per kv head from the logits [B, H, G, S] of its query heads.

    how: softmax_sum, raw_sum or max; ConfigError for others.
    """
    if how not in COMBINE:
        raise ConfigError(f"combine must be one of {', '.join(COMBINE)}, got {how!r}")
    if logits.shape[2] == 1:
        return logits[:, :, 0]  # a softmax keeps the order but may round neighbours into ties
    if how == "softmax_sum":
        return torch.softmax(logits, dim=-1).sum(2)
    return logits.sum(2) if how == "raw_sum" else logits.amax(2)


@dataclass(frozen=True)
class Selection:
    """A method's selection.

    slots [B, H, N]: candidates to attend to, no slot twice in a head, -1: none; extra: whatever else the method's
    `attend` needs.
    """

    slots: Tensor
    extra: Any = None
