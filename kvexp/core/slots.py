"""Slots: keys, values, position ids and score of one layer, which always move together."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 64  # slots added at a time when a cache grows and its final size is not known


class Slots:
    """Buffers keys [B, H, P, D], values [B, H, P, Dv], positions [B, H, P] int64 (-1: dead), score [B, H, P] float32.

    `used` counts the places in use from the left; the rest is room to grow. `visible` [B, H, P] bool exists in mask
    mode only (None: every live slot is attended). `aligned`: every head holds the same position in the same place,
    in the order of the columns, as after a prompt nobody has evicted from.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, visible: Tensor | None = None):
        self.keys, self.values, self.positions, self.score, self.visible = keys, values, positions, score, visible
        self.used = keys.shape[2]
        self.aligned = False
        self._borrowed = False
        self._peak_bytes = 0

    @classmethod
    def like(cls, keys: Tensor, values: Tensor, *, masked: bool) -> Slots:
        """No slots yet, in the shape, dtype and device of a first key [B, H, Q, D] and value [B, H, Q, Dv]."""
        b, h = keys.shape[:2]
        ids = torch.empty(b, h, 0, dtype=torch.int64, device=keys.device)
        visible = torch.empty(b, h, 0, dtype=torch.bool, device=keys.device) if masked else None
        slots = cls(keys[:, :, :0], values[:, :, :0], ids, ids.to(torch.float32), visible)
        slots.aligned = True
        return slots

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that moves when a slot moves."""
        named = {"keys": self.keys, "values": self.values, "positions": self.positions, "score": self.score}
        return named if self.visible is None else named | {"visible": self.visible}

    def _replace(self, name: str, tensor: Tensor) -> None:
        """Exchange one buffer; old and new are in memory together for a moment, and the ledger shall know."""
        if name in ("keys", "values"):
            self._peak_bytes = max(self._peak_bytes, self.kv_bytes + tensor.nbytes)
        self._borrowed = False
        setattr(self, name, tensor)

    def take_peak_bytes(self) -> int:
        """Most key and value bytes held at any moment since the last call."""
        peak, self._peak_bytes = max(self._peak_bytes, self.kv_bytes), 0
        return peak

    @property
    def kv_bytes(self) -> int:
        """Bytes that keys and values occupy now, room to grow included."""
        return self.keys.nbytes + self.values.nbytes

    def live(self) -> Tensor:
        """[B, H, used] bool: the slots that hold a token."""
        return self.positions[:, :, : self.used] >= 0

    def seen_positions(self) -> Tensor:
        """[B, 1, used] where heads agree, else [B, H, used]."""
        return self.positions[:, :1, : self.used] if self.aligned else self.positions[:, :, : self.used]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, room: int = 0) -> None:
        """Add Q tokens behind the last slot in use. positions [B, Q]; score [B, H, Q]; `room`: final size if known."""
        count = keys.shape[2]
        if self.used + count > self.keys.shape[2]:
            spare = max(room - self.used - count, 0) if room else (GROWTH if self.used else 0)
            self._grow(count + spare)
        where = slice(self.used, self.used + count)
        self.keys[:, :, where], self.values[:, :, where] = keys, values
        self.positions[:, :, where], self.score[:, :, where] = positions[:, None], score
        if self.visible is not None:
            self.visible[:, :, where] = True
        self.used += count

    def borrow(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor) -> None:
        """Hold another cache's prompt, keys and values [B, H, S, *], until these slots are changed; positions [B, S].

        Whatever changes keys, values or the rows makes buffers of its own first: there is no room behind to append to.
        """
        self.keys, self.values, self.score = keys, values, score
        self.positions = positions[:, None].expand(score.shape).contiguous()
        if self.visible is not None:
            self.visible = torch.ones(score.shape, dtype=torch.bool, device=keys.device)
        self.used, self._borrowed = keys.shape[2], True

    def _grow(self, by: int) -> None:
        for name, old in self.tensors.items():
            new = old.new_empty(*old.shape[:2], self.used + by, *old.shape[3:])
            new[:, :, : self.used] = old[:, :, : self.used]
            if name == "positions":
                new[:, :, self.used :] = -1
            self._replace(name, new)

    def write(self, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite one slot's key and value per head in place. at [B, H, 1]; keys [B, H, 1, D]."""
        self.keys.scatter_(2, at[..., None].expand(-1, -1, -1, self.keys.shape[-1]), keys)
        self.values.scatter_(2, at[..., None].expand(-1, -1, -1, self.values.shape[-1]), values)

    def enter(self, at: Tensor, positions: Tensor, score: Tensor) -> None:
        """Say who is in the slots `at` from now on. positions [B, 1]; score [B, H, 1]."""
        self.positions.scatter_(2, at, positions[:, None].expand(at.shape))
        self.score.scatter_(2, at, score)

    def kill(self, at: Tensor) -> None:
        """Mark slots [B, H, N] dead: no query sees them, the next newcomers may take their places."""
        self.positions.scatter_(2, at, -1)

    def gather(self, index: Tensor, keep: Tensor, spare: int) -> None:
        """Keep slots index [B, H, N] (dead where keep [B, H, N] is False) in new buffers, `spare` dead slots behind."""
        b, h, n = index.shape
        for name, old in self.tensors.items():
            at = index[..., None].expand(-1, -1, -1, old.shape[-1]) if old.ndim == 4 else index
            new = old.new_empty(b, h, n + spare, *old.shape[3:])
            new[:, :, :n] = old.gather(2, at)
            _vacate(name, new[:, :, n:])
            self._replace(name, new)
        self.positions[:, :, :n].masked_fill_(~keep, -1)
        self.used, self.aligned = n + spare, False

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows (beams, batch_select_indices)."""
        rows = rows.to(self.keys.device)
        frozen = self._borrowed or (self.keys.is_inference() and not torch.is_inference_mode_enabled())
        for name, tensor in self.tensors.items():
            chosen = tensor.index_select(0, rows)
            if rows.shape[0] == tensor.shape[0] and not frozen:
                tensor.copy_(chosen)  # in place: buffers keep their addresses
            else:
                self._replace(name, chosen)

    @classmethod
    def stacked(cls, parts: list[Slots]) -> Slots:
        """Buffers [sum of B, H, most P, *] that hold all parts, which become views of them; the rest is dead slots."""
        sizes, most = [part.keys.shape[0] for part in parts], max(part.keys.shape[2] for part in parts)
        places = [part.keys.shape[2] for part in parts]
        whole = []
        for name, like in parts[0].tensors.items():
            buffer = like.new_empty(sum(sizes), like.shape[1], most, *like.shape[3:])
            for part, rows, count in zip(parts, buffer.split(sizes), places, strict=True):
                rows[:, :, :count] = part.tensors[name]
                _vacate(name, rows[:, :, count:])
                setattr(part, name, rows[:, :, :count])
            whole.append(buffer)
        return cls(*whole)

    def picked(self, rows: Tensor) -> Slots:
        """These batch rows, which may repeat, in buffers of their own, without the room to grow."""
        rows = rows.to(self.keys.device)
        other = Slots(*(tensor[:, :, : self.used].index_select(0, rows) for tensor in self.tensors.values()))
        other.aligned = self.aligned
        return other


def _vacate(name: str, places: Tensor) -> None:
    """Make dead slots of these places of a new buffer; what a dead slot holds is a number: nothing times NaN is NaN."""
    places.fill_(-1 if name == "positions" else 0)
