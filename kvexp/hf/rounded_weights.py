"""Weights rounded to fewer bits and computed with as before: stated baselines, which give a cache's loss its scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvexp.util import ConfigError

WEIGHTS = ("float32", "bfloat16", "int8")


def rounded(weight: Tensor, bits: int) -> Tensor:
    """weight [out, in] to the nearest of 2^bits - 1 levels, symmetric around 0, one scale per output row."""
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
    levels = (weight / scale).round().clamp(-most, most)
    made: Tensor = levels * scale
    return made


@torch.no_grad()
def round_linear_layers(model: Any, bits: int) -> None:
    """Round the weights of linear layers in place; an output head that shares the embedding's weights stays."""
    tied = {id(model.get_input_embeddings().weight)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tied:
            module.weight.copy_(rounded(module.weight, bits))
        elif isinstance(module, Conv1D):  # GPT-2's, whose weight is [in, out]
            module.weight.copy_(rounded(module.weight.T, bits).T)


@torch.no_grad()
def round_weights(model: Any, weights: str | None) -> None:
    """Round a model's weights in place as `model.weights` says, before they are packed.

    bfloat16: all of them, to the nearest. int8: those of linear layers (`round_linear_layers`). Products and sums stay
    in the model's dtype.
    """
    if weights == "bfloat16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
    elif weights == "int8":
        round_linear_layers(model, 8)


def check_weights(weights: str | None, dtype: str) -> None:
    """ConfigError for weights that are not offered, or that a model of this dtype cannot have."""
    if weights is None:
        return
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be {', '.join(WEIGHTS)} or null for those as loaded, got {weights!r}")
    if weights in (dtype, "int8"):
        return
    if dtype != "float32":
        raise ConfigError(
            f"weights={weights} needs model.dtype=float32, got {dtype}: weights that were loaded in {dtype} have no "
            "more bits, and its products round by themselves"
        )
