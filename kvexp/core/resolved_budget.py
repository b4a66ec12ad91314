"""The budget of one layer as integers per batch row, and per kv head where heads differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.granted_slots import window
from kvexp.core.head_budgets import StreamingHeads
from kvexp.core.method import Method


@dataclass
class ResolvedBudget:
    """The budget of one layer as integers per batch row, each as a list on the host and as an int64 tensor [B].

    slots: the budget k; keep: slots kept after an eviction (k - 1 where the token being generated counts); recent:
    newest tokens that are protected at an eviction. head_keep [B][H]: slots that each kv head keeps, where heads were
    given different numbers (`share_out`); None: `keep` for all. streaming: which kv heads hold sinks and newest tokens
    whatever the method says; None: no head. new_tokens: tokens after the prompt that retrieval heads, which are all
    others then, have room for.
    """

    slots: list[int]
    keep: list[int]
    recent: list[int]
    slots_t: Tensor
    keep_t: Tensor
    recent_t: Tensor
    head_keep: list[list[int]] | None = None
    head_keep_t: Tensor | None = None
    streaming: StreamingHeads | None = None
    new_tokens: int = 0

    @classmethod
    def from_slots(cls, method: Method, slots: list[int], *, counts_self: bool, device: torch.device) -> ResolvedBudget:
        """Keep and recent window for `slots` slots per kv head, one number per batch row.

        counts_self: as of `Budget`. ConfigError where sinks and recent window of the method do not fit into the slots.
        """
        # The token being generated is one of the recent ones where it is one of the budget.
        windows = [window(method, k, counts_self=counts_self) for k in slots]
        recents = [max(recent - 1, 0) if counts_self else recent for recent in windows]
        kept = [k - 1 if counts_self else k for k in slots]
        slots_t, kept_t, recent_t = (torch.tensor(x, dtype=torch.int64, device=device) for x in (slots, kept, recents))
        return cls(slots, kept, recents, slots_t, kept_t, recent_t)

    def share_out(self, by_head: Tensor | None, heads: int) -> None:
        """From now on kv heads keep by_head [B, H] slots; None: `keep` each. heads: H."""
        by_head = self.keep_t[:, None].expand(-1, heads) if by_head is None else by_head
        self.head_keep, self.head_keep_t = by_head.tolist(), by_head.contiguous()

    def lacks_room(self, new: int | None) -> bool:
        """Whether retrieval heads, which evict nothing, have room for fewer than `new` tokens after the prompt."""
        return self.streaming is not None and (new or 0) > self.new_tokens

    def make_room(self, new: int) -> None:
        """Let retrieval heads hold `new` tokens after the prompt, more than they have room for (`lacks_room`)."""
        assert self.streaming is not None and self.head_keep_t is not None
        more = self.head_keep_t + (new - self.new_tokens)
        self.share_out(torch.where(self.streaming.heads, self.head_keep_t, more), more.shape[1])
        self.new_tokens = new

    @property
    def recent_by_head(self) -> Tensor:
        """Newest tokens that are protected at an eviction, [B, H], or [B, 1] where heads do not differ."""
        recent = self.recent_t[:, None]
        return recent if self.streaming is None else recent.masked_fill(self.streaming.heads, 0)

    def sinks_by_head(self, method: Method) -> int | Tensor:
        """First tokens that are never evicted: the method's, or [B, H] where heads differ."""
        if self.streaming is None:
            return method.sinks
        return torch.where(self.streaming.heads, self.streaming.sinks, method.sinks)

    def by_stream(self, priority: Tensor, positions: Tensor) -> Tensor:
        """The priority [B, H, S] of the method, and recency in streaming heads; positions [B, H, S]."""
        if self.streaming is None:
            return priority
        return torch.where(self.streaming.heads[..., None], positions.to(priority.dtype), priority)

    @property
    def keep_by_head(self) -> Tensor:
        """Slots kept after an eviction, [B, H], or [B, 1] where all heads keep the same number."""
        return self.keep_t[:, None] if self.head_keep_t is None else self.head_keep_t

    @property
    def most(self) -> list[int]:
        """Per row, the slots kept by the head that keeps most."""
        return self.keep if self.head_keep is None else [max(heads) for heads in self.head_keep]

    @property
    def least(self) -> list[int]:
        """Per row, the slots kept by the head that keeps fewest."""
        return self.keep if self.head_keep is None else [min(heads) for heads in self.head_keep]

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: only among the beams of a sample, of equal budgets."""
        if self.streaming is not None:
            self.streaming = self.streaming.of_rows(rows)
        if self.head_keep is not None and self.head_keep_t is not None:
            self.head_keep = [self.head_keep[i] for i in rows.tolist()]
            self.head_keep_t = self.head_keep_t[rows.to(self.head_keep_t.device)]
        if not same_prompts:
            self.slots = [self.slots[i] for i in rows.tolist()]
            self.keep = [self.keep[i] for i in rows.tolist()]
            self.recent = [self.recent[i] for i in rows.tolist()]
        rows = rows.to(self.slots_t.device)
        self.slots_t, self.keep_t, self.recent_t = self.slots_t[rows], self.keep_t[rows], self.recent_t[rows]
