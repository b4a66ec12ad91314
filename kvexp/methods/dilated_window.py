"""Sliding window with gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class DilatedWindow(Method):
    """keep = every (dilation + 1)-th of the recent positions, k in all.

    Source: the dilated window of Keyformer's section 2.3 (arXiv:2403.09054), after Longformer (arXiv:2004.05150).
    Departure: in those papers the kept positions move with each query, which needs every token in memory; here they
    are the multiples of dilation + 1. Other positions are evicted first, the oldest first.
    """

    name: ClassVar[str] = "dilated_window"
    dilation: Annotated[int, AtLeast(1)] = 1

    def priority(self, ctx: EvictionContext) -> Tensor:
        on_grid = ctx.positions % (self.dilation + 1) == 0
        return torch.where(on_grid, ctx.positions + (1 << 22), ctx.positions).to(torch.float32)
