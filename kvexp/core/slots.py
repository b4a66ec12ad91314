"""Slots of a layer: keys, values, positions and scores that move together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvexp.util.errors import ConfigError

GROWTH = 64  # slots added at a time when a cache grows and its final size is not known


@dataclass(frozen=True)
class Rewritten:
    """What an eviction puts into the N slots of each kv head that it keeps, in the order of their positions.

    bias [B, H, N] float32: added to a slot's logits. values [B, H, N, Dv], keys [B, H, N, D]. None: as they were.
    failed [B, H] bool: heads whose numbers could not be computed, and whose slots stay as they were; None: no head.
    """

    bias: Tensor | None = None
    values: Tensor | None = None
    keys: Tensor | None = None
    failed: Tensor | None = None


class Slots:
    """Buffers keys [B, H, C, D], values [B, H, C, Dv], positions [B, H, C] int64 (-1: dead), score [B, H, C] float32.

    length: slots in use, from the left; the other C - length are room to grow. visible [B, H, C] bool: in mask mode
    the slots not evicted; None: every live slot is attended. same_order: every head holds the same position in the same
    slot, in the order of the columns, as after a prompt from which nothing was evicted. bias [B, H, C] float32: added
    to the logits of a slot that stands for more than its token (`rewrite`); None: of no slot.

    Copies (`index_rows`) share keys and values with these slots until either side overwrites one.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        score: Tensor,
        visible: Tensor | None = None,
        bias: Tensor | None = None,
    ):
        self.keys, self.values, self.positions, self.score, self.visible = keys, values, positions, score, visible
        self.bias = bias
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
        optional = {"visible": self.visible, "bias": self.bias}
        return named | {name: tensor for name, tensor in optional.items() if tensor is not None}

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
    def kv_buffers(self) -> list[Tensor]:
        """The buffers of keys and of values, in whatever layout; as long as they are the same, so are all others."""
        return [self.keys, self.values]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """All buffers by name, in whatever layout; none is made for it."""
        named = {"positions": self.positions, "score": self.score}
        named |= {} if self.bias is None else {"bias": self.bias}
        return named | dict(zip(("keys", "values"), self.kv_buffers, strict=False))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and biases, room to grow included."""
        return sum(buffer.nbytes for buffer in self.kv_buffers) + self.bias_bytes

    @property
    def bias_bytes(self) -> int:
        """Bytes of the biases: 4 a slot and kv head, 0 without them."""
        return 0 if self.bias is None else self.bias.nbytes

    def valid(self) -> Tensor:
        """[B, H, length] bool: the slots that hold a token."""
        return self.positions[:, :, : self.length] >= 0

    def visible_positions(self) -> Tensor:
        """Position ids [B, H, length], -1 for dead slots and those that mask mode has evicted."""
        positions = self.positions[:, :, : self.length]
        return positions if self.visible is None else positions.masked_fill(~self.visible[:, :, : self.length], -1)

    def broadcast_positions(self) -> Tensor:
        """Position ids [B, 1, length] where all heads hold the same positions, else [B, H, length]."""
        return self.positions[:, :1, : self.length] if self.same_order else self.positions[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, reserve: int = 0) -> None:
        """Write Q tokens behind the last slot in use, growing the buffers where they are full.

        keys [B, H, Q, D], values [B, H, Q, Dv], positions [B, Q], score [B, H, Q]; reserve: the final length, 0: not
        known.
        """
        count = keys.shape[2]
        self.make_room(count, reserve)
        new = slice(self.length, self.length + count)
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        self.positions[:, :, new], self.score[:, :, new] = positions[:, None], score
        if self.visible is not None:
            self.visible[:, :, new] = True
        if self.bias is not None:
            self.bias[:, :, new] = 0
        self.length += count

    def make_room(self, count: int, reserve: int = 0) -> None:
        """Grow the buffers unless they have room for `count` tokens more; reserve: as of `append`."""
        if self.length + count > self.keys.shape[2]:
            reserve = max(reserve - self.length - count, 0) if reserve else (GROWTH if self.length else 0)
            self._grow(count + reserve)

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
            _fill_invalid(name, new[:, :, self.length :])
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

    def write(self, index: Tensor, keys: Tensor, values: Tensor, *, behind: bool = False) -> None:
        """Overwrite the key and value of one slot per head.

        index [B, H, 1]: of the slots; keys [B, H, 1, D]; values [B, H, 1, Dv]. behind: whether the slots lie behind all
        that a copy can share.
        """
        if not behind:
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

    def rewrite(self, rewritten: Rewritten, where: Tensor) -> None:
        """Give the slots just gathered other biases, values and keys where `where` [B, H, N] bool says so."""
        count = where.shape[-1]
        if rewritten.bias is not None:
            self.bias = torch.zeros(self.score.shape, device=self.score.device)
            self.bias[:, :, :count] = rewritten.bias.masked_fill(~where, 0.0)
        for buffer, states in ((self.values, rewritten.values), (self.keys, rewritten.keys)):
            if states is not None:
                held = buffer[:, :, :count]
                held.copy_(torch.where(where[..., None], states.to(held.dtype), held))

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
    def stacked(cls, parts: list[Slots], most: int) -> Slots:
        """The slots of several caches in common buffers [R, H, most, *]; `parts` become views of them.

        Behind the slots of a cache with fewer, slots are dead. most: columns, at least as many as any part has.
        """
        sizes = [slots.keys.shape[0] for slots in parts]
        capacities = [slots.keys.shape[2] for slots in parts]
        whole = {}
        for name, like in parts[0].tensors.items():
            buffer = like.new_empty(sum(sizes), like.shape[1], most, *like.shape[3:])
            for slots, rows, count in zip(parts, buffer.split(sizes), capacities, strict=True):
                rows[:, :, :count] = slots.tensors[name]
                _fill_invalid(name, rows[:, :, count:])
                setattr(slots, name, rows[:, :, :count])
            whole[name] = buffer
        for slots in parts:
            slots._shared = False
        return cls(**whole)

    def index_rows(self, rows: Tensor) -> Slots:
        """A copy of the batch rows `rows` [n], which may repeat, without room to grow.

        Where the rows lie side by side, or are one, keys and values are shared until one of both sides overwrites them.
        Tokens that are appended to these slots lie behind the copy's.
        """
        index, can_share, shares = rows.to(self.keys.device), self._can_share(), False
        copied = {}
        for name, tensor in self.tensors.items():
            used = tensor[:, :, : self.length]
            view = rows_view(used, rows) if can_share and name in ("keys", "values") else None
            copied[name] = used.index_select(0, index) if view is None else view
            shares |= view is not None
        other = Slots(**copied)
        other.same_order = self.same_order
        if shares:
            self._shared = other._shared = True
        return other

    def _can_share(self) -> bool:
        """Whether keys and values are buffers of these slots alone, and no part of a stack's, which writes to it."""
        whole = all(states.untyped_storage().nbytes() == states.nbytes for states in (self.keys, self.values))
        return whole and not self._borrowed


