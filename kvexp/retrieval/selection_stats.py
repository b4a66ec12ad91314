"""Statistics of one layer's selections, updated at every new token, for the rows of results."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.retrieval.offload import OffloadedKV
from kvexp.retrieval.query import RetrievalQuery


class SelectionStats:
    """What the new tokens of one layer attended to.

    steps: new tokens so far; num_resident: per row, sinks + window + current token, summed over the steps. attended [B,
    H, N]: positions that the newest token attended to, -1: none. retained_attention [B]: the share of the first new
    token's exact attention that was attended to, mean over kv heads; None where the keys are not on the device.
    has_nan: whether an output held NaN.
    """

    def __init__(self, rows: int) -> None:
        self.steps = 0
        self.num_resident = [0] * rows
        self.attended: Tensor | None = None
        self.retained_attention: Tensor | None = None
        self.has_nan: Tensor | None = None

    def update(self, inputs: AttentionInputs, retrieval_query: RetrievalQuery, sinks: int, out: Tensor) -> None:
        """Count one new token per row, which attended to `inputs` with output `out`; sinks: their number."""
        memory = retrieval_query.memory
        self.steps += 1
        for row, (length, local) in enumerate(zip(memory.lengths, memory.config.local, strict=True)):
            self.num_resident[row] += min(length, sinks + local + 1)
        self.attended = inputs.positions
        bad = out.isnan().any()
        self.has_nan = bad if self.has_nan is None else self.has_nan | bad
        if self.steps == 1 and not memory.offloaded:
            exact = torch.softmax(
                retrieval_query.logits_of(memory.keys[:, :, : memory.length], past=True), dim=-1
            ).mean(2)
            held = exact.gather(-1, inputs.positions.clamp(min=0)).masked_fill(inputs.positions < 0, 0.0)
            self.retained_attention = held.sum(-1).mean(-1)

    def positions(self, memory: OffloadedKV) -> list[list[list[int]]]:
        """Positions that the newest token attended to, per row and kv head, ascending; at first, all that are held."""
        if self.attended is None:
            return [[list(range(length))] * memory.keys.shape[1] for length in memory.lengths]
        return [[sorted(p for p in head if p >= 0) for head in row] for row in self.attended.tolist()]

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: only among beams, which share `retained_attention`."""
        self.num_resident = [self.num_resident[i] for i in rows.tolist()]
        self.attended = self.attended[rows.to(self.attended.device)] if self.attended is not None else None
        if self.retained_attention is not None and not same_prompts:
            self.retained_attention = self.retained_attention[rows.to(self.retained_attention.device)]
