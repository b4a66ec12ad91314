"""How keys and values are stored in few bits: the setting, and the arithmetic of codes, scales and packing.

The formula is KIVI's (arXiv:2402.02750, section 3): a group of numbers x is stored as codes of `bits` bits,
q = round((x - zero) / scale), with zero = min(x) and scale = (max(x) - min(x)) / (2^bits - 1); attention reads
q * scale + zero. Symmetric groups have no zero: scale = max|x| / (2^(bits - 1) - 1), codes from -(2^(bits - 1) - 1) to
that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvexp.errors import ConfigError

Axis = Literal["channel", "token"]
BITS = (16, 8, 4, 2)
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

    ConfigError for values outside these.
    """

    key_bits: int = 4
    value_bits: int = 4
    key_axis: Axis = "channel"
    value_axis: Axis = "token"
    group: int = 32
    residual: int = 32
    symmetric: bool = False

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            if isinstance(getattr(self, name), bool) or getattr(self, name) not in BITS:
                raise ConfigError(f"{name} must be one of {', '.join(map(str, BITS))}, got {getattr(self, name)!r}")
        if self.key_bits == self.value_bits == FULL_BITS:
            raise ConfigError("key_bits=16 and value_bits=16 quantise nothing: give quantization=None")
        for name in ("key_axis", "value_axis"):
            if getattr(self, name) not in get_args(Axis):
                allowed = ", ".join(get_args(Axis))
                raise ConfigError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name, least in (("group", 1), ("residual", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not isinstance(self.symmetric, bool):
            raise ConfigError(f"symmetric must be True or False, got {self.symmetric!r}")

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
        if dtype not in SUPPORTED:
            names = ", ".join(str(one).removeprefix("torch.") for one in SUPPORTED[:3])
            raise ConfigError(f"keys and values of {dtype} cannot be quantised; a model's dtype may be {names}")

    def label(self) -> str:
        """In a few letters, as in k4v2: bits of keys and of values."""
        return f"k{self.key_bits}v{self.value_bits}"


@dataclass(frozen=True)
class Codec:
    """How the keys or the values of a layer are stored: fields as of `Quantization`."""

    bits: int
    axis: Axis
    group: int
    residual: int
    symmetric: bool

    @property
    def parameters(self) -> int:
        """Numbers that a group stores beside its codes: a scale, and a zero where it is not symmetric."""
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
            made = [x.abs().amax(dim) / self._half]
        else:
            least, largest = x.amin(dim), x.amax(dim)
            made = [(largest - least) / self._levels, least]
        end = torch.finfo(PARAMETER).max
        return torch.stack(made, dim).clamp(-end, end).to(PARAMETER)

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


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] uint8 of `bits` bits as bytes [..., ceil(n * bits / 8)], the first code in the lowest bits."""
    if bits == 8:
        return codes
    per = 8 // bits
    codes = pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    packed = codes[..., 0].clone()
    for place in range(1, per):
        packed |= codes[..., place] << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The codes [..., width] uint8 that `pack` put into bytes."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    parts = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :width]
