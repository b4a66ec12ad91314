"""Keyformer: accumulated attention of Gumbel-noised, tempered logits, and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import AttentionScoreSpec, EvictionContext, Method, Noise
from kvexp.util.errors import ConfigError
from kvexp.util.fields import Range


@dataclass(frozen=True)
class Keyformer(Method):
    """score[j] = sum over q of softmax((x_q + zeta) / tau)[j]; keep = newest `recent_ratio` of k U top of score.

    Source: Adnan et al., arXiv:2403.09054, eq. 9-10 and Algorithm 1; tau_t = tau_init + t (tau_end - tau_init) / T,
    T the new tokens. noise: zeta's distribution, gumbel | gaussian | constant | none; fresh per (query, key) as in
    the authors' code; fresh=false: one draw per key (the other reading of Algorithm 1). score_scope=shared: one
    score for all layers (Table 3), whose order is our choice. Departures of the release, as switches:
    key_window=release_frozen loses the token that leaves the recent window, so keys freeze at prefill;
    score_batch=sum_all adds up the whole batch (the default only beams of a sample); budget.of=padded; cadence
    every=8 at_prefill=false for its real-drop MPT.
    """

    name: ClassVar[str] = "keyformer"
    recent_ratio: Annotated[float, Range(0, 1)] = 0.3  # the release's scripts
    tau_init: Annotated[float, Range(0, above=True)] = 1.0  # arXiv:2403.09054 appendix A.8
    tau_end: Annotated[float, Range(0, above=True)] = 2.0
    noise: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel"  # all but gumbel: Table 4
    fresh: bool = True  # false: one draw per key
    score_scope: Literal["layer", "shared"] = "layer"  # shared: Table 3
    key_window: Literal["paper", "release_frozen"] = "paper"  # release_frozen: the off-by-one of the release
    score_batch: Literal["per_beam", "per_sample", "sum_all"] = "per_sample"  # sum_all: the release

    @property
    def score_spec(self) -> AttentionScoreSpec:
        noise = None if self.noise == "none" else Noise(self.noise, self.fresh)
        shared = self.score_scope == "shared"
        return AttentionScoreSpec((self.tau_init, self.tau_end), noise, batch=self.score_batch, across_layers=shared)

    def recent(self, budget: int) -> int:
        recent = super().recent(budget)
        if self.key_window == "release_frozen" and recent == 0:
            raise ConfigError("key_window=release_frozen needs a recent window: the release drops nothing without one")
        return recent

    @property
    def priority_is_score(self) -> bool:
        return self.key_window == "paper"

    def priority(self, ctx: EvictionContext) -> Tensor:
        if self.priority_is_score:
            return ctx.score
        return ctx.score.masked_fill(ctx.just_left_window(), -torch.inf)
