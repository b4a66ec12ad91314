"""Formats in which engines store the key or the value of one token and head.

A vector of D numbers becomes one row of bytes that holds its scales too, whatever other tokens hold, so that slots can
move and go. Layouts and formulas:

fp8: vLLM's `fp8_e4m3` cache on a GPU with its default scale of 1: one E4M3 byte a number, 448 at most.
fp8_truncated: vLLM's on a CPU, whose conversion cuts off what E4M3 cannot hold where the GPU rounds to nearest.
nvfp4: NVIDIA's FP4 with a scale of 1 for the tensor, as without calibration: E2M1 codes, two in a byte, the first in
    the low half, then one E4M3 scale for each 16 numbers.
q8_0, q4_0: llama.cpp's blocks of 32 numbers: a float16 scale, then 32 signed bytes; or 16 bytes, number j in the low
    and number j + 16 in the high half. What llama.cpp does to a vector before is in `GGMLBlocks`.
u8: OpenVINO's formula by token: D bytes, then scale and zero point in float32. Its bytes were not compared.
turboquant: TurboQuant (arXiv:2504.19874) as vLLM ships it (vllm-project/vllm, PR 38479), all layers compressed where
    vLLM leaves the first and last two: see `TurboKeys`, `TurboValues`. 0.03 to 0.19 % of codes are one step off vLLM's,
    where a number lies so near the middle of two values that another order of sums decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

HALF, SINGLE = torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
E4M3_MOST = 448.0
TURNED = 64  # channels that llama.cpp turns together at least


class Format(Protocol):
    """How one token's vector is stored. divides: what D must be a multiple of."""

    divides: ClassVar[int]

    def row_bytes(self, width: int) -> int:
        """Bytes of a vector of `width` numbers, scales included."""

    def encode(self, x: Tensor) -> Tensor:
        """Rows of bytes [..., bytes] uint8 for x [..., D]."""

    def decode(self, rows: Tensor, width: int) -> Tensor:
        """The numbers [..., width] that rows of bytes stand for, float32."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] uint8 of `bits` bits as bytes [..., ceil(n * bits / 8)], the first code in the lowest bits."""
    if bits == 8:
        return codes
    if 8 % bits:  # a stream of bits, whose codes may lie in two bytes
        single = (codes[..., None] >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
        return pack(single.flatten(-2), 1)
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
    if 8 % bits:
        single = unpack(packed, 1, width * bits).unflatten(-1, (width, bits))
        places = torch.arange(bits, dtype=torch.uint8, device=packed.device)
        codes: Tensor = (single << places).sum(-1, dtype=torch.uint8)
        return codes
    mask = (1 << bits) - 1
    parts = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :width]


def _bytes(x: Tensor) -> Tensor:
    """The bytes [..., n * itemsize] of numbers [..., n], little-endian."""
    return x.contiguous().view(torch.uint8)


def _numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., n / itemsize] of this dtype in bytes [..., n]."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)  # bytes may begin anywhere


def _away_from_zero(x: Tensor) -> Tensor:
    """x rounded to whole numbers, halves away from zero, as C's roundf does."""
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, 0, 1 / x)


@dataclass(frozen=True)
class FP8:
    """One E4M3 number a value, under a scale of 1. What is larger than 448 becomes 448.

    truncate: towards zero, as vLLM's `float_to_fp8e4m3_scalar` does on a CPU; else to the nearest, of two the even one.
    """

    truncate: bool = False
    divides: ClassVar[int] = 1

    def row_bytes(self, width: int) -> int:
        return width

    def encode(self, x: Tensor) -> Tensor:
        x = x.to(SINGLE).clamp(-E4M3_MOST, E4M3_MOST)
        if not self.truncate:
            return _bytes(x.to(E4M3))
        bits = (x * 2.0**-120).contiguous().view(torch.int32)  # exponents as E4M3 counts them, subnormal numbers too
        return torch.where(x == 0, 0, bits >> 24 & 0x80 | bits >> 20 & 0x7F).to(torch.uint8)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        return _numbers(rows, E4M3).to(SINGLE)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; code 8 adds the sign


