"""Key norm: keys with a small L2 norm are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvexp.core import Method


@dataclass(frozen=True)
class KNorm(Method):
    """score[j] = -||key_j||_2; keep = top k.

    Source: Devoto et al., arXiv:2406.11430, section 3; RoPE leaves norms as they are, so cached keys serve.
    Departures: every layer has its budget (the paper leaves the first two whole); norms are compared to 16 bits, so
    that RoPE's rounding does not decide between equal tokens.
    """

    name: ClassVar[str] = "knorm"
    reads_states: ClassVar[bool] = True

    def initial_score(self, keys: Tensor, positions: Tensor, seeds: Tensor, layer: int) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
        fraction, exponent = torch.frexp(norm)
        return -torch.ldexp((fraction * 65536).round() / 65536, exponent)
