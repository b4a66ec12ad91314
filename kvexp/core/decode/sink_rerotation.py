"""Renumbered sinks in one decode step, where everything else that is kept is the newest tokens.

The newest tokens of such a cache are as far from the query by their places in the cache as by their positions; only the
sinks have come nearer, all by as much. So the step looks at them from a query that is turned back by that, instead of
turning every cached key as the general path does (`kvexp.core.attention.renumbered`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams, newest_logits
from kvexp.core.slots import Slots


class SinkRerotation:
    """The sinks of a stack's rows. most: the largest number of them; sinks: the number, or [R, 1, 1] of each row."""

    def __init__(self, most: int, sinks: int | Tensor) -> None:
        self.most, self.sinks = most, sinks

    def by(self, where: Tensor, newest: Tensor, *, dense: bool) -> Tensor:
        """[R, 1, 1]: the place of the query among the slots at `where` [R, H, S] less its position; never positive."""
        live = where.shape[-1] if dense else (where[:, :1] >= 0).sum(-1, keepdim=True)
        return live - 1 - newest

    def correct(
        self, x: Tensor, query: Tensor, slots: Slots, newest: Tensor, by: Tensor, geometry: AttentionParams
    ) -> None:
        """Replace the sinks' logits in x [R, H, G, 1, S]. They never left the first slots, where eviction put them."""
        if geometry.rotation is not None:
            heads = query.flatten(1, 2)
            turned = geometry.rotation.shift(heads, by)
            query = turned.unflatten(1, query.shape[1:3])
        keys, where = slots.keys[:, :, : self.most], slots.positions[:, :, : self.most]
        nearer = newest_logits(query, keys, where, newest + by, geometry)
        x[..., : self.most] = torch.where(self.among(where)[:, :, None, None], nearer, x[..., : self.most])

    def among(self, where: Tensor) -> Tensor:
        """Which slots at `where` hold a sink."""
        return (where >= 0) & (where < self.sinks)
