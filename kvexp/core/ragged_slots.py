"""The slots of one layer whose kv heads hold different numbers of tokens (`Budget.heads`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvexp.core.packed_states import PackedStates
from kvexp.core.slots import GROWTH, Slots


class RaggedSlots(Slots):
    """`Slots` whose keys and values are packed by the first eviction; positions and score stay [B, H, C].

    C is the width of the widest head; behind a head's own slots, slots are dead and have neither key nor value.
    `keys` and `values` are then copies, with zeros there: right for whoever reads them, and slow. The fast decode step
    (`kvexp.core.decode.ragged_products`) reads the packed ones. Copies share nothing.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, visible: Tensor | None = None):
        self._states: dict[str, Tensor | PackedStates] = {}
        self._used: list[int] = []  # of each pair of row and head: its slots in use, from the left
        super().__init__(keys, values, positions, score, visible)

    @classmethod
    def of(cls, slots: Slots) -> RaggedSlots:
        """The same slots, in the same buffers, until `pack` replaces them."""
        made = cls(slots.keys, slots.values, slots.positions, slots.score, slots.visible)
        made.length, made.same_order = slots.length, slots.same_order
        made._borrowed, made._shared, made._peak_bytes = slots._borrowed, slots._shared, slots._peak_bytes
        return made

    @property
    def keys(self) -> Tensor:
        """[B, H, C, D]; a copy once packed."""
        return self._rectangle("keys")

    @keys.setter
    def keys(self, states: Tensor) -> None:
        self._states["keys"] = states

    @property
    def values(self) -> Tensor:
        """[B, H, C, Dv]; a copy once packed."""
        return self._rectangle("values")

    @values.setter
    def values(self, states: Tensor) -> None:
        self._states["values"] = states

    @property
    def is_packed(self) -> bool:
        """Whether keys and values are packed, as from the first eviction on."""
        return isinstance(self._states["values"], PackedStates)

    def packed(self, name: str) -> PackedStates:
        """The packed keys or values; an AssertionError before the first eviction."""
        states = self._states[name]
        assert isinstance(states, PackedStates)
        return states

    @property
    def key_buffer(self) -> Tensor:
        states = self._states["keys"]
        return states.buffer if isinstance(states, PackedStates) else states

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, room to grow included."""
        return sum(states.nbytes for states in self._states.values())

    def _rectangle(self, name: str) -> Tensor:
        """Keys or values as [B, H, C, D]; a copy, once packed, which counts towards the peak as if both were copied."""
        states = self._states[name]
        if isinstance(states, Tensor):
            return states
        heads, columns = self.positions.shape[1:]
        both = (self.packed("keys"), self.packed("values"))
        copied = sum(len(one.parts) * columns * one.buffer[:1].nbytes for one in both)
        self._peak_bytes = max(self._peak_bytes, self.kv_bytes + copied)
        return states.padded(heads, columns)

    def _take(self, name: str, states: PackedStates) -> None:
        """Put packed keys or values in place of the old ones, and count the bytes while both are in memory."""
        self._peak_bytes = max(self._peak_bytes, self.kv_bytes + states.nbytes)
        self._states[name] = states

    def pack(self, index: Tensor, keep: Tensor, reserve: int, widths: Sequence[Sequence[int]]) -> None:
        """`gather` into packed buffers: of row b and head h the first widths[b][h] of the slots index [B, H, N].

        keep [B, H, N] bool: where it is False the copied slot is made dead. C is N + reserve.
        """
        b, h, n = index.shape
        flat = [min(width, n + reserve) for row in widths for width in row]
        for name, old in list(self._states.items()):
            parts = old.parts if isinstance(old, PackedStates) else [head for row in old.unbind(0) for head in row]
            self._take(name, PackedStates.gathered(parts, index, flat))
        positions = self.positions.new_full((b, h, n + reserve), -1)
        positions[:, :, :n] = self.positions.gather(2, index).masked_fill(~keep, -1)
        score = self.score.new_zeros(b, h, n + reserve)
        score[:, :, :n] = self.score.gather(2, index)
        self.positions, self.score, self._used = positions, score, flat
        self.length, self.same_order, self._borrowed, self._shared = n + reserve, False, False, False

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, reserve: int = 0) -> None:
        """As `Slots.append`; once packed, behind the slots in use of each head, whatever their number."""
        if not self.is_packed:
            super().append(keys, values, positions, score, reserve)
            return
        b, h, count = score.shape
        after = [used + count for used in self._used]
        if any(need > width for need, width in zip(after, self.packed("keys").widths, strict=True)):
            for name in ("keys", "values"):
                self._take(name, self.packed(name).widened([need + GROWTH for need in after]))
            self._add_columns(max(after) + GROWTH - self.positions.shape[2])
        first = torch.tensor(self._used, device=self.positions.device).view(b, h, 1)
        index = first + torch.arange(count, device=self.positions.device)
        self.write(index, keys, values)
        self.positions.scatter_(2, index, positions[:, None].expand(index.shape))
        self.score.scatter_(2, index, score)
        self._used, self.length = after, max(self.length, *after)

    def widen(self, columns: int) -> None:
        """Have so many columns of positions and score in use; new ones are dead."""
        self._add_columns(columns - self.positions.shape[2])
        self.length = columns

    def _add_columns(self, count: int) -> None:
        """Add so many dead columns to positions and score, if any."""
        if count > 0:
            b, h, _ = self.positions.shape
            self.positions = torch.cat([self.positions, self.positions.new_full((b, h, count), -1)], dim=2)
            self.score = torch.cat([self.score, self.score.new_zeros(b, h, count)], dim=2)

    def own(self) -> None:
        if not self.is_packed:
            super().own()

    def write(self, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `Slots.write`, of n slots per head: index [B, H, n], keys [B, H, n, D], values [B, H, n, Dv]."""
        if not self.is_packed:
            super().write(index, keys, values)
            return
        places = self.packed("keys").places(index)  # of values too, which are as wide
        self.packed("keys").write(places, keys)
        self.packed("values").write(places, values)

    def select_rows(self, rows: Tensor) -> None:
        if not self.is_packed:
            super().select_rows(rows)
            return
        pairs, there = self._pairs(rows), rows.to(self.positions.device)
        for name in ("keys", "values"):
            self._take(name, self.packed(name).of_pairs(pairs))
        self.positions, self.score = self.positions[there], self.score[there]
        self._used = [self._used[pair] for pair in pairs]

    def index_rows(self, rows: Tensor) -> Slots:
        """A copy of the batch rows `rows` [n], which may repeat; once packed it shares nothing with these slots."""
        if not self.is_packed:
            return super().index_rows(rows)
        there, pairs = rows.to(self.positions.device), self._pairs(rows)
        keys, values = (self.packed(name).of_pairs(pairs) for name in ("keys", "values"))
        empty = self.score.new_empty(0, 0, 0, 0)
        other = RaggedSlots(empty, empty, self.positions[there], self.score[there])
        other._states = {"keys": keys, "values": values}
        other._used, other.length = [self._used[pair] for pair in pairs], self.length
        return other

    def _pairs(self, rows: Tensor) -> list[int]:
        """The pairs of row and head, b * H + h, of these batch rows."""
        heads = self.positions.shape[1]
        return [row * heads + head for row in rows.tolist() for head in range(heads)]
