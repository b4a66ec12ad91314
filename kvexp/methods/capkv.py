"""CapKV: slots whose values span what the expected queries attend to are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvexp.core import EvictionContext, Method, Needs
from kvexp.util.fields import AtLeast

EPSILON = 1e-6  # is added to every weight in the matrix


@dataclass(frozen=True)
class CapKV(Method):
    """s[j] = mean over a kv head's query heads of w_j v_j.A^-1.v_j, A = I + sum_i (w_i + 1e-6) v_i v_i^T,
    w_j = exp(`tau` * (cos(key_j, mu) - the largest)); keep = sinks U top of s. Chosen once.

    mu: mean of the prompt's queries before RoPE, without the sinks', turned by the mean of RoPE's matrices over the
    `n_future` positions that follow; sums are over the tokens behind the sinks. Source: arXiv:2604.25975, as in
    kvpress's CapPress, which sets the defaults, takes cosines (the paper: products) and turns mu (the paper does not).
    """

    name: ClassVar[str] = "capkv"
    evicts_while_decoding: ClassVar[bool] = False
    n_sinks: Annotated[int, AtLeast(0)] = 4  # kvpress
    tau: Annotated[float, AtLeast(0)] = 5.0  # kvpress
    n_future: Annotated[int, AtLeast(1)] = 512  # positions

    @property
    def needs(self) -> Needs:
        return Needs(queries_after=self.n_sinks)

    def priority(self, ctx: EvictionContext) -> Tensor:
        # In float64: equal keys and values must have equal scores, whatever the order of a sum.
        values = ctx.slots.values[:, :, : ctx.slots.length].double()
        counted = (ctx.held() & (ctx.positions >= self.n_sinks))[:, :, None]  # [B, H, 1, S]
        weights = self._weights(ctx, counted)
        priority = torch.zeros_like(ctx.score, dtype=torch.float64)
        for weight in weights.unbind(2):
            counts = ((weight + EPSILON) * counted[:, :, 0])[..., None]
            capacity = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
            capacity = capacity + values.transpose(-1, -2) @ (counts * values)
            solved = torch.linalg.solve(capacity, values.transpose(-1, -2))
            priority += weight * (values * solved.transpose(-1, -2)).sum(-1)
        return (priority / weights.shape[2]).float()

    def _weights(self, ctx: EvictionContext, counted: Tensor) -> Tensor:
        """w [B, H, G, S], 0 of slots that do not count; counted [B, H, 1, S]."""
        assert ctx.query_statistics is not None
        mean, _ = ctx.query_statistics.at(ctx.newest + 1, self.n_future)
        keys = normalize(ctx.slots.keys[:, :, : ctx.slots.length].double(), dim=-1)
        cosine = normalize(mean.double(), dim=-1) @ keys.transpose(-1, -2)
        logits = (self.tau * cosine).masked_fill(~counted, -torch.inf)
        return (logits - logits.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