class LatentSlots(Slots):
    """Slots that hold latents, as methods see them: a ConfigError where one reads keys or values."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self.length, self.visible = slots, slots.length, slots.visible
        self.positions, self.score = slots.positions, slots.score

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        raise ConfigError(
            "a method reads keys or values of slots, and this model's slots are latents, of which every head makes its "
            "own keys and values: take a method of attention or of positions"
        )

    values = keys

    @property
    def kv_buffers(self) -> list[Tensor]:
        return self._slots.kv_buffers

    @property
    def buffers(self) -> dict[str, Tensor]:
        return self._slots.buffers


def rows_view(tensor: Tensor, rows: Tensor) -> Tensor | None:
    """The batch rows `rows` [n] of a tensor as a view, where they lie side by side or are one; else None."""
    chosen = rows.tolist()
    first, count = chosen[0] if chosen else 0, len(chosen)
    if chosen == list(range(first, first + count)):
        return tensor[first : first + count]
    return tensor[first : first + 1].expand(count, *tensor.shape[1:]) if chosen == [first] * count else None


def _fill_invalid(name: str, dead: Tensor) -> None:
    """Fill new slots of the buffer called `name` as dead slots: position -1, zeros elsewhere, since 0 * NaN is NaN."""
    dead.fill_(-1 if name == "positions" else 0)


class PackedStates:
    """Keys or values of every batch row and kv head, one behind the other in one buffer [sum of widths, D].

    For kv heads that hold different numbers of slots: bytes are the sum over the heads.

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
        """Zeros, `widths` slots per pair, with the last dimension, dtype and device of `like`."""
        return cls(like.new_zeros(sum(widths), like.shape[-1]), widths)

    @classmethod
    def gathered(cls, parts: Sequence[Tensor], index: Tensor, widths: Sequence[int]) -> PackedStates:
        """The slots index [B, H, N] of each pair, the first of them up to its width; zeros behind.

        parts: keys or values [any width, D] of each pair. An index beyond a pair's slots is a dead slot's: any of the
        pair's slots may stand there.
        """
        packed = cls.zeros(parts[0], widths)
        for new, old, chosen in zip(packed.parts, parts, index.flatten(0, 1), strict=True):
            count = min(len(new), len(chosen))
            if count and len(old):
                new[:count] = old.index_select(0, chosen[:count].clamp_max(len(old) - 1))
        return packed

    def places(self, index: Tensor) -> Tensor:
        """Rows [B * H * n] of the buffer that hold the slots index [B, H, n]; the same wherever `widths` are."""
        return (self._starts[:, None] + index.flatten(0, 1)).flatten()

    def write(self, places: Tensor, states: Tensor) -> None:
        """Overwrite the slots at `places` (see there) with states [B, H, n, D]."""
        self.buffer.index_copy_(0, places, states.flatten(0, 2).to(self.buffer.dtype))

    def widened(self, widths: Sequence[int]) -> PackedStates:
        """A copy with at least as much room for every pair, zeros behind what it holds."""
        wider = PackedStates.zeros(self.buffer, widths)
        for new, old in zip(wider.parts, self.parts, strict=True):
            new[: len(old)] = old
        return wider

    def of_pairs(self, pairs: Sequence[int]) -> PackedStates:
        """A copy of the pairs of row and head `pairs`, in this order."""
        chosen = [self.parts[pair] for pair in pairs]
        return PackedStates(torch.cat(chosen), [len(states) for states in chosen])

    def padded(self, heads: int, columns: int) -> Tensor:
        """A copy as [B, H, columns, D], zeros behind the slots of each pair."""
        rectangle = self.buffer.new_zeros(len(self.parts), columns, self.buffer.shape[-1])
        for new, states in zip(rectangle, self.parts, strict=True):
            new[: len(states)] = states
        return rectangle.view(-1, heads, columns, rectangle.shape[-1])


