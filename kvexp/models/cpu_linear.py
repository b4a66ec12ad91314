"""Matrix products of few rows at the speed of memory, on a CPU, and with sums that no batch and no thread changes.

`torch.nn.functional.linear` hands float32 to MKL, whose product of one row runs on one thread whatever there are,
and which takes two to three times as long as the weights take to read where the processor is not Intel's. oneDNN,
which torch brings along, comes near to memory's limit if it is given a copy of the weights in the order it reads
them (measured: docs/decisions/numerics.md). From two rows on its kernels for AVX2 and AVX-512 add up a row's sums
in one order, whatever the number of rows or threads and whether they read the copy or the weights; so a single row
is given to it twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvexp.models.free_memory import available

LEAST = 1 << 16  # weights from which it pays: below, a quarter of a megabyte, the call itself is what takes time
SHARE = 0.25  # of the free memory, at most, for the copies of a model's weights; with none, products take longer


class PackedLinear(nn.Linear):
    """`nn.Linear` with the same weights and results, but for the order of sums; takes the short way where it can."""

    _copy: Tensor | None = None  # the weights as oneDNN reads them fastest
    _agrees = True  # does such a copy give the sums that the weights give, to the bit?

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if input.numel() == 0 or not self._able(input):
            return functional.linear(input, self.weight, self.bias)
        weight = self.weight if self._copy is None else self._copy
        if input.numel() > input.shape[-1]:
            return _product(input, weight, self.bias)
        twice = _product(input.reshape(1, -1).expand(2, -1), weight, self.bias)
        return twice[:1].view(*input.shape[:-1], -1)

    def _able(self, x: Tensor | None = None) -> bool:
        weight = self.weight
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and (x is None or (x.device == weight.device and x.dtype == weight.dtype))
            and weight.numel() >= LEAST
            and type(weight) is nn.Parameter  # and no quantized tensor in its place
            and weight.is_contiguous()
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def renew(self, room: int) -> int:
        """Have a copy of the weights as they are now, if it takes no more than `room` bytes; returns those left."""
        if not self._able():
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
        """Whether copy and weights make the same of a row, to the bit; other weights make other sums."""
        row = torch.linspace(0.5, 1.5, self.in_features).expand(2, -1)
        return torch.equal(_product(row, copy), _product(row, self.weight))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_copy"}


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


def quicken(model: nn.Module) -> None:
    """Make every plain linear layer of `model` a `PackedLinear`, in place, where torch has oneDNN."""
    ours = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ours, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            linear: Any = module  # its class changes
            linear.__class__ = PackedLinear
            linear._agrees = hasattr(ours, "_reorder_linear_weight")


def renew(model: nn.Module) -> None:
    """Where something begins, and nothing is gone on with: see that copies of weights are of those the model has now.

    Where gradients are wanted there is nothing to see: no copy is used.
    """
    if torch.is_grad_enabled():
        return
    room = int(SHARE * available())
    for module in model.modules():
        if isinstance(module, PackedLinear):
            room = module.renew(room)
