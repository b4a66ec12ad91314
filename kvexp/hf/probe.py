"""What only a short forward tells of a model: sizes of states, and how each layer turns its keys by their position.

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
from kvexp.core.budget import OtherLayers
from kvexp.core.config import Sliding
from kvexp.hf.layers import WindowLayer, compose, state_numbers
from kvexp.hf.patch import forward_columns, takes_positions, uncached_attention
from kvexp.hf.traits import Traits, rope_of, text_config, traits_of
from kvexp.util.errors import ConfigError

TOKENS, SHIFT = 8, 3
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gptj", "codegen")  # one RoPE in all layers
_FOUND: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], list[RoPE | None]]] = WeakKeyDictionary()
_OTHERS: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], OtherLayers]] = WeakKeyDictionary()
_ALIKE: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


class _Noting:
    """A layer of one forward that notes the new keys [B, H, Q, D] and values [B, H, Q, Dv], a `LayerCache`."""

    seq_len = 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`."""
        self.keys, self.values = key, value
        return uncached_attention(query, key, value, padding, params)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Does nothing: there is one forward."""

    def reset(self) -> None:
        """Does nothing: there is one forward."""


def layer_ropes(model: PreTrainedModel, sliding: Sliding = "auto") -> list[RoPE | None]:
    """The RoPE of each layer that kvexp holds, None for a layer whose keys do not depend on their position.

    sliding: as of `held_layers`. Computed once per model. ConfigError where keys turn otherwise than by one of the
    model's tables.
    """
    traits = traits_of(model.config, sliding)
    if traits.position != "rope":
        return [None] * len(traits.held)
    if traits.type in PLAIN:
        return [rope_of(model)] * len(traits.held)
    known = _FOUND.setdefault(model, {})
    if traits.held not in known:
        known[traits.held] = _probe(model, traits)
    return known[traits.held]


def check_heads(model: PreTrainedModel, traits: Traits) -> None:
    """ConfigError where keys and values of the held layers differ in shape, so that no budget counts them alike."""
    if model not in _ALIKE:
        shapes = [(noted.keys.shape, noted.values.shape) for noted in _noted(model, traits, 0)]
        _ALIKE[model] = len(set(shapes)) == 1
    if not _ALIKE[model]:
        raise ConfigError(
            f"cache.evict_sliding=true cannot work on {traits.title}: keys and values of its layers with a sliding "
            "window have other heads than its other layers have. Leave cache.evict_sliding at auto"
        )


def other_layers(model: PreTrainedModel, traits: Traits) -> OtherLayers | None:
    """What the model's cache holds besides the slots that are evicted; None: every layer is evicted from.

    Computed once per model.
    """
    if not traits.composed:
        return None
    known = _OTHERS.setdefault(model, {})
    if traits.held not in known:
        layers = _forward(model, traits, 0).layers
        windows = [layer.state for layer in layers if isinstance(getattr(layer, "state", None), WindowLayer)]
        sizes = tuple((window.numbers // window.window.keys.shape[2], window.size - 1) for window in windows)
        known[traits.held] = OtherLayers(traits.kv_heads, sizes, sum(map(state_numbers, layers)))
    return known[traits.held]


def _noted(model: PreTrainedModel, traits: Traits, first: int) -> list[_Noting]:
    """What the held layers note of a forward of random tokens, the first of them at position `first`."""
    layers = _forward(model, traits, first).layers
    return [layers[number].state for number in traits.held]


@torch.no_grad()
def _forward(model: PreTrainedModel, traits: Traits, first: int) -> Cache:
    """The cache of a forward of random tokens, the first of them at position `first`."""
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, int(text_config(model.config).vocab_size), (1, TOKENS), generator=generator).to(device)
    states = [_Noting() for _ in traits.held]
    places = torch.arange(first, first + TOKENS, device=device)[None]
    cache = Cache(layers=compose(model.config, states, sliding=traits.sliding))
    forward_columns(model, ids, torch.ones_like(ids), places, cache, keep=1)
    return cache


@torch.no_grad()
def _probe(model: PreTrainedModel, traits: Traits) -> list[RoPE | None]:
    unknown = f"positions of keys cannot be changed in {traits.title}: set positions=original, or choose another method"
    if not takes_positions(model):
        raise ConfigError(f"{unknown} (its forward takes no position ids)")
    by_place = [[noted.keys for noted in _noted(model, traits, first)] for first in (0, SHIFT)]
    tables = [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.startswith("original")
    ]
    known = [RoPE(table.detach(), interleaved) for table in tables for interleaved in (False, True)]
    ropes: list[RoPE | None] = []
    for number, keys, shifted in zip(traits.held, *by_place, strict=True):
        rope, turns = None, not _equal(keys, shifted)
        if turns:
            delta = torch.full(keys.shape[:3], SHIFT, device=keys.device)
            fits = (candidate for candidate in known if 2 * len(candidate.inv_freq) <= keys.shape[-1])
            rope = next((candidate for candidate in fits if _equal(candidate.rotate_by(keys, delta), shifted)), None)
        if turns and rope is None:
            raise ConfigError(f"{unknown} (layer {number} turns them by none of the model's tables)")
        ropes.append(rope)
    return ropes


def _equal(keys: Tensor, other_keys: Tensor) -> bool:
    """Whether keys are the same up to rounding."""
    room = 1e-3 if keys.dtype == torch.float32 else 0.05
    return float((keys - other_keys).abs().max()) <= room * float(other_keys.abs().max())
