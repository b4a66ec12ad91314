"""The decode step: attention, observation and eviction of stacked rows, and the bookkeeping of all layers at once.

Every row knows the slot that its next token takes: one that an eviction has freed or, of a cache that grows, the first
behind those in use. Position ids of new tokens grow, so every live slot is visible to the newest query: only dead slots
need a mask, and where all rows fill their budgets there are none. `EvictionLayer.store`, `attend` and `update` keep the
same slots; numbers are equal up to the order of sums over the query heads of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvexp.core import triton_ops
from kvexp.core.attention import AttentionParams, apply_probs_any_width, decode_logits, token_share
from kvexp.core.backends import InPlace, growing_width, stackable_width
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
from kvexp.core.method import NOTHING
from kvexp.core.observe import pool_sums
from kvexp.core.slots import RaggedSlots, Slots

if TYPE_CHECKING:
    from kvexp.core.eviction import DueEviction, EvictionLayer

# Slots of all rows, heads and layers: above it, merged buffers do not fit into a CPU's caches.
MAX_MERGED_SLOTS = 1 << 22
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
        self.newest = torch.empty(0)  # [R, 1]: positions of the new tokens, by the first layer for all
        self.dead = torch.empty(0)  # [L, R, H, S] bool: slots without a token, by the first layer for all
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
        ragged = first.products is not None
        limit = MAX_WIDENING if first.groups < ORDERED_GROUP else min(MAX_WIDENING, NEAR_WIDENING)
        if ragged and self.layers * width > limit * sum(stack.slots.positions.shape[2] for stack in self._stacks):
            return False
        return len(set(self._windows)) == 1 and all(
            other.slots.positions.device == positions.device
            and (ragged or other.slots.positions.shape == positions.shape)
            and first.same_policy(other)
            for other in others
        )

    @property
    def _width(self) -> int:
        """Columns of the widest layer."""
        return max(stack.slots.positions.shape[2] for stack in self._stacks)

    def _merge(self) -> None:
        """Copy positions, scores and free slots of all layers into common buffers; the layers' own become views."""
        stacks = self._stacks
        if stacks[0].products is not None:
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

    def write_tokens(self, positions: Tensor) -> None:
        """Write the positions [R, 1] of the new tokens into their slots of all layers."""
        self.newest = positions
        next_slots = self.free_slots[..., :1]
        self.positions.scatter_(3, next_slots, positions[None, :, None].expand(next_slots.shape))
        self.score.scatter_(3, next_slots, 0.0)
        self._sums = []

    def collect(self, stack: StackedLayer, sums: Tensor, newest: Tensor) -> None:
        """Collect a layer's column sums [n, H, S]; after the last layer, accumulate and select victims for all layers.

        n: the rows that observe, which come first; newest [R, 1, 1]: position id of each row's new token.
        """
        self._sums.append(sums)
        if stack.index + 1 < self.layers:
            return
        rows, eviction = stack.evicting_rows, stack.eviction
        if stack.backends:
            columns = stack.evicting_columns
            positions, score = (x[:, rows, :, :columns] for x in (self.positions, self.score))
            evicted = eviction.advance(
                *(positions, score, self.free_slots[:, rows], torch.stack(self._sums)),
                lambda: torch.stack([layer.priority(newest) for layer in self._stacks]),
                *(newest[rows], None if stack.is_ranked else self._windows[0], self.out_of_budget),
            )
            for layer in self._stacks if evicted else ():
                layer.change_scores(newest)
        if stack.growing:
            self.free_slots[:, : rows.start] += 1
        self._sums = []


def takes_step(config: CacheConfig) -> bool:
    """Whether caches of this configuration take the decode step, once each row has a slot for its next token.

    Others compute it as they compute prompts: simulations, caches that copy what they keep or renumber it, quantised
    slots, and slots of one layer that depend on another's.
    """
    method, spec = config.method, config.score_spec
    # Renumbered, the newest tokens stay as far from the query as they were: only sinks move (see `SinkRerotation`).
    in_place = config.mode == "overwrite" and config.quantization is None
    in_place &= config.positions == "original" or (method.is_window and config.plain_choice and not config.is_ragged)
    if config.only_grows:
        return in_place and config.positions == "original" and not config.is_ragged
    by_layer = not (config.joins_layers or (spec is not None and spec.across_layers))
    return method.evicts and method.evicts_while_decoding and in_place and by_layer


