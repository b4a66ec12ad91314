"""CaM: the value of a dropped token is added, in parts, to the kept tokens that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core import AttentionScoreSpec, EvictionContext, Rewrites, Rewritten
from kvexp.core.noise import lowbias32, stream_id, uniform
from kvexp.core.slot_order import INT64_MAX
from kvexp.util.fields import AtLeast, Range


@dataclass(frozen=True)
class CaM(Rewrites):
    """keep = sinks U recent window U top of score, the attention summed up as H2O does. A dropped token i gives its
    value to the next `share` kept tokens j, v_j' = v_j + sum_i z_i v_i / share, with z_i = 1 by the probability
    min(1, score_i / mean of those j's scores), else 0. Chosen and merged once.

    Source: Zhang et al., CaM (ICML 2024, PMLR 235), and the authors' code (`share=32`), which chooses by age or as H2O.
    `draw="above"`: z_i = 1 where score_i is above the mean, as their GPT-NeoX code. Draws are a function of seed,
    layer, head and position. Departures: one eviction at the end of the prompt, where theirs go on for every token
    and merge it as it leaves the recent window.
    """

    name: ClassVar[str] = "cam"
    n_sinks: Annotated[int, AtLeast(0)] = 4
    recent_ratio: Annotated[float, Range(0, 1)] = 0.5
    share: Annotated[int, AtLeast(1)] = 32  # kept tokens among which a dropped value is divided
    draw: Literal["random", "above"] = "random"

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()

    @property
    def rewrites(self) -> tuple[str, ...]:
        return ("values",)

    def rewrite(self, ctx: EvictionContext, index: Tensor, keep: Tensor) -> Rewritten:
        count, n = ctx.slots.length, index.shape[-1]
        values = ctx.slots.values[:, :, :count].float()
        places = ctx.positions.gather(-1, index).masked_fill(~keep, INT64_MAX)  # ascending
        dropped = ctx.held() & (torch.zeros_like(ctx.positions).scatter(-1, index, keep.long()) == 0)
        first = torch.searchsorted(places, ctx.positions.contiguous())
        last = (first + self.share).clamp_max(keep.sum(-1, keepdim=True))
        scores = pad(ctx.score.gather(-1, index).masked_fill(~keep, 0.0).double().cumsum(-1), (1, 0))
        mean = (scores.gather(-1, last) - scores.gather(-1, first)) / (last - first).clamp_min(1)
        ratio = ctx.score / mean.clamp_min(torch.finfo(torch.float32).tiny)
        drawn = 1.0 if self.draw == "above" else self._draws(ctx)
        given = values * (dropped & (ratio > drawn) & (last > first))[..., None] / self.share
        change = torch.zeros(*index.shape[:2], n + 1, values.shape[-1], device=values.device)
        for where, sign in ((first.clamp_max(n), 1), (last, -1)):
            change.scatter_add_(2, where[..., None].expand_as(given), sign * given)
        at_kept = index[..., None].expand(-1, -1, -1, values.shape[-1])
        return Rewritten(values=values.gather(2, at_kept) + change[:, :, :n].cumsum(2))

    def _draws(self, ctx: EvictionContext) -> Tensor:
        """Numbers [B, H, S] between 0 and 1."""
        base = stream_id(ctx.seeds, ctx.layer, ctx.positions.shape[1])
        return uniform(lowbias32(base[:, :, None] + ctx.positions.int()))
