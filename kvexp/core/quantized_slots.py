"""Slots whose keys and values are quantised, but for a window of the newest tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.quantization import Quantization
from kvexp.core.quantized_states import PlainStates, states_of
from kvexp.core.slot_bytes import bytes_at_16
from kvexp.core.slots import GROWTH, Slots


class QuantizedSlots(Slots):
    """The slots of one layer after its prompt, with keys and values as a `Quantization` says.

    positions, score and length are those of `Slots`. `keys` and `values` are what attention reads: made anew from codes
    for every forward, dropped when it ends, and counted at the peak. Each forward ends with `settle`.
    """

    def __init__(self, positions: Tensor, score: Tensor, length: int, keys: PlainStates, values: PlainStates) -> None:
        self.positions, self.score, self.visible = positions, score, None
        self.key_states, self.value_states = keys, values
        self.length = length
        self.same_order = False
        self._borrowed = self._shared = False
        self._peak_bytes = 0
        self._dense: dict[str, Tensor] = {}

    @classmethod
    def of_prompt(cls, slots: Slots, quantization: Quantization, newest: Tensor) -> QuantizedSlots:
        """The slots of a prompt that has ended and was evicted, quantised; newest [B]: position id of the last token.

        The given slots are used up. ConfigError for heads or a dtype that cannot be quantised so.
        """
        quantization.check_head(slots.keys.shape[-1], slots.values.shape[-1])
        quantization.check_dtype(slots.keys.dtype)
        positions = slots.positions
        made = cls(
            positions,
            slots.score,
            slots.length,
            states_of(quantization.keys, slots.keys, positions, newest),
            states_of(quantization.values, slots.values, positions, newest),
        )
        made.same_order = slots.same_order
        made._peak_bytes = max(slots.take_peak_bytes(), slots.kv_bytes + made.kv_bytes)
        return made

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """Keys [B, H, C, D] as attention reads them, of dead slots anything finite; not to be written to."""
        return self._read("keys", self.key_states)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """Values [B, H, C, Dv] as attention reads them, of dead slots anything finite; not to be written to."""
        return self._read("values", self.value_states)

    def _read(self, name: str, states: PlainStates) -> Tensor:
        if type(states) is PlainStates:
            return states.data
        if name not in self._dense:
            self._dense[name] = states.dense(self.positions)
            made = sum(dense.nbytes for dense in self._dense.values())
            self._peak_bytes = max(self._peak_bytes, self.kv_bytes + made)
        return self._dense[name]

    @property
    def _states(self) -> tuple[PlainStates, PlainStates]:
        return self.key_states, self.value_states

    @property
    def kv_bytes(self) -> int:
        """Bytes of codes, scales and zeros, group starts, tokens in full precision and their slots; room included."""
        return self.key_states.nbytes + self.value_states.nbytes

    @property
    def bytes_at_16(self) -> int:
        """`kv_bytes` with numbers in full precision as 16 bits each, whatever their dtype."""
        return sum(bytes_at_16(*states.tensors.values()) for states in self._states)

    def settle(self, newest: Tensor) -> None:
        """End a forward, after its eviction: quantise what has left the window. newest [B]: as of `of_prompt`."""
        self._dense = {}
        for states in self._states:
            states.settle(self.positions, newest)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, reserve: int = 0) -> None:
        """As `Slots.append`."""
        b, h, count = keys.shape[:3]
        if self.length + count > self.positions.shape[2]:
            self._grow(count + (max(reserve - self.length - count, 0) if reserve else GROWTH))
        new = slice(self.length, self.length + count)
        self.positions[:, :, new], self.score[:, :, new] = positions[:, None], score
        self.write(torch.arange(new.start, new.stop, device=keys.device).expand(b, h, count), keys, values)
        self.length += count

    def _grow(self, by: int) -> None:
        capacity = self.length + by
        for name, dead in (("positions", -1), ("score", 0)):
            old = getattr(self, name)
            new = old.new_full((*old.shape[:2], capacity), dead)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)
        held = self.kv_bytes
        for states in self._states:
            states.grow(capacity)
        self._peak_bytes = max(self._peak_bytes, held + self.kv_bytes)

    def own(self) -> None:
        """As `Slots.own`."""
        for states in self._states:
            states.own()

    def write(self, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store tokens in the slots index [B, H, Q], in full precision: keys [B, H, Q, D], values [B, H, Q, Dv]."""
        self._dense = {}
        self.key_states.add(index, keys)
        self.value_states.add(index, values)

    def gather(self, index: Tensor, keep: Tensor, reserve: int) -> None:
        """As `Slots.gather`."""
        b, h, n = index.shape
        self._dense, held = {}, self.kv_bytes
        for name, dead in (("positions", -1), ("score", 0)):
            old = getattr(self, name)
            new = old.new_full((b, h, n + reserve), dead)
            new[:, :, :n] = old.gather(2, index)
            setattr(self, name, new)
        self.positions[:, :, :n].masked_fill_(~keep, -1)
        for states in self._states:
            states.gather(index, keep, reserve)
        self._peak_bytes = max(self._peak_bytes, held + self.kv_bytes)
        self.length, self.same_order = n + reserve, False

    def select_rows(self, rows: Tensor) -> None:
        """As `Slots.select_rows`."""
        rows = rows.to(self.positions.device)
        self._dense, held = {}, self.kv_bytes
        self.positions, self.score = self.positions.index_select(0, rows), self.score.index_select(0, rows)
        for states in self._states:
            states.select_rows(rows)
        self._peak_bytes = max(self._peak_bytes, held + self.kv_bytes)

    def index_rows(self, rows: Tensor) -> QuantizedSlots:
        """As `Slots.index_rows`, room to grow included; codes are shared until one of both sides takes a token."""
        there = rows.to(self.positions.device)
        keys, values = (states.index_rows(rows) for states in self._states)
        positions, score = self.positions.index_select(0, there), self.score.index_select(0, there)
        other = QuantizedSlots(positions, score, self.length, keys, values)
        other.same_order = self.same_order
        return other


def settled(slots: Slots, quantization: Quantization, newest: Tensor) -> QuantizedSlots:
    """The slots after a forward and its eviction, quantised; newest [B]: position id of each row's newest token."""
    if isinstance(slots, QuantizedSlots):
        slots.settle(newest)
        return slots
    return QuantizedSlots.of_prompt(slots, quantization, newest)
