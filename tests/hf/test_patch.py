"""patch_model and what undoes it: the model afterwards is the one before, in every attribute and every logit."""

from __future__ import annotations

import copy
import inspect
import re

import pytest
import torch
import transformers
from tiny import CONFIGS, LAYERS, stock, tiny, tokens
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from kvexp.core import Budget, EvictionLayer
from kvexp.generate import GenerationParams, generate
from kvexp.hf import EvictionCache, is_patched, patch_model, patched, unpatch_model
from kvexp.hf.layers import EvictionCacheLayer
from kvexp.hf.patch import ATTN_IMPLEMENTATION, kvexp_attention, padding_mask
from kvexp.methods import H2O, Full
from kvexp.util.errors import CacheError, ConfigError

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
    hooks = ("_forward_pre_hooks", "_forward_hooks")
    modules = [
        (
            *(name, type(module), module.training, sorted(vars(module))),
            *(list(getattr(module, kind).values()) for kind in hooks),
            *(len(getattr(module, f"{kind}_with_kwargs")) for kind in hooks),
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
        with pytest.raises(CacheError, match=r"call kvexp\.hf\.patch_model"):
            model(IDS[:, :1], past_key_values=each)
    with patched(model):
        assert model(IDS[:, :1], past_key_values=cache).logits.isfinite().all()


# -- what attention is asked for, and torch.compile --------------------------------------------------------------------

CHANGING = {
    "softcap": 50.0,
    "s_aux": torch.zeros(15),
    "sinks": torch.zeros(15),
    "is_causal": False,
    "dropout": 0.1,
    "position_bias": torch.zeros(1, 15, 5, 5),
    "head_mask": torch.ones(15),
    "output_attentions": True,
    "cu_seq_lens_q": torch.tensor([0, 3, 5]),
    "max_length_q": 3,
    "block_table": 7,
    "something_new": 0,
}


@pytest.mark.parametrize("name", CHANGING)
def test_an_argument_that_could_change_attention_raises_by_its_name(name):
    query, key = torch.randn(1, 15, 5, 14), torch.randn(1, 3, 5, 14)
    module = torch.nn.Identity()
    if name not in ("dropout", "is_causal"):
        plain, _ = kvexp_attention(module, query, key, key, None)
        given = {"position_ids": torch.arange(5)[None], "use_cache": True, "is_causal": True, name: None}
        same, _ = kvexp_attention(module, query, key, key, None, **given)
        assert torch.equal(plain, same), "None stands for an argument that is not given"
    with pytest.raises(CacheError, match=rf"Identity asks for attention with {name}\b.*kvexp does not compute"):
        kvexp_attention(module, query, key, key, None, **{name: CHANGING[name]})


@pytest.mark.parametrize("family", CONFIGS)
def test_such_arguments_and_dropout_of_the_whole_model_raise(family):
    model = patch_model(fresh(family))
    if family not in ("gptj", "mpt"):
        with pytest.raises(CacheError, match=r"asks for attention with softcap=3\.0"):
            model(IDS, softcap=3.0)
    changed = False
    for module in model.modules():
        for name in {"attention_dropout", "attn_dropout", "attn_dropout_p"} & {*vars(module), *module._modules}:
            whole = isinstance(getattr(module, name), torch.nn.Module)
            setattr(module, name, torch.nn.Dropout(0.25) if whole else 0.25)
            changed = True
    model(IDS)
    model.train()
    if family != "opt":  # whose attention calls it as its other layers do
        assert changed
        with pytest.raises(CacheError, match=r"asks for attention with dropout=0\.25"):
            model(IDS)


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "mpt"])
def test_packed_sequences_raise(family):
    """Stock keeps them apart, where it sees no mask and no cache."""
    model = patch_model(fresh(family))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    for more in ({}, {"use_cache": False}, {"past_key_values": EvictionCache(model, Full())}):
        with pytest.raises(CacheError, match="packed sequences"):
            model(IDS, position_ids=packed, **more)
    if family == "opt":
        return  # whose mask does not go by position_ids, in stock neither
    with pytest.raises(CacheError, match="packed sequences"):
        model.base_model(IDS, position_ids=packed, use_cache=False)
    model(IDS, position_ids=torch.arange(11).expand(2, -1))


@pytest.mark.parametrize("family", CONFIGS)
def test_masks_that_are_no_padding_mask_raise(family):
    model = patch_model(fresh(family))
    for mask in (torch.zeros(2, 1, 11, 11), torch.ones(2, 11, 11), {"full_attention": None}):
        with pytest.raises(CacheError, match=r"takes the 2-D attention mask \[batch, columns\], got"):
            model(IDS, attention_mask=mask)
    assert torch.equal(model(IDS, attention_mask=torch.ones_like(IDS)).logits, model(IDS).logits)
    model.config.is_causal = False
    with pytest.raises(CacheError, match="attention in both directions"):
        model(IDS)


