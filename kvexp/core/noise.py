"""Noise of a method: a pure function of seed, layer, query head, query position and key position.

No generator state means that blocks, batches, beams, padding and devices cannot change a draw. Fresh noise, one draw
per (query, key), would cost several times what attention costs if every draw were hashed and put through two
logarithms. So the draws lie ready in a pool: (seed, layer, head, query) are hashed to an offset into it, and the keys
of that query take the draws from there on, `pool[offset + key position]`. Within a row of attention no draw comes
twice; two rows share a run of draws where their offsets are near, at different keys (DECISIONS.md).

The mixer is the public-domain 32-bit integer hash "lowbias32" (two multiplications, three xor-shifts).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvexp.util.errors import ConfigError


class StepInput:
    """The input of one decode step from a schedule that is computed on the host.

    value: the tensor while a step is computed for which it was held; None: nothing is held, and whoever computes takes
    the next one from the schedule.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._buffer: Tensor | None = None

    def hold(self, value: Tensor) -> None:
        """Copy `value` into the buffer of the steps before, of the same shape; the first call makes the buffer."""
        if self._buffer is None:
            self._buffer = value.clone()
        else:
            self._buffer.copy_(value)
        self.value = self._buffer

    def release(self) -> None:
        """End the step. The buffer stays, since captured steps read it."""
        self.value = None


EULER = 0.5772156649015329  # mean of the standard Gumbel distribution
GUMBEL_STD = math.pi / math.sqrt(6)  # its standard deviation, 1.2825
KINDS = ("gumbel", "gaussian", "constant", "none")
POOL_SIZE = 1 << 22  # draws: 16 MiB in float32
POOL_OVERLAP = 1 << 20  # the pool's first draws repeated behind its end, so that a row up to this long is contiguous
STEPS_AHEAD = 64  # decode steps whose offsets into the pool are hashed at once
_GOLDEN = -1640531527  # 0x9E3779B9 as a signed 32-bit integer
_CHUNK = 1 << 16  # draws made at a time, so that intermediate results stay in the CPU's cache


def lowbias32(x: Tensor) -> Tensor:
    """The hash lowbias32 of every int32 of x; shifts are made logical by masking, products wrap around."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def uniform(bits: Tensor) -> Tensor:
    """Random int32 bits as float32 strictly between 0 and 1, on the grid (i + 1/2) / 2**23.

    23 bits, because 2**24 - 1/2 is no float32: it would round to 1, and a Gumbel draw to infinity.
    """
    return (((bits >> 9) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23


def to_distribution(bits: Tensor, kind: str) -> Tensor:
    """Random int32 bits as float32 draws: Gumbel, or Gaussian with the Gumbel distribution's mean and deviation."""
    u = uniform(bits)
    if kind == "gumbel":
        return u.log_().neg_().log_().neg_()
    radius = u.log_().mul_(-2).sqrt_()
    return radius.mul_(torch.cos(2 * math.pi * uniform(lowbias32(bits ^ 0x5BD1E995)))).mul_(GUMBEL_STD).add_(EULER)


def stream_id(seeds: Tensor, layer: int, heads: int, first: int = 0) -> Tensor:
    """Stream ids [B, heads] int32 of seeds [B]: one independent stream per seed, layer and query head.

    first: the first of the `heads` heads.
    """
    low = seeds.to(torch.int64) & 0xFFFFFFFF
    low = torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
    base = lowbias32(lowbias32(low) + layer * 97 + 1)
    heads_of = torch.arange(first, first + heads, device=seeds.device, dtype=torch.int32)
    return lowbias32(base[:, None] + heads_of * _GOLDEN)


def hash_draws(kind: str, base: Tensor, keys: Tensor) -> Tensor:
    """Draws [..., S] float32, one hash each, of stream ids `base` [...] at integer keys [..., S]."""
    return to_distribution(lowbias32(base[..., None] + keys.to(torch.int32) * _GOLDEN), kind)


def gumbel(seeds: Tensor, layer: int, query_positions: Tensor, keys: Tensor) -> Tensor:
    """Gumbel draws [B, S] float32 for sampling tokens, each hashed by itself.

    seeds, query_positions [B]; keys [B, S]: token ids.
    """
    base = lowbias32(stream_id(seeds, layer, 1)[:, 0] + query_positions.to(torch.int32) * _GOLDEN)
    return hash_draws("gumbel", base, keys)


@functools.cache  # two kinds, on every device there is
def pool(kind: str, device: torch.device) -> Tensor:
    """The pool of POOL_SIZE + POOL_OVERLAP float32 draws, made on the CPU so that every device has the same bits."""
    with torch.inference_mode(False), torch.no_grad():
        if device.type != "cpu":
            return pool(kind, torch.device("cpu")).to(device)
        table = torch.empty(POOL_SIZE + POOL_OVERLAP)
        for start in range(0, POOL_SIZE, _CHUNK):
            index = torch.arange(start + 1, start + _CHUNK + 1, dtype=torch.int32)
            table[start : start + _CHUNK] = to_distribution(lowbias32(index * _GOLDEN), kind)
        table[POOL_SIZE:] = table[:POOL_OVERLAP]
        return table


@functools.cache
def exp_pool(kind: str) -> Tensor:
    """exp of every draw of the `pool`, on the CPU: what noise in front of a softmax multiplies probabilities by."""
    with torch.inference_mode(False), torch.no_grad():
        return pool(kind, torch.device("cpu")).exp()


