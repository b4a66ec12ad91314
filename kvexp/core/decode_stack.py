"""The fast decode step: attention, observation and eviction of stacked rows, and the bookkeeping of all layers at once.

Position ids of new tokens grow, so every live slot is visible to the newest query: only dead slots need a mask, and
where all rows fill their budgets there are no dead slots. The numbers are `EvictionLayer.forward`'s up to the
order of sums over the query heads of a group; kept sets are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvexp.core import triton_ops
from kvexp.core.attention import AttentionParams, apply_probs_any_width, decode_logits, token_share
from kvexp.core.backends import InPlace
from kvexp.core.budget_shares import union_priority
from kvexp.core.config import CacheConfig
from kvexp.core.decode import (
    BatchedEviction,
    NoisedObserver,
    RaggedProducts,
    SinkRerotation,
    cat_rows,
    group_by_noise,
    pad_last_dim,
)
from kvexp.core.method import NOTHING, EvictionContext, Method
from kvexp.core.observe import pool_sums
from kvexp.core.ranking import float_priority
from kvexp.core.slots import RaggedSlots, Slots

if TYPE_CHECKING:
    from kvexp.core.eviction import EvictionLayer

# Slots of all rows, heads and layers: above it, merged buffers do not fit into a CPU's caches.
MAX_MERGED_SLOTS = 1 << 20
# Layers whose heads have slots of their own are widened to the widest, up to so many times the columns of all: at 1.3
# times, merged bookkeeping took 0.4 of the time of each layer by itself (30 layers, batch 1, 4k tokens on a CPU).
MAX_WIDENING = 2.0
# From so many query heads per kv head on, torch sums them in an order that depends on the number of columns on a CPU:
# beyond NEAR_WIDENING such layers keep their own columns.
ORDERED_GROUP, NEAR_WIDENING = 4, 1.25


class CrossLayerBuffers:
    """Positions, scores and free slots of all layers of the same stacked caches, merged after the first step.

    They are small tensors, so an operation on one layer's costs no more than calling it. Once every layer has taken one
    step by itself, all are merged into common buffers. From then on the first layer of a step writes the new token's
    position into all layers and draws the noise for all of them; the last layer accumulates all scores and selects all
    victims.

    merged: whether the layers' buffers are views of common ones [L, R, H, S] yet.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.reset()

    def __deepcopy__(self, memo: Any) -> CrossLayerBuffers:
        return CrossLayerBuffers(self.layers)  # a copy of the caches has stacks of its own

    def reset(self) -> None:
        """Forget all layers, because the caches or their rows have changed; they merge again after the next step."""
        self.merged = False
        self.out_of_budget: Tensor | None = None  # [L, R, H, S], of heads with slots of their own
        self._stacks: list[StackedLayer] = []  # of the layers registered so far, in order
        self._windows: list[int | None] = []
        self._sums: list[Tensor] = []
        self.drawn: list[tuple[list[Tensor] | None, Tensor]] = []  # by the first layer for all, as of `NoisedObserver`

    def register_layer(self, stack: StackedLayer, window: int | None) -> None:
        """Note that a layer has taken a step by itself; after the last layer, merge.

        window: the layer's sliding window in tokens; None: it has none.
        """
        if len(self._stacks) != stack.index:
            self.reset()
        if len(self._stacks) == stack.index:
            self._stacks.append(stack)
            self._windows.append(window)
        if len(self._stacks) == self.layers > 1:
            if self._can_merge():
                self._merge()
            else:
                self.reset()

    def _can_merge(self) -> bool:
        """Whether all stacks have equal shapes, budgets and windows, and on a CPU are small enough for its caches."""
        first, *others = self._stacks
        positions, width = first.slots.positions, self._width
        if positions.device.type == "cpu" and self.layers * positions[..., :1].numel() * width > MAX_MERGED_SLOTS:
            return False
        ragged = first.eviction.is_ragged
        limit = MAX_WIDENING if first.groups < ORDERED_GROUP else min(MAX_WIDENING, NEAR_WIDENING)
        if ragged and self.layers * width > limit * sum(one.slots.positions.shape[2] for one in self._stacks):
            return False
        alike = len(set(self._windows)) == 1 and not first.pools_scores
        return alike and all(
            one.slots.positions.device == positions.device
            and (ragged or one.slots.positions.shape == positions.shape)
            and first.eviction.same_policy(one.eviction)
            for one in others
        )

    @property
    def _width(self) -> int:
        """Columns of the widest layer."""
        return max(one.slots.positions.shape[2] for one in self._stacks)

    def _merge(self) -> None:
        """Copy positions, scores and free slots of all layers into common buffers; the layers' own become views."""
        stacks = self._stacks
        if stacks[0].eviction.is_ragged:
            width = self._width
            for stack in stacks:
                stack.widen(width)
            self.out_of_budget = torch.stack([stack.eviction.reach for stack in stacks])
        self.positions = torch.stack([stack.slots.positions for stack in stacks])
        self.score = torch.stack([stack.slots.score for stack in stacks])
        self.free_slots = torch.stack([stack.free_slots for stack in stacks])
        for stack, positions, score, free_slots in zip(
            stacks, self.positions, self.score, self.free_slots, strict=True
        ):
            stack.rebind(positions, score, free_slots)
        self.merged = True

    # -- a step of all ------------------------------------------------------------------------------------------------

    def write_token(self, stack: StackedLayer, positions: Tensor) -> Tensor:
        """The slots [R, H, 1] that this layer's new tokens are written to.

        Layer 0 writes the positions [R, 1] of all layers.
        """
        if stack.index == 0:
            self.positions.scatter_(3, self.free_slots, positions[None, :, None].expand(self.free_slots.shape))
            self.score.scatter_(3, self.free_slots, 0.0)
            self._sums = []
        return self.free_slots[stack.index]

    def collect(self, stack: StackedLayer, sums: Tensor, newest: Tensor) -> None:
        """Collect a layer's column sums [n, H, S]; after the last layer, accumulate and select victims for all layers.

        n: the rows that observe, which come first; newest [R, 1, 1]: position id of each row's new token.
        """
        self._sums.append(sums)
        if stack.index + 1 < self.layers:
            return
        eviction = stack.eviction
        eviction.accumulate(self.score, torch.stack(self._sums))
        priority = (
            self.score if eviction.priority_is_score else torch.stack([one.priority(newest) for one in self._stacks])
        )
        victim = eviction.select_victim(self.positions, priority, newest, self._windows[0], self.out_of_budget)
        self.positions.scatter_(3, victim, -1)
        self.free_slots.copy_(victim)
        self._sums = []


