"""H2O(C): H2O with a larger budget, as compensation for the bytes that a retrieval method moves and H2O does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvexp.core import AttentionScoreSpec
from kvexp.core.budget import floor_share
from kvexp.core.special_methods import GrantsSlots
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class H2OC(GrantsSlots):
    """H2O whose budget of k slots becomes k + T / 128 for a prompt of T tokens, or 1.5 k + T / 128; always with sinks.

    Source: PQCache's baseline, arXiv:2407.12820, section 4.1.3; its release has no code for it. compensation: codes
    pays for the extra communication, 1/128 of the tokens; codes_and_fetch also for the half of the budget that is
    fetched at every step; none is the release's own H2O (n_sinks=32 there). The window counts the token being
    generated on top, as the retrieval methods here do.
    """

    name: ClassVar[str] = "h2o_c"
    n_sinks: Annotated[int, AtLeast(0)] = 4  # 32: the release
    recent_ratio: Annotated[float, Range(0, 1)] = 0.5
    compensation: Literal["codes", "codes_and_fetch", "none"] = "codes"  # codes_and_fetch: 1.5 times the budget too

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()

    def effective_budget(self, budget: int, tokens: int) -> int:
        if self.compensation == "none":
            return budget
        return tokens // 128 + (budget + budget // 2 if self.compensation == "codes_and_fetch" else budget)

    def recent(self, budget: int) -> int:
        return 1 + floor_share(self.recent_ratio, max(0, budget - self.n_sinks - 1))
