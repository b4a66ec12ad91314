"""H2O: heavy hitters by accumulated attention, and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from kvexp.core import AttentionScoreSpec, EvictionContext
from kvexp.core.special_methods import Simulated
from kvexp.util.errors import ConfigError
from kvexp.util.fields import Range


@dataclass(frozen=True)
class H2O(Simulated):
    """score[j] = sum over queries q of softmax(x_q)[j]; keep = newest `recent_ratio` of k U top of score.

    Source: Zhang et al., arXiv:2306.14048, Algorithm 1; halves are heavy and recent as in the official scripts.
    Defaults drop for real (official `utils_real_drop`), except that k counts the current token
    (`budget.counts_self=false` gives the official k + 1). impl="mask": the official simulation since June 2024
    (mode=mask): the token leaving the recent window is hidden for one step and may then return; before, it stayed
    visible (`budget.counts_self=false`). Departure: the release sums scores over the batch (`score_batch=sum_all`).
    """

    name: ClassVar[str] = "h2o"
    recent_ratio: Annotated[float, Range(0, 1)] = 0.5  # the halves of the official scripts
    impl: Literal["real_drop", "mask"] = "real_drop"  # or mask, with cache.mode=mask
    score_batch: Literal["per_beam", "per_sample", "sum_all"] = "per_beam"  # sum_all: the release

    @property
    def simulation_only(self) -> bool:
        return self.impl == "mask"

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec(batch=self.score_batch)

    def recent(self, budget: int) -> int:
        recent = super().recent(budget)
        if self.impl == "mask" and recent == 0:
            raise ConfigError("impl=mask needs a recent window: the release drops nothing without one")
        return recent

    def hidden_next_step(self, ctx: EvictionContext) -> Tensor | None:
        return None if self.impl == "real_drop" else ctx.just_left_window()
