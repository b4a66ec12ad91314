"""Matrix products of few rows at the speed of memory, on a CPU.

`torch.nn.functional.linear` hands float32 to MKL, whose product of one row runs on one thread whatever there are, and
which takes two to three times as long as the weights take to read where the processor is not Intel's (measured:
DECISIONS.md). The same sums, in another order, come faster from two other places: for one or two rows from MKL's
batched product, given the weights in halves; for more from oneDNN, which torch brings along.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LEAST = 1 << 17  # weights from which it pays: below, half a megabyte, the call itself is what takes time
FEW = 2  # rows up to which the batched product is the faster one


class MemoryBoundLinear(nn.Linear):
    """`nn.Linear` with the same weights and results, but for the order of sums; takes the short way where it can."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not self._able(input):
            return functional.linear(input, self.weight, self.bias)
        out, rows = self.weight.shape[0], input.numel() // input.shape[-1]
        if rows <= FEW and out % 2 == 0:
            made = self._in_halves(input.reshape(rows, -1)).view(*input.shape[:-1], out)
            return made if self.bias is None else made + self.bias
        result: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return result

    def _able(self, x: Tensor) -> bool:
        weight = self.weight
        return (
            x.device.type == "cpu"
            and x.dtype == weight.dtype == torch.float32
            and weight.numel() >= LEAST
            and type(weight) is nn.Parameter  # and no quantized tensor in its place
            and weight.is_contiguous()
            and x.numel() > 0
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def _in_halves(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out]."""
        halves = self.weight.view(2, -1, x.shape[1])
        made = torch.bmm(halves, x.t().expand(2, -1, -1))  # [2, out / 2, R]
        return made.permute(2, 0, 1).reshape(x.shape[0], -1).contiguous()


def quicken(model: nn.Module) -> None:
    """Make every plain linear layer of `model` a `MemoryBoundLinear`, in place, where torch has oneDNN."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = MemoryBoundLinear
