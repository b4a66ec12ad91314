"""The layers of one cache at the end of the prompt, where each one's budget depends on what all of them look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvexp.core.layer_budgets import LayerBudgets


class WaitingLayer(Protocol):
    """A layer whose eviction waits for its budget; `index`: its number."""

    index: int

    def take_budget(self, preferences: Sequence[Sequence[float]]) -> None:
        """Go on with the eviction; preferences [B][L]: of every row, those of all layers."""


class LayerAllocation:
    """Preferences of one cache's layers, until the last of `layers` has one and all can be told.

    how: by which slots are shared out. One for all layers of a cache.
    """

    def __init__(self, how: LayerBudgets, layers: int) -> None:
        self.how, self.layers = how, layers
        self._waiting: dict[int, tuple[WaitingLayer, list[float]]] = {}

    def reset(self) -> None:
        """Forget the layers that wait."""
        self._waiting = {}

    def add(self, layer: WaitingLayer, preference: list[float]) -> None:
        """A layer's preference, one number per batch row. With the last layer's, every layer takes its budget."""
        self._waiting[layer.index] = (layer, preference)
        if len(self._waiting) < self.layers:
            return
        told = [self._waiting[index] for index in range(self.layers)]
        self._waiting = {}
        rows = [list(row) for row in zip(*(each for _, each in told), strict=True)]
        for waiting, _ in told:
            waiting.take_budget(rows)
