"""Bookkeeping of a fast decode step for all layers at once: everything that does not depend on attention.

Positions and scores of one layer are small tensors, so an operation on them costs no more than calling it. Once every
layer has taken one step by itself, the positions, scores and free slots of all layers are merged into common buffers
[L, R, H, S], of which each layer's are views. From then on the first layer of a step writes the new token's position
into all layers and draws the noise for all of them; the last layer accumulates all scores and selects all victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvexp.core.decode.bookkeeping import BatchedEviction
from kvexp.core.decode.noised_attention import NoisedObserver, next_noise_and_tau
from kvexp.core.slots import Slots

# Slots of all rows, heads and layers: above it, merged buffers do not fit into a CPU's caches.
MAX_MERGED_SLOTS = 1 << 20
# Layers whose heads have slots of their own are widened to the widest, up to so many times the columns of all: at 1.3
# times, merged bookkeeping took 0.4 of the time of each layer by itself (30 layers, batch 1, 4k tokens on a CPU).
MAX_WIDENING = 2.0
# From so many query heads per kv head on, torch sums them in an order that depends on the number of columns on a CPU:
# beyond NEAR_WIDENING such layers keep their own columns.
ORDERED_GROUP, NEAR_WIDENING = 4, 1.25


class StackedLayerProtocol(Protocol):
    """The part of `kvexp.core.decode.fast_step.StackedLayer` that `CrossLayerBuffers` uses."""

    @property
    def index(self) -> int:
        """The layer's number, from 0."""

    @property
    def slots(self) -> Slots:
        """The slots [R, H, S] of all stacked rows."""

    @property
    def eviction(self) -> BatchedEviction:
        """How the stacked rows accumulate scores and select the slot to evict."""

    @property
    def groups(self) -> int:
        """Query heads per kv head; 0 before the first step."""

    @property
    def noised(self) -> Sequence[NoisedObserver]:
        """The groups of adjacent rows whose observed attention has a temperature or noise."""

    @property
    def pools_scores(self) -> bool:
        """Whether a row's score sums up the attention of other rows or heads too."""

    @property
    def free_slots(self) -> Tensor:
        """The free slot [R, H, 1] that the next token of each row is written to."""

    def widen(self, columns: int) -> None:
        """Give the slots so many columns, of which new ones are dead; of heads with slots of their own."""

    def rebind(self, positions: Tensor, score: Tensor, free_slots: Tensor) -> None:
        """Use these buffers, which hold the same numbers and have the same shapes, in place of the layer's own."""

    def priority(self, newest: Tensor) -> Tensor:
        """The priority [R, H, S] of every slot, by the method of each row's cache; newest [R, 1, 1]."""


class CrossLayerBuffers:
    """Positions, scores and free slots of all layers of the same stacked caches, merged after the first step.

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
        self._stacks: dict[int, StackedLayerProtocol] = {}
        self._windows: list[int | None] = []
        self._sums: list[Tensor] = []
        self._drawn: list[tuple[list[Tensor] | None, Tensor]] = []

    def register_layer(self, stack: StackedLayerProtocol, window: int | None) -> None:
        """Note that a layer has taken a step by itself; after the last layer, merge.

        window: the layer's sliding window in tokens; None: it has none.
        """
        if len(self._stacks) != stack.index:
            self.reset()
        if len(self._stacks) == stack.index:
            self._stacks[stack.index] = stack
            self._windows.append(window)
        if len(self._stacks) == self.layers > 1:
            if self._can_merge():
                self._merge()
            else:
                self.reset()

    def _can_merge(self) -> bool:
        """Whether all stacks have equal shapes, budgets and windows, and on a CPU are small enough for its caches."""
        first, *others = self._stacks.values()
        positions, width = first.slots.positions, self._width
        if positions.device.type == "cpu" and self.layers * positions[..., :1].numel() * width > MAX_MERGED_SLOTS:
            return False
        ragged = first.eviction.is_ragged
        limit = MAX_WIDENING if first.groups < ORDERED_GROUP else min(MAX_WIDENING, NEAR_WIDENING)
        if ragged and self.layers * width > limit * sum(one.slots.positions.shape[2] for one in self._all):
            return False
        alike = len(set(self._windows)) == 1 and not first.pools_scores
        return alike and all(
            one.slots.positions.device == positions.device
            and (ragged or one.slots.positions.shape == positions.shape)
            and first.eviction.same_policy(one.eviction)
            for one in others
        )

    @property
    def _all(self) -> list[StackedLayerProtocol]:
        """The layers registered so far, in order."""
        return list(self._stacks.values())

    @property
    def _width(self) -> int:
        """Columns of the widest layer."""
        return max(one.slots.positions.shape[2] for one in self._all)

    def _merge(self) -> None:
        """Copy positions, scores and free slots of all layers into common buffers; the layers' own become views."""
        stacks = self._all
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

    def write_token(self, stack: StackedLayerProtocol, positions: Tensor) -> Tensor:
        """The slots [R, H, 1] that this layer's new tokens are written to.

        Layer 0 writes the positions [R, 1] of all layers.
        """
        if stack.index == 0:
            self.positions.scatter_(3, self.free_slots, positions[None, :, None].expand(self.free_slots.shape))
            self.score.scatter_(3, self.free_slots, 0.0)
            self._sums = []
        return self.free_slots[stack.index]

    def draw_noise(
        self, stack: StackedLayerProtocol, positions: Tensor, groups: int
    ) -> list[tuple[list[Tensor] | None, Tensor]]:
        """Per group of rows with noise or temperature: the noise of each layer (None for no noise) and tau.

        Layer 0 draws for all layers of the step. positions [R, 1]: of the new tokens; groups: query heads per kv head.
        """
        if stack.index == 0:
            self._drawn = next_noise_and_tau(stack.noised, positions, self.positions, range(self.layers), groups)
        return self._drawn

    def collect(self, stack: StackedLayerProtocol, sums: Tensor, newest: Tensor) -> None:
        """Collect a layer's column sums [n, H, S]; after the last layer, accumulate and select victims for all layers.

        n: the rows that observe, which come first; newest [R, 1, 1]: position id of each row's new token.
        """
        self._sums.append(sums)
        if stack.index + 1 < self.layers:
            return
        eviction = stack.eviction
        eviction.accumulate(self.score, torch.stack(self._sums))
        priority = (
            self.score
            if eviction.priority_is_score
            else torch.stack([one.priority(newest) for one in self._stacks.values()])
        )
        victim = eviction.select_victim(self.positions, priority, newest, self._windows[0], self.out_of_budget)
        self.positions.scatter_(3, victim, -1)
        self.free_slots.copy_(victim)
        self._sums = []
