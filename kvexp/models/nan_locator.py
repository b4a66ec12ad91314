"""The module of a model in which NaN or inf came up first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def first_not_finite(model: nn.Module) -> Iterator[list[str]]:
    """A block in which the list receives the name of the first module with NaN or inf in its output ("layers.2.mlp").

    For running a forward again that has failed: it waits for the device at every module.
    """
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(output)):
                found.append(name or type(module).__name__)

        return hook

    # Modules inside a module are done before it, so the first one to be noticed is the innermost.
    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in a module's output."""
    parts = output if isinstance(output, tuple | list) else [output]
    return [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
