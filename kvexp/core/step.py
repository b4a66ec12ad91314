"""One decode step of full caches: what `LayerState.forward` does in general, in as few operations as possible.

Positions of new tokens grow, so every live slot is visible to the newest query: only dead slots need a mask, and where
all rows fill their budgets there are none. The numbers are those of the general path up to the order of sums over the
query heads of a group; kept sets are the same (tests compare both, and both with the two slower modes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core import triton_step
from kvexp.core.attend import Geometry, attend_with, newest_logits
from kvexp.core.evict import Overwrite
from kvexp.core.method import Method, Moment
from kvexp.core.plan import Plan
from kvexp.core.score import pooled
from kvexp.core.select import LAST
from kvexp.core.sinks import Moved
from kvexp.core.slots import Slots
from kvexp.core.tempered import runs

if TYPE_CHECKING:
    from kvexp.core.layer import LayerState


def allowed(plan: Plan, shared: bool) -> bool:
    """Whether caches of this plan come to a state in which every step is the same."""
    method, kind = plan.method, type(plan.method)
    plain = kind.birth is Method.birth and kind.after_eviction is Method.after_eviction
    # Renumbered, the newest tokens stay as far from the query as they were: only sinks move (kvexp.core.sinks).
    steady = plan.mode == "overwrite" and plan.cadence.every == 1
    steady = steady and (plan.positions == "original" or method.keeps_newest)
    return method.evicts and method.evicts_while_decoding and plain and steady and not shared


def ready(state: LayerState, query: Tensor, padding: Tensor | None) -> bool:
    """Whether this forward brings one real token to every row, and each has a free slot for it."""
    return query.shape[2] == 1 and padding is None and state.steady


class Stack:
    """One layer of one or several caches in the steady state of `ready`, in the order of `turn`; rows R: those of all.

    The slots of several become parts of common buffers, so each cache goes on holding and reporting its own; behind
    the slots of a cache that has fewer than the largest are dead ones that nobody may take.
    """

    def __init__(self, states: list[LayerState]) -> None:
        self.states = states
        held = [state.held() for state in states]
        self.slots = held[0] if len(held) == 1 else Slots.stacked(held)
        self.keys = self.slots.keys
        modes = [state.mode for state in states]
        assert all(isinstance(mode, Overwrite) for mode in modes)
        self.modes: list[Overwrite] = modes  # type: ignore[assignment]
        self.sizes = [slots.keys.shape[0] for slots in held]
        self.places = [slots.keys.shape[2] for slots in held]
        self.dense = all(mode.dense for mode in self.modes) and len(set(self.places)) == 1
        self.closed = None if self.dense else self._closed()
        self.full = all(mode.full for mode in self.modes)  # then what is dead never changes
        self.recent = _joined([state.quota.recent_t for state in states if state.quota is not None])[:, None, None]
        self.views = [state.view for state in states]
        self.observing = sum(view is not None for view in self.views)  # caches, and their rows
        self.observed = sum(self.sizes[: self.observing])
        self.pools = any(map(_pools, states))
        self.plain = sum(n for n, view in zip(self.sizes, self.views, strict=True) if view is not None and view.plain)
        self.tempered = runs(states, self.sizes, self.plain)
        self.decay = self._decay()
        sinks = [state.plan.method.sinks for state in states]
        self.sinks: int | Tensor = sinks[0] if len(set(sinks)) == 1 else self._by_row([float(n) for n in sinks])
        self.newest_only = all(state.plan.method.keeps_newest for state in states)
        renumbered = [state.plan.positions == "renumbered" for state in states]
        assert all(renumbered) or not any(renumbered)
        self.moved = Moved(max(sinks), self.sinks) if renumbered[0] and any(sinks) else None
        kernels = triton_step.able(states) and self.keys.dtype != torch.float64
        self.fused = triton_step.Fused(states, self.sizes, self.keys.device) if kernels else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, geometry: Geometry) -> Tensor:
        """As `LayerState.forward`; query [R, H * G, 1, D] -> [R, H * G, 1, Dv]."""
        slots = self.slots
        free = _joined([mode.take() for mode in self.modes])
        parts = [state.join(k, None) for state, k in zip(self.states, key.split(self.sizes), strict=True)]
        positions = _joined(parts)
        slots.write(free, key, value, positions, torch.zeros((), device=key.device).expand(free.shape))
        newest = positions[:, None]  # [R, 1, 1]
        query = query.unflatten(1, (key.shape[1], -1))
        if self.fused is None:
            out, columns = self._attend(query, positions, geometry)
        else:
            out, columns = self.fused(query, slots, positions, geometry)
        self._accumulate(columns)
        self._free(newest, geometry)
        for state in self.states:
            state.note_losses()
            state.timeline.arrive()
        return out.flatten(1, 2)

    def _attend(self, query: Tensor, positions: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Output [R, H, G, 1, Dv] and column sums of the rows that are observed, the first ones."""
        slots, newest = self.slots, positions[:, None]
        x = newest_logits(query, slots.keys, slots.positions, newest, geometry)
        by = None if self.moved is None else self.moved.by(slots.positions, newest, dense=self.dense)
        if self.moved is not None and by is not None:
            self.moved.correct(x, query, slots, newest, by, geometry)
        dead = self._dead(newest, by, geometry)
        if dead is not None:
            x.masked_fill_(dead[:, :, None, None], -torch.inf)
        probabilities = torch.softmax(x, dim=-1)
        where = slots.positions
        tempered = (part.observed(x[part.rows], positions[part.rows], where[part.rows]) for part in self.tempered)
        seen = _joined([part for part in (probabilities[: self.plain], *tempered) if len(part)] or [probabilities[:0]])
        columns = seen[:, :, 0, 0] if seen.shape[2] == 1 else seen[..., 0, :].sum(2)
        return attend_with(probabilities, slots.values), columns

    def _dead(self, newest: Tensor, by: Tensor | None, geometry: Geometry) -> Tensor | None:
        """[R, H, S] bool: slots that are not seen; None: there are none. by: how far sinks have moved."""
        where = self.slots.positions
        dead = self.closed if self.full else where < 0
        if geometry.sliding_window is None:
            return dead
        past = where <= newest - geometry.sliding_window
        if self.moved is not None and by is not None:
            past &= ~(self.moved.among(where) & (where > newest + by - geometry.sliding_window))
        return past if dead is None else past | dead

    def _accumulate(self, columns: Tensor) -> None:
        """Add what each cache observes of its rows, the first ones of columns [.., H, S], to its score."""
        columns = columns[: self.observed]
        if not len(columns):
            return
        if self.pools:
            each = zip(self.states, self.views, columns.split(self.sizes[: self.observing]), strict=False)
            columns = _joined([pooled(view, own, state.timeline) for state, view, own in each if view is not None])
        if self.decay is not None:
            self.slots.score.mul_(self.decay)
        self.slots.score[: len(columns)] += columns

    def _free(self, newest: Tensor, geometry: Geometry) -> None:
        """Free the slot of the lowest rank for the next token: empty ones first, among equals the oldest."""
        where = self.slots.positions
        if self.newest_only:
            self._give(where.masked_fill(self._kept(where), LAST).argmin(dim=-1, keepdim=True))
            return
        rank = self._rank(newest)
        if geometry.sliding_window is not None:
            rank = rank.masked_fill(where <= newest + 1 - geometry.sliding_window, -torch.inf)
        guard = where > newest - self.recent
        if isinstance(self.sinks, Tensor) or self.sinks:
            guard = guard | (where < self.sinks)
        if self.closed is not None:
            if not self.full:
                rank = rank.masked_fill(where < 0, -torch.inf)
                guard = guard & (where >= 0)
            guard = guard | self.closed
        rank = rank.masked_fill(guard, torch.inf)
        lowest = rank == rank.amin(dim=-1, keepdim=True)
        self._give(where.masked_fill(~lowest, LAST).argmin(dim=-1, keepdim=True))

    def _kept(self, where: Tensor) -> Tensor:
        """[R, H, S] bool, where all but the newest are sinks: these, and the slots that no token may take."""
        sinks = where < self.sinks if self.full else (where < self.sinks) & (where >= 0)
        return sinks if self.closed is None else sinks | self.closed

    def _give(self, free: Tensor) -> None:
        """Free the slots [R, H, 1] for the next token."""
        self.slots.kill(free)
        for mode, part in zip(self.modes, free.split(self.sizes), strict=True):
            mode.give(part)

    def _rank(self, newest: Tensor) -> Tensor:
        if all(type(state.plan.method).rank is Method.rank for state in self.states):
            return self.slots.score
        ranks = []
        for state, last in zip(self.states, newest[:, 0, 0].split(self.sizes), strict=True):
            quota, slots = state.quota, state.held()
            assert quota is not None
            seeds = state.timeline.seeds.to(last.device)
            now = Moment(slots, state.index, quota.slots_t, quota.recent_t, last, seeds)
            ranks.append(state.plan.method.rank(now).to(torch.float32))
        return _joined([_padded(rank, max(self.places), -torch.inf) for rank in ranks])

    def _closed(self) -> Tensor:
        """[R, 1, S] bool: slots that no token may take."""
        most = max(self.places)
        return _joined([_padded(mode.closed, most, True) for mode in self.modes if mode.closed is not None])

    def _decay(self) -> Tensor | float | None:
        decays = [1.0 if view is None else view.decay for view in self.views]
        if all(decay == 1 for decay in decays):
            return None
        return decays[0] if len(set(decays)) == 1 else self._by_row(decays)

    def _by_row(self, values: list[float]) -> Tensor:
        """[R, 1, 1] float32: one value per cache."""
        each = [v for value, size in zip(values, self.sizes, strict=True) for v in [value] * size]
        return torch.tensor(each, device=self.slots.keys.device)[:, None, None]


def _pools(state: LayerState) -> bool:
    """Whether a column sum is more than that of its own row and head."""
    view = state.view
    if view is None:
        return False
    return view.pool_heads or view.batch == "sum_all" or (view.batch == "per_sample" and state.timeline.num_beams > 1)


def _padded(x: Tensor, width: int, value: float) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]), value=value)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
