"""The keys, or the values, of one layer's slots, stored by slot: as they are, or as codes with a window of new tokens.

Three kinds: `PlainStates` (not quantised), `TokenStates` (scales belong to one token) and `ChannelStates` (scales
belong to a group of tokens). A slot is addressed by its index in the layer's `Slots`, whose position ids say which
token it holds. All tensors begin with [B, H]; W is the number of places for tokens in full precision.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvexp.core.quantization import Codec, pack, unpack
from kvexp.core.select import INT64_MAX


class PlainStates:
    """Unquantised states [B, H, C, D] by slot, and what quantised states share with them.

    BY_SLOT: names of tensors [B, H, C, n], which move when a slot moves; BY_HEAD: names of tensors [B, H, n, *].
    """

    BY_SLOT: ClassVar[tuple[str, ...]] = ("data",)
    BY_HEAD: ClassVar[tuple[str, ...]] = ()

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._shared = False  # whether a copy reads the same tensors

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: getattr(self, name) for name in (*self.BY_SLOT, *self.BY_HEAD)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: room to grow, scales and group starts included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dense(self, positions: Tensor) -> Tensor:
        """The states [B, H, C, D] that attention reads, in the model's dtype; positions [B, H, C]: of the slots."""
        return self.data

    def add(self, slots: Tensor, states: Tensor) -> None:
        """Store new tokens' states [B, H, Q, D] in the slots with indices [B, H, Q]."""
        self.own()
        self.data.scatter_(2, slots[..., None].expand_as(states), states)

    def settle(self, positions: Tensor, newest: Tensor) -> None:
        """After a forward and its eviction: quantise what has left the window.

        positions [B, H, C]: of the slots, -1 for dead ones; newest [B]: position id of each row's newest token.
        """

    def gather(self, index: Tensor, keep: Tensor, reserve: int) -> None:
        """As `Slots.gather`."""
        for name in self.BY_SLOT:
            old = getattr(self, name)
            new = old.new_zeros(*index.shape[:2], index.shape[2] + reserve, *old.shape[3:])
            new[:, :, : index.shape[2]] = old.gather(2, index[..., None].expand(-1, -1, -1, old.shape[-1]))
            setattr(self, name, new)
        self._shared = False

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots."""
        for name in self.BY_SLOT:
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, *old.shape[3:])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def own(self) -> None:
        """Copy what is shared with a copy of these states, before something is overwritten."""
        if self._shared:
            for name, tensor in self.tensors.items():
                setattr(self, name, tensor.clone(memory_format=torch.contiguous_format))
            self._shared = False

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows: rows [n] are indices of the old rows."""
        for name, tensor in self.tensors.items():
            setattr(self, name, tensor.index_select(0, rows))
        self._shared = False

    def index_rows(self, rows: Tensor) -> PlainStates:
        """A copy of the batch rows `rows` [n]; where they lie side by side, or are one, the tensors are shared."""
        other = self._without_tensors()
        chosen = rows.tolist()
        first = chosen[0] if chosen else 0
        side_by_side = chosen == list(range(first, first + len(chosen)))
        for name, tensor in self.tensors.items():
            if side_by_side:
                taken = tensor[first : first + len(chosen)]
            elif chosen == [first] * len(chosen):
                taken = tensor[first : first + 1].expand(len(chosen), *tensor.shape[1:])
            else:
                setattr(other, name, tensor.index_select(0, rows.to(tensor.device)))
                continue
            setattr(other, name, taken)
            self._shared = other._shared = True
        return other

    def _without_tensors(self) -> PlainStates:
        """An object with the same settings, whose tensors are still to be set."""
        other = object.__new__(type(self))
        other.__dict__ = {name: kept for name, kept in self.__dict__.items() if name not in self.tensors}
        other._shared = False
        return other


