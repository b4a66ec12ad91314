"""A budget in bytes: as many slots as fit into a share of the full cache's, at the bits they are stored in."""

from __future__ import annotations

from dataclasses import dataclass

from kvexp.core.budget import Budget
from kvexp.core.quantization import Quantization
from kvexp.core.slot_bytes import SlotBytes
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class BytesBudget(Budget):
    """How many slots a kv head may hold, as a share of the bytes of the row's prompt in a full cache at 16 bits.

    bytes_ratio: the share, in (0, 1]; key_dim, value_dim: channels of a head; quantization: how slots are stored, None
    for 16 bits. Slots' bytes are those of codes, scales and zeros, and of the window in full precision (`SlotBytes`),
    with numbers that are not quantised as 16 bits whatever dtype runs. With few bits more slots may fit than the prompt
    has tokens: then nothing is evicted until they are used. The other fields are those of `Budget`; `pyramid` moves
    bytes between layers. ConfigError for a share outside its range, for kv_ratio or tokens beside it, and where not one
    slot fits.
    """

    bytes_ratio: float = 0.25
    key_dim: int = 64
    value_dim: int = 64
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.kv_ratio is not None or self.tokens is not None or self.threshold is not None:
            raise ConfigError(
                f"give bytes_ratio, kv_ratio or tokens, one of the three, got bytes_ratio={self.bytes_ratio} "
                f"kv_ratio={self.kv_ratio} tokens={self.tokens} threshold={self.threshold}"
            )
        if isinstance(self.bytes_ratio, bool) or not 0 < self.bytes_ratio <= 1:
            raise ConfigError(f"bytes_ratio must be in (0, 1], got {self.bytes_ratio!r}")
        if min(self.key_dim, self.value_dim) < 1:
            raise ConfigError(f"key_dim and value_dim must be at least 1, got {self.key_dim} and {self.value_dim}")
        self.check_base()

    @property
    def slot_bytes(self) -> SlotBytes:
        """The bytes of this budget's slots, at 16 bits per unquantised number."""
        return SlotBytes(self.key_dim, self.value_dim, self.quantization)

    def _one(self, length: int, padded: int, max_new_tokens: int | None, layer: int, layers: int) -> int:
        tokens = self.base(length, padded, max_new_tokens)
        share = self.bytes_ratio
        if self.pyramid and layers > 1:
            share *= 1 + self.pyramid * (1 - 2 * layer / (layers - 1))
        allowed = share * SlotBytes(self.key_dim, self.value_dim).of(tokens)
        slots = self.slot_bytes.most_slots(allowed + 1e-9)
        if slots < 1:
            raise ConfigError(
                f"bytes_ratio={self.bytes_ratio:g} of a prompt of {length} tokens is {allowed:.0f} bytes per kv head "
                f"in layer {layer}, and one slot takes {self.slot_bytes.of(1)}: raise bytes_ratio"
            )
        return slots
