"""D2O: a dropped token is merged into the kept one whose key is most like its own, if it is like enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvexp.core import AttentionScoreSpec, EvictionContext, Rewrites, Rewritten
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class D2O(Rewrites):
    """keep = sinks U recent window U top of score, the attention summed up as H2O does. A dropped token i with
    u_i = max_j cos(k_i, k_j) over kept j is merged into that j where u_i >= the mean of all dropped tokens' u:
    k_j' = (e k_j + sum_i e^(u_i) k_i) / (e + sum_i e^(u_i)), values likewise. Chosen and merged once.

    Source: Wan et al., arXiv:2406.13035, section 3.3, and the authors' code, whose kept tokens are three heavy ones for
    each recent one, the first four among them. `weights="mean"`: the code's (k_j + sum_i u_i k_i) / (1 + n).
    `threshold="rank"`: as in the code, the i-th dropped tokens of all heads are merged together or not at all, by the
    mean of their u. Keys are compared and merged as cached, turned by RoPE at their own positions, as in the code; a
    merged key keeps the position of its kept token. Departures: layers have equal budgets (the paper's are by the
    spread of attention; the code leaves the first two layers and the last whole), one eviction and one threshold at the
    end of the prompt (theirs go on for every token, with a moving average, from the first generated one on), query
    heads that share a key share its slots (the code repeats keys).
    """

    name: ClassVar[str] = "d2o"
    later: ClassVar[tuple[str, ...]] = ("threshold",)
    n_sinks: Annotated[int, AtLeast(0)] = 4
    recent_ratio: Annotated[float, Range(0, 1)] = 0.25  # heavy to recent 3 to 1
    weights: Literal["softmax", "mean"] = "softmax"  # mean: the authors' code
    threshold: Literal["token", "rank"] = "token"  # rank: the authors' code

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()

    @property
    def rewrites(self) -> tuple[str, ...]:
        return ("keys", "values")

    def rewrite(self, ctx: EvictionContext, index: Tensor, keep: Tensor) -> Rewritten:
        count = ctx.slots.length
        keys, values = ctx.slots.keys[:, :, :count].float(), ctx.slots.values[:, :, :count].float()
        kept = torch.zeros_like(ctx.positions, dtype=torch.bool).scatter(-1, index, keep)
        dropped = ctx.held() & ~kept
        unit, at = normalize(keys, dim=-1), index[..., None].expand(-1, -1, -1, keys.shape[-1])
        likeness = (unit @ unit.gather(2, at).transpose(-1, -2)).masked_fill(~keep[:, :, None], -torch.inf)
        best, into = likeness.max(-1)
        best = best.masked_fill(~dropped, 0.0)
        threshold = best.sum((1, 2)) / dropped.sum((1, 2)).clamp_min(1)
        merged = dropped & (self._held_against(best, dropped) >= threshold[:, None, None])
        weight, kept_weight = (best.exp(), math.e) if self.weights == "softmax" else (best, 1.0)
        weight = weight.masked_fill(~merged, 0.0)
        share = weight if self.weights == "softmax" else merged.float()
        total = torch.full(index.shape, kept_weight, device=index.device).scatter_add(-1, into, share)[..., None]

        def merge(states: Tensor) -> Tensor:
            at_kept = index[..., None].expand(-1, -1, -1, states.shape[-1])
            sums = kept_weight * states.gather(2, at_kept)
            target = into[..., None].expand(-1, -1, -1, states.shape[-1])
            return sums.scatter_add(2, target, weight[..., None] * states) / total

        return Rewritten(keys=merge(keys), values=merge(values))

    def _held_against(self, best: Tensor, dropped: Tensor) -> Tensor:
        """What the threshold is held against for every dropped slot [B, H, S]; best: likeness, 0 where not dropped."""
        if self.threshold == "token":
            return best
        rank = (dropped.cumsum(-1) - 1).clamp_min(0)  # all heads of a row drop as many
        means = torch.zeros_like(best[:, 0]).scatter_add(-1, rank.flatten(1), best.flatten(1)) / best.shape[1]
        return means[:, None].expand_as(best).gather(-1, rank)
