"""The output projection of every attention layer, head by head, reduced to what the size of a projected value needs."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvexp.errors import ConfigError
from kvexp.models.families import num_kv_heads, num_layers

NAMES = ("o_proj", "out_proj", "c_proj", "dense")  # of the projection, in the attention modules of all families
_FACTORS: WeakKeyDictionary[PreTrainedModel, tuple[Any, list[Tensor]]] = WeakKeyDictionary()


def output_factors(model: PreTrainedModel) -> list[Tensor]:
    """R [H, G, n, Dv] float32 of every layer, with ||R v|| = ||W v|| for the block W of each query head's outputs.

    R is that of W = QR, so n is Dv where the model is wider than a head. Computed once per model and state of its
    weights. ConfigError where a layer's projection is no matrix of floating-point numbers in memory.
    """
    weights = _weights(model)
    state = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
    known = _FACTORS.get(model)
    if known is None or known[0] != state:
        heads = (num_kv_heads(model.config), model.config.num_attention_heads // num_kv_heads(model.config))
        _FACTORS[model] = known = (state, [_factor(weight, heads) for weight in weights])
    return known[1]


def output_blocks(model: PreTrainedModel) -> list[Tensor]:
    """W [H, G, n, Dv] of every layer, the block of the output projection behind each query head, n: the model's width.

    Views of the weights, which stay as they are. ConfigError as of `output_factors`.
    """
    heads = (num_kv_heads(model.config), model.config.num_attention_heads // num_kv_heads(model.config))
    return [_blocks(weight, heads) for weight in _weights(model)]


def _weights(model: PreTrainedModel) -> list[Tensor]:
    """The weight of every layer's output projection, in the order of the layers; ConfigError as of `output_factors`."""
    weights = [_weight(model, module) for module in model.modules() if type(module).__name__.endswith("Attention")]
    if len(weights) != num_layers(model.config):
        raise ConfigError(
            f"found {len(weights)} output projections in {num_layers(model.config)} layers of this "
            f"{model.config.model_type} model, so the size of projected values is not known"
        )
    return weights


def _blocks(weight: Tensor, heads: tuple[int, int]) -> Tensor:
    """One layer's weight [model width, H * G * Dv] as [H, G, model width, Dv]; heads: H and G."""
    blocks: Tensor = weight.unflatten(1, (*heads, -1)).permute(1, 2, 0, 3)
    return blocks


def _weight(model: PreTrainedModel, attention: Any) -> Tensor:
    """The weight [model width, H * G * Dv] of an attention module's output projection."""
    projection = next((getattr(attention, name) for name in NAMES if hasattr(attention, name)), None)
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        raise ConfigError(
            f"the output projection of this {model.config.model_type} model is a {type(projection).__name__} whose "
            "weight is no matrix of floating-point numbers in memory (quantised or offloaded?), so the size of "
            "projected values is not known"
        )
    return weight.detach().T if isinstance(projection, Conv1D) else weight.detach()


@torch.no_grad()
def _factor(weight: Tensor, heads: tuple[int, int]) -> Tensor:
    """R [H, G, n, Dv] of one layer's weight [model width, H * G * Dv]; heads: H and G."""
    factor: Tensor = torch.linalg.qr(_blocks(weight.float(), heads), mode="r").R
    return factor
