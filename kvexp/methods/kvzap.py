"""KVzap: KVzip+'s scores as a trained surrogate predicts them from what the attention layer gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from kvexp.core import Method, Needs
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class KVzap(Method):
    """s[j] = w.h_j + b, h_j what the attention layer gets at token j, after the norm; keep = sinks U newest U top of s.

    w and b of each layer and kv head are trained to predict the logarithm of KVzip+'s score (kvexp calibrate
    kvzap), so that nothing is fed twice. Source: KVzap, arXiv:2601.07891, its linear form. Departures: a budget,
    the same in each kv head (the paper: a threshold); `n_sinks` as in KVzip (the paper: none).
    """

    name: ClassVar[str] = "kvzap"
    n_sinks: Annotated[int, AtLeast(0)] = 4
    protect_recent: Annotated[int, AtLeast(0)] = 8  # the paper: 128

    @property
    def needs(self) -> Needs:
        return Needs(surrogate=True)

    @property
    def priority_kind(self) -> Literal["log_share"]:
        return "log_share"
