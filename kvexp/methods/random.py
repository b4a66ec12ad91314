"""Random eviction: the floor every score must beat."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvexp.core import Method
from kvexp.core.observe.noise import mix, stream, uniform


@dataclass(frozen=True)
class Random(Method):
    """score[k] = uniform noise of (seed, layer, head, position); keep = top k. A control, no paper."""

    name: ClassVar[str] = "random"

    def birth(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor:
        base = stream(seeds, layer, keys.shape[1])
        return uniform(mix(base[:, :, None] + positions[:, None].int() * -1640531527))
