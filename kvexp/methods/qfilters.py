"""Q-Filters: keys that lie along the main direction of the model's queries are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from kvexp.core import EvictionContext, Method, Needs
from kvexp.util.fields import AtLeast

GRID = 2**20  # steps of 1 in which projections are compared


@dataclass(frozen=True)
class QFilters(Method):
    """f = mean over a kv head's query heads of v; s[j] = f.key_j; keep = newest U top k.

    v: the first right singular vector of a calibration pass's queries, RoPE applied, pointed to the side of their
    mean; the command `kvexp calibrate` makes it, once for each model. Source: Godey et al., arXiv:2503.02812,
    equation 1, theorem 3.3 and section 3.2 (average over grouped heads). As in kvpress, which stores -f.
    Departures: v is of all queries of the pass, not of 3,000 drawn ones, and its sign the paper's (of the mean; the
    release counts on which side more queries lie); the newest token is protected until a second query has seen it
    (`protect_recent=0`: the paper and kvpress; 64: the release's example); projections are compared in steps of
    2^-20, so that rounding does not decide between equal keys.
    """

    name: ClassVar[str] = "qfilters"
    protect_recent: Annotated[int, AtLeast(0)] = 2  # 0: the paper

    @property
    def needs(self) -> Needs:
        return Needs(calibration=True)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.calibration is not None
        filters = ctx.calibration.direction.mean(1)  # [H, D]
        projected: Tensor = ctx.slots.keys[:, :, : ctx.slots.length].float() @ filters[..., None]
        return (projected[..., 0] * GRID).round() / GRID
