"""Random eviction: a control, whose quality every score should exceed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.core import EvictionContext, Method
from kvexp.core.noise import lowbias32, stream_id, uniform
from kvexp.util.fields import AtLeast

_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit integer


@dataclass(frozen=True)
class Random(Method):
    """score[j] = uniform noise of (seed, layer, head, position); keep = top k. A control.

    A token's draw is its own for good, so that what stays is a uniform sample of everything seen. `redraw=true` draws
    anew at every eviction: a token survives each by the same chance, and old ones are forgotten geometrically.
    `per="layer"`, `per="model"`: the heads of a layer, of all layers, share their draws. `block`: so do neighbouring
    positions. Random Attention (arXiv:2609.03430) is `redraw=true` with `keep=prompt`, `protect_recent=64`,
    `cache.evict_every=64`, `budget.counts_self=false`. Departures from its code: evictions come every so many generated
    tokens (there: when the cache's length is a multiple of 64); a prompt that does not fit is an error (there: it is
    cut); a block is of neighbouring positions (there: of neighbouring slots, whatever was between them).
    """

    name: ClassVar[str] = "random"
    later: ClassVar[tuple[str, ...]] = ("redraw", "per", "block", "protect_recent")
    redraw: bool = False  # true: at every eviction, as Random Attention
    per: Literal["head", "layer", "model"] = "head"  # whose draws are equal
    block: Annotated[int, AtLeast(1)] = 1  # neighbouring positions that share a draw
    protect_recent: Annotated[int, AtLeast(0)] = 0  # 64: Random Attention; counts the token being generated

    def initial_score(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor | None:
        return None if self.redraw else self.draws(positions[:, None], seeds, layer, keys.shape[1], None)

    @property
    def priority_is_score(self) -> bool:
        return not self.redraw

    def priority(self, ctx: EvictionContext) -> Tensor:
        if not self.redraw:
            return ctx.score
        return self.draws(ctx.positions, ctx.seeds, ctx.layer, ctx.positions.shape[1], ctx.newest)

    def draws(self, positions: Tensor, seeds: Tensor, layer: int, heads: int, eviction: Tensor | None) -> Tensor:
        """Draws [B, H, S] float32 between 0 and 1 at positions [B, 1 or H, S].

        seeds [B]; eviction [B]: newest position, by which an eviction is known; None: the same draws in all.
        """
        base = stream_id(seeds, 0 if self.per == "model" else layer, heads if self.per == "head" else 1)
        if eviction is not None:
            base = lowbias32(base + eviction.int()[:, None] * _GOLDEN)
        places = torch.div(positions, self.block, rounding_mode="floor").int()
        return uniform(lowbias32(base[:, :, None] + places * _GOLDEN)).expand(-1, heads, -1)
