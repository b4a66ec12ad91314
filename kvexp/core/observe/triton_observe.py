"""Column sums of a prompt by the Triton kernels: prepares their inputs and launches them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.observe.noise import POOL_SIZE, Noise, hash_draws, pool, stream_id
from kvexp.core.observe.triton_tiles import prompt_tile
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.errors import ConfigError


def available() -> bool:
    """Whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


@torch.no_grad()
def triton_column_sums(
    inputs: AttentionInputs,
    spec: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    first: int = 0,
) -> Tensor:
    """Column sums [B, H, S] float32, as `naive.column_sums`, of prompt rows from `first` on; rows before weigh nothing.

    In float32 the products are exact (no TensorFloat-32); what differs is the order of summation. A constant noise is
    left out, since it does not change a softmax. ConfigError without Triton, on a CPU and in float64.
    """
    _check(inputs, spec)
    from kvexp.core.observe import triton_observe_kernels as kernels

    assert kernels.POOL_MASK.value == POOL_SIZE - 1
    b, h, g, rows, d = inputs.query.shape
    slots, device = inputs.keys.shape[2], inputs.keys.device
    lse = torch.empty(b, h, g, rows, device=device)
    out = torch.empty(b, h, slots, device=device)
    if first >= rows:
        return out.zero_()
    read, choices = _inputs(inputs, spec, taus, seeds, layer, first)
    query, keys = inputs.query, inputs.keys
    element_size = 4 if inputs.params.upcast else query.element_size()
    choices = {**choices, "D": d, "BLOCK_D": max(16, 1 << (d - 1).bit_length()), "enable_fp_fusion": True}
    tile = prompt_tile("row_log_sum_exp", d, element_size)
    grid = (-(-(rows - first) // tile.rows), b * h * g)
    kernels.row_log_sum_exp[grid](query, keys, lse, *read, **choices, **tile.options)
    tile = prompt_tile("column_sums", d, element_size)
    grid = (-(-slots // tile.slots), b * h)
    kernels.column_sums[grid](query, keys, lse, out, weights.contiguous(), *read, **choices, **tile.options)
    return out


def check_installed() -> None:
    """ConfigError where Triton is not installed."""
    if not available():
        raise ConfigError(
            "observe=triton needs Triton, which is not installed: pip install 'kvexp[gpu]', or set observe=blocked"
        )


def _check(inputs: AttentionInputs, spec: AttentionScoreSpec) -> None:
    """ConfigError without Triton, on a CPU or in float64; ValueError for inputs that are no plain prompt."""
    check_installed()
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


def _inputs(
    inputs: AttentionInputs, spec: AttentionScoreSpec, taus: Tensor, seeds: Tensor, layer: int, first: int
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that both kernels take behind their first tensors, and the constants that choose their branches.

    Arguments as of `triton_column_sums`.
    """
    h, g, rows = inputs.query.shape[1:4]
    slots, params = inputs.keys.shape[2], inputs.params
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
