"""LagKV: in each partition of the prompt, the tokens that stand out against the next partition are kept.

Or against the one before, while an answer grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core import EvictionContext, Method
from kvexp.core.window_attention import oldest_first
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
    `against="previous"`, causal LagKV: partitions of the slots held, oldest first, each against the one before it (the
    first is not normalised); s = std of keys plus std of values, top of s at every eviction. Source: EpiKV,
    arXiv:2606.26472, and its code at d424208, class LagKVEviction: `n_sinks=0`, `protect_recent=128`, `keep=prompt`.
    Departure: a choice of each kv head (there: one set for the model, of keys and values averaged over layers).
    """

    name: ClassVar[str] = "lagkv"
    reads_states: ClassVar[bool] = True
    later: ClassVar[tuple[str, ...]] = ("against", "protect_recent")
    n_sinks: Annotated[int, AtLeast(0)] = 16  # the release; kvpress: 4
    lag: Annotated[int, AtLeast(2)] = 128  # the release's README and kvpress; the release's class: 1024
    against: Literal["next", "previous"] = "next"  # previous: causal, and while decoding
    protect_recent: Annotated[int, AtLeast(0)] = 0  # 128: causal LagKV's code; counts the token being generated

    @property
    def evicts_while_decoding(self) -> bool:  # type: ignore[override]
        return self.against == "previous"

    @property
    def needs_whole_prompt(self) -> str:  # type: ignore[override]
        return "" if self.evicts_while_decoding else "compares each partition of the prompt with the next one"

    def priority(self, ctx: EvictionContext) -> Tensor:
        if self.against == "previous":
            order = oldest_first(ctx)
            score = self._causal_score(ctx.slots.keys, order) + self._causal_score(ctx.slots.values, order)
            return torch.empty_like(score).scatter_(-1, order, score)
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
        parts = self._parts(states, index)
        low, high = parts[:, :, 1:].amin(3, keepdim=True), parts[:, :, 1:].amax(3, keepdim=True)
        inside = torch.where(high > low, (parts[:, :, :-1] - low) / (high - low), 0.0)
        return inside.std(dim=-1).softmax(dim=-1)

    def _causal_score(self, states: Tensor, order: Tensor) -> Tensor:
        """s [B, H, S] of keys or values [B, H, C, D] in `order` [B, H, S], whose last partition may not be full."""
        length = order.shape[-1]
        parts = self._parts(states, pad(order, (0, -length % self.lag)))
        low, high = parts[:, :, :-1].amin(3, keepdim=True), parts[:, :, :-1].amax(3, keepdim=True)
        inside = torch.cat([parts[:, :, :1], (parts[:, :, 1:] - low) / (high - low + 1e-9)], dim=2)
        return inside.std(dim=-1).flatten(2)[..., :length]

    def _parts(self, states: Tensor, index: Tensor) -> Tensor:
        """Partitions [B, H, n, lag, D] float32 of keys or values [B, H, C, D] at index [B, H, n * lag]."""
        parts = states.gather(2, index[..., None].expand(-1, -1, -1, states.shape[-1]))
        in_lags: Tensor = parts.float().unflatten(2, (-1, self.lag))
        return in_lags
