"""Random eviction: a control, whose quality every score should exceed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvexp.core import Method
from kvexp.core.noise import lowbias32, stream_id, uniform


@dataclass(frozen=True)
class Random(Method):
    """score[j] = uniform noise of (seed, layer, head, position); keep = top k. A control, no paper."""

    name: ClassVar[str] = "random"

    def initial_score(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor:
        base = stream_id(seeds, layer, keys.shape[1])
        return uniform(lowbias32(base[:, :, None] + positions[:, None].int() * -1640531527))
