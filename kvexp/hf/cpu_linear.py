"""Changes of a loaded model's weights: linear layers on a CPU by oneDNN, and rounding to fewer bits.

`pack_linear`: `torch.nn.functional.linear` hands float32 to MKL, whose product of one row runs on one thread whatever
there are, and which takes two to three times as long as the weights take to read where the processor is not Intel's.
oneDNN, which torch brings along, comes near to memory's limit if it is given a copy of the weights in the order it
reads them (measured: DECISIONS.md). From two rows on its kernels for AVX2 and AVX-512 add up a row's sums in one order,
whatever the number of rows or threads and whether they read the copy or the weights; so a single row is given to it
twice. Small layers go the same way, where a call takes longer than the product, so that a run's numbers do not depend
on its batch or on how many threads were free. It changes the order of sums, and so is not part of `patch_model`.

`round_weights` rounds and computes as before: stated baselines, which give a cache's loss its scale.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from kvexp.hf.traits import cache_among
from kvexp.util.errors import ConfigError
from kvexp.util.machine import available

# Of the free memory, at most, for the copies of a model's weights; without a copy, products take longer.
MAX_MEMORY_SHARE = 0.25

_HOOK = "_kvexp_packed"  # attribute of a model with packed layers: the handle of its hook
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class PackedLinear(nn.Linear):
    """`nn.Linear` by oneDNN where it is faster: the same weights and results but for the order of summation."""

    _copy: Tensor | None = None  # the weights as oneDNN reads them fastest
    _agrees = True  # whether such a copy gives the sums that the weights give, to the bit

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> output [..., out]."""
        if input.numel() == 0 or not self._eligible(input):
            return functional.linear(input, self.weight, self.bias)
        weight = self.weight if self._copy is None else self._copy
        if input.numel() > input.shape[-1]:
            return _product(input, weight, self.bias)
        twice = _product(input.reshape(1, -1).expand(2, -1), weight, self.bias)
        return twice[:1].view(*input.shape[:-1], -1)

    def _eligible(self, x: Tensor | None = None) -> bool:
        """Whether oneDNN may compute the product: float32 on a CPU, no gradients. x: the input."""
        weight = self.weight
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and (x is None or (x.device == weight.device and x.dtype == weight.dtype))
            and type(weight) is nn.Parameter  # and no quantized tensor in its place
            and weight.is_contiguous()
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def refresh(self, room: int) -> int:
        """Repack the weights as they are now, if the copy takes at most `room` bytes; returns the bytes left."""
        if not self._eligible():
            self._copy = None
            return room
        if self._copy is not None and self._same(self._copy):
            return room
        self._copy, size = None, self.weight.nbytes
        if self._agrees and size <= room:
            copy = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self._agrees = self._same(copy)
            if self._agrees:
                self._copy = copy
                return room - size
        return room

    def _same(self, copy: Tensor) -> bool:
        """Whether the packed copy and the weights give a test row the same product, to the bit."""
        row = torch.linspace(0.5, 1.5, self.weight.shape[1]).expand(2, -1)
        return torch.equal(_product(row, copy), _product(row, self.weight))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_copy"}


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight, plus bias, by oneDNN: [rows, out]; weight: plain or packed."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def pack_linear(model: AnyModule) -> AnyModule:
    """Make every plain linear layer of `model` a `PackedLinear`, in place, where torch has oneDNN; returns the model.

    Copies of the weights are made at the first forward and looked at whenever a prompt begins. Doing it twice is
    harmless; `unpack_linear` undoes it. Moves the last digits of float32 results on a CPU, and nothing elsewhere.
    """
    ours = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ours, "_linear_pointwise"):
        return model
    for module in model.modules():
        if type(module) is nn.Linear:
            linear: Any = module  # its class changes
            linear.__class__ = PackedLinear
            linear._agrees = hasattr(ours, "_reorder_linear_weight")
    if _HOOK not in vars(model):
        setattr(model, _HOOK, model.register_forward_pre_hook(_refresh_hook, with_kwargs=True))
    return model


def unpack_linear(model: AnyModule) -> AnyModule:
    """Make every `PackedLinear` of `model` the plain linear layer it was, without its copy; returns the model."""
    hook = vars(model).pop(_HOOK, None)
    if hook is not None:
        hook.remove()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            linear: Any = module  # its class changes
            linear.__class__ = nn.Linear
            for name in ("_copy", "_agrees"):
                vars(linear).pop(name, None)
    return model


def refresh_packed_weights(model: nn.Module) -> None:
    """Repack the layers of `model` whose weights have changed since they were packed.

    Costs one product of two rows per layer where nothing has changed. With gradients on it does nothing, because then
    no copy is used.
    """
    if torch.is_grad_enabled():
        return
    room = int(MAX_MEMORY_SHARE * available())
    for module in model.modules():
        if isinstance(module, PackedLinear):
            room = module.refresh(room)


def _refresh_hook(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: repack before a prompt, since weights may have changed since the last one."""
    cache = cache_among(kwargs)
    if cache is None or cache.get_seq_length() == 0:
        refresh_packed_weights(model)


WEIGHTS = ("float32", "float16", "bfloat16", "int8")


def rounded(weight: Tensor, bits: int) -> Tensor:
    """weight [out, in] to the nearest of 2^bits - 1 levels, symmetric around 0, one scale per output row."""
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
    levels = (weight / scale).round().clamp(-most, most)
    nearest: Tensor = levels * scale
    return nearest


@torch.no_grad()
def round_linear_layers(model: Any, bits: int) -> None:
    """Round the weights of linear layers in place; an output head that shares the embedding's weights stays."""
    shared = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not shared:
            module.weight.copy_(rounded(module.weight, bits))
        elif isinstance(module, Conv1D):  # GPT-2's, whose weight is [in, out]
            module.weight.copy_(rounded(module.weight.T, bits).T)


@torch.no_grad()
def round_weights(model: Any, weights: str | None) -> None:
    """Round a model's weights in place as `model.weights` says, before they are packed.

    bfloat16: all of them, to the nearest; float16: matrices alone, as a float16 GGUF file has them. int8: of linear
    layers (`round_linear_layers`). Products and sums stay in the model's dtype.
    """
    if weights == "bfloat16":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
    elif weights == "float16":
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.copy_(parameter.to(torch.float16).to(parameter.dtype))
    elif weights == "int8":
        round_linear_layers(model, 8)


def check_weights(weights: str | None, dtype: str) -> None:
    """ConfigError for weights that are not offered, or that a model of this dtype cannot have."""
    if weights is not None and weights not in WEIGHTS:
        raise ConfigError(f"weights must be {', '.join(WEIGHTS)} or null for those as loaded, got {weights!r}")
    if weights not in (None, dtype, "int8") and dtype != "float32":
        raise ConfigError(
            f"weights={weights} needs model.dtype=float32, got {dtype}: weights that were loaded in {dtype} have no "
            "more bits, and its products round by themselves"
        )