def test_only_causal_masks_sliding_windows_and_chunks_pass():
    def asked(function, size=None):
        return padding_mask(batch_size=2, q_length=11, mask_function=function, local_size=size)

    assert asked(causal_mask_function).shape == (2, 0)
    for size in (1, 2, 7, 4096):
        assert asked(sliding_window_causal_mask_function(size), size).shape == (2, 0)
    for padding in (None, torch.tensor([[1, 1, 1], [0, 0, 1]])):
        pads = torch.tensor([0, 2 if padding is not None else 0])
        function = chunked_causal_mask_function(7, pads)
        assert (
            padding_mask(batch_size=2, q_length=11, mask_function=function, local_size=7, attention_mask=padding).shape[
                0
            ]
            == 2
        )
    others = {  # what each is -> the function, and the window that is told
        "both ways": (bidirectional_mask_function, None),
        "a window both ways": (sliding_window_bidirectional_mask_function(7), 7),
        "chunks that begin elsewhere": (chunked_causal_mask_function(7, torch.ones(2, dtype=torch.long)), 7),
        "chunks of another size": (chunked_causal_mask_function(7, torch.zeros(2, dtype=torch.long)), 8),
        "a prefix": (or_masks(causal_mask_function, lambda b, h, q, k: k < 3), None),
        "a place in the middle": (and_masks(causal_mask_function, lambda b, h, q, k: k != 100), None),
        "a window that is not told": (sliding_window_causal_mask_function(7), None),
        "another window": (sliding_window_causal_mask_function(7), 8),
        "none where one is told": (causal_mask_function, 7),
        "a callable": (torch.nn.Identity(), None),
    }
    for function, size in others.values():
        with pytest.raises(CacheError, match="kvexp computes causal attention"):
            asked(function, size)


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ["llama", pytest.param("gptj", marks=pytest.mark.slow), pytest.param("mpt", marks=pytest.mark.slow)]
)
def test_torch_compile_says_in_one_line_that_it_cannot(family):
    model = patch_model(copy.deepcopy(stock(family)))
    line = "^torch.compile cannot compile a model that attends through kvexp: .*$"
    calls = (lambda one: one(IDS), lambda one: generate(one, [[1, 2, 3]], H2O(), Budget(tokens=8)))
    for call in calls if family == "llama" else calls[:1]:
        torch._dynamo.reset()
        with pytest.raises(CacheError, match=line):
            call(torch.compile(model, backend="eager"))
    torch._dynamo.reset()
    inside = copy.deepcopy(model)
    inside.forward = torch.compile(inside.forward, backend="eager")
    with pytest.raises(CacheError, match=line):
        inside(IDS)
    for compiled in (torch.compile(copy.deepcopy(stock(family)), backend="eager"), copy.deepcopy(stock(family))):
        if not hasattr(compiled, "_orig_mod"):
            compiled.compile(backend="eager")
        with pytest.raises(ConfigError, match=line):
            patch_model(compiled)
    torch._dynamo.reset()
    assert torch.isfinite(model(IDS).logits).all(), "the model itself goes on"


# Tells at once when a new transformers breaks an assumption that kvexp rests on, and which.


TESTED = ((5, 3), (5, 24))  # first and last minor version that `make oldest`, `make test` or `make newest` was run with

# What generate() and the models may ask of a cache, of a layer; anything else is new and must be thought about.
CACHE = {
    *("layers", "get_seq_length", "get_mask_sizes", "update", "reorder_cache", "is_compileable", "is_sliding"),
    *("get_query_offset", "is_linear", "is_dummy", "is_initialized", "offloading", "layer_class_to_replicate"),
    *("batch_size", "has_previous_state", "get_max_cache_shape", "get_max_length", "max_batch_size", "is_croppable"),
    "_is_user_defined",
}
OURS = {
    *(
        "config",
        "sequence",
        "memory_tracker",
        "cross_layer_score",
        "state_changes",
        "_of_all_layers",
        "layer_states",
        "_select",
        "caches",
    ),
    *("logits_nan_flag", "repeated_prompt", "prompts", "first_layer", "held", "windows", "hand_out"),
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
def test_every_layer_is_asked_once_per_forward_and_nothing_new_of_the_cache(family, num_beams, monkeypatch):
    calls, asked, forward = [], set(), EvictionLayer.forward
    monkeypatch.setattr(EvictionLayer, "forward", lambda self, *a: (calls.append(self.index), forward(self, *a))[1])

    class Spy(EvictionCache):
        def __getattribute__(self, name):
            if not name.startswith("__"):
                asked.add(name)
            return super().__getattribute__(name)

    model, options = tiny(family), {"num_beams": num_beams, "max_new_tokens": 4, "pad_token_id": 0}
    cache = Spy(model, H2O(), Budget(kv_ratio=0.5), num_beams=num_beams)
    asked.clear()
    model.generate(torch.arange(3, 14)[None], past_key_values=cache, **options)
    assert calls == list(range(LAYERS)) * 4
    assert asked <= CACHE | OURS, f"new in this transformers: {sorted(asked - CACHE - OURS)}"
    assert {"update", "get_seq_length"} <= asked
