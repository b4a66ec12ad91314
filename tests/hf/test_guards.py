"""Guards of every forward through a kvexp cache: what would bypass the cache raises, with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import LAYERS, stock, tokens
from transformers import AttentionInterface, DynamicCache, StaticCache

from kvexp.core import Budget
from kvexp.hf import EvictionCache, MultiMethodCache, patch_model
from kvexp.hf.patch import ATTN_IMPLEMENTATION, kvexp_attention
from kvexp.methods import H2O, Full
from kvexp.util.errors import CacheError

IDS = tokens(5, 2, 11)


@pytest.fixture
def model():
    """A patched model of its own, whose attention modules a test may change."""
    return patch_model(copy.deepcopy(stock("llama")))


@pytest.fixture
def attends(monkeypatch):
    """Puts another function between the attention modules and kvexp's."""
    interface = AttentionInterface()

    def put(function):
        monkeypatch.setitem(interface._global_mapping, ATTN_IMPLEMENTATION, function)

    return put


def cache_of(model):
    return EvictionCache(model, H2O(), Budget(kv_ratio=0.5), max_new_tokens=4)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_guards_see_the_cache_under_either_name(model, name):
    """transformers' own generate() calls the model's forward with `cache` from 5.24 on."""
    with pytest.raises(CacheError, match="a static cache pads its keys"):
        model(IDS, **{name: StaticCache(config=model.config, max_cache_len=16)})


def test_a_key_without_its_mark_raises(model, attends):
    """Such as the keys that MLA expands from latents: kvexp would see the newest tokens alone."""
    attends(lambda module, query, key, *rest, **more: kvexp_attention(module, query, key.clone(), *rest, **more))
    with pytest.raises(CacheError, match="keys lost the mark of the cache between update"):
        model(IDS, past_key_values=cache_of(model))
    model(IDS, past_key_values=DynamicCache(config=model.config))  # a cache of Hugging Face's marks nothing
    model(IDS, use_cache=False)


def test_keys_attended_to_twice_raise(model, attends):
    def twice(*given, **more):
        kvexp_attention(*given, **more)
        return kvexp_attention(*given, **more)

    attends(twice)
    with pytest.raises(CacheError, match="attends twice to the keys of the same layer"):
        model(IDS, past_key_values=cache_of(model))


@pytest.mark.parametrize("joined", [False, True])
def test_a_layer_that_does_not_attend_through_the_cache_raises_after_the_forward(model, joined):
    passed = model.model.layers[1]
    passed.forward = lambda hidden, *_, **__: hidden
    cache = MultiMethodCache([cache_of(model), cache_of(model)], 2) if joined else cache_of(model)
    with pytest.raises(CacheError, match=rf"through 1 of the {LAYERS} layers of this cache \(layer 1 first\)"):
        model(IDS, past_key_values=cache)


def test_a_model_without_attention_raises_after_the_forward(model):
    """Such as Mamba, which kept its states elsewhere while a cache of kvexp's evicted nothing."""
    for layer in model.model.layers:
        layer.forward = lambda hidden, *_, **__: hidden
    with pytest.raises(CacheError, match=rf"did not come through {LAYERS} of the {LAYERS} layers"):
        model(IDS, past_key_values=cache_of(model))


def test_a_cache_that_sees_other_tokens_than_were_fed_raises(model, attends):
    def newest(module, query, key, value, mask, **more):
        layer = key._kvexp
        query, key, value = query[:, :, 1:], key[:, :, 1:], value[:, :, 1:]
        key._kvexp = layer
        out, _ = kvexp_attention(module, query, key, value, mask[:, :, 1:, :], **more)
        return torch.cat([out[:, :1], out], dim=1), None

    attends(newest)
    with pytest.raises(CacheError, match="a forward of 11 tokens ended with 10 columns in the cache, of which 0"):
        model(IDS, past_key_values=cache_of(model))


def test_an_error_inside_a_forward_is_the_one_reported_and_ends_the_guard(model):
    cache = cache_of(model)
    model(IDS, past_key_values=cache)
    with pytest.raises(CacheError, match="already holds a prompt"):
        model(IDS, past_key_values=cache)
    model(IDS, use_cache=False)  # no forward through a cache is in progress any more
    model(IDS, past_key_values=EvictionCache(model, Full(), max_new_tokens=4))
