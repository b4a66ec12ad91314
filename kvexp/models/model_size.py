"""The size of a model as its configuration alone tells it: parameters, layers, heads; no weight is read or made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvexp.errors import ConfigError
from kvexp.models.families import kv_heads, layers_of, longest
from kvexp.models.load import dtype_of
from kvexp.models.retrieval_calibration import head_dim


@dataclass(frozen=True)
class ModelSize:
    """parameters: all of them, embeddings included; width: query heads times their components; positions: the longest
    sequence."""

    parameters: int
    layers: int
    width: int
    kv_heads: int
    head_dim: int
    positions: int

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * dtype_of(dtype).itemsize

    def token_bytes(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_of(dtype).itemsize


def shape_of(config: Any) -> ModelSize:
    """Of a Hugging Face configuration. The model is made of tensors without memory, to count its parameters exactly."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # torch's and transformers' own, of values that no model has
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"config.json cannot be that of a {config.model_type} model: {reason}") from error
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=layers_of(config),
        width=int(config.num_attention_heads) * head_dim(config),
        kv_heads=kv_heads(config),
        head_dim=head_dim(config),
        positions=longest(config),
    )
