"""Counter-based noise: a pure function of (seed, layer, query head, query position, key position).

No generator state means that blocks, batches, beams, padding and devices cannot change a draw. The mixer is the
public-domain 32-bit integer hash "lowbias32" (two multiplications, three xor-shifts), applied once per query and once
per element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvexp.errors import ConfigError

EULER = 0.5772156649015329  # mean of the standard Gumbel distribution
GUMBEL_STD = math.pi / math.sqrt(6)  # its standard deviation, 1.2825
_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit integer
KINDS = ("gumbel", "gaussian", "constant", "none")


def mix(x: Tensor) -> Tensor:
    """lowbias32 of an int32 tensor; shifts are made logical by masking, products wrap."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def uniform(bits: Tensor) -> Tensor:
    """int32 bits -> float32 strictly between 0 and 1, on the grid (i + 1/2) / 2**23.

    23 bits, because 2**24 - 1/2 is no float32: it would round to 1, and a Gumbel draw to infinity.
    """
    return (((bits >> 9) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23


def stream(seeds: Tensor, layer: int, heads: int) -> Tensor:
    """[B] integer seeds -> [B, heads] int32: one independent stream per row seed, layer and head."""
    low = seeds.to(torch.int64) & 0xFFFFFFFF
    low = torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
    base = mix(mix(low) + layer * 97 + 1)
    return mix(base[:, None] + torch.arange(heads, device=seeds.device, dtype=torch.int32) * _GOLDEN)


@dataclass(frozen=True)
class Noise:
    """The logit adjustment zeta of Keyformer (arXiv:2403.09054, section 3.2).

    `fresh`: one draw per (query, key), as the authors' code does; otherwise one per key, the other reading of
    Algorithm 1. Gaussian and constant have the mean (and standard deviation) of the Gumbel distribution, as Table 4 of
    that paper; a constant cannot change a softmax, so it must equal none (DECISIONS.md).
    """

    kind: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel"
    fresh: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"noise must be one of {', '.join(KINDS)}, got {self.kind!r}")

    def draw(self, seeds: Tensor, layer: int, heads: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Noise for logits.

        seeds [B]; heads = H * G query heads; query_positions [B, Q]; key_positions [B, H, S] or [B, 1, S].
        Returns [B, H * G, Q (1 if per key), S] float32, same device.
        """
        if self.kind == "none":
            return torch.zeros((), device=key_positions.device)
        if self.kind == "constant":
            return torch.full((), EULER, device=key_positions.device)
        base = stream(seeds, layer, heads)[:, :, None]
        keys = key_positions.to(torch.int32)
        if keys.shape[1] != 1:
            keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
        if self.fresh:
            base = mix(base + query_positions.to(torch.int32)[:, None, :] * _GOLDEN)
        bits = mix(base[..., None] + keys[:, :, None, :] * _GOLDEN)
        u = uniform(bits)
        if self.kind == "gumbel":
            return u.log_().neg_().log_().neg_()
        radius = u.log_().mul_(-2).sqrt_()
        return radius.mul_(torch.cos(2 * math.pi * uniform(mix(bits ^ 0x5BD1E995)))).mul_(GUMBEL_STD).add_(EULER)
