"""The slots of one layer brought back to their budget: the budget row by row, and evictions by known priorities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvexp.core import bounded_prefill
from kvexp.core.budget import Budget
from kvexp.core.cache_budget import resolve_budget
from kvexp.core.eviction_backend import Compacting
from kvexp.core.head_budgets import RankedSlots
from kvexp.core.method import Method, checked
from kvexp.core.ragged_slots import RaggedSlots
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.slots import Slots
from kvexp.core.stored_layer import StoredLayer
from kvexp.errors import CacheError


class BudgetedLayer(StoredLayer):
    """A layer whose slots can be dropped until each row holds its budget. When, and by what: `EvictionLayer`.

    resolved_budget: None until the prompt's length is known; has_evicted: whether there was an eviction.
    first_eviction: per row, decode tokens seen when the first slot was lost; None: not yet.
    """

    def reset(self) -> None:
        super().reset()
        self.resolved_budget: ResolvedBudget | None = None
        self.has_evicted = False
        self.first_eviction: list[int | None] = []

    @property
    def _budget(self) -> Budget:
        """The budget of a cache that evicts."""
        assert self.config.budget is not None
        return self.config.budget

    def _resolve(self, preferences: Sequence[Sequence[float]] | None = None) -> ResolvedBudget:
        """The budget in slots, from the real lengths of the prompts; preferences: as of `granted_slots.granted`."""
        sequence = self.sequence
        assert sequence.prompt_columns is not None and self.slots is not None
        lengths, new, device = sequence.prompt_lengths_ahead(), sequence.max_new_tokens, self.slots.positions.device
        return resolve_budget(
            self.config, lengths, sequence.prompt_columns, new, self.index, self.layers, device, preferences
        )

    def _evicts_after_chunk(self) -> bool:
        """Whether this forward is a chunk of a prompt that goes on, and some row holds more than its budget now."""
        if not self.is_bounded or not self.sequence.in_prompt:
            return False
        if self.sequence.padded:
            raise CacheError(
                "prompts with padding cannot be evicted between chunks: give one, or several of one length"
            )
        if self.resolved_budget is None:
            self.resolved_budget = self._resolve()
        return bounded_prefill.evicts_after_chunk(self.config, self.sequence, self.resolved_budget.keep)

    def _should_evict(self) -> bool:
        """Whether this forward ends with an eviction: the cadence says so, and some row holds more than its budget."""
        sequence, every = self.sequence, self.config.evict_every
        if not self.config.method.evicts or not sequence.prompt_complete:
            return False
        if self.resolved_budget is None:
            self.resolved_budget = self._resolve()
        if self.config.method.per_query:
            return False
        if sequence.in_prompt:
            due = self.config.cadence.at_prefill
        else:
            width = sequence.seq_len - sequence.past_len
            due = every is not None and (sequence.decode_steps + width) // every > sequence.decode_steps // every
        decoded = sequence.seq_len - (sequence.prompt_columns or 0)
        over = any(
            n + decoded > kept for n, kept in zip(sequence.prompt_lengths, self.resolved_budget.least, strict=True)
        )
        by_threshold = sequence.in_prompt and self._budget.threshold is not None
        return due and (over or by_threshold or self.has_evicted)

    @property
    def _lacks_room(self) -> bool:
        """Whether more tokens are to follow the prompt than were announced when retrieval heads got their room."""
        resolved = self.resolved_budget
        return resolved is not None and resolved.lacks_room(self.sequence.max_new_tokens)

    def _make_room(self) -> None:
        """Give retrieval heads room for all tokens to come; the next eviction lays the slots out anew.

        A prefilled context learns only with the question how many tokens follow its prompt.
        """
        if self._lacks_room and not self.sequence.in_prompt:
            assert self.resolved_budget is not None and self.sequence.max_new_tokens is not None
            self.resolved_budget.make_room(self.sequence.max_new_tokens)
            self.backend.reset_layout()

    def _share_out(self, by_head: Tensor | None) -> None:
        """From now on kv heads hold by_head [B, H] slots in rows that lose some, and the uniform number elsewhere.

        None: the uniform number everywhere.
        """
        resolved, slots = self.resolved_budget, self.require_slots()
        assert resolved is not None and self.sequence.num_real is not None
        if by_head is not None:
            over = self.sequence.num_real.to(by_head.device) > resolved.keep_t
            if self._budget.threshold is not None:
                over = torch.ones_like(over)
            by_head = torch.where(over[:, None], by_head, resolved.keep_t[:, None])
        resolved.share_out(by_head, slots.positions.shape[1])

    def _drop(self, ranked: RankedSlots) -> None:
        """Evict by priorities that are known, and record the first eviction of each row.

        Where heads hold different numbers, slots become ragged, except in mode mask, which leaves them all in place.
        """
        slots = self.require_slots()
        if self.config.is_ragged and self.config.mode != "mask" and not isinstance(slots, RaggedSlots):
            self.slots = slots = RaggedSlots.of(slots)
        assert self.resolved_budget is not None and self.sequence.num_real is not None
        self.backend.evict(slots, ranked.priority, ranked.protected, self.resolved_budget, ranked.hidden)
        self._update_after_eviction(slots)
        self.backend.at_budget = self._all_at_budget()
        self.backend.no_padding_slots = self.backend.at_budget and slots.length == min(self.resolved_budget.least) + (
            self.config.evict_every or 0
        )
        self.note_first_eviction()

    def _drop_after_chunk(self, ranked: RankedSlots) -> None:
        """Evict from a prompt that goes on: the slots are not laid out for decode steps yet."""
        slots = self.require_slots()
        assert self.resolved_budget is not None
        Compacting().evict(slots, ranked.priority, ranked.protected, self.resolved_budget, ranked.hidden)
        self._update_after_eviction(slots)

    def _update_after_eviction(self, slots: Slots) -> None:
        """Change the scores of what is left as the method says."""
        method = self.config.method
        assert self.resolved_budget is not None and self.sequence.num_real is not None
        # A row or head within its budget has lost nothing, whatever its neighbours lose.
        if type(method).after_eviction is not Method.after_eviction:
            tokens = self.sequence.num_real.to(slots.positions.device)
            reduced = (tokens[:, None] > self.resolved_budget.keep_by_head)[..., None]
            after = checked(
                method.after_eviction(slots.score), slots.score.shape, method, "after_eviction", "[B, H, S]"
            )
            slots.score.copy_(torch.where(reduced, after, slots.score))
        self.has_evicted = True

    def _all_at_budget(self) -> bool:
        """Whether every row holds as many tokens as its budget allows."""
        assert self.resolved_budget is not None
        sequence = self.sequence
        decoded = sequence.seq_len - (sequence.prompt_columns or 0)
        return all(
            n + decoded >= kept for n, kept in zip(sequence.prompt_lengths, self.resolved_budget.most, strict=True)
        )

    def note_first_eviction(self) -> None:
        """Record for every row at which decode step its first slot was evicted."""
        if not self.first_eviction or None in self.first_eviction:
            assert self.resolved_budget is not None
            self.first_eviction = self.sequence.first_eviction_steps(self.first_eviction, self.resolved_budget.least)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        super().select_rows(rows, same_prompts=same_prompts)
        if self.resolved_budget is not None:
            self.resolved_budget.select_rows(rows, same_prompts=same_prompts)
        if not same_prompts:
            self.first_eviction = [self.first_eviction[i] for i in rows.tolist()] if self.first_eviction else []
