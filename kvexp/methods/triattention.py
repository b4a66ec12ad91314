"""TriAttention: keys that the model's mean query will look at from the distances to come, and long keys, are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Needs
from kvexp.core.special_methods import JoinsLayers
from kvexp.core.statistics import mean_rotation
from kvexp.util.fields import AtLeast, Range

LARGEST = 1 << 20  # of max_offset: angles in float32 say little beyond


@dataclass(frozen=True)
class TriAttention(JoinsLayers):
    """s[j] = mean over d of sum_f |E q_f| |k_f| cos(w_f (t + d - p_j) + phi_f) + sum_f (E|q_f| - |E q_f|) |k_f| in each
    query head, d = 1, 2, 4 ... `max_offset`; keep = newest U top k of the largest z-score of s over query heads.

    f: RoPE's pairs of dimensions as complex numbers, before RoPE; E: over a calibration pass's queries, which the
    command `kvexp calibrate` leaves; phi_f = arg(E q_f conj k_f), t: the next position, p_j: of slot j. Source: Mao
    et al., arXiv:2604.04921, equations 6 to 13, as in its release (`per_layer_perhead_pruning`, scores normalised
    over the slots held). `group="mean"`: an option of the release. `pruning="per_head"`, which its launchers run: the
    mean of that largest z-score over layers, so that a kv head keeps the same in all layers; `pruning="union"`, its and
    TensorRT-LLM's default: the largest over all layers and heads, one set for the model. Departures: the prompt is
    evicted too (`keep=prompt`: the release, which then takes z-scores over generated tokens); eviction comes at every
    step (the release: `cache.evict_every=128`); the newest token is protected (`protect_recent=0`: the release); no
    noise of 1e-6 is added. Our reading: dimensions that RoPE does not turn count as E q times key.
    """

    name: ClassVar[str] = "triattention"
    later: ClassVar[tuple[str, ...]] = ("pruning",)
    max_offset: Annotated[int, Range(1, LARGEST)] = 65536  # positions
    group: Literal["max", "mean"] = "max"  # mean, over query heads
    protect_recent: Annotated[int, AtLeast(0)] = 2  # 0: the release
    pruning: Literal["per_layer_head", "per_head", "union"] = "per_layer_head"  # what is kept in common

    @property
    def needs(self) -> Needs:
        return Needs(calibration=True)

    @property
    def joins_layers(self) -> bool:
        return self.pruning != "per_layer_head"

    def join_layers(self, priorities: Tensor) -> Tensor:
        if self.pruning == "union":
            return priorities.amax((0, 2), keepdim=True).expand_as(priorities)
        counted = priorities.isfinite()
        total = priorities.double().masked_fill(~counted, 0.0).sum(0, keepdim=True)
        return (total / counted.sum(0, keepdim=True).clamp_min(1)).float().expand_as(priorities)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.calibration is not None
        keys, mean = ctx.slots.keys[:, :, : ctx.slots.length].float(), ctx.calibration.mean[None]
        if ctx.rope is None:
            score = mean @ keys.transpose(-1, -2)
        else:
            offsets = 2 ** torch.arange(self.max_offset.bit_length(), device=keys.device)
            turn = mean_rotation(ctx.rope, ctx.newest[:, None] + 1 + offsets, keys.shape[-1])[:, None]
            spread = ctx.calibration.size - torch.linalg.vector_norm(ctx.rope.pairs(mean), dim=-1)
            lengths = torch.linalg.vector_norm(ctx.rope.pairs(keys), dim=-1)
            score = mean @ turn.transpose(-1, -2) @ keys.transpose(-1, -2) + spread @ lengths.transpose(-1, -2)
        held = ctx.held()
        if ctx.kept_prompt is not None:
            held = held & (ctx.positions >= ctx.kept_prompt[:, None, None])
        held = held[:, :, None]  # [B, H, 1, S]
        count = held.sum(-1, keepdim=True).clamp_min(1)
        score = score.masked_fill(~held, 0.0)
        apart = (score - score.sum(-1, keepdim=True) / count).masked_fill(~held, 0.0)
        deviation = (apart.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
        return (apart / deviation).amax(2) if self.group == "max" else (apart / deviation).mean(2)
