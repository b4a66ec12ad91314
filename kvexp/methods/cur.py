"""CUR (CurDKV): keys and values that are large among their neighbours are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core import EvictionContext, Method
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class CUR(Method):
    """l(x)[j] = ||x_j||_2^2 / sum of ||x_i||_2^2 over the `block` tokens among which j stands;
    s[j] = l(key)[j] * l(value)[j]; keep = sinks U top of s. Chosen once.

    Source: CurDKV, arXiv:2509.15038, as in kvpress's CURPress, which sets the defaults: a row's squared norm stands
    for its leverage score. Where heads are compared (`budget.heads=adaptive`, `global` or `union`,
    `budget.threshold`, `select.by=chunk`), s is divided by its sum over the head's slots, sinks included, as in
    kvpress. Departures: no Gaussian projection (off by default in kvpress too); the paper's adaptive budgets of
    heads are `budget.heads=adaptive`.
    """

    name: ClassVar[str] = "cur"
    reads_states: ClassVar[bool] = True
    evicts_while_decoding: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = "compares each token of the prompt with the block around it"
    n_sinks: Annotated[int, AtLeast(0)] = 4  # kvpress
    block: Annotated[int, AtLeast(1)] = 16  # kvpress
    leverage: Literal["product", "mean", "key", "value"] = "product"

    def priority(self, ctx: EvictionContext) -> Tensor:
        leverage = self._leverage(ctx)
        if not ctx.compares_heads:  # the quotient could round two neighbours of one head to a tie
            return leverage
        # In float64, where the order of the summands, which padding changes, does not show in float32.
        total = leverage.double().masked_fill(~ctx.held(), 0.0).sum(-1, keepdim=True)
        return (leverage / total.clamp_min(torch.finfo(torch.float32).tiny)).float()

    def _leverage(self, ctx: EvictionContext) -> Tensor:
        """s [B, H, S] before heads are compared."""
        if self.leverage in ("key", "value"):
            return self._share(ctx.slots.keys if self.leverage == "key" else ctx.slots.values, ctx)
        key, value = (self._share(states, ctx) for states in (ctx.slots.keys, ctx.slots.values))
        return key * value if self.leverage == "product" else (key + value) / 2

    def _share(self, states: Tensor, ctx: EvictionContext) -> Tensor:
        """l [B, H, S] of keys or values [B, H, C, D], in blocks that begin with each row's first real token."""
        length = ctx.slots.length
        size = states[:, :, :length].float().square().sum(-1)
        # A prompt's slots stand in the order of its columns; entry `length` stands for what no row has.
        columns = torch.arange(-(-length // self.block) * self.block, device=size.device)
        index = (columns + (length - 1 - ctx.newest)[:, None]).clamp_max(length)[:, None].expand(-1, size.shape[1], -1)
        blocks = pad(size, (0, 1)).gather(-1, index).unflatten(-1, (-1, self.block))
        share = blocks / blocks.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return pad(size, (0, 1)).scatter(-1, index, share.flatten(-2))[..., :length]