class StackedLayer:
    """One layer of one or several caches, stacked as the R rows of one decode step.

    states: the same layer of every cache, each with a free slot (`EvictionLayer.can_step`), of one `stack_kind` and
    sorted by `stack_order`. The slots of several caches become views of common buffers, so each cache still holds and
    reports its own slots. A cache with fewer slots than the largest has dead slots behind its own, which no token may
    take. buffers: what all layers of these caches share; None: each layer keeps its own.

    free_slots [R, H, every]: the slots that the next tokens of each row are written to, the last victims' or, of caches
    that only grow, the first behind those in use. growing: those caches' layers, which come first. is_ranked: whether
    `kvexp.core.ranking.rank` gives the priorities, with what is spared and what has left a sliding window.
    """

    def __init__(self, states: list[EvictionLayer], buffers: CrossLayerBuffers | None = None) -> None:
        self.states, self.index = states, states[0].index
        held = [state.require_slots() for state in states]
        self.sizes = [slots.positions.shape[0] for slots in held]
        self.growing = [state for state in states if state.config.only_grows]
        evicting, evicting_sizes = states[len(self.growing) :], self.sizes[len(self.growing) :]
        first = sum(self.sizes[: len(self.growing)])
        self.evicting_rows = slice(first, first + sum(evicting_sizes))
        most = max(slots.positions.shape[2] for slots in held)
        if self.growing:
            most = stackable_width(most, held[0].positions.device)
        alone = len(held) == 1 and held[0].positions.shape[2] == most
        self.slots = held[0] if alone else Slots.stacked(held, most)
        self.keys = self.slots.kv_buffers[0]
        self._held = [slots.kv_buffers[0] for slots in held]
        backends = [state.backend for state in evicting]
        assert all(isinstance(backend, InPlace) for backend in backends)
        self.backends: list[InPlace] = backends  # type: ignore[assignment]
        self.products = RaggedProducts(self.slots) if isinstance(self.slots, RaggedSlots) else None
        self.eviction = BatchedEviction(evicting, evicting_sizes, self.backends)
        self.is_ranked = any(not state.config.plain_choice for state in evicting)
        starts = accumulate(evicting_sizes, initial=first)
        self._looking = [  # caches that evict and whose methods look at queries: number among them, layer, rows
            (place, state, slice(start, start + size))
            for place, (state, size, start) in enumerate(zip(evicting, evicting_sizes, starts, strict=False))
            if state.config.method.needs != NOTHING
        ]
        self._due: dict[int, DueEviction] = {}  # what their evictions after this step need
        self._scored = [state.evicts_by_score for state in evicting]
        self._scores_new_tokens = any(state.scores_new_tokens for state in states)
        self._changes_scores = any(state.changes_scores for state in evicting)
        heads = self.slots.positions.shape[1]
        free = [
            torch.full((rows, heads, 1), slots.length, device=slots.positions.device)
            for slots, rows in zip(held[: len(self.growing)], self.sizes, strict=False)
        ]
        free += [backend.free_slots for backend in self.backends if backend.free_slots is not None]
        self.set_free(cat_rows(free))
        self.score_specs = [state.score_spec for state in evicting]
        self._sees_sinks: Tensor | None = None
        self.num_observing = sum(spec is not None for spec in self.score_specs)  # caches, and their rows
        self.num_observed_rows = sum(evicting_sizes[: self.num_observing])
        self.pools_scores = any(map(_pools_scores, evicting))
        self.num_plain_rows = sum(
            n for n, spec in zip(evicting_sizes, self.score_specs, strict=True) if spec is not None and spec.is_plain
        )
        self.noised = group_by_noise(evicting, evicting_sizes, first + self.num_plain_rows)
        renumbered = [state.config.renumbered for state in states]
        assert all(renumbered) or not any(renumbered)
        moves = renumbered[0] and self.eviction.max_sinks
        self.sink_rerotation = SinkRerotation(self.eviction.max_sinks, self.eviction.sinks) if moves else None
        kernels = triton_ops.supported(states) and self.keys.dtype != torch.float64 and self.products is None
        kernels = kernels and not self.growing and self.eviction.every == 1 and not self._looking
        self.fused = triton_ops.FusedDecodeAttention(states, self.sizes, self.keys.device) if kernels else None
        self._params: AttentionParams | None = None  # of the step in progress
        self.buffers = CrossLayerBuffers(1) if buffers is None else buffers
        self.buffers.reset()
        self.groups = 0  # query heads per kv head, as of the last step

    def forward(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Take one new token per row and attend, as `EvictionLayer.forward`: returns [R, H * G, 1, Dv].

        query [R, H * G, 1, D], key [R, H, 1, D], value [R, H, 1, Dv].
        """
        slots, buffers = self.slots, self.buffers
        by_cache = [state.advance(k, None) for state, k in zip(self.states, key.split(self.sizes), strict=True)]
        positions = buffers.newest if buffers.merged and self.index else cat_rows(by_cache)
        if buffers.merged and self.index == 0:
            buffers.write_tokens(positions)
        newest = positions[:, None]  # [R, 1, 1]
        self._params, next_slots = params, self.free_slots[..., :1]
        slots.write(next_slots, key, value, behind=not self.backends)
        scores = self._initial_scores(key, positions)
        if not buffers.merged:
            slots.set_metadata(
                next_slots, positions, slots.score.new_zeros(next_slots.shape) if scores is None else scores
            )
        elif scores is not None:
            slots.score.scatter_(2, next_slots, scores)
        for state in self.growing:
            state.begin_step()
        query = query.unflatten(1, (key.shape[1], -1))
        self.groups = query.shape[2]
        if self.fused is None:
            out, sums = self._attend(query, positions, params)
        else:
            out, sums = self.fused(query, slots, positions, params)
        sums = sums[: self.num_observed_rows]
        if self.pools_scores:
            eviction = self.eviction
            caches = zip(
                eviction.states, self.score_specs, sums.split(eviction.sizes[: self.num_observing]), strict=False
            )
            sums = cat_rows([pool_sums(spec, seen, state.sequence) for state, spec, seen in caches if spec is not None])
        window = params.sliding_window
        if buffers.merged:
            buffers.collect(self, sums, newest)
        else:
            self._choose_next(slots.positions, slots.score, sums, newest, window)
            buffers.register_layer(self, window)
        for state in self.states:
            state.end_step()
        return out.flatten(1, 2)

    def _initial_scores(self, key: Tensor, positions: Tensor) -> Tensor | None:
        """The scores [R, H, 1] that the new tokens start with; None: 0. key [R, H, 1, D]; positions [R, 1]."""
        if not self._scores_new_tokens:
            return None
        parts = zip(self.states, key.split(self.sizes), positions.split(self.sizes), strict=True)
        return cat_rows([state.initial_score(k, p) for state, k, p in parts])

    def _choose_next(self, positions: Tensor, score: Tensor, sums: Tensor, newest: Tensor, window: int | None) -> None:
        """Add column sums to the scores, evict, and set the slots of the next tokens."""
        rows, columns = self.evicting_rows, self.evicting_columns
        if self.backends:
            evicted = self.eviction.advance(
                *(positions[rows, :, :columns], score[rows, :, :columns], self.free_slots[rows], sums),
                lambda: self.priority(newest),
                *(newest[rows], None if self.is_ranked else window),
            )
            if evicted:
                self.change_scores(newest)
        if self.growing:
            self.free_slots[: rows.start] += 1

    def change_scores(self, newest: Tensor) -> None:
        """Let the methods that do so change their scores after an eviction; newest [R, 1, 1]."""
        if not self._changes_scores:
            return
        tokens = (newest[self.evicting_rows, 0, 0] + 1).split(self.eviction.sizes)
        for state, count in zip(self.eviction.states, tokens, strict=True):
            if state.changes_scores:
                state.change_scores(state.require_slots().score, count)

    @property
    def is_current(self) -> bool:
        """Whether the caches still hold the slots that this stack was made of, with room for a token more."""
        held = [state.require_slots().kv_buffers[0] for state in self.states]
        return all(buffer is held_buffer for buffer, held_buffer in zip(held, self._held, strict=True)) and not any(
            state.lacks_slot for state in self.growing
        )

    def set_free(self, free: Tensor) -> None:
        """Take free [R, H, every] as the slots of the next tokens, a buffer that steps write in place."""
        self.free_slots = free
        for backend, free_slots in zip(self.backends, free.split(self.sizes)[len(self.growing) :], strict=True):
            backend.free_slots = free_slots

    def hold_inputs(self, positions: Tensor) -> None:
        """Hold what the step in progress takes from schedules of the host at fixed addresses (`NoisedObserver`).

        positions [R, 1]: of the new tokens. Where buffers are merged, the first layer's inputs are for all layers.
        """
        for observer in self._scheduled:
            observer.hold_inputs(positions)

    def release_inputs(self) -> None:
        """End the step whose inputs were held."""
        for observer in self._scheduled:
            observer.release_inputs()

    @property
    def sees_sinks(self) -> Tensor:
        """Rows [R, 1, 1, 1, 1] whose methods see what attention sinks leave to the slots (score.sink=applied)."""
        if self._sees_sinks is None:
            sized_states = zip(self.states, self.sizes, strict=True)
            applied = [state.config.score_sink == "applied" for state, size in sized_states for _ in range(size)]
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

    def same_policy(self, other: StackedLayer) -> bool:
        """Whether another layer's stack of the same caches can choose its next slots together with this one's."""
        grown, others = ([state.require_slots().length for state in stack.growing] for stack in (self, other))
        return grown == others and (not self.backends or self.eviction.same_policy(other.eviction))

    def rebind(self, positions: Tensor, score: Tensor, free: Tensor) -> None:
        """Use these buffers, which hold the same numbers: positions, score [R, H, S]; free [R, H, 1]."""
        self.slots.positions, self.slots.score = positions, score
        self.set_free(free)
        parts = (x.split(self.sizes) for x in (positions, score))
        for state, slot_positions, scores in zip(self.states, *parts, strict=True):
            slots = state.require_slots()
            count = slots.positions.shape[2]
            slots.positions, slots.score = slot_positions[:, :, :count], scores[:, :, :count]

    def _attend(self, query: Tensor, positions: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Output [R, H, G, 1, Dv], and column sums [n, H, S] of the n rows that are observed, which come first.

        query [R, H, G, 1, D]; positions [R, 1]: of the new tokens.
        """
        slots, newest, products = self.slots, positions[:, None], self.products
        columns, observed_columns = self.columns(), self.evicting_columns
        if products is None:
            keys, values = params.states_of(slots.keys[:, :, :columns], slots.values[:, :, :columns])
            x = decode_logits(query, keys, slots.positions[:, :, :columns], newest, params)
        else:
            x = products.logits(query, newest, params)
        if slots.bias is not None:
            x += slots.bias[:, :, None, None, :columns]
        offset: Tensor | None = None
        if (rotation := self.sink_rerotation) is not None:
            whole = self.eviction.no_padding_slots and self.eviction.every == 1
            offset = rotation.offset(slots.positions, newest, no_padding_slots=whole)
            rotation.apply(x, query, slots, newest, offset, params)
        dead = self._invisible_mask(newest, offset, params)
        if dead is not None:
            x.masked_fill_(dead[:, :, None, None], -torch.inf)
        probabilities = torch.softmax(x, dim=-1) if products is None else products.softmax(x)
        observed = probabilities
        if params.sinks is not None:
            share = token_share(x, params.sinks)
            observed = probabilities * torch.where(self.sees_sinks, share, 1.0)
            probabilities *= share
        drawn = self._noise_and_tau(positions, query.shape[2])
        tempered = (
            observer.observed_probs(x[observer.rows][..., :observed_columns], *noise_and_tau)
            for observer, noise_and_tau in zip(self.noised, drawn, strict=True)
        )
        self._note_queries(query, observed, positions, params)
        first = self.evicting_rows.start
        plain = observed[first : first + self.num_plain_rows, ..., :observed_columns]
        seen = cat_rows([probs for probs in (plain, *tempered) if len(probs)] or [plain])
        # A sum over no rows is a launch all the same.
        sums = seen[:, :, 0, 0] if seen.shape[2] == 1 or not len(seen) else seen[..., 0, :].sum(2)
        if products is not None:
            return products.output(), sums
        return apply_probs_any_width(probabilities, values), sums

    def _note_queries(self, query: Tensor, observed: Tensor, positions: Tensor, params: AttentionParams) -> None:
        """Let the methods that need them see the new queries [R, H, G, 1, D] and their attention [R, H, G, 1, S].

        positions [R, 1]: of the new tokens.
        """
        self._due = {}
        for place, state, rows in self._looking:
            seen = observed[rows, ..., : state.require_slots().length]
            self._due[place] = state.note_queries(query[rows], seen, positions[rows], params)

    def columns(self, coming: int = 0) -> int:
        """Columns that a step reads: those in use, so that a cache's room to grow costs nothing (`growing_width`).

        coming: tokens that will have been written by then.
        """
        capacity = self.slots.positions.shape[2]
        if not self.growing:
            return capacity
        used = coming + max(state.require_slots().length for state in self.growing)
        return min(capacity, growing_width(max(used, self.evicting_columns), self.keys.device))

    @property
    def evicting_columns(self) -> int:
        """Columns of the caches that evict, whose attention may be observed."""
        return max(self.eviction.capacities, default=0)

    def _noise_and_tau(self, positions: Tensor, groups: int) -> list[tuple[Tensor | None, Tensor]]:
        """Noise (None: none) and temperature of every group of rows in `noised`, at this step.

        positions [R, 1]: of the new tokens; groups: query heads per kv head. Where buffers are merged, the first layer
        draws for all.
        """
        buffers = self.buffers
        slot_positions = buffers.positions if buffers.merged else self.slots.positions[None]
        slot_positions = slot_positions[..., : self.evicting_columns]
        layers = range(buffers.layers) if buffers.merged else [self.index]
        if not buffers.merged or self.index == 0:
            buffers.drawn = [noised.noise_and_tau(positions, slot_positions, layers, groups) for noised in self.noised]
        place = self.index if buffers.merged else 0
        return [(None if noise is None else noise[place], tau) for noise, tau in buffers.drawn]

    def _invisible_mask(self, newest: Tensor, offset: Tensor | None, params: AttentionParams) -> Tensor | None:
        """Slots [R, H, S] bool that the new token does not see; None: it sees all.

        newest [R, 1, 1]: position id of the new token; offset [R, 1, 1]: of `SinkRerotation`, None: not renumbered.
        """
        columns, buffers = self.columns(), self.buffers
        slot_positions = self.slots.positions[:, :, :columns]
        if not self.growing and self.eviction.every == 1:
            dead = self.eviction.out_of_budget if self.eviction.at_budget else slot_positions < 0
            if self.products is not None and self.eviction.at_budget:
                dead = None  # the products leave out what lies behind a head's own slots
        elif self._sees_all(columns):
            dead = None
        elif buffers.merged:
            if self.index == 0:
                buffers.dead = buffers.positions[..., :columns] < 0
            dead = buffers.dead[self.index]
        else:
            dead = slot_positions < 0
        if params.sliding_window is None:
            return dead
        past = slot_positions <= newest - params.sliding_window
        if self.sink_rerotation is not None and offset is not None:
            past &= ~(
                self.sink_rerotation.is_sink(slot_positions)
                & (slot_positions > newest + offset - params.sliding_window)
            )
        return past if dead is None else past | dead

    def _sees_all(self, columns: int) -> bool:
        """Whether all of the first `columns` slots of every row hold a token that new ones see, as far as is known."""
        return not self.backends and all(
            slots.same_order and slots.length == columns and not state.sequence.padded
            for state, slots in ((state, state.require_slots()) for state in self.growing)
        )

    def priority(self, newest: Tensor) -> Tensor:
        """The priority [n, H, S] of every slot of the caches that evict, by their methods; newest [R, 1, 1]."""
        rows, columns, eviction = self.evicting_rows, self.evicting_columns, self.eviction
        if eviction.priority_is_score:
            return self.slots.score[rows, :, :columns]
        priorities = []
        newest_by_cache = newest[rows, 0, 0].split(eviction.sizes)
        caches = zip(eviction.states, self._scored, newest_by_cache, strict=True)
        for place, (state, scored, last) in enumerate(caches):
            score = state.require_slots().score
            priorities.append(score if scored else state.step_priority(self._due.get(place), self._params, last))
        return cat_rows([pad_last_dim(priority, columns, -torch.inf) for priority in priorities])


def _pools_scores(state: EvictionLayer) -> bool:
    """Whether a cache's score sums up the attention of several heads or batch rows."""
    spec = state.score_spec
    if spec is None:
        return False
    return spec.pool_heads or spec.batch == "sum_all" or (spec.batch == "per_sample" and state.sequence.num_beams > 1)
