"""A trained surrogate: scores of tokens predicted from what the attention layer gets, one linear map per layer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Surrogate:
    """Linear maps from a layer's input to the scores of its kv heads; float32, on the CPU.

    weight [L, H, n], bias [L, H]: n the model's width. digest: 16 hex digits of all numbers; surrogates with the same
    digest are equal.
    """

    digest: str
    weight: Tensor = field(compare=False, repr=False)
    bias: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Surrogate:
        """The surrogate with its digest; ConfigError for tensors that do not go together or hold no numbers."""
        if weight.ndim != 3 or bias.shape != weight.shape[:2]:
            raise ConfigError(
                f"tensors of shapes {list(weight.shape)} and {list(bias.shape)} are not weight and bias of a surrogate"
            )
        total = hashlib.sha256()
        for name, one in {"weight": weight, "bias": bias}.items():
            if one.dtype != torch.float32 or not bool(one.isfinite().all()):
                raise ConfigError(f"{name} must be finite numbers in float32")
            total.update(f"{name} {list(one.shape)}\n".encode() + one.contiguous().numpy().tobytes())
        return cls(total.hexdigest()[:16], weight, bias)

    def layer(self, index: int) -> LayerSurrogate:
        """The map of one layer."""
        return LayerSurrogate(self.weight[index], self.bias[index])

    def check_shape(self, layers: int, heads: int, width: int) -> None:
        """ConfigError where the model has other numbers of layers or kv heads, or another width."""
        wanted, found = [layers, heads, width], list(self.weight.shape)
        if wanted != found:
            raise ConfigError(
                f"this surrogate has weights of shape [L, H, n] = {found}, the model's would be {wanted}: it is of "
                "another model"
            )


@dataclass(frozen=True)
class LayerSurrogate:
    """The map of one layer: weight [H, n], bias [H]."""

    weight: Tensor
    bias: Tensor

    def scores(self, inputs: Tensor) -> Tensor:
        """Scores [B, H, Q] float32 of tokens by the layer's inputs [B, Q, n].

        In float64: in the first layer equal tokens have equal inputs, and which of them is kept must not hang on the
        order of a sum.
        """
        on = self.on(inputs.device)
        return (inputs.double() @ on.weight.T + on.bias).transpose(1, 2).float()

    def on(self, device: torch.device) -> LayerSurrogate:
        """This map in float64 on a device: itself where it is there already."""
        weight, bias = (part.to(device, torch.float64) for part in (self.weight, self.bias))
        return self if weight is self.weight and bias is self.bias else LayerSurrogate(weight, bias)
