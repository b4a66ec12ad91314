"""One decode step of a stack by the Triton kernels: prepares what they read and launches them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams
from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.decode.noised_attention import TauSchedule
from kvexp.core.observe.noise import Following, Noise, pool, stream
from kvexp.core.slots import Slots

TILE = 64  # slots of a kernel's tile
PARTS = 64  # at most so many programs share a row's slots: one per head would leave most of a GPU idle
PLAIN, TEMPERED, GUMBEL, GAUSSIAN = 1, 2, 3, 4  # as in triton_step_kernels; 0: not observed


def able(states: list[DecodableLayer]) -> bool:
    """Was it asked for, and is every noise one that the kernels know?"""
    if not asked(states) or any(state.config.positions != "original" for state in states):
        return False
    noises = [state.view.noise for state in states if state.view is not None]
    return all(noise is None or (type(noise) is Noise and (noise.fresh or noise.constant)) for noise in noises)


def asked(states: list[DecodableLayer]) -> bool:
    return all(state.config.observe == "triton" for state in states)


class FusedDecodeAttention:
    """Attention and observation of the rows R of a stack in two kernels."""

    def __init__(self, states: list[DecodableLayer], sizes: list[int], device: torch.device) -> None:
        self.states, self.device = states, device
        kinds = [_kind(state) for state, size in zip(states, sizes, strict=True) for _ in range(size)]
        self.kinds = torch.tensor(kinds, dtype=torch.int32, device=device)
        self.noisy, self.observes = max(kinds) >= GUMBEL, max(kinds) > 0
        self.temperatures = TauSchedule(states, sizes)
        self._following: Following | None = None

    def __call__(self, query: Tensor, slots: Slots, newest: Tensor, geometry: AttentionParams) -> tuple[Tensor, Tensor]:
        """query [R, H, G, 1, D], newest [R, 1] -> output [R, H, G, 1, Dv] and what each slot is given [R, H, S].

        In float32 the products are exact (no TensorFloat-32); what differs is the order of summation. A constant noise
        is left out: a softmax does not see it. Rows that observe nothing give nothing.
        """
        from kvexp.core.decode import triton_decode_kernels as kernels

        r, h, g, _, d = query.shape
        count, width = slots.keys.shape[2], slots.values.shape[-1]
        block, parts, length = shares(count)
        wide = {"DV": width, "BLOCK_DV": _power(width), "G": _power(g)}
        scratch = _Scratch(query.new_empty(0, dtype=torch.float32), (r, h, g), count, parts, width)
        observation = self._observation(newest, h * g)
        where = slots.positions
        slopes = scratch.none if geometry.alibi is None else geometry.alibi.to(scratch.none).contiguous()
        fixed = {"OBSERVED": self.observes, "NOISE": self.noisy, "N": block, **wide}
        single = query[..., 0, :]
        kernels.attend_parts[(parts, r * h)](
            *(single, slots.keys, slots.values, *scratch.partial, where, newest.contiguous(), slopes, *observation),
            *(h, g, count, parts, length, float(geometry.scale), geometry.sliding_window or 0),
            *(*single.stride(), *slots.keys.stride(), *slots.values.stride(), *where.stride()[:2]),
            **{"D": d, "BLOCK_D": _power(d), **fixed},
            ALIBI=geometry.alibi is not None,
            WINDOW=geometry.sliding_window is not None,
            UPCAST=geometry.upcast,
        )
        kernels.add_parts[(-(-count // block) if self.observes else 1, r * h)](
            *(*scratch.partial, scratch.out, scratch.given, where, *observation),
            *(h, g, count, parts, *where.stride()[:2]),
            **{"PARTS": 1 << (parts - 1).bit_length(), **fixed},
        )
        return scratch.out[..., None, :].to(slots.values.dtype), scratch.given

    def _observation(self, newest: Tensor, heads: int) -> list[Tensor]:
        """How each row is observed: kinds, taus, places in the pools, and the pools."""
        none = torch.empty(1, device=self.device)
        taus = self.temperatures.now(self.device) if self.observes else none
        if not self.noisy:
            return [self.kinds, taus, none, none, none]
        if self._following is None:
            seeds = torch.cat([state.timeline.seeds.to(self.device) for state in self.states])
            self._following = Following(stream(seeds, self.states[0].index, heads))
        places = self._following.places_of(newest).contiguous()
        return [self.kinds, taus, places, pool("gumbel", self.device), pool("gaussian", self.device)]


class _Scratch:
    """What the kernels write; partial: logits, and statistics and sums of the parts."""

    def __init__(self, like: Tensor, heads: tuple[int, int, int], slots: int, parts: int, width: int) -> None:
        new = like.new_empty
        self.none = new(1)
        statistics = [new(*heads, parts) for _ in range(4)]
        self.partial = [new(*heads, slots), *statistics[:2], new(*heads, parts, width), *statistics[2:]]
        self.out, self.given = new(*heads, width), like.new_zeros(*heads[:2], slots)


def shares(slots: int) -> tuple[int, int, int]:
    """Slots of a tile, into how many parts the slots fall, and slots of a part (a whole number of tiles)."""
    tiles = -(-slots // TILE)
    per_part = -(-tiles // PARTS)
    return TILE, -(-tiles // per_part), per_part * TILE


def _kind(state: DecodableLayer) -> int:
    view = state.view
    if view is None:
        return 0
    if view.plain:
        return PLAIN
    if view.noise is None or view.noise.constant:
        return TEMPERED
    return GUMBEL if view.noise.kind == "gumbel" else GAUSSIAN


def _power(n: int) -> int:
    """The side of a tile that holds n: tensor cores take 16 at least."""
    return max(16, 1 << (n - 1).bit_length())