def supports_fast_decode(config: CacheConfig, shared: bool) -> bool:
    """Whether steady caches of this configuration can take the fast step; shared: one score spans all layers."""
    method, kind = config.method, type(config.method)
    plain = kind.initial_score is Method.initial_score and kind.after_eviction is Method.after_eviction
    plain = plain and method.needs == NOTHING and config.select.plain and config.keep is None
    # Renumbered, the newest tokens stay as far from the query as they were: only sinks move (see sink_rerotation).
    steady = config.mode == "overwrite" and config.evict_every == 1
    steady = steady and (config.positions == "original" or (method.is_window and not config.is_ragged))
    plain = plain and config.quantization is None  # its slots are not buffers that several caches could share
    return method.evicts and method.evicts_while_decoding and plain and steady and not shared


def can_fast_decode(state: EvictionLayer, query: Tensor, padding: Tensor | None) -> bool:
    """Whether this forward brings one real token to every row, and each row has a free slot for it."""
    return query.shape[2] == 1 and padding is None and state.is_steady


class StackedLayer:
    """One layer of one or several caches, stacked as the R rows of one decode step.

    states: the same layer of every cache, each with a free slot (`can_fast_decode`), sorted by `stack_order`. The slots
    of several caches become views of common buffers, so each cache still holds and reports its own slots. A cache with
    fewer slots than the largest has dead slots behind its own, which no token may take. buffers: what all layers of
    these caches share; None: each layer keeps its own.
    """

    def __init__(self, states: list[EvictionLayer], buffers: CrossLayerBuffers | None = None) -> None:
        self.states, self.index = states, states[0].index
        held = [state.require_slots() for state in states]
        self.slots = held[0] if len(held) == 1 else Slots.stacked(held)
        self.keys = self.slots.kv_buffers[0]
        backends = [state.backend for state in states]
        assert all(isinstance(backend, InPlace) for backend in backends)
        self.backends: list[InPlace] = backends  # type: ignore[assignment]
        self.sizes = [slots.positions.shape[0] for slots in held]
        self.products = RaggedProducts(self.slots) if isinstance(self.slots, RaggedSlots) else None
        self.eviction = BatchedEviction(states, self.sizes, self.backends)
        self.score_specs = [state.score_spec for state in states]
        self._sees_sinks: Tensor | None = None
        self.num_observing = sum(spec is not None for spec in self.score_specs)  # caches, and their rows
        self.num_observed_rows = sum(self.sizes[: self.num_observing])
        self.pools_scores = any(map(_pools_scores, states))
        self.num_plain_rows = sum(
            n for n, spec in zip(self.sizes, self.score_specs, strict=True) if spec is not None and spec.is_plain
        )
        self.noised = group_by_noise(states, self.sizes, self.num_plain_rows)
        renumbered = [state.config.renumbered for state in states]
        assert all(renumbered) or not any(renumbered)
        moves = renumbered[0] and self.eviction.max_sinks
        self.sink_rerotation = SinkRerotation(self.eviction.max_sinks, self.eviction.sinks) if moves else None
        kernels = triton_ops.supported(states) and self.keys.dtype != torch.float64 and self.products is None
        self.fused = triton_ops.FusedDecodeAttention(states, self.sizes, self.keys.device) if kernels else None
        self.buffers = CrossLayerBuffers(1) if buffers is None else buffers
        self.buffers.reset()
        self.groups = 0  # query heads per kv head, as of the last step

    def forward(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Take one new token per row and attend, as `EvictionLayer.forward`: returns [R, H * G, 1, Dv].

        query [R, H * G, 1, D], key [R, H, 1, D], value [R, H, 1, Dv].
        """
        slots, buffers = self.slots, self.buffers
        positions = cat_rows(
            [state.advance(k, None) for state, k in zip(self.states, key.split(self.sizes), strict=True)]
        )
        newest = positions[:, None]  # [R, 1, 1]
        if buffers.merged:
            slots.write(buffers.write_token(self, positions), key, value)
        else:
            free = cat_rows([backend.pop_free() for backend in self.backends])
            slots.write(free, key, value)
            slots.set_metadata(free, positions, torch.zeros((), device=key.device).expand(free.shape))
        query = query.unflatten(1, (key.shape[1], -1))
        self.groups = query.shape[2]
        if self.fused is None:
            out, sums = self._attend(query, positions, params)
        else:
            out, sums = self.fused(query, slots, positions, params)
        sums = sums[: self.num_observed_rows]
        if self.pools_scores:
            each = zip(self.states, self.score_specs, sums.split(self.sizes[: self.num_observing]), strict=False)
            sums = cat_rows([pool_sums(spec, own, state.sequence) for state, spec, own in each if spec is not None])
        if buffers.merged:
            buffers.collect(self, sums, newest)
        else:
            self.eviction.accumulate(slots.score, sums)
            window = params.sliding_window
            free = self.eviction.select_victim(slots.positions, self.priority(newest), newest, window)
            slots.invalidate(free)
            for backend, part in zip(self.backends, free.split(self.sizes), strict=True):
                backend.refill(part)
            buffers.register_layer(self, window)
        for state in self.states:
            state.note_first_eviction()
            state.sequence.layer_done()
        return out.flatten(1, 2)

    @property
    def free_slots(self) -> Tensor:
        """The free slot [R, H, 1] that the next token of each row is written to."""
        return cat_rows([backend.free_slots for backend in self.backends if backend.free_slots is not None])

    def hold_inputs(self, positions: Tensor) -> None:
        """Hold what the step in progress takes from schedules of the host at fixed addresses (`NoisedObserver`).

        positions [R, 1]: of the new tokens. Where buffers are merged, the first layer's inputs are for all layers.
        """
        for part in self._scheduled:
            part.hold_inputs(positions)

    def release_inputs(self) -> None:
        """End the step whose inputs were held."""
        for part in self._scheduled:
            part.release_inputs()

    @property
    def sees_sinks(self) -> Tensor:
        """Rows [R, 1, 1, 1, 1] whose methods see what attention sinks leave to the slots (score.sink=applied)."""
        if self._sees_sinks is None:
            each = zip(self.states, self.sizes, strict=True)
            applied = [state.config.score_sink == "applied" for state, size in each for _ in range(size)]
            self._sees_sinks = torch.tensor(applied, device=self.keys.device)[:, None, None, None, None]
        return self._sees_sinks

    @property
    def _scheduled(self) -> Sequence[NoisedObserver | triton_ops.FusedDecodeAttention]:
        """What of this layer takes temperatures and noise from a schedule."""
        if self.fused is not None:
            return [self.fused]
        return [] if self.buffers.merged and self.index else self.noised

    def widen(self, columns: int) -> None:
        """Give the slots of a cache whose heads have slots of their own so many columns; new ones are dead."""
        assert isinstance(self.slots, RaggedSlots)
        self.slots.widen(columns)
        self.eviction.widen(columns)

    def rebind(self, positions: Tensor, score: Tensor, free: Tensor) -> None:
        """Use these buffers, which hold the same numbers: positions, score [R, H, S]; free [R, H, 1]."""
        self.slots.positions, self.slots.score = positions, score
        parts = [x.split(self.sizes) for x in (positions, score, free)]
        for state, backend, slot_positions, own, spot in zip(self.states, self.backends, *parts, strict=True):
            slots = state.require_slots()
            count = slots.positions.shape[2]
            slots.positions, slots.score = slot_positions[:, :, :count], own[:, :, :count]
            backend.set_free(spot)

    def _attend(self, query: Tensor, positions: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Output [R, H, G, 1, Dv], and column sums [n, H, S] of the n rows that are observed, which come first.

        query [R, H, G, 1, D]; positions [R, 1]: of the new tokens.
        """
        slots, newest = self.slots, positions[:, None]
        if self.products is None:
            x = decode_logits(query, slots.keys, slots.positions, newest, params)
        else:
            x = self.products.logits(query, newest, params)
        offset: Tensor | None = None
        if (rotation := self.sink_rerotation) is not None:
            offset = rotation.offset(slots.positions, newest, no_padding_slots=self.eviction.no_padding_slots)
            rotation.apply(x, query, slots, newest, offset, params)
        dead = self._invisible_mask(newest, offset, params)
        if dead is not None:
            x.masked_fill_(dead[:, :, None, None], -torch.inf)
        probabilities = torch.softmax(x, dim=-1) if self.products is None else self.products.softmax(x)
        observed = probabilities
        if params.sinks is not None:
            share = token_share(x, params.sinks)
            observed = probabilities * torch.where(self.sees_sinks, share, 1.0)
            probabilities *= share
        drawn = self._noise_and_tau(positions, query.shape[2])
        tempered = (part.observed_probs(x[part.rows], *its) for part, its in zip(self.noised, drawn, strict=True))
        seen = cat_rows([part for part in (observed[: self.num_plain_rows], *tempered) if len(part)] or [observed[:0]])
        sums = seen[:, :, 0, 0] if seen.shape[2] == 1 else seen[..., 0, :].sum(2)
        if self.products is not None:
            return self.products.output(), sums
        return apply_probs_any_width(probabilities, slots.values), sums

    def _noise_and_tau(self, positions: Tensor, groups: int) -> list[tuple[Tensor | None, Tensor]]:
        """Noise (None: none) and temperature of every group of rows in `noised`, at this step.

        positions [R, 1]: of the new tokens; groups: query heads per kv head. Where buffers are merged, the first layer
        draws for all.
        """
        buffers = self.buffers
        slot_positions = buffers.positions if buffers.merged else self.slots.positions[None]
        layers = range(buffers.layers) if buffers.merged else [self.index]
        if not buffers.merged or self.index == 0:
            buffers.drawn = [part.noise_and_tau(positions, slot_positions, layers, groups) for part in self.noised]
        place = self.index if buffers.merged else 0
        return [(None if noise is None else noise[place], tau) for noise, tau in buffers.drawn]

    def _invisible_mask(self, newest: Tensor, offset: Tensor | None, params: AttentionParams) -> Tensor | None:
        """Slots [R, H, S] bool that the new token does not see; None: it sees all.

        newest [R, 1, 1]: position id of the new token; offset [R, 1, 1]: of `SinkRerotation`, None: not renumbered.
        """
        slot_positions = self.slots.positions
        dead = self.eviction.out_of_budget if self.eviction.at_budget else slot_positions < 0
        if self.products is not None and self.eviction.at_budget:
            dead = None  # the products leave out what lies behind a head's own slots
        if params.sliding_window is None:
            return dead
        past = slot_positions <= newest - params.sliding_window
        if self.sink_rerotation is not None and offset is not None:
            past &= ~(
                self.sink_rerotation.is_sink(slot_positions)
                & (slot_positions > newest + offset - params.sliding_window)
            )
        return past if dead is None else past | dead

    def priority(self, newest: Tensor) -> Tensor:
        """The priority [R, H, S] of every slot, by the method of each row's cache; newest [R, 1, 1]."""
        if self.eviction.priority_is_score:
            return self.slots.score
        priorities = []
        for state, last in zip(self.states, newest[:, 0, 0].split(self.sizes), strict=True):
            allowed, slots = state.layer_slots, state.require_slots()
            assert allowed is not None
            seeds = state.sequence.seeds.to(last.device)
            ctx = EvictionContext(
                *(slots, state.index, allowed.slots_t, allowed.recent_t, last, seeds),
                compares_heads=state.config.compares_heads,
                nan_flag=state.nan_flag,
            )
            priority = allowed.by_stream(float_priority(state.config.method, ctx), ctx.positions)
            if state.config.is_union:
                priority = union_priority(priority, logarithmic=state.config.method.priority_kind == "log_share")
            priorities.append(priority)
        return cat_rows([pad_last_dim(priority, max(self.eviction.capacities), -torch.inf) for priority in priorities])


def _pools_scores(state: EvictionLayer) -> bool:
    """Whether a cache's score sums up the attention of several heads or batch rows."""
    spec = state.score_spec
    if spec is None:
        return False
    return spec.pool_heads or spec.batch == "sum_all" or (spec.batch == "per_sample" and state.sequence.num_beams > 1)