@dataclass(frozen=True)
class NVFP4:
    """E2M1 codes with one E4M3 scale (largest magnitude / 6) for each 16 values; ties go to the even code."""

    divides: ClassVar[int] = 16

    def row_bytes(self, width: int) -> int:
        return width // 2 + width // 16

    def encode(self, x: Tensor) -> Tensor:
        blocks = x.to(SINGLE).unflatten(-1, (-1, 16))
        scale = (blocks.abs().amax(-1) / E2M1[-1]).clamp(max=E4M3_MOST).to(E4M3)
        scaled = blocks * _inverse(scale.to(SINGLE))[..., None]
        middles = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=x.device)
        odd = torch.arange(7, device=x.device) % 2 == 1
        middles = torch.where(odd, torch.nextafter(middles, torch.zeros_like(middles)), middles)
        codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
        return torch.cat([pack(codes.flatten(-2), 4), _bytes(scale)], -1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        codes = unpack(rows[..., : width // 2], 4, width)
        magnitudes = torch.tensor(E2M1, device=rows.device)[(codes & 7).long()]
        signed = torch.where(codes >= 8, -magnitudes, magnitudes)
        scale = _numbers(rows[..., width // 2 :], E4M3).to(SINGLE)
        decoded: Tensor = (signed.unflatten(-1, (-1, 16)) * scale[..., None]).flatten(-2)
        return decoded


@dataclass(frozen=True)
class GGMLBlocks:
    """llama.cpp's q8_0 (bits 8) and q4_0 (bits 4): blocks of 32 numbers with a float16 scale in front.

    neighbours: channels that RoPE turns together, half a head apart in Hugging Face's order, become neighbours first,
        as in llama.cpp's keys of a llama. Blocks then hold other channels.
    turn: channels that a Hadamard matrix turns together before they are stored (llama.cpp's PR 21038): 0, none; 64, as
        of its values; -1, as of its keys, the largest power of two that divides D. Only where 64 divides D. Decoding
        turns back, in place of the query and the output that llama.cpp turns: the same product.
    """

    bits: int
    neighbours: bool = False
    turn: int = 0
    divides: ClassVar[int] = 32

    @property
    def query(self) -> GGMLBlocks:
        """The format of a query that is multiplied with keys in this one: turned alike, and rounded to q8_0."""
        return replace(self, bits=8)

    def _turned(self, x: Tensor) -> Tensor:
        """x [..., D] turned by blocks of channels; its own inverse."""
        width = x.shape[-1]
        if not self.turn or width % TURNED:
            return x
        size = TURNED if self.turn == TURNED else width & -width
        return hadamard(x.unflatten(-1, (-1, size))).flatten(-2)

    @property
    def _block(self) -> int:
        return 2 + 4 * self.bits

    def row_bytes(self, width: int) -> int:
        return width // 32 * self._block

    def encode(self, x: Tensor) -> Tensor:
        x = x.to(SINGLE)
        if self.neighbours:
            x = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        blocks = self._turned(x).unflatten(-1, (-1, 32))
        if self.bits == 8:
            scale = blocks.abs().amax(-1, keepdim=True) / 127
            codes = _bytes(_away_from_zero(blocks * _inverse(scale)).to(torch.int8))
        else:  # the value of the largest magnitude becomes -8
            largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
            scale = largest / -8
            raised = torch.trunc(blocks * _inverse(scale) + 8.5).clamp(0, 15).to(torch.uint8)
            codes = raised[..., :16] | (raised[..., 16:] << 4)
        return torch.cat([_bytes(scale.to(HALF)), codes], -1).flatten(-2)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        blocks = rows.unflatten(-1, (-1, self._block))
        scale, codes = _numbers(blocks[..., :2], HALF).to(SINGLE), blocks[..., 2:]
        if self.bits == 8:
            numbers = _numbers(codes, torch.int8).to(SINGLE)
        else:
            numbers = torch.cat([codes & 15, codes >> 4], -1).to(SINGLE) - 8
        x = self._turned((numbers * scale).flatten(-2))
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.neighbours else x


@dataclass(frozen=True)
class U8:
    """OpenVINO's u8 by token: round(x / scale + zero) with scale = (max - min) / 255 and zero = -min / scale."""

    divides: ClassVar[int] = 1

    def row_bytes(self, width: int) -> int:
        return width + 8

    def encode(self, x: Tensor) -> Tensor:
        x = x.to(SINGLE)
        least = x.amin(-1, keepdim=True)
        scale = (x.amax(-1, keepdim=True) - least) / 255
        scale = torch.where(scale == 0, 0.0001, scale)
        zero = -least / scale
        codes = (x * (1 / scale) + zero).round().clamp(0, 255).to(torch.uint8)
        return torch.cat([codes, _bytes(scale), _bytes(zero)], -1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        scale, zero = _numbers(rows[..., width:], SINGLE).split(1, -1)
        decoded: Tensor = (rows[..., :width].to(SINGLE) - zero) * scale
        return decoded


@functools.cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits numbers, ascending, that a standard normal number is coded by with the least mean squared error.

    Lloyd's iteration on the density itself: each is the mean of the density between the middles of its neighbours.
    """
    count = 1 << bits
    points = [3.0 * (2 * index + 1 - count) / count for index in range(count)]

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    for _ in range(5000):
        edges = [-math.inf, *((low + high) / 2 for low, high in pairwise(points)), math.inf]
        new = [(density(low) - density(high)) / (below(high) - below(low)) for low, high in pairwise(edges)]
        moved = max(abs(point - new_point) for point, new_point in zip(points, new, strict=True))
        points = new
        if moved < 1e-12:
            break
    return tuple(points)


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times Sylvester's Hadamard matrix / √D, which is its own inverse; D: a power of two.

    By sums and differences of numbers alone, so that a vector's result does not depend on how many there are.
    """
    width, step = x.shape[-1], 1
    while step < width:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        step *= 2
    return x / math.sqrt(width)


@functools.cache
def random_signs(width: int) -> Tensor:
    """Signs [D] of ±1, the same for every layer, head, run and machine: bits of a linear congruential generator."""
    state, signs = 12345, []
    for _ in range(width):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        signs.append(1.0 if state >> 63 else -1.0)
    return torch.tensor(signs)


@dataclass(frozen=True)
class TurboKeys:
    """Keys of TurboQuant: the norm in float16, and codes of the turned unit vector.

    y = H k / |k| is coded, number by number, by the nearest of 2^bits values that suit N(0, 1/D); read is |k| times
    what the codes stand for, made a unit vector again (`correct`) and turned back. vLLM turns the query in place of the
    keys, has no random signs in front of H (signs=False; arXiv:2504.19874 turns at random), and leaves out the paper's
    second stage (a sign of each coordinate of a projection of the rest). A constant vector needs the signs.
    """

    bits: int
    signs: bool = False
    correct: bool = True
    divides: ClassVar[int] = 0  # a power of two

    def row_bytes(self, width: int) -> int:
        return -(-width * self.bits // 8) + 2

    def encode(self, x: Tensor) -> Tensor:
        x = x.to(SINGLE)
        norm = x.norm(dim=-1, keepdim=True)
        turned = hadamard(x * _inverse(norm) * self._signs(x)) * math.sqrt(x.shape[-1])
        points = lloyd_max(self.bits)
        middles = torch.tensor([(low + high) / 2 for low, high in pairwise(points)])
        codes = torch.bucketize(turned, middles.to(x.device)).to(torch.uint8)
        return torch.cat([pack(codes, self.bits), _bytes(norm.clamp(max=torch.finfo(HALF).max).to(HALF))], -1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        codes = unpack(rows[..., :-2], self.bits, width)
        norm = _numbers(rows[..., -2:], HALF).to(SINGLE)
        y = torch.tensor(lloyd_max(self.bits), dtype=SINGLE, device=rows.device)[codes.long()]
        y = y / (y.norm(dim=-1, keepdim=True) if self.correct else math.sqrt(width))
        return hadamard(y) * self._signs(y) * norm

    def _signs(self, x: Tensor) -> Tensor | float:
        return random_signs(x.shape[-1]).to(x.device) if self.signs else 1.0


@dataclass(frozen=True)
class TurboValues:
    """Values of TurboQuant in vLLM: evenly spaced between least and largest of a token, scale and least in float16."""

    bits: int
    divides: ClassVar[int] = 1

    def row_bytes(self, width: int) -> int:
        return -(-width * self.bits // 8) + 4

    def encode(self, x: Tensor) -> Tensor:
        x, most, end = x.to(SINGLE), (1 << self.bits) - 1, torch.finfo(HALF).max
        least = x.amin(-1, keepdim=True).clamp(-end, end).to(HALF)
        scale = ((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / most).clamp(max=end).to(HALF)
        codes = ((x - least.to(SINGLE)) * _inverse(scale.to(SINGLE))).round().clamp(0, most).to(torch.uint8)
        return torch.cat([pack(codes, self.bits), _bytes(scale), _bytes(least)], -1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        scale, least = _numbers(rows[..., -4:], HALF).to(SINGLE).split(1, -1)
        decoded: Tensor = unpack(rows[..., :-4], self.bits, width).to(SINGLE) * scale + least
        return decoded


# -- the registry: a codec is a Format above and an entry here ---------------------------------------------------------

FP8_BITS = 8
TURBO_BITS = (8, 4, 3)


@dataclass(frozen=True)
class EngineCodec:
    """A value of `cache.codec`. settings: fields of `EngineQuantization` that it reads, `residual` aside.

    formats: of keys and of values, for such an object. options: keys of the group `cache` that set these fields.
    """

    settings: tuple[str, ...]
    formats: Callable[[Any], tuple[Format, Format]]
    options: tuple[str, ...] = ()


def _turbo_formats(how: Any) -> tuple[Format, Format]:
    keys: Format = FP8() if how.key_bits == FP8_BITS else TurboKeys(how.key_bits, how.signs)
    return keys, TurboValues(how.value_bits)


def _in_blocks(bits: int) -> EngineCodec:
    def formats(how: Any) -> tuple[Format, Format]:
        turns = (0, 0) if how.rotate is False else (-1, TURNED)
        return GGMLBlocks(bits, how.neighbours, turns[0]), GGMLBlocks(bits, turn=turns[1])

    return EngineCodec(("rotate", "neighbours"), formats, ("rotate",))


def _plain(layout: Format) -> EngineCodec:
    return EngineCodec((), lambda _: (layout, layout))


CODECS = {
    "turboquant": EngineCodec(
        ("key_bits", "value_bits", "signs"), _turbo_formats, ("bits", "key_bits", "value_bits", "signs")
    ),
    "fp8": _plain(FP8()),
    "fp8_truncated": _plain(FP8(truncate=True)),
    "nvfp4": _plain(NVFP4()),
    "q8_0": _in_blocks(8),
    "q4_0": _in_blocks(4),
    "u8": _plain(U8()),
}
