"""Launchers of the Triton kernels: prompts' column sums, and attention with observation of a fast decode step.

What each choice of tiles, warps and stages did is in docs/gpu_details.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.config import check_installed
from kvexp.core.decode import TauSchedule
from kvexp.core.method import AttentionScoreSpec
from kvexp.core.noise import POOL_SIZE, Noise, PoolOffsets, hash_draws, pool, stream_id
from kvexp.core.slots import Slots
from kvexp.util.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.core.eviction import EvictionLayer
    from kvexp.core.observe import ObservedRows


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at a time.

    rows, slots: query rows and slots of the tile. warps: that share it. stages: tiles whose loads are in flight.
    """

    rows: int
    slots: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The launch's constants and options."""
        return {"M": self.rows, "N": self.slots, "num_warps": self.warps, "num_stages": self.stages}


def prompt_tile(kernel: str, head_size: int, element_size: int) -> Tile:
    """The tile of `row_log_sum_exp` or `column_sums`.

    head_size: D; element_size: bytes of a number in a product (4 where logits are computed in float32).
    """
    sums = kernel == "column_sums"
    if element_size == 4:  # these products take no tensor cores: every number of the tile lies in registers
        if head_size > 128:
            return Tile(16, 16, 8, 2) if sums else Tile(16, 16, 4, 1)
        return Tile(32, 32, 8 if head_size > 64 else 4, 3)
    if sums and (head_size <= 64 or head_size > 128):
        return Tile(32, 64, 4, 3)
    return Tile(64, 64, 8, 3)


def kv_tile(head_size: int, element_size: int) -> int:
    """Slots of a tile of `split_kv_attention` and `combine_splits`.

    head_size: D; element_size: bytes of a query's numbers.
    """
    return 32 if element_size == 4 and head_size > 128 else 64


def decode_options(head_size: int, element_size: int) -> dict[str, int]:
    """Warps and stages of `split_kv_attention`. Arguments as of `prompt_tile`."""
    if element_size == 4 and head_size > 64:
        return {"num_warps": 8, "num_stages": 2}
    return {"num_warps": 4 if head_size <= 128 else 8, "num_stages": 3}


# At most so many programs share the slots of one row and head: one program each would leave most of a GPU idle.
MAX_KV_SPLITS = 64
PLAIN, TEMPERED, GUMBEL, GAUSSIAN = 1, 2, 3, 4  # as in triton_kernels; 0: not observed


def supported(states: list[EvictionLayer]) -> bool:
    """Whether these caches ask for the kernels (observe=triton) and the kernels know their noises and positions.

    states: one layer of each cache.
    """
    if not requested(states) or any(state.config.positions != "original" for state in states):
        return False
    noises = [state.score_spec.noise for state in states if state.score_spec is not None]
    return all(noise is None or (type(noise) is Noise and (noise.fresh or noise.constant)) for noise in noises)


def requested(states: list[EvictionLayer]) -> bool:
    """Whether all these caches are configured with observe=triton; states: one layer of each."""
    return all(state.config.observe == "triton" for state in states)


class FusedDecodeAttention:
    """Attention of R stacked rows, and what they observe of it, in two kernels.

    states: one layer of each cache; sizes: batch rows of each cache.
    """

    def __init__(self, states: list[EvictionLayer], sizes: list[int], device: torch.device) -> None:
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
        from kvexp.core import triton_kernels as kernels

        check_logits(params)
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
    acc of the attention and m, l of what is observed (see triton_kernels); out [R, H, G, Dv]; given [R, H, S].
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


def _kind(state: EvictionLayer) -> int:
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


