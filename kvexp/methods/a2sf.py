"""A2SF: accumulated attention with a forgetting factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvexp.core import AttentionScoreSpec, Method
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class A2SF(Method):
    """score_t[j] = alpha * score_{t-1}[j] + softmax(x_t)[j]; keep = top k - 1 of score and the current token.

    Source: Jo and Shin, arXiv:2407.20485, eq. 5: no sinks, no recent window. protect_recent=16 is what the authors'
    2026 code keeps besides. alpha may be 0 (newest row only) and 1 (plain accumulation), which the paper excludes.
    score_source=full sums rows of full attention (their 2024 mask, mode=mask); survivors renormalises over what is
    left, the only choice once slots are gone. Grouped heads: scores are summed over the query heads of a kv head.
    """

    name: ClassVar[str] = "a2sf"
    alpha: Annotated[float, Range(0, 1)] = 0.1  # the authors' ratio sweeps; the paper does not state it
    protect_recent: Annotated[int, AtLeast(0)] = 0  # 16: the authors' 2026 code
    score_source: Literal["survivors", "full"] = "survivors"  # full, with cache.mode=mask

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec(decay=self.alpha, over=self.score_source)