class TokenStates(PlainStates):
    """States whose scales belong to groups of neighbouring channels of one token, and lie in the token's slot.

    codes [B, H, C, bytes] uint8; parameters [B, H, C, m * D / group] float16: scales, then zeros. full [B, H, W, D]:
    tokens in full precision; slot_of [B, H, W] int64: their slots, -1 for a free place.
    """

    BY_SLOT: ClassVar[tuple[str, ...]] = ("codes", "parameters")
    BY_HEAD: ClassVar[tuple[str, ...]] = ("full", "slot_of")

    def __init__(self, codec: Codec, states: Tensor, positions: Tensor, newest: Tensor) -> None:
        """Take over the states [B, H, C, D] of a prompt, all in full precision, and quantise what is due."""
        b, h, c, width = states.shape
        self.codec, self.width, self._shared = codec, width, False
        self.codes = states.new_zeros(b, h, c, codec.code_bytes(width), dtype=torch.uint8)
        self._make_parameters(states)
        self.full = states
        self.slot_of = torch.arange(c, device=states.device).expand(b, h, c).masked_fill(positions < 0, -1)
        self.settle(positions, newest)
        if self.full is states:  # all fit into the window
            self.full = states.clone(memory_format=torch.contiguous_format)

    def _make_parameters(self, states: Tensor) -> None:
        """Make the tensors of scales, empty."""
        b, h, c, width = states.shape
        count = self.codec.parameters * (width // self.codec.group)
        self.parameters = states.new_zeros(b, h, c, count, dtype=torch.float16)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """What scales and codes are computed in: float32, for float64 states float64."""
        return torch.promote_types(self.full.dtype, torch.float32)

    # -- reading ------------------------------------------------------------------------------------------------------

    def dense(self, positions: Tensor) -> Tensor:
        b, h, c = positions.shape
        dense = self.full.new_empty(b, h, c + 1, self.width)  # one slot more, for free places
        same = self.full.dtype == self._compute_dtype
        made = dense[:, :, :c] if same else dense.new_empty(b, h, c, self.width, dtype=self._compute_dtype)
        self._decode(positions, made)
        if not same:
            dense[:, :, :c] = made
        index = self._slots_or(c)[..., None].expand(-1, -1, -1, self.width)
        return dense.scatter_(2, index, self.full)[:, :, :c]

    def _decode(self, positions: Tensor, out: Tensor) -> None:
        """Write what the codes stand for to out [B, H, C, D]; anything in slots whose token is in full precision."""
        codec = self.codec
        codes = unpack(self.codes, codec.bits, self.width).unflatten(-1, (-1, codec.group))
        scale, zero = self._split(self.parameters.to(self._compute_dtype)[..., None])
        codec.decode(codes, scale, zero, out=out.unflatten(-1, (-1, codec.group)))

    def _split(self, parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and zeros (None: symmetric) of parameters [B, H, n, m * count, 1]."""
        if self.codec.symmetric:
            return parameters, None
        scale, zero = parameters.chunk(2, dim=3)
        return scale, zero

    def _slots_or(self, other: int) -> Tensor:
        """Slots [B, H, W] of the places in full precision, `other` for free ones."""
        return torch.where(self.slot_of < 0, other, self.slot_of)

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, slots: Tensor, states: Tensor) -> None:
        self.own()
        count = slots.shape[-1]
        most = min(self.codec.unquantized + count, self.codes.shape[2])
        self._resize(max(self.full.shape[2], most))
        free = (self.slot_of < 0).to(torch.int8)
        places = free.argmax(-1, keepdim=True) if count == 1 else _first_of(free)[..., :count]
        self.slot_of.scatter_(2, places, slots)
        self.full.scatter_(2, places[..., None].expand_as(states), states)

    def _resize(self, capacity: int) -> None:
        """Have `capacity` places for tokens in full precision, which are no fewer than are in use."""
        b, h, width, d = self.full.shape
        if capacity == width:
            return
        order = _first_of((self.slot_of >= 0).to(torch.int8))[..., :capacity]
        full, slot_of = self.full.new_zeros(b, h, capacity, d), self.slot_of.new_full((b, h, capacity), -1)
        full[:, :, : order.shape[-1]] = self.full.gather(2, order[..., None].expand(-1, -1, -1, d))
        slot_of[:, :, : order.shape[-1]] = self.slot_of.gather(2, order)
        self.full, self.slot_of = full, slot_of

    def settle(self, positions: Tensor, newest: Tensor) -> None:
        self.own()
        c = positions.shape[2]
        held = positions.gather(2, self.slot_of.clamp(min=0)).masked_fill(self.slot_of < 0, -1)
        self.slot_of = self.slot_of.masked_fill(held < 0, -1)  # evicted: its place is free
        self._quantize(held, positions, (newest - self.codec.residual)[:, None, None])
        self._resize(min(self.codec.unquantized + 1, c))

    def _quantize(self, held: Tensor, positions: Tensor, edge: Tensor) -> None:
        """Quantise the tokens behind the window.

        held [B, H, W]: position ids of the places in full precision, -1 for free ones; positions [B, H, C]: of the
        slots; edge [B, 1, 1]: the newest position id behind the window.
        """
        row, head, place = ((held >= 0) & (held <= edge)).nonzero(as_tuple=True)
        x = self.full[row, head, place].to(self._compute_dtype).unflatten(-1, (-1, self.codec.group))
        parameters = self.codec.fit(x, -1)  # [n, D / group, m]
        scale, *zero = parameters.to(x.dtype).unbind(-1)
        codes = self.codec.encode(x, scale[..., None], zero[0][..., None] if zero else None).flatten(-2)
        slots = self.slot_of[row, head, place]
        self.codes[row, head, slots] = pack(codes, self.codec.bits)
        self.parameters[row, head, slots] = parameters.transpose(-1, -2).flatten(-2)
        self.slot_of[row, head, place] = -1

    def gather(self, index: Tensor, keep: Tensor, reserve: int) -> None:
        self.own()
        c, n = self.codes.shape[2], index.shape[2]
        super().gather(index, keep, reserve)
        moved = self.slot_of.new_full((*index.shape[:2], c + 1), -1)
        moved.scatter_(2, torch.where(keep, index, c), torch.arange(n, device=index.device).expand_as(index))
        moved[..., c] = -1
        self.slot_of = moved.gather(2, self._slots_or(c))


class ChannelStates(TokenStates):
    """States whose scales belong to one channel of a group of tokens.

    A kv head's group is the `group` oldest tokens that it still holds in full precision, once all have left the window.
    Groups are in order of arrival, so that a token's group is the last one that starts at or before its position:
    nothing is stored by slot but codes, and slots may move. parameters [B, H, P, m * D] float16: of P groups; start
    [B, H, P] int64, ascending: the first position of each group, INT64_MAX for a group that is none. A group goes when
    none of its tokens is left, at the next time that one is made.
    """

    BY_SLOT: ClassVar[tuple[str, ...]] = ("codes",)
    BY_HEAD: ClassVar[tuple[str, ...]] = ("full", "slot_of", "parameters", "start")

    def _make_parameters(self, states: Tensor) -> None:
        b, h, c, width = states.shape
        self.parameters = states.new_zeros(b, h, 0, self.codec.parameters * width, dtype=torch.float16)
        self.start = torch.zeros(b, h, 0, dtype=torch.int64, device=states.device)
        self._most_pending = c  # at least the tokens of any kv head that wait for their group to be full

    def add(self, slots: Tensor, states: Tensor) -> None:
        super().add(slots, states)
        self._most_pending += slots.shape[-1]

    def _decode(self, positions: Tensor, out: Tensor) -> None:
        b, h, groups = self.start.shape
        if not groups:
            out.zero_()
            return
        index = self._group_of(positions) + groups * torch.arange(b * h, device=positions.device).view(b, h, 1)
        rows = self.parameters.to(self._compute_dtype).flatten(0, 2)
        found = rows.index_select(0, index.flatten()).view(*positions.shape, -1)
        codes = unpack(self.codes, self.codec.bits, self.width)
        scale, zero = self._split(found)
        self.codec.decode(codes, scale, zero, out=out)

    def _group_of(self, positions: Tensor) -> Tensor:
        """Index [B, H, C] of the group that a quantised token at these positions belongs to."""
        return torch.searchsorted(self.start.contiguous(), positions, right=True).sub_(1).clamp_(min=0)

    def _quantize(self, held: Tensor, positions: Tensor, edge: Tensor) -> None:
        size = self.codec.group
        if self._most_pending < size:  # known without asking the device
            return
        pending = (held >= 0) & (held <= edge)
        count = pending.sum(-1, keepdim=True)
        full_groups = count // size
        self._most_pending, most = (int(x) for x in torch.stack([(count % size).max(), full_groups.max()]).tolist())
        if not most:
            return
        order = held.masked_fill(~pending, INT64_MAX).argsort(dim=-1, stable=True)[..., : most * size]
        taken = torch.arange(most * size, device=held.device) < full_groups * size
        x = self.full.gather(2, order[..., None].expand(-1, -1, -1, self.width))
        x = x.to(self._compute_dtype).unflatten(2, (most, size))
        parameters = self.codec.fit(x, 3)  # [B, H, groups, m, D]
        scale, *zero = parameters.to(x.dtype).unsqueeze(3).unbind(4)
        codes = pack(self.codec.encode(x, scale, zero[0] if zero else None).flatten(2, 3), self.codec.bits)
        row, head, place = taken.nonzero(as_tuple=True)
        self.codes[row, head, self.slot_of.gather(2, order)[row, head, place]] = codes[row, head, place]
        self.slot_of[row, head, order[row, head, place]] = -1
        start = held.gather(2, order).masked_fill(~taken, INT64_MAX)[..., ::size]
        self._add_groups(start, parameters.flatten(3), positions)

    def _add_groups(self, start: Tensor, parameters: Tensor, positions: Tensor) -> None:
        """Add groups start [B, H, n], parameters [B, H, n, m * D] to the table, and drop those without a token left."""
        start = torch.cat([self.start, start], dim=2)
        parameters = torch.cat([self.parameters, parameters], dim=2)
        self.start, order = start.sort(dim=-1, stable=True)
        c = positions.shape[2]
        waiting = torch.zeros(*positions.shape[:2], c + 1, dtype=torch.bool, device=positions.device)
        waiting.scatter_(2, self._slots_or(c), True)
        quantized = (positions >= 0) & ~waiting[..., :c]
        tokens = torch.zeros_like(self.start).scatter_add_(2, self._group_of(positions), quantized.to(torch.int64))
        self.start, again = self.start.masked_fill(tokens == 0, INT64_MAX).sort(dim=-1, stable=True)
        left = int((self.start < INT64_MAX).sum(-1).max())
        self.start = self.start[..., :left].contiguous()
        order = order.gather(2, again)[..., :left]
        self.parameters = parameters.gather(2, order[..., None].expand(-1, -1, -1, parameters.shape[-1]))


def states_of(codec: Codec | None, states: Tensor, positions: Tensor, newest: Tensor) -> PlainStates:
    """Store the states [B, H, C, D] of a prompt as a codec says; None: as they are, in a tensor of their own.

    positions [B, H, C], newest [B]: as of `PlainStates.settle`.
    """
    if codec is None:
        return PlainStates(states.clone(memory_format=torch.contiguous_format))
    kind = ChannelStates if codec.axis == "channel" else TokenStates
    return kind(codec, states, positions, newest)


def _first_of(flags: Tensor) -> Tensor:
    """Indices [B, H, W] that put the places with a flag of 1 [B, H, W] first, in their order."""
    return flags.argsort(dim=-1, descending=True, stable=True)
