"""One score per position shared by all layers (Keyformer's shared score, SpAtten's accumulation over layers)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.sequence import SequenceState


class CrossLayerScore:
    """The score of every position, summed over layers: buffer [B, H, positions + 1] float32.

    The last entry is for dead slots; the buffer lies on the first layer's device. In every forward (the whole prompt is
    one) the layers take their turn from the first to the last: a layer adds its column sums to the buffer and then
    evicts by what the buffer holds. So it knows the layers below it from this forward, and all layers from earlier
    ones. The papers do not state an order; this one is our choice.
    """

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self.reset()

    def reset(self) -> None:
        """Set all scores to 0."""
        self.buffer: Tensor | None = None
        self._decayed_at = -1

    def update(self, positions: Tensor, sums: Tensor, factor: Tensor | None) -> Tensor:
        """Add a layer's sums [B, H, S] of the slots at positions [B, H, S]; return the slots' shared scores [B, H, S].

        factor [B, 1, 1]: decay, applied once per forward; None: no decay.
        """
        buffer = self._room(sums)
        if self._decayed_at != self.sequence.seq_len:
            self._decayed_at = self.sequence.seq_len
            if factor is not None:
                buffer *= factor.to(buffer.device)
        trash = buffer.shape[-1] - 1
        index = torch.where(positions < 0, trash, positions).to(buffer.device)
        buffer.scatter_add_(-1, index, sums.to(buffer.device))
        buffer[..., trash] = 0
        return buffer.gather(-1, index).to(sums.device)

    def _room(self, sums: Tensor) -> Tensor:
        """The buffer, grown to the sequence's length."""
        need = self.sequence.seq_len + 1
        if self.buffer is None or self.buffer.shape[-1] < need:
            device = sums.device if self.buffer is None else self.buffer.device
            grown = torch.zeros(*sums.shape[:2], need + 64, device=device)
            if self.buffer is not None:
                grown[..., : self.buffer.shape[-1]] = self.buffer
            self.buffer = grown
        return self.buffer

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(0, rows.to(self.buffer.device))
