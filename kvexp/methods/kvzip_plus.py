"""KVzip+: KVzip's attention, weighed by how far it moves the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvexp.core import EvictionContext, Needs
from kvexp.methods.kvzip import KVzip


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """s[j] = max over queries q and query heads h of softmax(x_q)[j] * ||W_h v_j||_2 / ||h_q||_2, else as KVzip.

    W_h: query head h's block of the output projection; h_q: what the attention layer gets at query q, after the norm.
    Source: KVzap, arXiv:2601.07891 (its regression target), as in kvpress's KVzipPress with that normalization.
    Departures: KVzip's.
    """

    name: ClassVar[str] = "kvzip_plus"

    @property
    def needs(self) -> Needs:
        return Needs(second_pass=self._second_pass(over_input=True), output_norms=True)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.second_pass_attention is not None
        return (ctx.second_pass_attention * ctx.output_norms()).amax(2)
