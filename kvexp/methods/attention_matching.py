"""Attention matching: kept slots get a bias and values that make attention come out as before the eviction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Needs, Rewrites, Rewritten, SecondPass
from kvexp.core.fitting import bounded_least_squares, fit_dtype, least_squares, matching_pursuit
from kvexp.methods.kvzip import FIRST, LATER
from kvexp.util.fields import AtLeast

STEPS = 2  # of gradient descent behind the clamped solution, in the authors' `AM-HighestAttnKeys`
LOG_BOUNDS = {"rms": (-3.0, 3.0), "omp": (-math.log(1e12), 7.0)}  # of the bias, in the authors' two algorithms


@dataclass(frozen=True)
class AttentionMatching(Rewrites):
    """Keep sinks and the newest `window` tokens as they are, and C, the other slots with the largest root mean square
    of softmax(x_q)[j] over queries q. C's slots get biases b = log w and values V' by which attention among the other
    slots comes out as before, with E[q, j] = exp(x_q[j] - max_j x_q[j]):
    w = argmin sum_q (sum_(j in C) w_j E[q, j] - sum_j E[q, j])^2 within bounds,
    V' = argmin sum_q |softmax_(j in C)(x_q[j] + b_j) V' - softmax_j(x_q[j]) V|^2.
    Chosen and fitted once, for each kv head with the queries of its query heads together.

    `choose="omp"`: C by orthogonal matching pursuit of sum_j E[q, j]. `bias="mass"`: one b = -log(the mean share of
    attention that C has), which spreads what is dropped over C. `bias="none"` and `values="kept"`: plain eviction by
    the same choice. q are up to `queries` tokens' of a second pass that repeats the prompt behind KVzip's instruction
    (`instruct=false`: without it), or, `reference="prompt"`, the prompt's own newest ones. With fewer than a prompt has
    the fit follows those few and fails the others. A head whose equations have no one solution keeps its slots as they
    are (info.fits_failed).

    Source: Zweiger et al., Fast KV Compaction via Attention Matching (arXiv:2602.16284), and the authors' code: bounds
    e^-3 to e^3 and two steps of gradient descent behind a clamped solution (rms), 1e-12 to e^7 and none (omp, one slot
    at a time). Departures: with `reference="prompt"` each query sees what is before it (the authors': everything; they
    also let the model ask itself questions); their text's frame is kept as it is, here sinks and window; every kv head
    has the same budget; power iterations start from ones; no slot of tiny weight is replaced (omp); biases are float32
    and counted in bytes.
    """

    name: ClassVar[str] = "attention_matching"
    needs_whole_prompt: ClassVar[str] = "fits what is left to a whole prompt"
    n_sinks: Annotated[int, AtLeast(0)] = 4
    window: Annotated[int, AtLeast(1)] = 32
    queries: Annotated[int, AtLeast(1)] = 1024
    reference: Literal["prompt", "repeat"] = "repeat"
    instruct: bool = True
    choose: Literal["rms", "omp"] = "rms"
    bias: Literal["fitted", "mass", "none"] = "fitted"
    values: Literal["fitted", "kept"] = "fitted"

    @property
    def needs(self) -> Needs:
        if self.reference == "prompt":
            return Needs(last_queries=self.queries)
        first, later = (FIRST, LATER) if self.instruct else ("", "")
        return Needs(second_pass=SecondPass(0, instruction=first, next_instruction=later, queries=self.queries))

    @property
    def rewrites(self) -> tuple[str, ...]:
        return (*(() if self.bias == "none" else ("bias",)), *(() if self.values == "kept" else ("values",)))

    def recent(self, budget: int) -> int:
        return self.window

    def _exponentials(self, ctx: EvictionContext, row: int) -> tuple[Tensor, Tensor]:
        """E [H, q, S] of one row, 0 for sinks, window and dead slots; and which slots may be dropped, [H, S] bool."""
        assert ctx.last_logits is not None
        open_slots = ctx.held() & (ctx.positions >= self.n_sinks) & (ctx.age() >= ctx.recent[:, None, None])
        x = ctx.last_logits[row].flatten(1, 2).to(fit_dtype(ctx.positions.device))
        x = x.masked_fill(~open_slots[row, :, None], -torch.inf)
        largest = x.amax(-1, keepdim=True)
        return torch.exp(x - largest.masked_fill(largest == -torch.inf, 0.0)), open_slots[row]

    def priority(self, ctx: EvictionContext) -> Tensor:
        priority = torch.zeros(ctx.positions.shape, device=ctx.positions.device)
        for row, budget in enumerate(ctx.budget.tolist()):
            e, open_slots = self._exponentials(ctx, row)
            total = e.sum(-1, keepdim=True)
            if self.choose == "rms":
                share = e / total.clamp_min(torch.finfo(e.dtype).tiny)
                priority[row] = share.square().sum(1).sqrt().float()
                continue
            frame = ctx.held()[row, 0].sum() - open_slots[0].sum()
            count = max(0, min(budget - int(frame), int(open_slots[0].sum())))
            chosen = matching_pursuit(e, total[..., 0], count, math.exp(LOG_BOUNDS["omp"][1]))
            order = torch.arange(count, 0, -1, device=e.device).float().expand(len(chosen), -1)
            priority[row] = priority[row].scatter(-1, chosen, order)
        return priority

    def rewrite(self, ctx: EvictionContext, index: Tensor, keep: Tensor) -> Rewritten:
        b, h, n = index.shape
        dim = ctx.slots.values.shape[-1]
        held = ctx.slots.values[:, :, : ctx.slots.length]
        values = held.gather(2, index[..., None].expand(-1, -1, -1, dim)).clone()
        bias, failed = torch.zeros(b, h, n, device=index.device), torch.zeros(b, h, dtype=torch.bool)
        failed = failed.to(index.device)
        for row in range(b):
            e, open_slots = self._exponentials(ctx, row)
            # All heads hold the same positions in sinks and window, so that the same number of slots is rewritten.
            rewritten = open_slots.gather(-1, index[row]) & keep[row]
            count = int(rewritten[0].sum())
            if not count:
                continue
            place = rewritten.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :count]
            chosen = index[row].gather(-1, place)
            log_weights, fitted, failed[row] = self._fit(e, held[row].to(e.dtype), chosen)
            bias[row].scatter_(-1, place, log_weights.float())
            values[row].scatter_(1, place[..., None].expand(-1, -1, dim), fitted.to(values.dtype))
        return Rewritten(
            bias if self.bias != "none" else None, values if self.values != "kept" else None, failed=failed
        )

    def _fit(self, e: Tensor, values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bias [H, t], values [H, t, Dv] of the slots chosen [H, t], and the heads [H] that stay as they are.

        e [H, q, S]; values [H, S, Dv].
        """
        tiny = torch.finfo(e.dtype).tiny
        kept_e, total = e.gather(-1, chosen[:, None].expand(-1, e.shape[1], -1)), e.sum(-1)
        weights, failed = torch.ones_like(kept_e[:, 0]), torch.zeros(len(e), dtype=torch.bool, device=e.device)
        if self.bias == "fitted":
            low, high = LOG_BOUNDS[self.choose]
            steps = STEPS if self.choose == "rms" else 0
            weights, failed = bounded_least_squares(kept_e, total, math.exp(low), math.exp(high), steps)
        elif self.bias == "mass":
            seeing = total > 0
            share = (kept_e.sum(-1) / total.clamp_min(tiny)).sum(-1) / seeing.sum(-1).clamp_min(1)
            failed = share <= 0
            weights = weights / share.clamp_min(tiny)[:, None]
        kept = values.gather(1, chosen[..., None].expand(-1, -1, values.shape[-1]))
        fitted = kept
        if self.values == "fitted":
            weighted = kept_e * weights[:, None]
            new_share = weighted / weighted.sum(-1, keepdim=True).clamp_min(tiny)
            before = (e / total[..., None].clamp_min(tiny)) @ values
            fitted, unsolved = least_squares(new_share, before)
            failed = failed | unsolved
        bias = weights.log().masked_fill(failed[:, None], 0.0)
        return bias, torch.where(failed[:, None, None], kept, fitted), failed