@dataclass(frozen=True)
class Noise:
    """The logit adjustment zeta of Keyformer (arXiv:2403.09054, section 3.2).

    `fresh`: one draw per (query, key), as the authors' code does; otherwise one per key, the other reading of
    Algorithm 1. Gaussian and constant have the mean (and standard deviation) of the Gumbel distribution, as Table 4 of
    that paper; a constant cannot change a softmax, so it must equal none (DECISIONS.md).
    """

    kind: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel"
    fresh: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"noise must be one of {', '.join(KINDS)}, got {self.kind!r}")

    @property
    def constant(self) -> bool:
        """Whether the noise is the same for all keys, so that a softmax does not change by it."""
        return self.kind in ("constant", "none")

    def draw(self, seeds: Tensor, layer: int, heads: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Noise for the logits of one layer.

        seeds [B]; heads = H * G query heads; query_positions [B, Q]; key_positions [B, H, S] or [B, 1, S].
        Returns [B, H * G, Q (1 if per key), S] float32 on the same device, or a scalar where it is constant.
        """
        streams = stream_id(seeds, layer, heads)
        if self.constant or not self.fresh:
            return self._of_keys(streams, key_positions)
        return _gather_draws(self.kind, _pool_offsets(streams, query_positions), key_positions)

    def make_stepper(self, seeds: Tensor, layers: Sequence[int], heads: int) -> Callable[[Tensor, Tensor], Tensor]:
        """`draw` for decode steps, as a function (query positions, key positions) -> noise.

        One query per row, whose position grows by one from call to call. Rows are the first layer's of `layers`, then
        the next one's: query positions [L * B, 1], key positions [L * B, H, S]. seeds [B]; heads: H * G query heads.
        """
        streams = torch.cat([stream_id(seeds, layer, heads) for layer in layers])
        if self.constant or not self.fresh:
            return lambda _, keys: self._of_keys(streams, keys)
        return PooledDraws(self.kind, PoolOffsets(streams))

    def _of_keys(self, streams: Tensor, key_positions: Tensor) -> Tensor:
        """Noise [B, H * G, 1, S] that is the same for all queries, or a scalar; streams [B, H * G]."""
        if self.constant:
            return torch.full((), EULER if self.kind == "constant" else 0.0, device=key_positions.device)
        keys = key_positions.repeat_interleave(streams.shape[1] // key_positions.shape[1], dim=1)
        return hash_draws(self.kind, streams, keys)[:, :, None]

    def pool_offsets(self, seeds: Tensor, layer: int, heads: int, query_positions: Tensor, first: int = 0) -> Tensor:
        """Offset into the pool at which each query's draws start: [B, heads, Q] int32.

        For `heads` query heads from number `first` on; seeds [B], query_positions [B, Q].
        """
        return _pool_offsets(stream_id(seeds, layer, heads, first), query_positions)


class PoolOffsets:
    """Offsets into the noise pool for decode steps: one query per row, whose position grows by one from call to call.

    STEPS_AHEAD steps are hashed at once, which costs no more than hashing one. streams [B, heads]: of `stream_id`.
    held: what `next_offsets` returns in a step for which `held.hold(draw_next(...))` was called before.
    """

    def __init__(self, streams: Tensor) -> None:
        self.streams, self.held = streams, StepInput()
        self.ready: Iterator[Tensor] = iter(())

    def next_offsets(self, query_positions: Tensor) -> Tensor:
        """Offsets [B, heads, 1] int32 for queries at positions [B, 1]."""
        return self.draw_next(query_positions) if self.held.value is None else self.held.value

    def draw_next(self, query_positions: Tensor) -> Tensor:
        """Offsets of the next step of the schedule; arguments and result of `next_offsets`."""
        pool_offsets = next(self.ready, None)
        if pool_offsets is None:
            ahead = torch.arange(STEPS_AHEAD, device=query_positions.device)
            self.ready = iter(_pool_offsets(self.streams, query_positions + ahead).split(1, dim=-1))
            pool_offsets = next(self.ready)
        return pool_offsets


class PooledDraws:
    """Fresh noise of decode steps, one query per row, as `Noise.make_stepper` returns it. kind: of the noise."""

    def __init__(self, kind: str, pool_offsets: PoolOffsets) -> None:
        self.kind, self.pool_offsets = kind, pool_offsets

    def __call__(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Draws [B, H * G, 1, S] float32 for queries at positions [B, 1] and slots at key_positions [B, H, S]."""
        return _gather_draws(self.kind, self.pool_offsets.next_offsets(query_positions), key_positions)


def _pool_offsets(streams: Tensor, query_positions: Tensor) -> Tensor:
    """Offsets [B, heads, Q] int32 into the pool, hashed from stream ids [B, heads] and query positions [B, Q]."""
    return lowbias32(streams[:, :, None] + query_positions.to(torch.int32)[:, None, :] * _GOLDEN) & (POOL_SIZE - 1)


def _gather_draws(kind: str, pool_offsets: Tensor, key_positions: Tensor) -> Tensor:
    """Draws [B, H * G, Q, S] out of the pool: offsets [B, H * G, Q] plus key positions [B, H or 1, S]."""
    index = pool_offsets.unflatten(1, (key_positions.shape[1], -1))[..., None] + key_positions[:, :, None, None]
    return pool(kind, pool_offsets.device).take(index.bitwise_and_(POOL_SIZE - 1)).flatten(1, 2)
