"""How a run shares its budget out over layers, and the layers of one cache that wait for it at the prompt's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvexp.core.budget import Budget
from kvexp.core.layer_budgets import CakeLayers, LayerBudgets, PyramidLayers
from kvexp.core.method import Method


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


BY_NAME: dict[str, LayerBudgets] = {"uniform": LayerBudgets(), "pyramid": PyramidLayers(), "cake": CakeLayers()}


def layer_budgets_of(method: Method, budget: Budget) -> LayerBudgets:
    """How a budget is shared out over layers: as it says itself, else as the method's paper does.

    A method whose own way is of the kind that is asked for goes by its own settings.
    """
    own = method.layer_budgets
    if budget.layers is None:
        return BY_NAME["uniform"] if budget.among_all_layers else own
    asked = BY_NAME[budget.layers]
    return own if type(own) is type(asked) else asked
