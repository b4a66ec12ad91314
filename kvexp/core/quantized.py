"""Slots stored in few bits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvexp.core.codecs import CODECS, FP8_BITS, TURBO_BITS, TURNED, Format, GGMLBlocks, pack, unpack
from kvexp.core.slot_order import INT64_MAX
from kvexp.core.slots import GROWTH, Slots, rows_view
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, check_fields

Axis = Literal["channel", "token"]
Bits = Literal[16, 8, 4, 2]
BITS = get_args(Bits)
FULL_BITS = 16  # not quantised: the model's dtype, which the axis of bytes counts as 16 bits
PARAMETER = torch.float16  # of scales and zeros
SUPPORTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # dtypes of keys and values


@dataclass(frozen=True)
class Quantization:
    """How the slots of all layers are quantised.

    key_bits, value_bits: 8, 4 or 2, or 16 for one of the two that is not quantised.
    key_axis, value_axis: what shares a scale: `channel`, one channel of `group` tokens that follow one another among
        the tokens the kv head still holds (KIVI's keys), or `token`, `group` neighbouring channels of one token (KIVI's
        values).
    group: numbers per scale. With the axis `token` it must divide the head's dimension.
    residual: the newest tokens that stay in full precision. A token is quantised once, at the end of the forward in
        which it leaves this window; of a `channel` group, once the window has passed the last of its tokens.
    symmetric: codes around 0 without a zero point; else affine.
    """

    key_bits: Bits = 4
    value_bits: Bits = 4
    key_axis: Axis = "channel"
    value_axis: Axis = "token"
    group: Annotated[int, AtLeast(1)] = 32
    residual: Annotated[int, AtLeast(0)] = 32
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.key_bits == self.value_bits == FULL_BITS:
            raise ConfigError("key_bits=16 and value_bits=16 quantise nothing: give quantization=None")

    @property
    def keys(self) -> Codec | None:
        """How keys are stored; None: not quantised."""
        return self._codec(self.key_bits, self.key_axis)

    @property
    def values(self) -> Codec | None:
        """How values are stored; None: not quantised."""
        return self._codec(self.value_bits, self.value_axis)

    def _codec(self, bits: int, axis: Axis) -> Codec | None:
        return None if bits == FULL_BITS else Codec(bits, axis, self.group, self.residual, self.symmetric)

    def check_head(self, key_dim: int, value_dim: int) -> None:
        """ConfigError where groups of channels do not divide a head of these dimensions."""
        for name, codec, width in (("key", self.keys, key_dim), ("value", self.values, value_dim)):
            if codec is not None and codec.axis == "token" and width % codec.group:
                fitting = [str(n) for n in range(2, width + 1) if width % n == 0]
                raise ConfigError(
                    f"group={codec.group} does not divide the {width} channels of a {name} head, and {name}_axis=token "
                    f"takes its groups along them: set group={' or '.join(fitting)}"
                )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """ConfigError for a dtype of keys and values that cannot be quantised."""
        _check_dtype(dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in SUPPORTED:
        names = ", ".join(str(supported).removeprefix("torch.") for supported in SUPPORTED[:3])
        raise ConfigError(f"keys and values of {dtype} cannot be quantised; a model's dtype may be {names}")


@dataclass(frozen=True)
class Codec:
    """How the keys or the values of a layer are stored: fields as of `Quantization`.

    The formula is KIVI's (arXiv:2402.02750, section 3): a group of numbers x is stored as codes of `bits` bits,
    q = round((x - zero) / scale), with zero = min(x) and scale = (max(x) - min(x)) / (2^bits - 1); attention reads
    q * scale + zero. Symmetric groups have no zero: scale = max|x| / (2^(bits - 1) - 1), codes from
    -(2^(bits - 1) - 1) to that number.
    """

    bits: int
    axis: Axis
    group: int
    residual: int
    symmetric: bool

    @property
    def parameters(self) -> int:
        """Numbers that a group stores with its codes: a scale, and a zero where it is not symmetric."""
        return 1 if self.symmetric else 2

    @property
    def unquantized(self) -> int:
        """At most so many tokens of a kv head are in full precision after a forward."""
        return self.residual + (self.group - 1 if self.axis == "channel" else 0)

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of `width` channels of one token."""
        return -(-width * self.bits // 8)

    def fit(self, x: Tensor, dim: int) -> Tensor:
        """Scale, and zero, of groups that lie along dimension `dim` of x: stacked at `dim`, in PARAMETER.

        Numbers beyond the range of float16 are taken as its ends.
        """
        if self.symmetric:
            parameters = [x.abs().amax(dim) / self._half]
        else:
            least, largest = x.amin(dim), x.amax(dim)
            parameters = [(largest - least) / self._levels, least]
        end = torch.finfo(PARAMETER).max
        return torch.stack(parameters, dim).clamp(-end, end).to(PARAMETER)

    def encode(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Codes of x as uint8, one per number; scale and zero (None: symmetric) in x's dtype, broadcast to x."""
        step = torch.where(scale == 0, 1, scale)
        if zero is None:
            return ((x / step).round().clamp(-self._half, self._half) + self._half).to(torch.uint8)
        return ((x - zero) / step).round().clamp(0, self._levels).to(torch.uint8)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor | None = None) -> Tensor:
        """The numbers that codes stand for, in the dtype of scale; scale and zero broadcast to codes.

        out: written to and returned, in place of a new tensor.
        """
        numbers = codes.to(scale.dtype)
        if zero is None:
            return torch.mul(numbers.sub_(self._half), scale, out=out)
        return torch.mul(numbers, scale, out=out).add_(zero)

    @property
    def _levels(self) -> int:
        return (1 << self.bits) - 1

    @property
    def _half(self) -> int:
        return (1 << self.bits - 1) - 1


TurboBits = Literal[16, 8, 4, 3]  # as typed; 16: the usual number of bits


@dataclass(frozen=True)
class EngineQuantization:
    """Slots of all layers in an engine's format (`kvexp.core.codecs`), every token by itself.

    codec: of keys and values. key_bits, value_bits: of turboquant alone; keys of 8 bits are fp8, values have 4 or 3.
    signs: turboquant turns keys behind random signs. residual: as of `Quantization`; engines have no such window.
    rotate, neighbours: of q8_0 and q4_0 alone (`GGMLBlocks`). rotate: None, where 64 divides a head's channels, as
    llama.cpp does. neighbours: of the model, which `EvictionCache` fills in.
    """

    codec: str
    key_bits: int | None = None
    value_bits: int | None = None
    signs: bool = False
    residual: Annotated[int, AtLeast(0)] = 0
    rotate: bool | None = None
    neighbours: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.codec not in CODECS:
            raise ConfigError(f"codec must be one of {', '.join(CODECS)}, got {self.codec!r}")
        turbo, reads = self.codec == "turboquant", CODECS[self.codec].settings
        for field in fields(self):
            if field.name not in ("codec", "residual", *reads) and getattr(self, field.name) != field.default:
                readers = [name for name, codec in CODECS.items() if field.name in codec.settings]
                raise ConfigError(f"{field.name} is of codec={' and '.join(readers)}, got codec={self.codec}")
        if turbo and (self.key_bits not in TURBO_BITS or self.value_bits not in TURBO_BITS[1:]):
            raise ConfigError(
                f"codec=turboquant stores keys in 8, 4 or 3 bits and values in 4 or 3, got key_bits={self.key_bits} "
                f"and value_bits={self.value_bits}"
            )
        if self.signs and self.key_bits == FP8_BITS:
            raise ConfigError("signs=true has no effect with key_bits=8, where keys are fp8 and not turned")

    @property
    def in_blocks(self) -> bool:
        """Whether it is a format of llama.cpp's."""
        return "rotate" in CODECS[self.codec].settings

    @property
    def keys(self) -> ByteCodec:
        """How keys are stored."""
        return ByteCodec(CODECS[self.codec].formats(self)[0], self.residual)

    @property
    def values(self) -> ByteCodec:
        """How values are stored."""
        return ByteCodec(CODECS[self.codec].formats(self)[1], self.residual)

    def check_head(self, key_dim: int, value_dim: int) -> None:
        """ConfigError where the format cannot hold vectors of a head of these dimensions."""
        for name, codec, width in (("key", self.keys, key_dim), ("value", self.values, value_dim)):
            divides = codec.format.divides
            if divides == 0 and width & (width - 1):
                raise ConfigError(f"codec={self.codec} turns a {name} head's channels, a power of two; it has {width}")
            if divides and width % divides:
                raise ConfigError(f"codec={self.codec} packs {divides} channels at a time; a {name} head has {width}")
            if self.rotate and width % TURNED:
                raise ConfigError(
                    f"rotate=true turns {TURNED} channels at a time, and llama.cpp leaves other heads as they are; a "
                    f"{name} head has {width}: leave out rotate"
                )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """As of `Quantization`."""
        _check_dtype(dtype)


AnyQuantization = Quantization | EngineQuantization


@dataclass(frozen=True)
class ByteCodec:
    """How the keys or the values of a layer are stored in a format whose rows of bytes hold their scales.

    The other attributes mean what they mean in `Codec`: bytes are counted by them.
    """

    format: Format
    residual: int
    axis: ClassVar[Axis] = "token"
    group: ClassVar[int] = 1
    parameters: ClassVar[int] = 0

    @property
    def unquantized(self) -> int:
        """As of `Codec`."""
        return self.residual

    def code_bytes(self, width: int) -> int:
        """Bytes of `width` channels of one token, scales included."""
        return self.format.row_bytes(width)


class PlainStates:
    """Unquantised states [B, H, C, D] (keys or values) by slot, and what quantised states share with them.

    `TokenStates` have scales that belong to one token, `ChannelStates` scales that belong to a group of tokens. A slot
    is addressed by its index in the layer's `Slots`, whose position ids say which token it holds.

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
        other = object.__new__(type(self))
        other.__dict__ = {name: kept for name, kept in self.__dict__.items() if name not in self.tensors}
        other._shared = False
        for name, tensor in self.tensors.items():
            view = rows_view(tensor, rows)
            setattr(other, name, tensor.index_select(0, rows.to(tensor.device)) if view is None else view)
            if view is not None:
                self._shared = other._shared = True
        return other


class TokenStates(PlainStates):
    """States whose scales belong to groups of neighbouring channels of one token, and lie in the token's slot.

    codes [B, H, C, bytes] uint8; parameters [B, H, C, m * D / group] float16: scales, then zeros. full [B, H, W, D]:
    the W places for tokens in full precision; slot_of [B, H, W] int64: their slots, -1 for a free place.
    """

    BY_SLOT: ClassVar[tuple[str, ...]] = ("codes", "parameters")
    BY_HEAD: ClassVar[tuple[str, ...]] = ("full", "slot_of")

    def __init__(self, codec: Any, states: Tensor, positions: Tensor, newest: Tensor) -> None:
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
        decoded = dense[:, :, :c] if same else dense.new_empty(b, h, c, self.width, dtype=self._compute_dtype)
        self._decode(positions, decoded)
        if not same:
            dense[:, :, :c] = decoded
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


class ByteStates(TokenStates):
    """States in a format whose rows of bytes hold their scales: codes [B, H, C, bytes] uint8 is all that a slot has.

    Reading and writing are in float32.
    """

    BY_SLOT: ClassVar[tuple[str, ...]] = ("codes",)

    def _make_parameters(self, states: Tensor) -> None:
        """No tensors of scales."""

    def _decode(self, positions: Tensor, out: Tensor) -> None:
        out.copy_(self.codec.format.decode(self.codes, self.width))

    def _quantize(self, held: Tensor, positions: Tensor, edge: Tensor) -> None:
        row, head, place = ((held >= 0) & (held <= edge)).nonzero(as_tuple=True)
        slots = self.slot_of[row, head, place]
        self.codes[row, head, slots] = self.codec.format.encode(self.full[row, head, place])
        self.slot_of[row, head, place] = -1


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
        group_parameters = rows.index_select(0, index.flatten()).view(*positions.shape, -1)
        codes = unpack(self.codes, self.codec.bits, self.width)
        scale, zero = self._split(group_parameters)
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


def states_of(codec: Codec | ByteCodec | None, states: Tensor, positions: Tensor, newest: Tensor) -> PlainStates:
    """Store the states [B, H, C, D] of a prompt as a codec says; None: as they are, in a tensor of their own.

    positions [B, H, C], newest [B]: as of `PlainStates.settle`.
    """
    if codec is None:
        return PlainStates(states.clone(memory_format=torch.contiguous_format))
    kind = ByteStates if isinstance(codec, ByteCodec) else ChannelStates if codec.axis == "channel" else TokenStates
    return kind(codec, states, positions, newest)


def _first_of(flags: Tensor) -> Tensor:
    """Indices [B, H, W] that put the places with a flag of 1 [B, H, W] first, in their order."""
    return flags.argsort(dim=-1, descending=True, stable=True)


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
    """Bytes of the slots of one kv head, from a configuration alone.

    key_dim, value_dim: channels D and Dv of a head; quantization: None for slots as the model makes them; itemsize:
    bytes of a number that is not quantised; bias: bytes of a slot's bias, where slots have one.
    """

    key_dim: int
    value_dim: int
    quantization: AnyQuantization | None = None
    itemsize: int = HALF_BYTES
    bias: int = 0

    def of(self, slots: int) -> int:
        """Bytes of so many slots, all of which hold a token; it never falls as slots grow."""
        how = self.quantization
        keys, values = (None, None) if how is None else (how.keys, how.values)
        sides = self._of_side(keys, self.key_dim, slots) + self._of_side(values, self.value_dim, slots)
        return sides + slots * self.bias

    def _of_side(self, codec: Codec | ByteCodec | None, width: int, slots: int) -> int:
        """Bytes of keys, or of values, with `width` channels."""
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
        return bisect_right(range(1, int(limit) + 2), limit, key=self.of)  # a slot takes a byte at least


class QuantizedSlots(Slots):
    """The slots of one layer after its prompt, with keys and values as a quantisation says.

    positions, score and length: as in `Slots`. `keys` and `values` are what attention reads: made anew from codes
    for every forward, dropped when it ends, and counted at the peak. Each forward ends with `settle`.
    """

    def __init__(self, positions: Tensor, score: Tensor, length: int, keys: PlainStates, values: PlainStates) -> None:
        self.positions, self.score, self.visible, self.bias = positions, score, None, None
        self.key_states, self.value_states = keys, values
        self.length = length
        self.same_order = False
        self._borrowed = self._shared = False
        self._peak_bytes = 0
        self._dense: dict[str, Tensor] = {}

    @classmethod
    def of_prompt(cls, slots: Slots, quantization: AnyQuantization, newest: Tensor) -> QuantizedSlots:
        """The slots of a prompt that has ended and was evicted, quantised; newest [B]: position id of the last token.

        The given slots are used up. ConfigError for heads or a dtype that cannot be quantised so.
        """
        quantization.check_head(slots.keys.shape[-1], slots.values.shape[-1])
        quantization.check_dtype(slots.keys.dtype)
        positions = slots.positions
        quantized = cls(
            positions,
            slots.score,
            slots.length,
            states_of(quantization.keys, slots.keys, positions, newest),
            states_of(quantization.values, slots.values, positions, newest),
        )
        quantized.same_order, quantized.bias = slots.same_order, slots.bias
        quantized._peak_bytes = max(slots.take_peak_bytes(), slots.kv_bytes + quantized.kv_bytes)
        return quantized

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """Keys [B, H, C, D] as attention reads them, of dead slots anything finite; not to be written to."""
        return self._read("keys", self.key_states)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """Values [B, H, C, Dv] as attention reads them, of dead slots anything finite; not to be written to."""
        return self._read("values", self.value_states)

    def read_query(self, query: Tensor) -> Tensor:
        """A query [..., D] as it is multiplied with the keys: rounded where the engine rounds it, in query's dtype."""
        form = self.key_states.codec.format if isinstance(self.key_states, ByteStates) else None
        if not isinstance(form, GGMLBlocks):
            return query
        return form.query.decode(form.query.encode(query), query.shape[-1]).to(query.dtype)

    def _read(self, name: str, states: PlainStates) -> Tensor:
        if type(states) is PlainStates:
            return states.data
        if name not in self._dense:
            self._dense[name] = states.dense(self.positions)
            dense_bytes = sum(dense.nbytes for dense in self._dense.values())
            self._peak_bytes = max(self._peak_bytes, self.kv_bytes + dense_bytes)
        return self._dense[name]

    @property
    def _states(self) -> tuple[PlainStates, PlainStates]:
        return self.key_states, self.value_states

    @property
    def buffers(self) -> dict[str, Tensor]:
        parts = zip(("keys", "values"), self._states, strict=True)
        codes = {f"{name}.{of}": tensor for name, states in parts for of, tensor in states.tensors.items()}
        named = {"positions": self.positions, "score": self.score} | codes | self._dense
        return named if self.bias is None else named | {"bias": self.bias}

    @property
    def kv_bytes(self) -> int:
        """Bytes of codes, scales and zeros, group starts, biases, tokens in full precision, their slots; with room."""
        return self.key_states.nbytes + self.value_states.nbytes + self.bias_bytes

    @property
    def bytes_at_16(self) -> int:
        """`kv_bytes` with keys and values in full precision as 16 bits each, whatever their dtype."""
        return sum(bytes_at_16(*states.tensors.values()) for states in self._states) + self.bias_bytes

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
        held, used = self.kv_bytes, torch.arange(self.length, device=self.positions.device)
        self._move(used.expand(*self.positions.shape[:2], -1), by)
        for states in self._states:
            states.grow(self.length + by)
        self._peak_bytes = max(self._peak_bytes, held + self.kv_bytes)

    def _move(self, index: Tensor, reserve: int) -> None:
        """Positions, scores and biases of the slots index [B, H, N] in new tensors, with `reserve` dead ones behind."""
        b, h, n = index.shape
        for name, dead in (("positions", -1), ("score", 0), *([] if self.bias is None else [("bias", 0)])):
            old = getattr(self, name)
            new = old.new_full((b, h, n + reserve), dead)
            new[:, :, :n] = old.gather(2, index)
            setattr(self, name, new)

    def own(self) -> None:
        for states in self._states:
            states.own()

    def write(self, index: Tensor, keys: Tensor, values: Tensor, *, behind: bool = False) -> None:
        """Store tokens in the slots index [B, H, Q], in full precision: keys [B, H, Q, D], values [B, H, Q, Dv]."""
        self._dense = {}
        self.key_states.add(index, keys)
        self.value_states.add(index, values)

    def gather(self, index: Tensor, keep: Tensor, reserve: int) -> None:
        """As `Slots.gather`."""
        n = index.shape[2]
        self._dense, held = {}, self.kv_bytes
        self._move(index, reserve)
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
        self.bias = None if self.bias is None else self.bias.index_select(0, rows)
        for states in self._states:
            states.select_rows(rows)
        self._peak_bytes = max(self._peak_bytes, held + self.kv_bytes)

    def index_rows(self, rows: Tensor) -> QuantizedSlots:
        """As `Slots.index_rows`, room to grow included; codes are shared until one of both sides takes a token."""
        index = rows.to(self.positions.device)
        keys, values = (states.index_rows(rows) for states in self._states)
        positions, score = self.positions.index_select(0, index), self.score.index_select(0, index)
        other = QuantizedSlots(positions, score, self.length, keys, values)
        other.same_order = self.same_order
        other.bias = None if self.bias is None else self.bias.index_select(0, index)
        return other


def settled(slots: Slots, quantization: AnyQuantization, newest: Tensor) -> QuantizedSlots:
    """The slots after a forward and its eviction, quantised; newest [B]: position id of each row's newest token."""
    if isinstance(slots, QuantizedSlots):
        slots.settle(newest)
        return slots
    return QuantizedSlots.of_prompt(slots, quantization, newest)
