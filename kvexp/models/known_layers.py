"""Forwards that begin above the first layers, where those are known to give what they gave in an earlier forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvexp.errors import ConfigError
from kvexp.models.families import num_layers


class KnownLayers:
    """What each layer of a model gave in one forward of one row of tokens: `noted`, then `beginning_at`.

    outputs: of each layer, as it returned them: a tensor [1, Q, n], or a tuple that begins with one; n: the model's
    width. A layer that is passed over sees none of its hooks called and its cache not touched.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = blocks_of(model)
        self.outputs: list[Any] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the layers give in the forward inside the block."""
        self.outputs = []
        hooks = [block.register_forward_hook(lambda _, __, made: self.outputs.append(made)) for block in self.blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def beginning_at(self, layer: int, rows: int) -> Iterator[None]:
        """Compute no layer below `layer` in forwards inside the block, of `rows` rows of the tokens that were noted."""
        passed = self.blocks[:layer]
        for block, made in zip(passed, self.outputs, strict=False):
            vars(block)["forward"] = _giving(made, rows)
        try:
            yield
        finally:
            for block in passed:
                vars(block).pop("forward", None)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model, from the first on; ConfigError where no module lists them."""
    count = num_layers(model.config)
    found = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    blocks = next(found, None)
    if blocks is None:
        raise ConfigError(f"{type(model).__name__} has no list of its {count} layers: its forwards begin at the first")
    return blocks


def _giving(made: Any, rows: int) -> Any:
    """A forward of a layer that gives what it gave before, to every row."""
    first = made if isinstance(made, Tensor) else made[0]
    wide = first.expand(rows, *first.shape[1:])
    given = wide if isinstance(made, Tensor) else (wide, *made[1:])
    return lambda *_, **__: given
