"""Keys or values of kv heads that hold different numbers of slots, packed: their bytes are the sum over the heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class PackedStates:
    """Keys or values of every batch row and kv head, one behind the other in one buffer [sum of widths, D].

    widths: slots of each pair of a row b and a kv head h, in the order b * H + h. parts: views [width, D] of the
    buffer, in the same order.
    """

    def __init__(self, buffer: Tensor, widths: Sequence[int]) -> None:
        self.buffer, self.widths = buffer, list(widths)
        self.parts = list(buffer.split(self.widths))
        starts = list(accumulate(self.widths, initial=0))[:-1]
        self._starts = torch.tensor(starts, dtype=torch.int64, device=buffer.device)

    @classmethod
    def zeros(cls, like: Tensor, widths: Sequence[int]) -> PackedStates:
        """Of zeros, with the last dimension, dtype and device of `like`."""
        return cls(like.new_zeros(sum(widths), like.shape[-1]), widths)

    @classmethod
    def gathered(cls, parts: Sequence[Tensor], index: Tensor, widths: Sequence[int]) -> PackedStates:
        """The slots index [B, H, N] of each pair, the first of them up to its width; zeros behind.

        parts: keys or values [any width, D] of each pair. An index beyond a pair's slots stands for any of them: it is
        that of a dead slot.
        """
        made = cls.zeros(parts[0], widths)
        for new, old, chosen in zip(made.parts, parts, index.flatten(0, 1), strict=True):
            count = min(len(new), len(chosen))
            if count and len(old):
                new[:count] = old.index_select(0, chosen[:count].clamp_max(len(old) - 1))
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes

    def places(self, index: Tensor) -> Tensor:
        """Rows [B * H * n] of the buffer that hold the slots index [B, H, n]; the same wherever `widths` are."""
        return (self._starts[:, None] + index.flatten(0, 1)).flatten()

    def write(self, places: Tensor, states: Tensor) -> None:
        """Overwrite the slots at `places` (see there) with states [B, H, n, D]."""
        self.buffer.index_copy_(0, places, states.flatten(0, 2).to(self.buffer.dtype))

    def widened(self, widths: Sequence[int]) -> PackedStates:
        """A copy with at least as much room for every pair, zeros behind what it holds."""
        made = PackedStates.zeros(self.buffer, widths)
        for new, old in zip(made.parts, self.parts, strict=True):
            new[: len(old)] = old
        return made

    def of_pairs(self, pairs: Sequence[int]) -> PackedStates:
        """A copy of these pairs, in this order."""
        chosen = [self.parts[pair] for pair in pairs]
        return PackedStates(torch.cat(chosen), [len(part) for part in chosen])

    def padded(self, heads: int, columns: int) -> Tensor:
        """A copy as [B, H, columns, D], zeros behind the slots of each pair."""
        made = self.buffer.new_zeros(len(self.parts), columns, self.buffer.shape[-1])
        for new, part in zip(made, self.parts, strict=True):
            new[: len(part)] = part
        return made.view(-1, heads, columns, made.shape[-1])
