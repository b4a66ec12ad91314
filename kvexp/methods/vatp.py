"""VATP: accumulated attention times the size of the value, and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from kvexp.core import AttentionScoreSpec, EvictionContext, Method
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class VATP(Method):
    """s[j] = sum over queries q of softmax(x_q)[j] * ||v_j||_1; keep = sinks U newest `recent_ratio` of k U top of s.

    Source: Guo et al., arXiv:2406.12335, over H2O's score; 20 sinks, and halves heavy and recent, as in the
    authors' release. Departures: slots are dropped (the release masks); one choice per kv head, by the attention
    summed over its query heads; sinks, window and the token being generated are part of the budget
    (`budget.counts_self=false`: the release's k + 1); the paper's other form, over Scissorhands' score, is left
    out.
    """

    name: ClassVar[str] = "vatp"
    reads_states: ClassVar[bool] = True
    n_sinks: Annotated[int, AtLeast(0)] = 20  # the release
    recent_ratio: Annotated[float, Range(0, 1)] = 0.5  # H2O's

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()

    @property
    def priority_kind(self) -> Literal["score"]:
        return "score"

    def priority(self, ctx: EvictionContext) -> Tensor:
        return ctx.score * ctx.slots.values[:, :, : ctx.slots.length].float().abs().sum(-1)
