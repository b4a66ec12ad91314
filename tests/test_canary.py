"""Tells at once when a new transformers breaks an assumption that kvexp rests on, and which."""

import inspect
import re

import pytest
import torch
import transformers
from tiny import CONFIGS, LAYERS, tiny
from transformers.cache_utils import CacheLayerMixin

from kvexp.core import Budget, EvictionLayer
from kvexp.methods import H2O
from kvexp.models import EvictionCache
from kvexp.models.cache import EvictionCacheLayer

TESTED = ((5, 3), (5, 23))  # first and last minor version the whole suite was run with

# What generate() and the models may ask of a cache, of a layer; anything else is new and must be thought about.
CACHE = {
    *("layers", "get_seq_length", "get_mask_sizes", "update", "reorder_cache", "is_compileable", "is_sliding"),
    *("get_query_offset", "is_linear", "is_dummy", "is_initialized", "offloading", "layer_class_to_replicate"),
    *("batch_size", "has_previous_state", "get_max_cache_shape", "get_max_length", "max_batch_size", "is_croppable"),
    "_is_user_defined",
}
OURS = {
    "config",
    "sequence",
    "memory_tracker",
    "cross_layer_score",
    "layer_states",
    "_select",
    "caches",
    "logits_nan_flag",
    "repeated_prompt",
    "prompts",
}


def test_version_is_one_that_was_tested():
    major, minor = (int(x) for x in re.findall(r"\d+", transformers.__version__)[:2])
    assert TESTED[0] <= (major, minor) <= TESTED[1], (
        f"transformers {transformers.__version__} is outside {TESTED}: run every test with it, then move the bound"
    )


def test_layer_implements_everything_abstract():
    assert not inspect.isabstract(EvictionCacheLayer)
    assert CacheLayerMixin in EvictionCacheLayer.__mro__


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_layer_is_asked_once_per_forward(family, num_beams, monkeypatch):
    calls = []
    forward = EvictionLayer.forward
    monkeypatch.setattr(EvictionLayer, "forward", lambda self, *a: (calls.append(self.index), forward(self, *a))[1])
    model = tiny(family)
    cache = EvictionCache(model, H2O(), Budget(kv_ratio=0.5), num_beams=num_beams)
    model.generate(
        torch.arange(3, 14)[None], past_key_values=cache, num_beams=num_beams, max_new_tokens=4, pad_token_id=0
    )
    assert calls == list(range(LAYERS)) * 4


@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_nothing_new_is_asked_of_the_cache(family, num_beams):
    asked = set()

    class Spy(EvictionCache):
        def __getattribute__(self, name):
            if not name.startswith("__"):
                asked.add(name)
            return super().__getattribute__(name)

    model = tiny(family)
    cache = Spy(model, H2O(), Budget(kv_ratio=0.5), num_beams=num_beams)
    asked.clear()
    model.generate(
        torch.arange(3, 14)[None], past_key_values=cache, num_beams=num_beams, max_new_tokens=4, pad_token_id=0
    )
    assert asked <= CACHE | OURS, f"new in this transformers: {sorted(asked - CACHE - OURS)}"
    assert {"update", "get_seq_length"} <= asked
