"""What a model's attention layers get: kept for a moment, for methods that score tokens by it (KVzap)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

_HOLDER = "_kvexp_layer_input"  # attribute of a model


class LayerInput:
    """The input [B, Q, n] of the attention layer that computes right now, n: the model's width; hooks put it in."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.hooks: list[RemovableHandle] = []

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of an attention module."""
        self.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def forget(self, model: Any, args: Any, output: Any) -> None:
        """Forward hook of the model: nothing is kept beyond a forward, whose cache may be of another method.

        Called also where the forward raises.
        """
        self.hidden = None

    def take(self) -> Tensor | None:
        """The input, which is forgotten with that; None where no hook has put one in."""
        hidden, self.hidden = self.hidden, None
        return hidden


def layer_input(model: PreTrainedModel) -> LayerInput:
    """The model's one `LayerInput`; the hooks are put on it and its attention modules at the first call."""
    holder: LayerInput | None = vars(model).get(_HOLDER)
    if holder is None:
        holder = LayerInput()
        attentions = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
        holder.hooks = [module.register_forward_pre_hook(holder.note, with_kwargs=True) for module in attentions]
        holder.hooks.append(model.register_forward_hook(holder.forget, always_call=True))
        setattr(model, _HOLDER, holder)
    return holder


def forget_layer_input(model: PreTrainedModel) -> None:
    """Take the hooks out again; harmless for a model without."""
    holder: LayerInput | None = vars(model).pop(_HOLDER, None)
    if holder is not None:
        for hook in holder.hooks:
            hook.remove()
