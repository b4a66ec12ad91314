"""Ideal: each query sees its own exact top k; nothing is dropped. The upper bound of any selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvexp.core import EvictionContext
from kvexp.core.slot_order import kept_mask
from kvexp.core.special_methods import Simulated


@dataclass(frozen=True)
class Ideal(Simulated):
    """query t attends to itself and its own top k - 1 of softmax(x_t) over everything seen. mode=mask only.

    Source: "Ideal" of A2SF, arXiv:2407.20485, section 4.3 and Fig. 4. Departures: for decode steps (prompt rows attend
    in full); with grouped heads one choice per kv head, by the sum over its query heads.
    """

    name: ClassVar[str] = "ideal"
    per_query: ClassVar[bool] = True

    def query_mask(self, probabilities: Tensor, ctx: EvictionContext) -> Tensor:
        newest = ctx.age() == 0
        max_keep = min(ctx.positions.shape[-1], int(ctx.budget.max()))
        return kept_mask(probabilities, ctx.positions, newest, ctx.budget, max_keep)
