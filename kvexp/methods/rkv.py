"""R-KV: slots that the last queries look at and that resemble few others are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize

from kvexp.core import EvictionContext, Method, Needs
from kvexp.core.window_attention import defended, older, oldest_first, window_rows
from kvexp.util.fields import AtLeast, Odd, Range

GRID = 2**20  # steps of 1 in which cosines are compared: their sums are exact, whatever their order
BLOCK = 64  # rows of the cosine matrix at a time: they stay in the processor's cache


@dataclass(frozen=True)
class RKV(Method):
    """I[j] = mean over the last `window` queries of the largest softmax(max over query heads of x_q) within `kernel`
    neighbours of j; R = softmax over j of the mean of column j of the keys' cosine matrix, in which the diagonal and
    each row's newest key with a cosine above `similar` are 0; s = `importance` * I - (1 - `importance`) * R;
    keep = newest `window` U top of s.

    Source: Cai et al., arXiv:2505.24133, equations 1-7, and the authors' release (window 8, kernel 7, similar 0.5).
    `form="release"`: softmax over the slots outside the window, and the mean pooled, not each query's row. Of the
    keys similar to one, the newest alone is spared, as in the release (the paper: the newest beta). Departures:
    evicts at the end of the prompt and at every step over budget (the release: `cache.evict_every=128`); a row
    without a similar key spares none (the release: its first); neighbours and the newest similar key are by
    position, also after evictions (the release: by slot); with fewer tokens than `window`, the queries there are
    count; cosines are taken in steps of 2^-20. `aggregate="defensive"` has DefensiveKV's worst case (arXiv:2510.13334)
    as I: the largest share in any row and query head, `kernel` neighbours averaged, at least the mean over slots.
    """

    name: ClassVar[str] = "rkv"
    reads_states: ClassVar[bool] = True
    later: ClassVar[tuple[str, ...]] = ("aggregate",)
    window: Annotated[int, AtLeast(1)] = 8  # queries, and newest tokens kept
    kernel: Annotated[int, Odd(1)] = 7
    importance: Annotated[float, Range(0, 1)] = 0.1  # the release: 0.07
    similar: Annotated[float, Range(0, 1)] = 0.5  # cosine
    form: Literal["paper", "release"] = "paper"  # release: softmax outside the window, pooled after the mean
    aggregate: Literal["mean", "defensive"] = "mean"  # of the queries; defensive: DefensiveKV's clamp

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window)

    def recent(self, budget: int) -> int:
        return self.window

    def priority(self, ctx: EvictionContext) -> Tensor:
        order = oldest_first(ctx)  # of which neighbours are, and the newest similar key
        repeated = redundancy(ctx, order, self.similar)
        score = self.importance * self._importance(ctx, order) - (1 - self.importance) * repeated
        # The window stays whole also where the budget counts the coming token as one of the recent ones.
        priority = torch.empty_like(score).scatter_(-1, order, score).float()
        return priority.masked_fill(ctx.age() < self.window, torch.inf)

    def _importance(self, ctx: EvictionContext, order: Tensor) -> Tensor:
        """I [B, H, S] float64 of the slots in `order`."""
        assert ctx.last_logits is not None
        if self.aggregate == "defensive":
            rows, _ = window_rows(ctx, self.window, among_older=self.form == "release")
            return defended(rows, ctx, self.window, self.kernel).gather(-1, order)
        among = ctx.held() if self.form == "paper" else older(ctx, self.window)
        x = ctx.last_logits.amax(2).double().masked_fill(~among[:, :, None], -torch.inf)
        number = x.isfinite().any(-1).sum(-1).clamp_min(1)[..., None]  # queries that see something: padding does not
        rows = x.softmax(-1).nan_to_num(0.0)
        rows = rows.gather(-1, order[:, :, None].expand_as(rows))
        if self.form == "release":
            rows = rows.sum(2, keepdim=True)
        pooled = max_pool1d(rows.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.view(rows.shape).sum(2) / number


def redundancy(ctx: EvictionContext, order: Tensor, similar: float) -> Tensor:
    """R [B, H, S] float64 of the slots in `order`, oldest first; similar: the cosine above which keys are alike."""
    held, keys = ctx.held().gather(-1, order), ctx.slots.keys[:, :, : ctx.slots.length]
    keys = keys.gather(2, order[..., None].expand_as(keys))
    units = normalize(keys.float(), dim=-1) * held[..., None]
    across = units.transpose(-1, -2) * GRID
    columns = torch.arange(keys.shape[2], device=keys.device, dtype=torch.int32)
    sums = torch.zeros(held.shape, dtype=torch.float64, device=keys.device)
    for start in range(0, keys.shape[2], BLOCK):
        cosine = (units[:, :, start : start + BLOCK] @ across).round_()
        cosine.diagonal(start, -2, -1).zero_()
        spared = torch.where(cosine > similar * GRID, columns, -1).amax(-1, keepdim=True)
        index = spared.clamp_min(0).long()
        cosine.scatter_(-1, index, cosine.gather(-1, index).masked_fill(spared >= 0, 0.0))
        sums += cosine.sum(2, dtype=torch.float64)
    mean = sums / GRID / held.sum(-1, keepdim=True).clamp_min(1)
    return mean.masked_fill(~held, -torch.inf).softmax(-1)
