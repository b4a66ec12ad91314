"""Observation of a prompt by the Triton kernels: prepares what they read and launches them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.observe.noise import POOL, Noise, hashed, pool, stream
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.errors import ConfigError

TILE = {2: 64, 4: 32}  # rows and slots of a kernel's tile by bytes per element: float32 products take no tensor cores


def available() -> bool:
    """Is Triton installed? Says so without importing it."""
    return find_spec("triton") is not None


@torch.no_grad()
def columns(
    sight: AttentionInputs,
    view: AttentionScoreSpec,
    weights: Tensor,
    taus: Tensor,
    seeds: Tensor,
    layer: int,
    first: int = 0,
) -> Tensor:
    """[B, H, S] float32, as `naive.column_sums`, of prompt rows from `first` on; rows before it weigh nothing.

    In float32 the products are exact (no TensorFloat-32); what differs is the order of summation. A constant noise is
    left out: a softmax does not see it.
    """
    _check(sight, view)
    from kvexp.core.observe import triton_observe_kernels as kernels

    assert kernels.POOL_MASK.value == POOL - 1
    b, h, g, rows, d = sight.query.shape
    slots, device = sight.keys.shape[2], sight.keys.device
    lse = torch.empty(b, h, g, rows, device=device)
    out = torch.empty(b, h, slots, device=device)
    if first >= rows:
        return out.zero_()
    read, choices = _inputs(sight, view, taus, seeds, layer, first)
    query, keys = sight.query, sight.keys
    side = TILE[4 if sight.geometry.upcast else query.element_size()]
    wide = {"D": d, "BLOCK_D": max(16, 1 << (d - 1).bit_length())}
    fixed = {**wide, "M": side, "N": side, **choices, "enable_fp_fusion": True}
    kernels.row_log_sum_exp[(-(-(rows - first) // side), b * h * g)](query, keys, lse, *read, **fixed)
    grid = (-(-slots // side), b * h)
    kernels.column_sums[grid](query, keys, lse, out, weights.contiguous(), *read, **fixed)
    return out


def check_installed() -> None:
    """ConfigError where Triton is not."""
    if not available():
        raise ConfigError(
            "observe=triton needs Triton, which is not installed: pip install 'kvexp[gpu]', or set observe=blocked"
        )


def _check(sight: AttentionInputs, view: AttentionScoreSpec) -> None:
    check_installed()
    if sight.keys.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("observe=triton needs a CUDA device, the model is on the CPU: set observe=blocked")
    if sight.query.dtype == torch.float64:
        raise ConfigError("observe=triton computes in float32, the model in float64: set observe=blocked")
    if sight.visible is not None or sight.places is not None or not (view.noise is None or type(view.noise) is Noise):
        raise ValueError("the kernels observe prompts, with noise that kvexp draws itself")


def _inputs(
    sight: AttentionInputs, view: AttentionScoreSpec, taus: Tensor, seeds: Tensor, layer: int, first: int
) -> tuple[list[Any], dict[str, Any]]:
    """What both kernels read behind their first tensors, and which of their branches apply."""
    h, g, rows = sight.query.shape[1:4]
    slots, geometry = sight.keys.shape[2], sight.geometry
    places = per_key = noise_pool = unused = torch.empty(1, device=sight.keys.device)
    noise, chosen = view.noise, 0
    if noise is not None and not noise.constant and noise.fresh:
        chosen, noise_pool = 1, pool(noise.kind, sight.keys.device)
        places = noise.places(seeds, layer, h * g, sight.query_positions).contiguous()
    elif noise is not None and not noise.constant:
        keys = sight.positions.repeat_interleave(h * g // sight.positions.shape[1], dim=1)
        chosen, per_key = 2, hashed(noise.kind, stream(seeds, layer, h * g), keys).contiguous()
    positions = sight.positions.to(torch.int32).contiguous()
    query_positions = sight.query_positions.to(torch.int32).contiguous()
    slopes = unused if geometry.alibi is None else geometry.alibi.to(unused).contiguous()
    read = [
        *(query_positions, positions, slopes, places, per_key, noise_pool, taus.to(unused).contiguous()),
        *(first, rows, slots, h, g, float(geometry.scale), geometry.sliding_window or 0),
        *(*sight.query.stride(), *sight.keys.stride()),
        *(positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0),
    ]
    choices = {
        "NOISE": chosen,
        "ALIBI": geometry.alibi is not None,
        "WINDOW": geometry.sliding_window is not None,
        "TEMPERED": view.tau != (1.0, 1.0),
        "UPCAST": geometry.upcast,
        "IN_ORDER": sight.in_order,
    }
    return read, choices
