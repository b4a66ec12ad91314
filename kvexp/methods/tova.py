"""TOVA (token omission via attention): the newest query's attention decides what is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from kvexp.core import AttentionScoreSpec, Method
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class TOVA(Method):
    """score[j] = mean over heads of softmax(x_t)[j] for the newest query t only; the lowest goes.

    Source: Oren et al., arXiv:2401.06104, section 3.2; one choice per layer, shared by its heads. Departure: a sum
    instead of a mean over heads (same order). The newest token competes like any other, as in the paper; a common
    re-implementation protects it (`protect_recent=2`: the token being generated counts).
    """

    name: ClassVar[str] = "tova"
    protect_recent: Annotated[int, AtLeast(0)] = 0

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec(decay=0.0, pool_heads=True, last_rows=1)
