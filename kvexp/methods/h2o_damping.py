"""H2O with damping: the accumulated scores are multiplied by a factor at every eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvexp.core.special_methods import ChangesScores
from kvexp.methods.h2o import H2O
from kvexp.util.fields import Range


@dataclass(frozen=True)
class H2ODamping(H2O, ChangesScores):
    """As H2O, and score *= damping each time slots have been evicted.

    Source: Keyformer, arXiv:2403.09054, Fig. 5 (damping of the accumulated attention, recent window 20 %).
    Departure: the paper gives no formula or code; "after each reduction" is our reading.
    """

    name: ClassVar[str] = "h2o_damping"
    recent_ratio: Annotated[float, Range(0, 1)] = 0.2  # Fig. 5 of Keyformer
    damping: Annotated[float, Range(0, 1)] = 0.9

    def after_eviction(self, score: Tensor) -> Tensor:
        return torch.where(score.isinf(), score, score * self.damping)  # -inf marks what mask mode has evicted
