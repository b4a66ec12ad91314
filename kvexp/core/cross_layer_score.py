"""One score by position for the whole model (Keyformer's shared score, SpAtten's accumulation over layers)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.sequence import SequenceState


class CrossLayerScore:
    """Buffer [B, H, positions] float32 on the first layer's device.

    Each layer adds its column sums and then ranks by what the layers before it have added in this forward (the whole
    prompt counts as one) and all layers in earlier ones; the order is our choice, the papers do not state one. The last
    place takes what dead slots add.
    """

    def __init__(self, timeline: SequenceState) -> None:
        self.timeline = timeline
        self.reset()

    def reset(self) -> None:
        """Forget every score."""
        self.buffer: Tensor | None = None
        self._decayed_at = -1

    def update(self, positions: Tensor, columns: Tensor, factor: Tensor | None) -> Tensor:
        """Add columns [B, H, S] of the slots at positions [B, H, S]; factor [B, 1, 1] decays once per forward."""
        buffer = self._room(columns)
        if self._decayed_at != self.timeline.end:
            self._decayed_at = self.timeline.end
            if factor is not None:
                buffer *= factor.to(buffer.device)
        trash = buffer.shape[-1] - 1
        index = torch.where(positions < 0, trash, positions).to(buffer.device)
        buffer.scatter_add_(-1, index, columns.to(buffer.device))
        buffer[..., trash] = 0
        return buffer.gather(-1, index).to(columns.device)

    def _room(self, columns: Tensor) -> Tensor:
        need = self.timeline.end + 1
        if self.buffer is None or self.buffer.shape[-1] < need:
            device = columns.device if self.buffer is None else self.buffer.device
            grown = torch.zeros(*columns.shape[:2], need + 64, device=device)
            if self.buffer is not None:
                grown[..., : self.buffer.shape[-1]] = self.buffer
            self.buffer = grown
        return self.buffer

    def select_rows(self, rows: Tensor) -> None:
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(0, rows.to(self.buffer.device))
