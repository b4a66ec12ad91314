"""SnapKV: slots are chosen once, at the end of the prompt, by the attention of its last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvexp.core import AttentionScoreSpec, EvictionContext, Method
from kvexp.util import AtLeast, Odd


@dataclass(frozen=True)
class SnapKV(Method):
    """score[j] = pool over neighbouring j of the sum over the last `window` prompt queries of softmax(x_q)[j];
    keep = those last `window` tokens U top of score. Chosen once.

    Source: Li et al., arXiv:2404.14469, section 4.1. The authors' code has kernel 5 and average pooling by default
    (`pool=avg`), kernel 7 and max pooling for LongBench (`kernel=7`); the defaults here are between the two.
    kvpress: window 64, kernel 5, average. Departure: one choice per kv head (sum over its query heads).
    """

    name: ClassVar[str] = "snapkv"
    evicts_while_decoding: ClassVar[bool] = False
    window: Annotated[int, AtLeast(1)] = 32  # arXiv:2404.14469
    kernel: Annotated[int, Odd(1)] = 5  # 7: the authors' LongBench settings
    pool: Literal["max", "avg"] = "max"  # avg: the authors' code where nothing is said, and kvpress

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec(last_rows=self.window)

    def recent(self, budget: int) -> int:
        return self.window

    @property
    def priority_kind(self) -> Literal["score"]:
        return "score"

    def priority(self, ctx: EvictionContext) -> Tensor:
        # Prompt slots stand in the order of their columns. The observing tokens themselves lend no mass to neighbours.
        score = ctx.score.masked_fill((ctx.age() < self.window) | ctx.score.isinf(), 0.0)
        pool = max_pool1d if self.pool == "max" else avg_pool1d
        pooled = pool(score, self.kernel, stride=1, padding=self.kernel // 2)
        # The window stays whole also where the budget counts the coming token as one of the recent ones.
        return pooled.masked_fill(ctx.age() < self.window, torch.inf)
