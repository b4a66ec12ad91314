"""PyramidKV: SnapKV with slots that fall from the bottom layer to the top one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvexp.core.budget_shares import LayerBudgets, PyramidLayers
from kvexp.methods.snapkv import SnapKV
from kvexp.util.fields import AtLeast, Odd


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """score and keep as SnapKV, in layer l of L with k_l = w + b - l * (b - t) / (L - 1) slots, t = (k - w) / `beta`,
    b = 2 * (k - w) - t, w = `window`: as many slots in all as k in every layer.

    b is at most the prompt's tokens less w, and t then as much larger. Source: Cai et al., arXiv:2406.02069, and
    the authors' code, whose settings are the defaults. `form="kvpress"` counts the window within t and b.
    Departures: w is part of the budget (the authors' code puts it on top, and leaves budgets above half the prompt
    alone); shares are rounded so that their sum stays (theirs fall by whole numbers); one choice per kv head (sum
    over its query heads). `budget.layers=uniform` gives every layer k.
    """

    name: ClassVar[str] = "pyramidkv"
    window: Annotated[int, AtLeast(1)] = 8  # arXiv:2406.02069
    kernel: Annotated[int, Odd(1)] = 7
    beta: Annotated[float, AtLeast(1)] = 20.0  # k over the top layer's slots, without the window; larger: steeper
    form: Literal["paper", "kvpress"] = "paper"  # kvpress: the window counts within every layer's share

    @property
    def layer_budgets(self) -> LayerBudgets:
        return PyramidLayers(self.beta, self.form)
