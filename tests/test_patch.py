"""patch_model and what undoes it: the model afterwards is the one before, in every attribute and every logit."""

import copy

import pytest
import torch
from tiny import stock, tokens

from kvexp.core import Budget
from kvexp.errors import CacheError, ConfigError
from kvexp.generate import GenerationParams, generate
from kvexp.methods import H2O
from kvexp.models import EvictionCache, is_patched, patch_model, patched, unpatch_model
from kvexp.models.attention_hook import ATTN_IMPLEMENTATION

FAMILIES = ["llama", "gpt2", "gptj", "mpt", "opt"]
IDS = tokens(5, 2, 11)


def fresh(family, attention="eager"):
    """A model of its own, partly in training mode, without MPT's refusal to use a cache mended."""
    model = copy.deepcopy(stock(family))
    if attention != "eager":
        model.set_attn_implementation(attention)
    model.register_forward_hook(seen)
    list(model.modules())[3].train()
    return model


def seen(module, args, output):
    """A user's own hook."""


def attributes(model):
    """All that a module tree says of itself, weights by identity."""
    modules = [
        (
            name,
            type(module),
            module.training,
            sorted(vars(module)),
            list(module._forward_pre_hooks.values()),
            list(module._forward_hooks.values()),
            len(module._forward_hooks_with_kwargs),
            len(module._forward_pre_hooks_with_kwargs),
        )
        for name, module in model.named_modules()
    ]
    configs = [vars(model.config).copy(), vars(model.generation_config).copy()]
    return modules, configs, {name: id(weight) for name, weight in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_it_was(family):
    model = fresh(family)
    before, wanted = attributes(model), logits(model)
    assert patch_model(model) is model
    assert is_patched(model) and not any(module.training for module in model.modules())
    assert attributes(model) != before and model.config._attn_implementation == ATTN_IMPLEMENTATION
    torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-4)
    generate(model, IDS.tolist(), H2O(), Budget(kv_ratio=0.5), decoding=GenerationParams(3, eos=None))
    assert unpatch_model(model) is model and not is_patched(model)
    assert attributes(model) == before
    assert torch.equal(logits(model), wanted)
    unpatch_model(model)  # harmless
    assert attributes(model) == before


def test_the_implementation_it_had_comes_back():
    model = fresh("llama", "sdpa")
    with patched(model):
        assert model.config._attn_implementation == model.model.config._attn_implementation == ATTN_IMPLEMENTATION
    assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_nested_and_twice(family):
    model = fresh(family)
    before = attributes(model)
    with patched(model) as same:
        assert same is model
        inside = attributes(model)
        with patched(model):
            patch_model(model)
            assert len(model._forward_pre_hooks) == 1
        assert attributes(model) == inside, "the inner block leaves the outer one in force"
    assert attributes(model) == before
    patch_model(model)
    with patched(model):
        pass
    assert is_patched(model), "who patched it before the block decides"
    with patched(model):
        unpatch_model(model)
    assert attributes(model) == before


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_an_error_inside_the_block(family):
    model = fresh(family)
    before = attributes(model)
    with pytest.raises(ZeroDivisionError), patched(model):
        1 / 0  # noqa: B018
    assert attributes(model) == before


def test_a_model_that_cannot_be_patched_is_left_as_it_was(monkeypatch):
    model = fresh("mpt")
    model.config.attn_config.alibi = False
    before = attributes(model)
    with pytest.raises(ConfigError, match="without ALiBi"), patched(model):
        pass
    assert attributes(model) == before
    model = fresh("llama")
    before = attributes(model)
    monkeypatch.setattr(type(model), "register_forward_hook", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch_model(model)
    assert attributes(model) == before


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_copy_is_undone_by_itself(family):
    model = fresh(family)
    wanted = logits(model)
    patch_model(model)
    inside = attributes(model)
    other = copy.deepcopy(model)
    unpatch_model(other)
    assert attributes(model) == inside and other.config._attn_implementation == "eager"
    assert len(other._forward_hooks) == 1 and not other._forward_pre_hooks
    assert [type(part) for part in other.modules()] == [type(part) for part in stock(family).modules()]
    assert torch.equal(logits(other), wanted)


def test_accelerates_hooks_keep_their_forward():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(fresh("mpt"), {"": "cpu"}, force_hooks=True)
    before = [vars(module).get("_old_forward") for module in model.modules()]
    wanted = logits(model)
    with patched(model):
        assert [vars(module).get("_old_forward") for module in model.modules()] != before
    assert [vars(module).get("_old_forward") for module in model.modules()] == before
    assert torch.equal(logits(model), wanted)


@torch.no_grad()
def test_a_cache_is_refused_by_a_model_that_is_not_patched_any_more():
    model = fresh("llama")
    with patched(model):
        cache = EvictionCache(model, H2O(), Budget(tokens=6))
        model(IDS, past_key_values=cache)
        other = cache.fork([0, 1])
    for each in (cache, other):
        with pytest.raises(CacheError, match=r"call kvexp\.models\.patch_model"):
            model(IDS[:, :1], past_key_values=each)
    with patched(model):
        assert model(IDS[:, :1], past_key_values=cache).logits.isfinite().all()


def test_the_old_name_warns():
    import kvexp.models

    with pytest.warns(DeprecationWarning, match="patch_model"):
        assert kvexp.models.install is patch_model
