"""Attention and observation of a fast decode step by the Triton kernels: prepares their inputs and launches them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams
from kvexp.core.decode.decodable_layer import DecodableLayer
from kvexp.core.decode.noised_attention import TauSchedule
from kvexp.core.observe.noise import Noise, PoolOffsets, pool, stream_id
from kvexp.core.observe.triton_tiles import decode_options, kv_tile
from kvexp.core.slots import Slots

# At most so many programs share the slots of one row and head: one program each would leave most of a GPU idle.
MAX_KV_SPLITS = 64
PLAIN, TEMPERED, GUMBEL, GAUSSIAN = 1, 2, 3, 4  # as in triton_decode_kernels; 0: not observed


def supported(states: list[DecodableLayer]) -> bool:
    """Whether these caches ask for the kernels (observe=triton) and the kernels know their noises and positions.

    states: one layer of each cache.
    """
    if not requested(states) or any(state.config.positions != "original" for state in states):
        return False
    noises = [state.score_spec.noise for state in states if state.score_spec is not None]
    return all(noise is None or (type(noise) is Noise and (noise.fresh or noise.constant)) for noise in noises)


def requested(states: list[DecodableLayer]) -> bool:
    """Whether all these caches are configured with observe=triton; states: one layer of each."""
    return all(state.config.observe == "triton" for state in states)


class FusedDecodeAttention:
    """Attention of R stacked rows, and what they observe of it, in two kernels.

    states: one layer of each cache; sizes: batch rows of each cache.
    """

    def __init__(self, states: list[DecodableLayer], sizes: list[int], device: torch.device) -> None:
        self.states, self.device = states, device
        kinds = [_kind(state) for state, size in zip(states, sizes, strict=True) for _ in range(size)]
        self.kinds = torch.tensor(kinds, dtype=torch.int32, device=device)
        self.noisy, self.observes = max(kinds) >= GUMBEL, max(kinds) > 0
        self.tau_schedule = TauSchedule(states, sizes)
        self._offsets: PoolOffsets | None = None

    def __call__(self, query: Tensor, slots: Slots, newest: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Output [R, H, G, 1, Dv] and column sums [R, H, S] of query [R, H, G, 1, D] over the slots; newest [R, 1].

        In float32 the products are exact (no TensorFloat-32); what differs is the order of summation. A constant noise
        is left out, since it does not change a softmax. The column sums of rows that observe nothing are 0.
        """
        from kvexp.core.decode import triton_decode_kernels as kernels

        r, h, g, _, d = query.shape
        count, width = slots.keys.shape[2], slots.values.shape[-1]
        head_size, element_size = max(d, width), 4 if params.upcast else query.element_size()
        block = kv_tile(head_size, query.element_size())
        parts, length = num_kv_splits(count, block)
        wide = {"DV": width, "BLOCK_DV": next_power_of_2(width), "G": next_power_of_2(g)}
        scratch = _Scratch(query.new_empty(0, dtype=torch.float32), (r, h, g), count, parts, width)
        observation = self._observation(newest, h * g)
        slot_positions = slots.positions
        slopes = scratch.none if params.alibi is None else params.alibi.to(scratch.none).contiguous()
        fixed = {"OBSERVED": self.observes, "NOISE": self.noisy, "N": block, **wide, "enable_fp_fusion": True}
        single = query[..., 0, :]
        kernels.split_kv_attention[(parts, r * h)](
            *(
                single,
                slots.keys,
                slots.values,
                *scratch.partial,
                slot_positions,
                newest.contiguous(),
                slopes,
                *observation,
            ),
            *(h, g, count, parts, length, float(params.scale), params.sliding_window or 0),
            *(*single.stride(), *slots.keys.stride(), *slots.values.stride(), *slot_positions.stride()[:2]),
            **{"D": d, "BLOCK_D": next_power_of_2(d), **fixed},
            ALIBI=params.alibi is not None,
            WINDOW=params.sliding_window is not None,
            UPCAST=params.upcast,
            **decode_options(head_size, element_size),
        )
        kernels.combine_splits[(-(-count // block) if self.observes else 1, r * h)](
            *(*scratch.partial, scratch.out, scratch.given, slot_positions, *observation),
            *(h, g, count, parts, *slot_positions.stride()[:2]),
            **{"PARTS": 1 << (parts - 1).bit_length(), **fixed},
        )
        return scratch.out[..., None, :].to(slots.values.dtype), scratch.given

    def hold_inputs(self, positions: Tensor) -> None:
        """As `NoisedObserver.hold_inputs`, for these rows: positions [R, 1]."""
        if self.observes:
            self.tau_schedule.held.hold(self.tau_schedule.from_schedule(self.device))
        if self._offsets is not None:
            self._offsets.held.hold(self._offsets.draw_next(positions).contiguous())

    def release_inputs(self) -> None:
        """As `NoisedObserver.release_inputs`."""
        self.tau_schedule.held.release()
        if self._offsets is not None:
            self._offsets.held.release()

    def _observation(self, newest: Tensor, heads: int) -> list[Tensor]:
        """The kernels' arguments on how each row is observed: kind [R], tau [R], pool offsets, and the two noise pools.

        newest [R, 1]: position ids of the new tokens; heads: H * G query heads.
        """
        none = torch.empty(1, device=self.device)
        taus = self.tau_schedule.current(self.device) if self.observes else none
        if not self.noisy:
            return [self.kinds, taus, none, none, none]
        if self._offsets is None:
            seeds = torch.cat([state.sequence.seeds.to(self.device) for state in self.states])
            self._offsets = PoolOffsets(stream_id(seeds, self.states[0].index, heads))
        pool_offsets = self._offsets.next_offsets(newest).contiguous()
        return [self.kinds, taus, pool_offsets, pool("gumbel", self.device), pool("gaussian", self.device)]


class _Scratch:
    """Buffers that the kernels write: partial results per split, the output and the column sums.

    heads: (R, H, G); slots: S; parts: number of splits; width: Dv. partial: logits [R, H, G, S], and per split m, l,
    acc of the attention and m, l of what is observed (see triton_decode_kernels); out [R, H, G, Dv]; given [R, H, S].
    """

    def __init__(self, like: Tensor, heads: tuple[int, int, int], slots: int, parts: int, width: int) -> None:
        new = like.new_empty
        self.none = new(1)
        statistics = [new(*heads, parts) for _ in range(4)]
        self.partial = [new(*heads, slots), *statistics[:2], new(*heads, parts, width), *statistics[2:]]
        self.out, self.given = new(*heads, width), like.new_zeros(*heads[:2], slots)


def num_kv_splits(slots: int, tile: int) -> tuple[int, int]:
    """(number of splits, slots of a split): each split is a whole number of tiles of `tile` slots."""
    tiles = -(-slots // tile)
    per_part = -(-tiles // MAX_KV_SPLITS)
    return -(-tiles // per_part), per_part * tile


def _kind(state: DecodableLayer) -> int:
    """The kernels' number for how a cache observes: 0 (not at all), PLAIN, TEMPERED, GUMBEL or GAUSSIAN."""
    spec = state.score_spec
    if spec is None:
        return 0
    if spec.is_plain:
        return PLAIN
    if spec.noise is None or spec.noise.constant:
        return TEMPERED
    return GUMBEL if spec.noise.kind == "gumbel" else GAUSSIAN


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n and at least 16, which tensor cores need."""
    return max(16, 1 << (n - 1).bit_length())
