"""How much attention an eviction at the end of the prompt takes away: part of every run's receipt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.slots import Slots


@dataclass(frozen=True)
class RetainedAttention:
    """The last prompt query's attention by position: table [B, H, positions + 1], the last place for dead slots."""

    table: Tensor

    @classmethod
    def of(cls, sight: AttentionInputs, slots: Slots) -> RetainedAttention:
        """Just before the eviction: mean over the query heads of a kv head of the last row's softmax."""
        count = sight.query.shape[3]
        row = torch.softmax(sight.logits(slice(count - 1, count), sight.keys.shape[2]), dim=-1)[..., 0, :].mean(2)
        positions = slots.positions[:, :, : slots.used]
        table = torch.zeros(*row.shape[:2], slots.used + 1, device=row.device)
        return cls(table.scatter_add_(-1, torch.where(positions < 0, slots.used, positions), row.float()))

    def kept(self, slots: Slots) -> Tensor:
        """Just after it: the share [B] of that attention which still has its slot, mean over kv heads."""
        positions = slots.positions[:, :, : slots.used]
        if slots.visible is not None:
            positions = positions.masked_fill(~slots.visible[:, :, : slots.used], -1)
        last = self.table.shape[-1] - 1
        held = self.table.gather(-1, torch.where(positions < 0, last, positions))
        return held.masked_fill(positions < 0, 0.0).sum(-1).mean(-1)
