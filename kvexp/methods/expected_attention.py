"""ExpectedAttention: the attention that queries to come are expected to pay, times the size of the value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method, Needs
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """z[j] = scale * mu.key_j + scale^2 / 2 * key_j.Sigma.key_j in each query head; p = softmax(z) over slots;
    s[j] = (mean over a kv head's query heads of p[j] + epsilon) * ||v_j||_2; keep = sinks U top of s. Chosen once.

    mu and Sigma: mean and covariance of the prompt's queries before RoPE, without the sinks', turned by the mean of
    RoPE's matrices over the `n_future` positions that follow. Source: Devoto et al., arXiv:2510.00636, as in
    kvpress's ExpectedAttentionPress, which sets the defaults (`epsilon=0.02` and `weight="output"` are the paper's:
    ||W v_j||_2 behind the output projection in place of ||v_j||_2, in each query head before their mean: our
    reading). `covariance=false` leaves Sigma out, `weight="none"` the values. Departures: each kv head has the same
    budget (the paper's: `budget.heads=adaptive`); nothing is evicted while decoding; models without RoPE have their
    queries as they are.
    """

    name: ClassVar[str] = "expected_attention"
    evicts_while_decoding: ClassVar[bool] = False
    n_sinks: Annotated[int, AtLeast(0)] = 4  # kvpress
    n_future: Annotated[int, AtLeast(1)] = 512  # positions
    covariance: bool = True
    epsilon: Annotated[float, AtLeast(0)] = 0.0  # the paper: 0.02
    weight: Literal["value", "output", "none"] = "value"  # output: the paper; none

    @property
    def needs(self) -> Needs:
        return Needs(queries_after=self.n_sinks, output_norms=self.weight == "output")

    @property
    def priority_kind(self) -> Literal["share", "log_share"]:
        return "log_share" if self.epsilon == 0 else "share"

    def threshold_as_priority(self, threshold: float) -> float:
        if self.priority_kind == "share":
            return threshold
        return math.log(threshold) if threshold > 0 else -math.inf

    def priority(self, ctx: EvictionContext) -> Tensor:
        statistics, length = ctx.query_statistics, ctx.slots.length
        assert statistics is not None
        keys, values = (x[:, :, :length].float() for x in (ctx.slots.keys, ctx.slots.values))
        mean, covariance = statistics.at(ctx.newest + 1, self.n_future)
        z = mean @ keys.transpose(-1, -2) * statistics.scale  # [B, H, G, S]
        if self.covariance:
            spread = [((keys @ matrix) * keys).sum(-1) for matrix in covariance.unbind(2)]
            z = z + torch.stack(spread, dim=2) * (statistics.scale**2 / 2)
        z = z.masked_fill(~(ctx.held() & (ctx.positions >= self.n_sinks))[:, :, None], -torch.inf)
        # In logarithms, where a softmax would round small shares to 0 and leave their order to chance.
        log_share = z.log_softmax(-1)
        size = torch.ones_like(log_share)
        if self.weight == "value":
            size = torch.linalg.vector_norm(values, dim=-1)[:, :, None]
        elif self.weight == "output":
            size = ctx.output_norms()
        if self.epsilon == 0:
            return (log_share + size.log()).logsumexp(2) - math.log(z.shape[2])
        return ((log_share.exp() + self.epsilon) * size).mean(2)