class RaggedSlots(Slots):
    """`Slots` whose keys and values are packed; positions and score stay [B, H, C].

    They are made `of` ordinary slots by the first eviction, which calls `pack` next: until then keys and values lie as
    they were. C is the width of the widest head; behind a head's own slots, slots are dead and have neither key nor
    value. `keys` and `values` are copies, with zeros there: right for whoever reads them, and slow. The fast decode
    step (`kvexp.core.decode`) reads the packed ones. Copies share nothing.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, score: Tensor, visible: Tensor | None = None):
        self._states: dict[str, Tensor | PackedStates] = {}
        self._used: list[int] = []  # of each pair of row and head: its slots in use, from the left
        super().__init__(keys, values, positions, score, visible)

    @classmethod
    def of(cls, slots: Slots) -> RaggedSlots:
        """Take over the slots, in the buffers they are in until `pack` replaces them."""
        ragged = cls(slots.keys, slots.values, slots.positions, slots.score, slots.visible)
        ragged.length, ragged.same_order = slots.length, slots.same_order
        ragged._borrowed, ragged._shared, ragged._peak_bytes = slots._borrowed, slots._shared, slots._peak_bytes
        return ragged

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

    def packed(self, name: str) -> PackedStates:
        """The packed keys or values; an AssertionError before `pack`."""
        states = self._states[name]
        assert isinstance(states, PackedStates)
        return states

    @property
    def kv_buffers(self) -> list[Tensor]:
        return [states.buffer if isinstance(states, PackedStates) else states for states in self._states.values()]

    def _rectangle(self, name: str) -> Tensor:
        """Keys or values as [B, H, C, D]; a copy, once packed, which counts towards the peak as if both were copied."""
        states = self._states[name]
        if isinstance(states, Tensor):
            return states
        heads, columns = self.positions.shape[1:]
        both = (self.packed("keys"), self.packed("values"))
        copied = sum(len(packed.parts) * columns * packed.buffer[:1].nbytes for packed in both)
        self._peak_bytes = max(self._peak_bytes, self.kv_bytes + copied)
        return states.padded(heads, columns)

    def _take(self, name: str, states: PackedStates) -> None:
        """Put packed keys or values in place of the old ones, and count the bytes while both are in memory."""
        self._peak_bytes = max(self._peak_bytes, self.kv_bytes + states.buffer.nbytes)
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
        """As `Slots.append`, behind the slots in use of each head; reserve, the final length, is not used."""
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
        """Widen positions and score to `columns` columns in use; new ones are dead."""
        self._add_columns(columns - self.positions.shape[2])
        self.length = columns

    def _add_columns(self, count: int) -> None:
        """Add `count` dead columns to positions and score; none for a count below 1."""
        if count > 0:
            b, h, _ = self.positions.shape
            self.positions = torch.cat([self.positions, self.positions.new_full((b, h, count), -1)], dim=2)
            self.score = torch.cat([self.score, self.score.new_zeros(b, h, count)], dim=2)

    def write(self, index: Tensor, keys: Tensor, values: Tensor, *, behind: bool = False) -> None:
        """As `Slots.write`, of n slots per head: index [B, H, n], keys [B, H, n, D], values [B, H, n, Dv]."""
        places = self.packed("keys").places(index)  # of values too, which are as wide
        self.packed("keys").write(places, keys)
        self.packed("values").write(places, values)

    def select_rows(self, rows: Tensor) -> None:
        pairs, index = self._pairs(rows), rows.to(self.positions.device)
        for name in ("keys", "values"):
            self._take(name, self.packed(name).of_pairs(pairs))
        self.positions, self.score = self.positions[index], self.score[index]
        self._used = [self._used[pair] for pair in pairs]

    def index_rows(self, rows: Tensor) -> Slots:
        """A copy of the batch rows `rows` [n], which may repeat; it shares nothing with these slots."""
        index, pairs = rows.to(self.positions.device), self._pairs(rows)
        keys, values = (self.packed(name).of_pairs(pairs) for name in ("keys", "values"))
        empty = self.score.new_empty(0, 0, 0, 0)
        other = RaggedSlots(empty, empty, self.positions[index], self.score[index])
        other._states = {"keys": keys, "values": values}
        other._used, other.length = [self._used[pair] for pair in pairs], self.length
        return other

    def _pairs(self, rows: Tensor) -> list[int]:
        """The pairs of row and head, b * H + h, of these batch rows."""
        heads = self.positions.shape[1]
        return [row * heads + head for row in rows.tolist() for head in range(heads)]
