"""One decode step of full caches: what `EvictionLayer.forward` does in general, in as few operations as possible.

Positions of new tokens grow, so every live slot is visible to the newest query: only dead slots need a mask, and where
all rows fill their budgets there are none. The numbers are those of the general path up to the order of sums over the
query heads of a group; kept sets are the same (tests compare both, and both with the two slower modes).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams, attend_with, newest_logits
from kvexp.core.cache_config import CacheConfig
from kvexp.core.decode import triton_decode
from kvexp.core.decode.bookkeeping import BatchedEviction, joined, padded
from kvexp.core.decode.cross_layer import CrossLayerBuffers
from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.decode.noised_attention import ahead, runs
from kvexp.core.decode.sink_rerotation import SinkRerotation
from kvexp.core.eviction_backend import InPlace
from kvexp.core.method import EvictionContext, Method
from kvexp.core.observe.accumulate import pooled
from kvexp.core.slots import Slots


def allowed(config: CacheConfig, shared: bool) -> bool:
    """Whether caches of this configuration come to a state in which every step is the same."""
    method, kind = config.method, type(config.method)
    plain = kind.birth is Method.birth and kind.after_eviction is Method.after_eviction
    # Renumbered, the newest tokens stay as far from the query as they were: only sinks move (see sink_rerotation).
    steady = config.mode == "overwrite" and config.evict_every == 1
    steady = steady and (config.positions == "original" or method.keeps_newest)
    return method.evicts and method.evicts_while_decoding and plain and steady and not shared


def ready(state: DecodableLayer, query: Tensor, padding: Tensor | None) -> bool:
    """Whether this forward brings one real token to every row, and each has a free slot for it."""
    return query.shape[2] == 1 and padding is None and state.steady


class StackedLayer:
    """One layer of one or several caches in the steady state of `ready`, in the order of `turn`; rows R: those of all.

    The slots of several become parts of common buffers, so each cache goes on holding and reporting its own; behind
    the slots of a cache that has fewer than the largest are dead ones that nobody may take.
    """

    def __init__(self, states: list[DecodableLayer], ladder: CrossLayerBuffers | None = None) -> None:
        self.states, self.index = states, states[0].index
        held = [state.held() for state in states]
        self.slots = held[0] if len(held) == 1 else Slots.stacked(held)
        self.keys = self.slots.keys
        modes = [state.mode for state in states]
        assert all(isinstance(mode, InPlace) for mode in modes)
        self.modes: list[InPlace] = modes  # type: ignore[assignment]
        self.sizes = [slots.keys.shape[0] for slots in held]
        self.books = BatchedEviction(states, self.sizes, self.modes)
        self.views = [state.view for state in states]
        self.observing = sum(view is not None for view in self.views)  # caches, and their rows
        self.observed = sum(self.sizes[: self.observing])
        self.pools = any(map(_pools, states))
        self.plain = sum(n for n, view in zip(self.sizes, self.views, strict=True) if view is not None and view.plain)
        self.tempered = runs(states, self.sizes, self.plain)
        renumbered = [state.config.renumbered for state in states]
        assert all(renumbered) or not any(renumbered)
        moves = renumbered[0] and self.books.most_sinks
        self.moved = SinkRerotation(self.books.most_sinks, self.books.sinks) if moves else None
        kernels = triton_decode.able(states) and self.keys.dtype != torch.float64
        self.fused = triton_decode.FusedDecodeAttention(states, self.sizes, self.keys.device) if kernels else None
        self.ladder = CrossLayerBuffers(1) if ladder is None else ladder
        self.ladder.clear()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams) -> Tensor:
        """As `EvictionLayer.forward`; query [R, H * G, 1, D] -> [R, H * G, 1, Dv]."""
        slots, ladder = self.slots, self.ladder
        positions = joined([state.join(k, None) for state, k in zip(self.states, key.split(self.sizes), strict=True)])
        newest = positions[:, None]  # [R, 1, 1]
        if ladder.joint:
            slots.write(ladder.enter(self, positions), key, value)
        else:
            free = joined([mode.take() for mode in self.modes])
            slots.write(free, key, value)
            slots.enter(free, positions, torch.zeros((), device=key.device).expand(free.shape))
        query = query.unflatten(1, (key.shape[1], -1))
        if self.fused is None:
            out, columns = self._attend(query, positions, geometry)
        else:
            out, columns = self.fused(query, slots, positions, geometry)
        columns = self._pooled(columns[: self.observed])
        if ladder.joint:
            ladder.attended(self, columns, newest)
        else:
            self.books.accumulate(slots.score, columns)
            self._free(newest, geometry.sliding_window)
            ladder.stepped(self, geometry.sliding_window)
        for state in self.states:
            state.note_losses()
            state.timeline.arrive()
        return out.flatten(1, 2)

    @property
    def free(self) -> Tensor:
        """[R, H, 1]: the slots for the next newcomers."""
        return joined([mode.free for mode in self.modes if mode.free is not None])

    def move(self, positions: Tensor, score: Tensor, free: Tensor) -> None:
        """Go on in these buffers, which hold the same: positions and score [R, H, S], free [R, H, 1]."""
        self.slots.positions, self.slots.score = positions, score
        parts = [x.split(self.sizes) for x in (positions, score, free)]
        for state, mode, where, own, spot in zip(self.states, self.modes, *parts, strict=True):
            slots = state.held()
            count = slots.keys.shape[2]
            slots.positions, slots.score = where[:, :, :count], own[:, :, :count]
            mode.give(spot)

    def _attend(self, query: Tensor, positions: Tensor, geometry: AttentionParams) -> tuple[Tensor, Tensor]:
        """Output [R, H, G, 1, Dv] and column sums of the rows that are observed, the first ones."""
        slots, newest = self.slots, positions[:, None]
        x = newest_logits(query, slots.keys, slots.positions, newest, geometry)
        by = None if self.moved is None else self.moved.by(slots.positions, newest, dense=self.books.dense)
        if self.moved is not None and by is not None:
            self.moved.correct(x, query, slots, newest, by, geometry)
        dead = self._dead(newest, by, geometry)
        if dead is not None:
            x.masked_fill_(dead[:, :, None, None], -torch.inf)
        probabilities = torch.softmax(x, dim=-1)
        drawn = self._ahead(positions, query.shape[2]) if self.tempered else []
        tempered = (part.observed(x[part.rows], *its) for part, its in zip(self.tempered, drawn, strict=True))
        seen = joined([part for part in (probabilities[: self.plain], *tempered) if len(part)] or [probabilities[:0]])
        columns = seen[:, :, 0, 0] if seen.shape[2] == 1 else seen[..., 0, :].sum(2)
        return attend_with(probabilities, slots.values), columns

    def _ahead(self, positions: Tensor, groups: int) -> list[tuple[Tensor | None, Tensor]]:
        """Noise and temperature of every run of `tempered`."""
        if self.ladder.joint:
            drawn, place = self.ladder.ahead(self, positions, groups), self.index
        else:
            drawn, place = ahead(self.tempered, positions, self.slots.positions[None], [self.index], groups), 0
        return [(None if zeta is None else zeta[place], tau) for zeta, tau in drawn]

    def _dead(self, newest: Tensor, by: Tensor | None, geometry: AttentionParams) -> Tensor | None:
        """[R, H, S] bool: slots that are not seen; None: there are none. by: how far sinks have moved."""
        where = self.slots.positions
        dead = self.books.closed if self.books.full else where < 0
        if geometry.sliding_window is None:
            return dead
        past = where <= newest - geometry.sliding_window
        if self.moved is not None and by is not None:
            past &= ~(self.moved.among(where) & (where > newest + by - geometry.sliding_window))
        return past if dead is None else past | dead

    def _pooled(self, columns: Tensor) -> Tensor:
        """What each cache observes of its rows, the first ones, as its own score takes it."""
        if not self.pools:
            return columns
        each = zip(self.states, self.views, columns.split(self.sizes[: self.observing]), strict=False)
        return joined([pooled(view, own, state.timeline) for state, view, own in each if view is not None])

    def _free(self, newest: Tensor, window: int | None) -> None:
        """Free the slot of the lowest rank for the next token."""
        slots = self.slots
        free = self.books.lowest(slots.positions, self.rank(newest), newest, window)
        slots.kill(free)
        for mode, part in zip(self.modes, free.split(self.sizes), strict=True):
            mode.give(part)

    def rank(self, newest: Tensor) -> Tensor:
        """[R, H, S], by each cache's method."""
        if self.books.by_score:
            return self.slots.score
        ranks = []
        for state, last in zip(self.states, newest[:, 0, 0].split(self.sizes), strict=True):
            quota, slots = state.quota, state.held()
            assert quota is not None
            seeds = state.timeline.seeds.to(last.device)
            now = EvictionContext(slots, state.index, quota.slots_t, quota.recent_t, last, seeds)
            ranks.append(state.config.method.rank(now).to(torch.float32))
        return joined([padded(rank, max(self.books.places), -torch.inf) for rank in ranks])


def _pools(state: DecodableLayer) -> bool:
    """Whether a column sum is more than that of its own row and head."""
    view = state.view
    if view is None:
        return False
    return view.pool_heads or view.batch == "sum_all" or (view.batch == "per_sample" and state.timeline.num_beams > 1)
