"""KeyDiff: keys that point elsewhere than the mean key are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvexp.core import EvictionContext, Method
from kvexp.util.fields import AtLeast

GRID = 2**20  # steps of 1 in which cosines are compared


@dataclass(frozen=True)
class KeyDiff(Method):
    """a = mean over the slots of key_j / ||key_j||_2; priority[j] = -cos(key_j, a); keep = top k.

    Source: Park et al., arXiv:2504.15364, section 3: the mean is of the normalised keys held at that eviction, RoPE
    applied, as in kvpress. Departures: the whole prompt is stored before the first eviction (the paper: block by
    block); the newest token is protected until a second query has seen it (`protect_recent=0`: the paper); cosines
    are compared in steps of 2^-20, so that rounding does not decide between equal keys.
    """

    name: ClassVar[str] = "keydiff"
    reads_states: ClassVar[bool] = True
    protect_recent: Annotated[int, AtLeast(0)] = 2  # 0: as the paper; counts the token being generated

    def priority(self, ctx: EvictionContext) -> Tensor:
        keys = ctx.slots.keys[:, :, : ctx.slots.length].float()
        inverse = 1 / torch.linalg.vector_norm(keys, dim=-1).clamp_min(1e-12)
        # Two products with the keys, and no copy of them: the sum of the normalised keys, and each key's share of it.
        anchor = normalize(inverse.masked_fill(~ctx.held(), 0.0)[:, :, None] @ keys, dim=-1)
        cosine: Tensor = (keys @ anchor.transpose(-1, -2))[..., 0] * inverse
        return -(cosine * GRID).round() / GRID
