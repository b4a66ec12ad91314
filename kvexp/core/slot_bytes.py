"""Bytes of a kv head's slots, from a configuration alone: what buffers of `Slots` and `QuantizedSlots` then hold."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvexp.core.quantization import PARAMETER, Codec, Quantization

INDEX_BYTES = 8  # of a slot's number or a group's first position, which are int64
HALF_BYTES = 2  # of a number on the axis of bytes, where it is not quantised: 16 bits, whatever dtype ran


def bytes_at_16(*tensors: Tensor) -> int:
    """Bytes of tensors whose floating-point numbers count as 16 bits each, whatever their dtype; others as they are."""
    return sum(
        tensor.numel()
        * (min(HALF_BYTES, tensor.element_size()) if tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors
    )


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of the slots of one kv head.

    key_dim, value_dim: channels D and Dv of a head; quantization: None for slots as the model makes them; itemsize:
    bytes of a number that is not quantised.
    """

    key_dim: int
    value_dim: int
    quantization: Quantization | None = None
    itemsize: int = HALF_BYTES

    def of(self, slots: int) -> int:
        """Bytes of so many slots, all of which hold a token; it never falls as slots grow."""
        how = self.quantization
        sides = ((how.keys, self.key_dim), (how.values, self.value_dim)) if how is not None else ()
        if how is None:
            return slots * (self.key_dim + self.value_dim) * self.itemsize
        return sum(self._of_side(codec, width, slots) for codec, width in sides)

    def _of_side(self, codec: Codec | None, width: int, slots: int) -> int:
        """Of keys, or of values, with `width` channels."""
        if codec is None:
            return slots * width * self.itemsize
        places = min(codec.unquantized + 1, slots) * (width * self.itemsize + INDEX_BYTES)
        parameter = codec.parameters * PARAMETER.itemsize
        if codec.axis == "token":
            scales = slots * parameter * (width // codec.group)
        else:
            groups = max(0, slots - codec.residual) // codec.group
            scales = groups * (parameter * width + INDEX_BYTES)
        return slots * codec.code_bytes(width) + places + scales

    def most_slots(self, limit: float) -> int:
        """The largest number of slots whose bytes are at most `limit`; 0 where one slot takes more."""
        low, high = 0, 1
        while self.of(high) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.of(middle) <= limit else (low, middle)
        return low
