"""How each layer of a model turns its keys by their position, found by two short forwards.

Some types turn keys in some layers and not in others, or by tables of their own for each kind of layer, and their
configurations name it in as many ways. A key at position p + SHIFT is the key at p turned by SHIFT, unless it is the
same: which table turns it so is tried.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core import RoPE
from kvexp.core.attention import AttentionParams
from kvexp.hf.layers import compose
from kvexp.hf.patch import forward_columns, takes_positions, uncached_attention
from kvexp.hf.traits import rope_of, text_config, traits_of
from kvexp.util import ConfigError

TOKENS, SHIFT = 8, 3
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gptj")  # one RoPE in all layers
_FOUND: WeakKeyDictionary[PreTrainedModel, list[RoPE | None]] = WeakKeyDictionary()


class _Noting:
    """A layer of one forward that notes the new keys [B, H, Q, D], a `LayerCache`."""

    seq_len = 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        self.keys = key
        return uncached_attention(query, key, value, padding, params)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Does nothing: there is one forward."""

    def reset(self) -> None:
        """Does nothing: there is one forward."""


def layer_ropes(model: PreTrainedModel) -> list[RoPE | None]:
    """The RoPE of each layer that kvexp holds, None for a layer whose keys do not depend on their position.

    Computed once per model. ConfigError where keys turn otherwise than by one of the model's tables.
    """
    traits = traits_of(model.config)
    if traits.position != "rope":
        return [None] * len(traits.held)
    if traits.type in PLAIN:
        return [rope_of(model)] * len(traits.held)
    if model not in _FOUND:
        _FOUND[model] = _probe(model)
    return _FOUND[model]


@torch.no_grad()
def _probe(model: PreTrainedModel) -> list[RoPE | None]:
    traits, device = traits_of(model.config), model.get_input_embeddings().weight.device
    unknown = f"positions of keys cannot be changed in {traits.title}: set positions=original, or choose another method"
    if not takes_positions(model):
        raise ConfigError(f"{unknown} (its forward takes no position ids)")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, int(text_config(model.config).vocab_size), (1, TOKENS), generator=generator).to(device)
    by_place = []
    for shift in (0, SHIFT):
        states = [_Noting() for _ in traits.held]
        places = torch.arange(shift, shift + TOKENS, device=device)[None]
        cache = Cache(layers=compose(model.config, states))
        forward_columns(model, ids, torch.ones_like(ids), places, cache, keep=1)
        by_place.append([state.keys for state in states])
    tables = [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.startswith("original")
    ]
    known = [RoPE(table.detach(), interleaved) for table in tables for interleaved in (False, True)]
    found: list[RoPE | None] = []
    for number, here, there in zip(traits.held, *by_place, strict=True):
        rope, turns = None, not _equal(here, there)
        if turns:
            delta = torch.full(here.shape[:3], SHIFT, device=here.device)
            fits = (each for each in known if 2 * len(each.inv_freq) <= here.shape[-1])
            rope = next((each for each in fits if _equal(each.rotate_by(here, delta), there)), None)
        if turns and rope is None:
            raise ConfigError(f"{unknown} (layer {number} turns them by none of the model's tables)")
        found.append(rope)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether keys are the same up to rounding."""
    room = 1e-3 if one.dtype == torch.float32 else 0.05
    return float((one - other).abs().max()) <= room * float(other.abs().max())
