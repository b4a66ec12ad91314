"""LagKV: in each partition of the prompt, the tokens that stand out against the next partition are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class LagKV(Method):
    """x'[j] = (x_j - min) / (max - min) per channel, min and max over the next partition; s[j] = softmax over j's
    partition of std over channels of x'[j], for keys plus for values; keep = sinks U last partition and remainder U
    an equal share of every other partition, top of s. Chosen once.

    Source: Liang et al., arXiv:2504.04704, section 3, and its release: after `n_sinks` tokens come partitions of
    `lag` tokens. Departures: the budget sets the share of a partition, as in kvpress (the release is given the
    share; what is left over goes to the newer partitions); a budget that cannot hold the last partition keeps its
    newest tokens; nothing is cut while decoding (the release: every `lag` tokens); a channel that is constant over
    the next partition counts as 0 (the release divides by 0).
    """

    name: ClassVar[str] = "lagkv"
    reads_states: ClassVar[bool] = True
    evicts_while_decoding: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = "compares each partition of the prompt with the next one"
    n_sinks: Annotated[int, AtLeast(0)] = 16  # the release; kvpress: 4
    lag: Annotated[int, AtLeast(2)] = 128  # the release's README and kvpress; the release's class: 1024

    def priority(self, ctx: EvictionContext) -> Tensor:
        slots, length = ctx.slots, ctx.slots.length
        priority = 1 + ctx.positions.float()  # what has no complete next partition: above every rank
        count = (length - self.n_sinks) // self.lag  # partitions of the longest row
        if count < 2:
            return priority
        # A prompt's slots stand in the order of its columns, behind the padding of its row.
        tokens = ctx.newest + 1
        columns = torch.arange(count * self.lag, device=tokens.device) + (length - tokens + self.n_sinks)[:, None]
        index = columns.clamp_max(length - 1)[:, None].expand(-1, priority.shape[1], -1)  # [B, H, count * lag]
        score = self._score(slots.keys, index) + self._score(slots.values, index)
        rank = score.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag  # [B, H, count - 1, lag]
        last = (torch.arange(count - 1, device=tokens.device) + 2) * self.lag + self.n_sinks
        complete = (last <= tokens[:, None])[:, None, :, None]  # a shorter row has fewer partitions
        index = index[..., : -self.lag]
        ranked = torch.where(complete, rank, priority.gather(-1, index).view_as(rank))
        return priority.scatter(-1, index, ranked.flatten(-2))

    def _score(self, states: Tensor, index: Tensor) -> Tensor:
        """s [B, H, n - 1, lag] of keys or values [B, H, C, D], of which index [B, H, n * lag] are n partitions."""
        parts = states.gather(2, index[..., None].expand(-1, -1, -1, states.shape[-1])).float()
        parts = parts.unflatten(2, (-1, self.lag))
        low, high = parts[:, :, 1:].amin(3, keepdim=True), parts[:, :, 1:].amax(3, keepdim=True)
        inside = torch.where(high > low, (parts[:, :, :-1] - low) / (high - low), 0.0)
        return inside.std(dim=-1).softmax(dim=-1)
