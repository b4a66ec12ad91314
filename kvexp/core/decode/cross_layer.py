"""What does not depend on attention, for all layers of a decode step at once.

One layer's positions and scores are small, so that the cost of an operation on them is that of calling it. Once every
layer has taken a step by itself, the positions, scores and free slots of all become parts of common buffers
[L, R, H, S]. From then on the first layer of a step enters the newcomer everywhere and draws the noise, and the last
one accumulates and selects, each in as many calls as one layer needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvexp.core.decode.bookkeeping import BatchedEviction
from kvexp.core.decode.noised_attention import NoisedObserver, ahead
from kvexp.core.slots import Slots

MOST = (
    1 << 20
)  # slots of all rows, heads and layers; beyond, on a CPU, one layer's fit its caches and all together do not


class StackedLayerProtocol(Protocol):
    """What it needs to know of one layer's stack (`kvexp.core.decode.fast_step.StackedLayer`)."""

    @property
    def index(self) -> int:
        """Which layer it is."""

    @property
    def slots(self) -> Slots:
        """Of its rows R."""

    @property
    def books(self) -> BatchedEviction:
        """How these accumulate and give up slots."""

    @property
    def tempered(self) -> Sequence[NoisedObserver]:
        """Those that observe tempered or noised attention."""

    @property
    def pools(self) -> bool:
        """Does a row observe more than itself?"""

    @property
    def free(self) -> Tensor:
        """[R, H, 1]: the slots for the next newcomers."""

    def move(self, positions: Tensor, score: Tensor, free: Tensor) -> None:
        """Go on in these buffers, which hold the same."""

    def rank(self, newest: Tensor) -> Tensor:
        """[R, H, S], by each cache's method."""


class CrossLayerBuffers:
    """The stacks of all `layers` of the same caches."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.clear()

    def __deepcopy__(self, memo: Any) -> CrossLayerBuffers:
        return CrossLayerBuffers(self.layers)  # a copy of the caches has stacks of its own

    def clear(self) -> None:
        """Let go of all stacks: caches or their rows have changed."""
        self.joint = False  # do all stacks lie in common buffers?
        self._stacks: dict[int, StackedLayerProtocol] = {}
        self._windows: list[int | None] = []
        self._columns: list[Tensor] = []
        self._drawn: list[tuple[list[Tensor] | None, Tensor]] = []

    def stepped(self, stack: StackedLayerProtocol, window: int | None) -> None:
        """A stack has taken a step by itself; if all have in order, their buffers become one. window: its layer's."""
        if len(self._stacks) != stack.index:
            self.clear()
        if len(self._stacks) == stack.index:
            self._stacks[stack.index] = stack
            self._windows.append(window)
        if len(self._stacks) == self.layers > 1:
            if self._alike():
                self._join()
            else:
                self.clear()

    def _alike(self) -> bool:
        first, *others = self._stacks.values()
        where = first.slots.positions
        if where.device.type == "cpu" and self.layers * where.numel() > MOST:
            return False
        alike = len(set(self._windows)) == 1 and not first.pools
        return alike and all(
            one.slots.positions.device == where.device
            and one.slots.positions.shape == where.shape
            and first.books.kept_like(one.books)
            for one in others
        )

    def _join(self) -> None:
        stacks = list(self._stacks.values())
        self.positions = torch.stack([stack.slots.positions for stack in stacks])
        self.score = torch.stack([stack.slots.score for stack in stacks])
        self.free = torch.stack([stack.free for stack in stacks])
        for stack, positions, score, free in zip(stacks, self.positions, self.score, self.free, strict=True):
            stack.move(positions, score, free)
        self.joint = True

    # -- a step of all ------------------------------------------------------------------------------------------------

    def enter(self, stack: StackedLayerProtocol, positions: Tensor) -> Tensor:
        """The slots [R, H, 1] that newcomers at positions [R, 1] take in this layer; the first one gives all theirs."""
        if stack.index == 0:
            self.positions.scatter_(3, self.free, positions[None, :, None].expand(self.free.shape))
            self.score.scatter_(3, self.free, 0.0)
            self._columns = []
        return self.free[stack.index]

    def ahead(
        self, stack: StackedLayerProtocol, positions: Tensor, groups: int
    ) -> list[tuple[list[Tensor] | None, Tensor]]:
        """Noise by layer and temperature of every run of tempered rows; the first layer draws for all."""
        if stack.index == 0:
            self._drawn = ahead(stack.tempered, positions, self.positions, range(self.layers), groups)
        return self._drawn

    def attended(self, stack: StackedLayerProtocol, columns: Tensor, newest: Tensor) -> None:
        """Take what a layer has observed, columns [r, H, S] of its first rows; the last layer closes all books."""
        self._columns.append(columns)
        if stack.index + 1 < self.layers:
            return
        books = stack.books
        books.accumulate(self.score, torch.stack(self._columns))
        rank = self.score if books.by_score else torch.stack([one.rank(newest) for one in self._stacks.values()])
        lowest = books.lowest(self.positions, rank, newest, self._windows[0])
        self.positions.scatter_(3, lowest, -1)
        self.free.copy_(lowest)
        self._columns = []
