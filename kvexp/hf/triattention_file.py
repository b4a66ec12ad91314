"""TriAttention's calibration file: statistics of a model's queries as its release and TensorRT-LLM read them.

A dict saved by torch. `metadata`: sampled_heads, a list of [layer, query head]; head_dim; rope_style. `stats`: under
layer00_head00 the mean query before RoPE as q_mean_real and q_mean_imag, and the mean length q_abs_mean, each float32
[D / 2]; pair f is dimensions f and f + D / 2. TensorRT-LLM also takes a flat dict with E_q (complex) and E_q_norm
[L, query heads, D / 2], which is read here too. Source: arXiv:2604.04921's code, `save_head_frequency_stats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvexp.core.statistics import QueryCalibration
from kvexp.util.errors import ConfigError


def read_triattention(file: Path, heads: int) -> QueryCalibration:
    """Statistics from a file, without directions, which are 0; heads: kv heads H of a layer.

    ConfigError for a file that cannot be read, lacks a head, or is of a model with other pairs or other heads.
    """
    try:
        given = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {file}") from error
    except Exception as error:
        raise ConfigError(f"{file} is no file of TriAttention: {str(error).splitlines()[0]:.80}") from error
    try:
        real, imaginary, size = _flat(given) if "E_q" in given else _by_head(given)
        style = given.get("metadata", {}).get("rope_style", "half")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file} is no file of TriAttention: it lacks {error}") from error
    if style != "half":
        raise ConfigError(f"{file} has rope_style={style}, and only half, pairs of dimensions f and f + D / 2, is read")
    if real.shape[1] % heads:
        raise ConfigError(f"{file} has {real.shape[1]} query heads in a layer, which {heads} kv heads cannot share")
    mean = torch.cat([real, imaginary], dim=-1)
    mean, size = (values.float().unflatten(1, (heads, -1)).contiguous() for values in (mean, size))
    return QueryCalibration.of(torch.zeros_like(mean), mean, size)


def _flat(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Real and imaginary part of the mean query and its mean length, each [L, query heads, D / 2]."""
    return given["E_q"].real, given["E_q"].imag, given["E_q_norm"]


def _by_head(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """As `_flat`, of a file that lists heads; KeyError for one that is missing."""
    sampled = [(int(layer), int(head)) for layer, head in given["metadata"]["sampled_heads"]]
    layers, heads = (1 + max(pair[place] for pair in sampled) for place in (0, 1))
    stats = given["stats"]
    parts = []
    for name in ("q_mean_real", "q_mean_imag", "q_abs_mean"):
        rows = [stats[f"layer{layer:02d}_head{head:02d}"][name] for layer in range(layers) for head in range(heads)]
        parts.append(torch.stack(rows).unflatten(0, (layers, heads)))
    return parts[0], parts[1], parts[2]
