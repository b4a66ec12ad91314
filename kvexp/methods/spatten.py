"""SpAtten-style accumulation across heads and layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.core import AttentionScoreSpec, Method


@dataclass(frozen=True)
class SpAtten(Method):
    """score[j] = sum over layers so far, heads and queries of softmax(x)[j]; keep = top k - 1 and the current token.

    Source: Wang et al., arXiv:2012.09852, section 3.1 (cumulative token importance, cascade pruning); named in A2SF
    (arXiv:2407.20485). Departure: every layer has the same budget and chooses anew from the score accumulated so
    far; the hardware's top-k, its keep ratios by layer and its head and value pruning are left out.
    """

    name: ClassVar[str] = "spatten"

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec(pool_heads=True, across_layers=True)
