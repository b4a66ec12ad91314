"""Sinks at renumbered positions in a fast decode step (StreamingLLM: sinks and the newest tokens are all that is kept).

With survivors renumbered 0..S-1, the newest tokens are as far from the query as by their original position ids; only
the sinks have come nearer, all by the same offset. So the logits of the sinks are computed from a query that is rotated
back by this offset, instead of rotating every cached key (`kvexp.core.attention.with_renumbered_positions`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams, decode_logits
from kvexp.core.slots import Slots


class SinkRerotation:
    """Computes the logits of the sinks of stacked rows.

    max_sinks: the largest number of sinks of a row; sinks: the number, or [R, 1, 1] where rows differ.
    """

    def __init__(self, max_sinks: int, sinks: int | Tensor) -> None:
        self.max_sinks, self.sinks = max_sinks, sinks

    def offset(self, slot_positions: Tensor, newest: Tensor, *, no_padding_slots: bool) -> Tensor:
        """[R, 1, 1]: the query's renumbered position less its original one, newest [R, 1, 1]; never positive.

        slot_positions [R, H, S]: original position ids. no_padding_slots: every slot is live, so none is counted.
        """
        live = slot_positions.shape[-1] if no_padding_slots else (slot_positions[:, :1] >= 0).sum(-1, keepdim=True)
        return live - 1 - newest

    def apply(
        self, x: Tensor, query: Tensor, slots: Slots, newest: Tensor, offset: Tensor, params: AttentionParams
    ) -> None:
        """Replace the sinks' logits in x [R, H, G, 1, S], in place.

        query [R, H, G, 1, D]; newest, offset [R, 1, 1]. Sinks stand in the first slots, where the first eviction puts
        them.
        """
        if params.rope is not None:
            heads = query.flatten(1, 2)
            turned = params.rope.rotate_by(heads, offset)
            query = turned.unflatten(1, query.shape[1:3])
        keys, slot_positions = slots.keys[:, :, : self.max_sinks], slots.positions[:, :, : self.max_sinks]
        nearer = decode_logits(query, keys, slot_positions, newest + offset, params)
        x[..., : self.max_sinks] = torch.where(
            self.is_sink(slot_positions)[:, :, None, None], nearer, x[..., : self.max_sinks]
        )

    def is_sink(self, slot_positions: Tensor) -> Tensor:
        """[R, H, S] bool: which slots, by their original position ids, hold a sink."""
        return (slot_positions >= 0) & (slot_positions < self.sinks)
