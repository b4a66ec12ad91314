"""The queries of a layer's newest tokens, kept beside its slots for methods that ask what they look at now."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs


class LastQueries:
    """The last `number` queries of each row, of the prompt or decoded, as the model rotated them.

    query [B, H, G, n, D] with n <= number, newest last; positions [B, n]: their position ids, -1 for padding.
    """

    def __init__(self, number: int, first: AttentionInputs) -> None:
        """No query yet; first: the inputs of the prompt's first forward, for shapes."""
        self.number = number
        self.query, self.positions = first.query[..., :0, :], first.query_positions[:, :0]

    def add(self, inputs: AttentionInputs) -> None:
        """Add the queries of one forward, and forget those before the last `number`."""
        query = torch.cat([self.query, inputs.query[..., -self.number :, :]], dim=3)
        positions = torch.cat([self.positions, inputs.query_positions[:, -self.number :]], dim=1)
        # Copies: a view would hold a whole prompt's queries.
        self.query = query[..., -self.number :, :].clone()
        self.positions = positions[:, -self.number :].clone()

    def logits(self, inputs: AttentionInputs) -> Tensor:
        """Their logits [B, H, G, n, S] over the slots of `inputs`; -inf for later and evicted slots, and for padding.

        float32 (float64 for a float64 model). inputs: of the newest forward, at original positions.
        """
        count = self.query.shape[3]
        mine = replace(inputs, query=self.query, query_positions=self.positions, all_visible=False)
        x = mine.logits(slice(0, count), inputs.keys.shape[2])
        return x.masked_fill((self.positions < 0)[:, None, None, :, None], -torch.inf)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        rows = rows.to(self.query.device)
        self.query, self.positions = self.query[rows], self.positions[rows]
