"""The part of a fast decode step that is not attention: accumulate scores and choose the slot that is overwritten next.

Every row is one of a steady cache (see `kvexp.core.decode`). Tensors are [R, H, S] for one layer's stacked rows, or [L,
R, H, S] for several layers whose rows have the same budgets.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.eviction_backend import InPlace
from kvexp.core.select import INT64_MAX


class BatchedEviction:
    """Accumulates scores and selects the slot to evict, for the stacked rows of one or several caches.

    states: one layer of each cache; sizes: batch rows of each cache, R in all; backends: of the same caches.
    capacities: slots allocated by each cache. out_of_budget [R, 1 or H, S] bool: slots that a row's or head's budget
    does not reach, None where there are none. at_budget: every row holds all tokens its budget allows, so which slots
    are dead never changes. no_padding_slots: every row uses every slot. has_recent: some row protects newest tokens.
    is_window, priority_is_score: hold for the methods of all caches.
    """

    def __init__(self, states: list[DecodableLayer], sizes: list[int], backends: list[InPlace]) -> None:
        self.states, self.sizes, self._backends = states, sizes, backends
        self.capacities = [state.require_slots().positions.shape[2] for state in states]
        self.no_padding_slots = all(backend.no_padding_slots for backend in backends) and len(set(self.capacities)) == 1
        self.at_budget = all(backend.at_budget for backend in backends)  # then what is dead never changes
        self.out_of_budget = None if self.no_padding_slots else self.reach
        self.is_ragged = any(state.config.is_ragged for state in states)
        budgets = [state.resolved_budget for state in states if state.resolved_budget is not None]
        self.recent = cat_rows([resolved.recent_by_head for resolved in budgets])[..., None]
        self.has_recent = any(recent for resolved in budgets for recent in resolved.recent)
        sinks = [state.config.method.sinks for state in states]
        self.sinks: int | Tensor = sinks[0] if len(set(sinks)) == 1 else self._by_row([float(n) for n in sinks])
        self.max_sinks = max(sinks)
        streaming = budgets[0].streaming  # of a stack of its own
        if streaming is not None:
            self.sinks = torch.where(streaming.heads, streaming.sinks, sinks[0])[..., None]
            self.max_sinks = max(self.max_sinks, streaming.sinks)
        self.is_window = all(state.config.method.is_window for state in states)
        self.priority_is_score = all(
            state.config.method.priority_is_score and not state.config.is_union for state in states
        )
        self.priority_is_score &= streaming is None
        decays = [1.0 if state.score_spec is None else state.score_spec.decay for state in states]
        uniform = decays[0] if len(set(decays)) == 1 else None
        self.decay = None if uniform == 1 else self._by_row(decays) if uniform is None else uniform

    @property
    def reach(self) -> Tensor:
        """[R, 1 or H, S] bool: as `out_of_budget`, all False where every row uses every slot."""
        each = [backend.out_of_budget for backend in self._backends if backend.out_of_budget is not None]
        return cat_rows([pad_last_dim(one, max(self.capacities), True) for one in each])

    def widen(self, columns: int) -> None:
        """Count so many columns, of which new ones are out of budget, for a stack of one cache."""
        self.out_of_budget, self.capacities = pad_last_dim(self.reach, columns, True), [columns]
        self.no_padding_slots = False
        for backend in self._backends:
            backend.out_of_budget, backend.no_padding_slots = self.out_of_budget, False

    def same_policy(self, other: BatchedEviction) -> bool:
        """Whether another layer's stack of the same caches has the same batch sizes, budgets and slots, row by row.

        Of heads with slots of their own it asks that they hold as many as they may, and that the same heads stream.
        """
        if self.is_ragged or other.is_ragged:
            alike = self.sizes == other.sizes and self.at_budget and other.at_budget
            return alike and all(
                _limits(a)[:3] == _limits(b)[:3] and _same_heads_stream(a, b)
                for a, b in zip(self.states, other.states, strict=True)
            )
        same = (self.sizes, self.capacities, self.no_padding_slots, self.at_budget) == (
            other.sizes,
            other.capacities,
            other.no_padding_slots,
            other.at_budget,
        )
        return same and all(_limits(a) == _limits(b) for a, b in zip(self.states, other.states, strict=True))

    def accumulate(self, score: Tensor, sums: Tensor) -> None:
        """Decay the score [.., R, H, S] and add column sums [.., n, H, S] of the first n rows, in place.

        n: the rows of caches that observe attention, which come first in a stack (`stack_order`); it may be 0.
        """
        if not sums.shape[-3]:
            return
        if self.decay is not None:
            score.mul_(self.decay)
        score[..., : sums.shape[-3], :, :] += sums

    def select_victim(
        self,
        positions: Tensor,
        priority: Tensor,
        newest: Tensor,
        window: int | None,
        out_of_budget: Tensor | None = None,
    ) -> Tensor:
        """The slot [.., R, H, 1] to evict: the lowest priority that is not protected, among equals the oldest token.

        positions, priority [.., R, H, S]; dead slots count as lower than any live one. newest [R, 1, 1]: position id of
        the newest token; window: the model's sliding window, behind which a slot is evicted first. out_of_budget: of
        several layers [L, R, H, S]; None: that of this stack.
        """
        out_of_budget = self.out_of_budget if out_of_budget is None else out_of_budget
        if self.is_window:
            kept = self._protected(positions, out_of_budget)
            return positions.masked_fill(kept, INT64_MAX).argmin(dim=-1, keepdim=True)
        if window is not None:
            priority = priority.masked_fill(positions <= newest + 1 - window, -torch.inf)
        protected = positions > newest - self.recent if self.has_recent else None
        if self.max_sinks:
            sinks = positions < self.sinks
            protected = sinks if protected is None else protected | sinks
        if out_of_budget is not None:
            if not self.at_budget:
                priority = priority.masked_fill(positions < 0, -torch.inf)
                protected = None if protected is None else protected & (positions >= 0)
            protected = out_of_budget if protected is None else protected | out_of_budget
        if protected is not None:
            priority = priority.masked_fill(protected, torch.inf)
        higher = priority != priority.amin(dim=-1, keepdim=True)
        return positions.masked_fill(higher, INT64_MAX).argmin(dim=-1, keepdim=True)

    def _protected(self, positions: Tensor, out_of_budget: Tensor | None) -> Tensor:
        """Slots [.., R, H, S] bool that a pure window never evicts: sinks, and slots out of budget.

        Its newest tokens need no protection, since the oldest token is evicted.
        """
        sinks = positions < self.sinks if self.at_budget else (positions < self.sinks) & (positions >= 0)
        return sinks if out_of_budget is None else sinks | out_of_budget

    def _by_row(self, values: list[float]) -> Tensor:
        """One value per cache, repeated for each of its rows: [R, 1, 1] float32."""
        each = [v for value, size in zip(values, self.sizes, strict=True) for v in [value] * size]
        return torch.tensor(each, device=self.states[0].require_slots().positions.device)[:, None, None]


def _limits(state: DecodableLayer) -> tuple[list[int], list[int], list[int], list[list[int]] | None]:
    """Budget, slots kept and recent window of a cache's rows, and slots kept by head, as lists of integers."""
    resolved = state.resolved_budget
    assert resolved is not None
    return resolved.slots, resolved.keep, resolved.recent, resolved.head_keep


def _same_heads_stream(state: DecodableLayer, other: DecodableLayer) -> bool:
    """Whether the same kv heads of a cache's two layers protect sinks and newest tokens of their own, if any do."""
    one, two = (None if layer.resolved_budget is None else layer.resolved_budget.streaming for layer in (state, other))
    return one is two is None or (one is not None and two is not None and torch.equal(one.heads, two.heads))


def pad_last_dim(x: Tensor, width: int, value: float) -> Tensor:
    """x [.., S] padded behind with `value` to [.., width]."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]), value=value)


def cat_rows(parts: list[Tensor]) -> Tensor:
    """Tensors concatenated along the rows; a single tensor is returned as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
