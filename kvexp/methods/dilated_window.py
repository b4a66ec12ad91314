"""Sliding window with gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method
from kvexp.util import ConfigError


@dataclass(frozen=True)
class DilatedWindow(Method):
    """keep = every (dilation + 1)-th of the recent positions, k in all.

    Source: the dilated window of Keyformer's section 2.3 (arXiv:2403.09054), after Longformer (arXiv:2004.05150).
    Departure: in those papers the kept positions move with each query, which needs every token in memory; with real
    eviction they are the multiples of dilation + 1. All other positions are evicted first, the oldest first.
    """

    name: ClassVar[str] = "dilated_window"
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.dilation < 1:
            raise ConfigError(f"dilation must be at least 1 (0 is method=window), got {self.dilation}")

    def priority(self, ctx: EvictionContext) -> Tensor:
        on_grid = ctx.positions % (self.dilation + 1) == 0
        return torch.where(on_grid, ctx.positions + (1 << 22), ctx.positions).to(torch.float32)
