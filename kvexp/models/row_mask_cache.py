"""A Hugging Face cache for the papers' row-mask protocol: one text, one forward, one mask per layer and head."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core.masked_layer import MaskedLayer, MaskFn
from kvexp.errors import ConfigError
from kvexp.models.attention_hook import check_patched
from kvexp.models.cache import EvictionCacheLayer
from kvexp.models.families import num_layers


class RowMaskCache(Cache):  # type: ignore[misc]
    """The cache for one forward of a patched model under row masks; `mask_fn` makes a layer's mask of its full logits.

    Example: `RowMaskCache(model, lambda x, layer: local_mask(x, heavy=6, recent=6))`.
    """

    def __init__(self, model: PreTrainedModel, mask_fn: MaskFn) -> None:
        check_patched(model.config, ConfigError)
        states = [MaskedLayer(mask_fn, index) for index in range(num_layers(model.config))]
        super().__init__(layers=[EvictionCacheLayer(state, None, model.config) for state in states])

    @property
    def layer_states(self) -> list[MaskedLayer]:
        """The layers, with their masks and probabilities after the forward."""
        return [layer.state for layer in self.layers]