@torch.no_grad()
def triton_column_sums(inputs: AttentionInputs, observed: ObservedRows, first: int = 0) -> Tensor:
    """Column sums [B, H, S] float32, as `naive_column_sums`, of prompt rows from `first` on; rows before weigh nothing.

    In float32 the products are exact (no TensorFloat-32); what differs is the order of summation. A constant noise is
    left out, since it does not change a softmax. ConfigError without Triton, on a CPU and in float64.
    """
    _check(inputs, observed.spec)
    from kvexp.core import triton_kernels as kernels

    assert kernels.POOL_MASK.value == POOL_SIZE - 1
    b, h, g, rows, d = inputs.query.shape
    slots, device = inputs.keys.shape[2], inputs.keys.device
    lse = torch.empty(b, h, g, rows, device=device)
    out = torch.empty(b, h, slots, device=device)
    if first >= rows:
        return out.zero_()
    read, choices = _inputs(inputs, observed, first)
    query, keys = inputs.query, inputs.keys
    element_size = 4 if inputs.params.upcast else query.element_size()
    choices = {**choices, "D": d, "BLOCK_D": next_power_of_2(d), "enable_fp_fusion": True}
    tile = prompt_tile("row_log_sum_exp", d, element_size)
    grid = (-(-(rows - first) // tile.rows), b * h * g)
    kernels.row_log_sum_exp[grid](query, keys, lse, *read, **choices, **tile.options)
    tile = prompt_tile("column_sums", d, element_size)
    grid = (-(-slots // tile.slots), b * h)
    kernels.column_sums[grid](query, keys, lse, out, observed.weights.contiguous(), *read, **choices, **tile.options)
    return out


def check_logits(params: AttentionParams) -> None:
    """ConfigError for a softcap or sinks, which the kernels do not compute."""
    for name, value in (("a softcap", params.softcap), ("attention sinks", params.sinks)):
        if value is not None:
            raise ConfigError(f"the kernels of observe=triton know no model with {name}: set observe=blocked")


def _check(inputs: AttentionInputs, spec: AttentionScoreSpec) -> None:
    """ConfigError without Triton, on a CPU or in float64; ValueError for inputs that are no plain prompt."""
    check_installed()
    check_logits(inputs.params)
    if inputs.keys.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("observe=triton needs a CUDA device, the model is on the CPU: set observe=blocked")
    if inputs.query.dtype == torch.float64:
        raise ConfigError("observe=triton computes in float32, the model in float64: set observe=blocked")
    if (
        inputs.visible is not None
        or inputs.rope_positions is not None
        or not (spec.noise is None or type(spec.noise) is Noise)
    ):
        raise ValueError("the kernels observe prompts, with noise that kvexp draws itself")


def _inputs(inputs: AttentionInputs, observed: ObservedRows, first: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that both kernels take behind their first tensors, and the constants that choose their branches.

    Arguments as of `triton_column_sums`.
    """
    h, g, rows = inputs.query.shape[1:4]
    slots, params, spec = inputs.keys.shape[2], inputs.params, observed.spec
    seeds, layer, taus = observed.seeds, observed.layer, observed.taus
    pool_offsets = per_key = noise_pool = unused = torch.empty(1, device=inputs.keys.device)
    noise, chosen = spec.noise, 0
    if noise is not None and not noise.constant and noise.fresh:
        chosen, noise_pool = 1, pool(noise.kind, inputs.keys.device)
        pool_offsets = noise.pool_offsets(seeds, layer, h * g, inputs.query_positions).contiguous()
    elif noise is not None and not noise.constant:
        keys = inputs.positions.repeat_interleave(h * g // inputs.positions.shape[1], dim=1)
        chosen, per_key = 2, hash_draws(noise.kind, stream_id(seeds, layer, h * g), keys).contiguous()
    positions = inputs.positions.to(torch.int32).contiguous()
    query_positions = inputs.query_positions.to(torch.int32).contiguous()
    slopes = unused if params.alibi is None else params.alibi.to(unused).contiguous()
    read = [
        *(query_positions, positions, slopes, pool_offsets, per_key, noise_pool, taus.to(unused).contiguous()),
        *(first, rows, slots, h, g, float(params.scale), params.sliding_window or 0),
        *(*inputs.query.stride(), *inputs.keys.stride()),
        *(positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0),
    ]
    choices = {
        "NOISE": chosen,
        "ALIBI": params.alibi is not None,
        "WINDOW": params.sliding_window is not None,
        "TEMPERED": spec.tau != (1.0, 1.0),
        "UPCAST": params.upcast,
        "IN_ORDER": inputs.in_column_order,
    }
    return read, choices
