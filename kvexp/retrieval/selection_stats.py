"""What one layer's choices came to: noted at every new token, for receipts."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.retrieval.offload import Memory
from kvexp.retrieval.query import RetrievalQuery


class Tally:
    """steps: new tokens so far; near: per row, sinks + window + current token, summed over them.

    attended [B, H, N]: positions the newest token attended to (-1: none). kept [B]: of the first new token's exact
    attention, the share that was attended to, mean over kv heads; None where the keys are not at hand to tell. broken:
    an output held NaN.
    """

    def __init__(self, rows: int) -> None:
        self.steps = 0
        self.near = [0] * rows
        self.attended: Tensor | None = None
        self.kept: Tensor | None = None
        self.broken: Tensor | None = None

    def note(self, sight: AttentionInputs, asked: RetrievalQuery, sinks: int, out: Tensor) -> None:
        """One new token has attended to `sight`."""
        memory = asked.memory
        self.steps += 1
        for row, (length, local) in enumerate(zip(memory.lengths, memory.layout.local, strict=True)):
            self.near[row] += min(length, sinks + local + 1)
        self.attended = sight.positions
        bad = out.isnan().any()
        self.broken = bad if self.broken is None else self.broken | bad
        if self.steps == 1 and not memory.apart:
            exact = torch.softmax(asked.against(memory.keys[:, :, : memory.used], past=True), dim=-1).mean(2)
            held = exact.gather(-1, sight.positions.clamp(min=0)).masked_fill(sight.positions < 0, 0.0)
            self.kept = held.sum(-1).mean(-1)

    def positions(self, memory: Memory) -> list[list[list[int]]]:
        """What the newest token attended to, per row and kv head, ascending; before there is one, everything held."""
        if self.attended is None:
            return [[list(range(length))] * memory.keys.shape[1] for length in memory.lengths]
        return [[sorted(p for p in head if p >= 0) for head in row] for row in self.attended.tolist()]

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        """Keep, repeat or reorder batch rows; beams of a sample share what was kept of their first token."""
        self.near = [self.near[i] for i in rows.tolist()]
        self.attended = self.attended[rows.to(self.attended.device)] if self.attended is not None else None
        if self.kept is not None and not same_prompts:
            self.kept = self.kept[rows.to(self.kept.device)]
