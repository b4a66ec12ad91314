"""The slots of one layer: keys, values, position ids and scores, which always move together."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 64  # slots added at a time when a cache grows and its final size is not known


class Slots:
    """Buffers keys [B, H, C, D], values [B, H, C, Dv], positions [B, H, C] int64 (-1: dead), score [B, H, C] float32.

    length: slots in use, from the left; the other C - length are room to grow. visible [B, H, C] bool: in mask mode
    the slots not evicted; None: every live slot is attended. same_order: every head holds the same position in the same
    slot, in the order of the columns, as after a prompt from which nothing was evicted.

    Copies (`index_rows`) share keys and values with these slots until either side overwrites one.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, visible: Tensor | None = None):
        self.keys, self.values, self.positions, self.score, self.visible = keys, values, positions, score, visible
        self.length = keys.shape[2]
        self.same_order = False
        self._borrowed = False
        self._shared = False  # whether a copy, or what this is a copy of, reads the same keys and values
        self._peak_bytes = 0

    @classmethod
    def empty_like(cls, keys: Tensor, values: Tensor, *, masked: bool) -> Slots:
        """Empty slots with the heads, dimensions, dtype and device of a key [B, H, Q, D] and value [B, H, Q, Dv].

        masked: with `visible`, for mask mode.
        """
        b, h = keys.shape[:2]
        ids = torch.empty(b, h, 0, dtype=torch.int64, device=keys.device)
        visible = torch.empty(b, h, 0, dtype=torch.bool, device=keys.device) if masked else None
        slots = cls(keys[:, :, :0], values[:, :, :0], ids, ids.to(torch.float32), visible)
        slots.same_order = True
        return slots

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The buffers by name: everything that moves when a slot moves."""
        named = {"keys": self.keys, "values": self.values, "positions": self.positions, "score": self.score}
        return named if self.visible is None else named | {"visible": self.visible}

    def _replace(self, name: str, tensor: Tensor) -> None:
        """Put another buffer in place of the one called `name`, and count the bytes while both are in memory."""
        if name in ("keys", "values"):
            self._peak_bytes = max(self._peak_bytes, self.kv_bytes + tensor.nbytes)
        self._borrowed = False
        setattr(self, name, tensor)

    def take_peak_bytes(self) -> int:
        """The largest number of key and value bytes held at any time since the last call."""
        peak, self._peak_bytes = max(self._peak_bytes, self.kv_bytes), 0
        return peak

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, room to grow included."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def key_buffer(self) -> Tensor:
        """The buffer of the keys: as long as it is the same one, so are all others."""
        return self.keys

    def valid(self) -> Tensor:
        """[B, H, length] bool: the slots that hold a token."""
        return self.positions[:, :, : self.length] >= 0

    def broadcast_positions(self) -> Tensor:
        """Position ids [B, 1, length] where all heads hold the same positions, else [B, H, length]."""
        return self.positions[:, :1, : self.length] if self.same_order else self.positions[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, reserve: int = 0) -> None:
        """Write Q tokens behind the last slot in use, growing the buffers where they are full.

        keys [B, H, Q, D], values [B, H, Q, Dv], positions [B, Q], score [B, H, Q]; reserve: the final length, 0: not
        known.
        """
        count = keys.shape[2]
        if self.length + count > self.keys.shape[2]:
            reserve = max(reserve - self.length - count, 0) if reserve else (GROWTH if self.length else 0)
            self._grow(count + reserve)
        new = slice(self.length, self.length + count)
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        self.positions[:, :, new], self.score[:, :, new] = positions[:, None], score
        if self.visible is not None:
            self.visible[:, :, new] = True
        self.length += count

    def alias(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor) -> None:
        """Share the buffers of another cache's prompt: keys, values [B, H, S, *], positions [B, S], score [B, H, S].

        The first change of keys, values or rows copies them into buffers of these slots' own. Positions are copied at
        once: they come from the `SequenceState`, which hands the same tensor to all layers.
        """
        self.keys, self.values, self.score = keys, values, score
        self.positions = positions[:, None].repeat(1, score.shape[1], 1)
        if self.visible is not None:
            self.visible = torch.ones(score.shape, dtype=torch.bool, device=keys.device)
        self.length, self._borrowed = keys.shape[2], True

    def _grow(self, by: int) -> None:
        """Copy the slots in use into buffers with room for `by` more; new slots are dead."""
        for name, old in self.tensors.items():
            new = old.new_empty(*old.shape[:2], self.length + by, *old.shape[3:])
            new[:, :, : self.length] = old[:, :, : self.length]
            if name == "positions":
                new[:, :, self.length :] = -1
            self._replace(name, new)
        self._shared = False

    def own(self) -> None:
        """Copy keys and values that are shared with a copy, before one of them is overwritten."""
        if self._shared:  # not by `_replace`: a copy counts its bytes from the start, and no more when it is made
            self.keys = self.keys.clone(memory_format=torch.contiguous_format)
            self.values = self.values.clone(memory_format=torch.contiguous_format)
            self._shared = False

    @property
    def is_shared(self) -> bool:
        """Whether a copy reads the same keys and values, so that the next write moves these to buffers of their own."""
        return self._shared

    def write(self, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite the key and value of one slot per head.

        index [B, H, 1]: of the slots; keys [B, H, 1, D]; values [B, H, 1, Dv].
        """
        self.own()
        self.keys.scatter_(2, index[..., None].expand(-1, -1, -1, self.keys.shape[-1]), keys)
        self.values.scatter_(2, index[..., None].expand(-1, -1, -1, self.values.shape[-1]), values)

    def set_metadata(self, index: Tensor, positions: Tensor, score: Tensor) -> None:
        """Set position id and score of one slot per head.

        index [B, H, 1]: of the slots; positions [B, 1]; score [B, H, 1].
        """
        self.positions.scatter_(2, index, positions[:, None].expand(index.shape))
        self.score.scatter_(2, index, score)

    def invalidate(self, index: Tensor) -> None:
        """Mark the slots index [B, H, n] dead: no query sees them, and new tokens may overwrite them."""
        self.positions.scatter_(2, index, -1)

    def gather(self, index: Tensor, keep: Tensor, reserve: int) -> None:
        """Copy the slots index [B, H, N] into new buffers, with `reserve` dead slots behind.

        keep [B, H, N] bool: where it is False the copied slot is made dead.
        """
        b, h, n = index.shape
        for name, old in self.tensors.items():
            wide = index[..., None].expand(-1, -1, -1, old.shape[-1]) if old.ndim == 4 else index
            new = old.new_empty(b, h, n + reserve, *old.shape[3:])
            new[:, :, :n] = old.gather(2, wide)
            _fill_invalid(name, new[:, :, n:])
            self._replace(name, new)
        self.positions[:, :, :n].masked_fill_(~keep, -1)
        self._shared = False
        self.length, self.same_order = n + reserve, False

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows: rows [n] are indices of the old rows."""
        rows = rows.to(self.keys.device)
        frozen = self._borrowed or (self.keys.is_inference() and not torch.is_inference_mode_enabled())
        for name, tensor in self.tensors.items():
            chosen = tensor.index_select(0, rows)
            if rows.shape[0] != tensor.shape[0] or frozen:
                self._replace(name, chosen)
            elif self._shared and name in ("keys", "values"):
                setattr(self, name, chosen)
            else:
                tensor.copy_(chosen)  # in place: buffers keep their addresses
        self._shared = False

    @classmethod
    def stacked(cls, parts: list[Slots]) -> Slots:
        """The slots of several caches in common buffers [R, H, largest C, *]; `parts` become views of them.

        Behind the slots of a cache with fewer than the largest, slots are dead.
        """
        sizes, most = [part.keys.shape[0] for part in parts], max(part.keys.shape[2] for part in parts)
        capacities = [part.keys.shape[2] for part in parts]
        whole = []
        for name, like in parts[0].tensors.items():
            buffer = like.new_empty(sum(sizes), like.shape[1], most, *like.shape[3:])
            for part, rows, count in zip(parts, buffer.split(sizes), capacities, strict=True):
                rows[:, :, :count] = part.tensors[name]
                _fill_invalid(name, rows[:, :, count:])
                setattr(part, name, rows[:, :, :count])
            whole.append(buffer)
        for part in parts:
            part._shared = False
        return cls(*whole)

    def index_rows(self, rows: Tensor) -> Slots:
        """A copy of the batch rows `rows` [n], which may repeat, without room to grow.

        Where the rows lie side by side, or are one, keys and values are shared until one of both sides overwrites them.
        Tokens that are appended to these slots lie behind the copy's.
        """
        there = rows.to(self.keys.device)
        shared = self._view_of(rows) if self._can_share() else None
        copied = {
            name: tensor[:, :, : self.length].index_select(0, there)
            for name, tensor in self.tensors.items()
            if shared is None or name not in shared
        }
        other = Slots(**copied, **(shared or {}))
        other.same_order = self.same_order
        if shared is not None:
            self._shared = other._shared = True
        return other

    def _can_share(self) -> bool:
        """Whether keys and values are buffers of these slots alone, and no part of a stack's, which writes to it."""
        whole = all(each.untyped_storage().nbytes() == each.nbytes for each in (self.keys, self.values))
        return whole and not self._borrowed

    def _view_of(self, rows: Tensor) -> dict[str, Tensor] | None:
        """Keys and values in use of these batch rows as views; None where views cannot hold them."""
        chosen = rows.tolist()
        first, count = chosen[0] if chosen else 0, len(chosen)
        if chosen == list(range(first, first + count)):
            views = {name: self.tensors[name][first : first + count, :, : self.length] for name in ("keys", "values")}
        elif chosen == [first] * count:
            views = {
                name: self.tensors[name][first : first + 1, :, : self.length].expand(count, -1, -1, -1)
                for name in ("keys", "values")
            }
        else:
            return None
        return views


def _fill_invalid(name: str, dead: Tensor) -> None:
    """Fill new slots of the buffer called `name` as dead slots: position -1, zeros elsewhere, since 0 * NaN is NaN."""
    dead.fill_(-1 if name == "positions" else 0)
