"""The size of a model as its configuration alone tells it: parameters, layers, heads; no weight is read or made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvexp.errors import ConfigError
from kvexp.models.cpu_linear import MIN_WEIGHTS
from kvexp.models.families import head_dim, max_positions, num_kv_heads, num_layers
from kvexp.models.load import parse_dtype


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    parameters: their number, embeddings included; linear: those of linear layers that `kvexp.models.pack_linear`
    copies; vocabulary: tokens that the model knows; width: query heads times D; positions: the longest sequence in
    tokens.
    """

    parameters: int
    linear: int
    vocabulary: int
    layers: int
    width: int
    kv_heads: int
    head_dim: int
    positions: int

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all parameters in this dtype (as text, such as bfloat16)."""
        return self.parameters * parse_dtype(dtype).itemsize

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * parse_dtype(dtype).itemsize


def shape_of(config: Any) -> ModelSize:
    """The size of a model of this Hugging Face configuration; parameters are counted on tensors without memory."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # torch's and transformers' own, of values that no model has
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"config.json cannot be that of a {config.model_type} model: {reason}") from error
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(
            module.weight.numel()
            for module in model.modules()
            if type(module) is torch.nn.Linear and module.weight.numel() >= MIN_WEIGHTS
        ),
        vocabulary=int(config.vocab_size),
        layers=num_layers(config),
        width=int(config.num_attention_heads) * head_dim(config),
        kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        positions=max_positions(config),
    )
