"""CAKE: layers share slots by how their attention spreads and shifts; what is looked at much or unevenly is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvexp.core import EvictionContext, Method, Needs
from kvexp.core.attention import attention_probs
from kvexp.core.budget_shares import CakeLayers, LayerBudgets
from kvexp.core.window_attention import older
from kvexp.util.fields import AtLeast, Odd, Range


@dataclass(frozen=True)
class CAKE(Method):
    """s[j] = mean over a kv head's query heads of the mean over `kernel` neighbours of j of mean_q(a_q[j]) + `gamma` *
    var_q(a_q[j]), a_q the softmax of the last `window` prompt queries; keep = those last `window` tokens U top of s, in
    each layer with slots as its preference E^(1 / tau1) * V^(1 / tau2). Chosen once.

    E: entropy of a_q over the tokens before the window, V: its variance over q, both summed over the layer. Source:
    Qin et al., arXiv:2503.12491, and the authors' code (window 32, kernel 5, gamma 200, tau1 and tau2 of its table
    by model, else 1). Departures: nothing is evicted while decoding (theirs: a token a step, by the newest query's
    attention); layers are cut when the last one has seen the prompt, and fill the budget (theirs are cut on the way
    and can leave slots empty: its sets are then part of these); a prompt a little above the budget is cut too
    (theirs leaves `window` more). `budget.layers=uniform`: the same in every layer; `budget.layers=cake`: these
    layer budgets for any other method (for SnapKV with DefensiveKV's worst case: that in place of mean and variance).
    """

    name: ClassVar[str] = "cake"
    evicts_while_decoding: ClassVar[bool] = False
    window: Annotated[int, AtLeast(2)] = 32  # queries, and newest tokens kept
    kernel: Annotated[int, Odd(1)] = 5
    gamma: Annotated[float, AtLeast(0)] = 200.0  # how much the variance over queries counts
    tau1: Annotated[float, Range(0, above=True)] = 1.0  # the authors' code has others for five models
    tau2: Annotated[float, Range(0, above=True)] = 1.0

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window)

    @property
    def layer_budgets(self) -> LayerBudgets:
        return CakeLayers(self.tau1, self.tau2, self.window)

    def recent(self, budget: int) -> int:
        return self.window

    @property
    def priority_kind(self) -> Literal["share"]:
        return "share"

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.last_logits is not None
        # Prompt slots stand in the order of their columns. Padding queries see nothing and count for nothing.
        rows = attention_probs(ctx.last_logits, ctx.sinks, torch.float64)
        real = ctx.last_logits.isfinite().any(-1, keepdim=True)
        number = real.sum(-2).clamp_min(1)
        rows = rows.masked_fill(~real, 0.0)
        mean = rows.sum(-2) / number
        spread = ((rows - mean[..., None, :]) ** 2).masked_fill(~real, 0.0).sum(-2) / (number - 1).clamp_min(1)
        outside = older(ctx, self.window)[:, :, None]
        score = (mean + self.gamma * spread).masked_fill(~outside, 0.0)
        pooled = avg_pool1d(score.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2).view(score.shape)
        return pooled.mean(2).float().masked_fill(ctx.age() < self.window, torch.inf)
