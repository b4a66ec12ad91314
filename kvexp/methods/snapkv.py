"""SnapKV: slots are chosen at the end of the prompt, by the attention of its last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvexp.core import AttentionScoreSpec, EvictionContext, Method, Needs
from kvexp.core.window_attention import by_neighbours, defended, window_rows
from kvexp.util.fields import AtLeast, Odd


@dataclass(frozen=True)
class SnapKV(Method):
    """score[j] = pool over neighbouring j of the sum over the last `window` prompt queries of softmax(x_q)[j];
    keep = those last `window` tokens U top of score. Chosen once.

    Source: Li et al., arXiv:2404.14469, section 4.1. The authors' code has kernel 5 and average pooling by default
    (`pool=avg`), kernel 7 and max pooling for LongBench (`kernel=7`); the defaults here are between the two.
    kvpress: window 64, kernel 5, average. Departure: one choice per kv head (sum over its query heads).
    `decoding=true` goes on choosing while an answer grows, by its newest queries, as the baseline of VaSE
    (arXiv:2606.03928) and of Random Attention (arXiv:2609.03430): `window=64`, `pool=avg`, `softmax="older"` (over the
    slots before the window), every 64 tokens. Neighbours are by position, also after evictions (the authors' code
    leaves survivors in falling order of score, the window behind, which matters to nothing that is chosen once;
    VaSE's baseline leaves them so too, and its next choice takes neighbours by slot). `aggregate="defensive"` takes
    DefensiveKV's worst case (arXiv:2510.13334) in place of the sum: the largest share in any row and query head,
    pooled by average before.
    """

    name: ClassVar[str] = "snapkv"
    later: ClassVar[tuple[str, ...]] = ("decoding", "softmax", "aggregate")
    window: Annotated[int, AtLeast(1)] = 32  # arXiv:2404.14469
    kernel: Annotated[int, Odd(1)] = 5  # 7: the authors' LongBench settings
    pool: Literal["max", "avg"] = "max"  # avg: the authors' code where nothing is said, and kvpress
    decoding: bool = False  # true: chosen anew while decoding, by the newest `window` queries
    softmax: Literal["seen", "older"] = "seen"  # older: over the slots before the window alone
    aggregate: Literal["sum", "defensive"] = "sum"  # defensive: DefensiveKV's clamp

    @property
    def evicts_while_decoding(self) -> bool:  # type: ignore[override]
        return self.decoding

    @property
    def by_rows(self) -> bool:
        """Whether the rows of the newest queries are looked at one by one, where their sum does not do."""
        return self.decoding or self.softmax == "older" or self.aggregate == "defensive"

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        return None if self.by_rows else AttentionScoreSpec(last_rows=self.window)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window if self.by_rows else 0)

    def recent(self, budget: int) -> int:
        return self.window

    @property
    def priority_kind(self) -> Literal["score", "share"]:
        return "share" if self.by_rows else "score"

    def priority(self, ctx: EvictionContext) -> Tensor:
        if self.by_rows:
            rows, number = window_rows(ctx, self.window, among_older=self.softmax == "older")
            if self.aggregate == "defensive":
                priority = defended(rows, ctx, self.window, self.kernel)
            else:
                mean = rows.sum(-2).mean(2) / number[:, None, None]
                priority = by_neighbours(mean, ctx, self.kernel, self.pool)
            return priority.float().masked_fill(ctx.age() < self.window, torch.inf)
        # Prompt slots stand in the order of their columns. The observing tokens themselves lend no mass to neighbours.
        score = ctx.score.masked_fill((ctx.age() < self.window) | ctx.score.isinf(), 0.0)
        pool = max_pool1d if self.pool == "max" else avg_pool1d
        pooled = pool(score, self.kernel, stride=1, padding=self.kernel // 2)
        # The window stays whole also where the budget counts the coming token as one of the recent ones.
        return pooled.masked_fill(ctx.age() < self.window, torch.inf)
