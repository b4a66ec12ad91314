"""How much attention survives the eviction at the end of the prompt: `attention_kept` in every row of results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.slots import Slots


@dataclass(frozen=True)
class RetainedAttention:
    """The last prompt query's attention by position: table [B, H, positions + 1], the last entry for dead slots."""

    table: Tensor

    @classmethod
    def before(cls, inputs: AttentionInputs, slots: Slots) -> RetainedAttention:
        """The attention before the eviction: the last query row's softmax, mean over a kv head's query heads."""
        count = inputs.query.shape[3]
        row = torch.softmax(inputs.logits(slice(count - 1, count), inputs.keys.shape[2]), dim=-1)[..., 0, :].mean(2)
        positions = slots.positions[:, :, : slots.length]
        table = torch.zeros(*row.shape[:2], slots.length + 1, device=row.device)
        return cls(table.scatter_add_(-1, torch.where(positions < 0, slots.length, positions), row.float()))

    def after(self, slots: Slots) -> Tensor:
        """After the eviction: the share [B] of that attention whose slots survived, mean over kv heads."""
        positions = slots.positions[:, :, : slots.length]
        if slots.visible is not None:
            positions = positions.masked_fill(~slots.visible[:, :, : slots.length], -1)
        last = self.table.shape[-1] - 1
        held = self.table.gather(-1, torch.where(positions < 0, last, positions))
        return held.masked_fill(positions < 0, 0.0).sum(-1).mean(-1)
