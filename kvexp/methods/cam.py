"""CaM: the value of a dropped token is added, in parts, to the tokens that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.core import AttentionScoreSpec, EvictionContext, Rewrites, Rewritten
from kvexp.core.noise import lowbias32, stream_id, uniform
from kvexp.util.fields import AtLeast, Range

BLOCK = 256  # tokens whose values are made at once


@dataclass(frozen=True)
class CaM(Rewrites):
    """keep = sinks U recent window U top of score, the attention summed up as H2O does. In the order of positions a
    dropped token i gives its value to the next `share` tokens j, kept or not: v_j' = v_j + sum_i z_i v_i' / share, with
    z_i = 1 by the probability min(1, score_i / mean of those j's scores), else 0. Chosen and merged once.

    Source: Zhang et al., CaM (ICML 2024, PMLR 235), and the authors' code: `share=16` and sums of attention for
    perplexity, 32 and the newest query's for Llama's tasks, where the mean is over all of the window that follows. It
    keeps sinks and a window alone (here `recent_ratio` near 1). `draw="above"`: z_i = 1 where score_i is above the
    mean, as their GPT-NeoX and OPT code (whose mean is over sinks and window). Draws are a function of seed, layer,
    head and position. Departures: tokens give at the end of the prompt, one after the other, by the sums of all of its
    queries (theirs: when they leave the window, by the sums until then), and not while decoding.
    """

    name: ClassVar[str] = "cam"
    n_sinks: Annotated[int, AtLeast(0)] = 4
    recent_ratio: Annotated[float, Range(0, 1)] = 0.5
    share: Annotated[int, AtLeast(1)] = 32  # tokens among which a dropped value is divided
    draw: Literal["random", "above"] = "random"

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()

    @property
    def rewrites(self) -> tuple[str, ...]:
        return ("values",)

    def rewrite(self, ctx: EvictionContext, index: Tensor, keep: Tensor) -> Rewritten:
        order = ctx.positions.argsort(-1)  # dead slots first
        held, count = ctx.held(), order.shape[-1]
        dropped = (held & ~torch.zeros_like(held).scatter(-1, index, keep)).gather(-1, order)
        score = ctx.score.masked_fill(~held, 0.0).gather(-1, order)
        sums, first = pad(score.double().cumsum(-1), (1, 0)), torch.arange(1, count + 1, device=order.device)
        last = (first + self.share).clamp_max(count)
        mean = (sums[..., last] - sums[..., first]) / (last - first).clamp_min(1)
        drawn = 1.0 if self.draw == "above" else self._draws(ctx).gather(-1, order)
        gives = dropped & (score / mean.clamp_min(torch.finfo(torch.float32).tiny) > drawn)
        values = ctx.slots.values[:, :, :count].float().masked_fill(~held[..., None], 0.0)
        wide = (-1, -1, -1, values.shape[-1])
        given = self._give(values.gather(2, order[..., None].expand(wide)), gives)
        return Rewritten(values=given.gather(2, order.argsort(-1).gather(-1, index)[..., None].expand(wide)))

    def _give(self, values: Tensor, gives: Tensor) -> Tensor:
        """Values [B, H, S, Dv] in the order of positions when all tokens of gives [B, H, S] have given theirs."""
        given, places = values.clone(), torch.arange(values.shape[2], device=values.device)
        for start in range(0, len(places), BLOCK):
            before = min(start, self.share)
            seen = slice(start - before, start + BLOCK)
            distance = places[start : start + BLOCK, None] - places[seen]
            parts = ((distance > 0) & (distance <= self.share)) * gives[:, :, None, seen] / self.share
            known = values[:, :, start : start + BLOCK] + parts[..., :before] @ given[:, :, start - before : start]
            # v' = known + parts v', and parts is strictly lower triangular: its diagonal of 0 is taken for ones.
            solved = torch.linalg.solve_triangular(-parts[..., before:], known, upper=False, unitriangular=True)
            given[:, :, start : start + BLOCK] = solved
        return given

    def _draws(self, ctx: EvictionContext) -> Tensor:
        """Numbers [B, H, S] between 0 and 1."""
        base = stream_id(ctx.seeds, ctx.layer, ctx.positions.shape[1])
        return uniform(lowbias32(base[:, :, None] + ctx.positions.int()))
