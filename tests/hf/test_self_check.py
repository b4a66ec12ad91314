"""The self-check at load: a model whose own logits kvexp does not give is refused, with difference and layer."""

from __future__ import annotations

import copy

import pytest
import torch
import twins
from tiny import CONFIGS, stock
from twins import twin

from kvexp.hf import is_patched, load_model, patch, patch_model, random_model
from kvexp.hf import self_check as checking
from kvexp.hf.patch import SeenMask, kvexp_attention
from kvexp.hf.self_check import check_model, fingerprint, measure
from kvexp.hf.traits import REFUSED, Layer, check_type, traits_of
from kvexp.util.errors import ConfigError


@pytest.mark.parametrize("family", CONFIGS)
def test_families_of_every_kind_of_positions_pass(family):
    model = patch_model(copy.deepcopy(stock(family)))
    classes = [type(module) for module in model.modules()]
    assert measure(model) < 5e-5
    assert classes == [type(module) for module in model.modules()] and is_patched(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_with_its_own_rounding(dtype):
    model = patch_model(copy.deepcopy(stock("llama")).to(dtype))
    difference = measure(model)
    assert 1e-4 < difference < 0.5


@pytest.fixture
def wrong(monkeypatch):
    """kvexp's attention with a fault in the layers of this index and above."""

    def put(first, **changes):
        def faulty(module, query, *rest, **more):
            if module.layer_idx >= first:
                more |= changes
            return kvexp_attention(module, query, *rest, **more)

        from transformers import AttentionInterface

        monkeypatch.setitem(AttentionInterface()._global_mapping, "kvexp", faulty)

    return put


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", [0, 1])
def test_another_scale_is_refused_with_the_first_bad_layer(layer, dtype, wrong):
    wrong(layer, scaling=0.2)
    model = copy.deepcopy(stock("llama")).to(dtype)
    with pytest.raises(ConfigError) as error:
        patch_model(model, check="always")
    assert f"first in the attention of layer {layer}, full attention" in str(error.value)
    assert "differ from the model's own by" in str(error.value)
    assert not is_patched(model) and model.config._attn_implementation == "eager"


def test_a_window_that_is_not_there_is_refused(wrong):
    wrong(0, sliding_window=30)  # shorter than the check's prompt
    with pytest.raises(ConfigError, match=r"is not supported: .*which must agree"):
        patch_model(copy.deepcopy(stock("llama")), check="always")


LAST, WINDOW = 5, 2  # layers of the twin: one that attends for the newest query alone, one with a window
MASKS = {  # what a layer makes of the mask it is given -> the layer, and the reason of the refusal
    "computes with it": (lambda mask: mask + 0, WINDOW, r"its mask is a tensor \[2, 48\] of its own"),
    "keeps it for all queries": (
        lambda mask: SeenMask.of(mask, mask.sight, 48),
        LAST,
        "its mask is that of 48 queries",
    ),
    "takes the oldest queries": (lambda mask: mask[:, :, :1, :], WINDOW, "not of its newest queries"),
    "takes every second query": (lambda mask: mask[:, :, 1::2, :], WINDOW, "not of its newest queries"),
    "takes no query": (lambda mask: mask[:, :, 48:, :], WINDOW, "not of its newest queries"),
    "takes other columns": (lambda mask: mask[:, :, :, 1:], WINDOW, "not of its newest queries"),
    "sees everything": (
        lambda mask: SeenMask.of(mask, Layer("full"), 48),
        WINDOW,
        "given a mask of full attention and",
    ),
}


@pytest.mark.parametrize("plant", MASKS)
def test_a_mask_that_is_not_the_one_given_to_the_model_is_refused(plant):
    model, (changed, layer, why) = copy.deepcopy(twin("gemma4_text")), MASKS[plant]

    def put(module, args, given):  # the model's own masks, of four dimensions, stay
        mask = given["attention_mask"]
        return args, given | {"attention_mask": changed(mask) if mask.ndim == 2 else mask}

    model.model.layers[layer].self_attn.register_forward_pre_hook(put, with_kwargs=True)
    with pytest.raises(ConfigError, match="is not supported: .*" + why):
        patch_model(model, check="always")


def test_a_window_that_was_taken_for_every_token_is_refused(monkeypatch):
    """In PhiMoE the mask alone has the window."""
    monkeypatch.setattr(patch, "_sight_of", lambda *_: Layer("full"))
    with pytest.raises(ConfigError, match=r"differ from the model's own by .*; first in the attention of layer 0"):
        patch_model(copy.deepcopy(twin("phimoe")), check="always")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts the measurements, with a cache folder of its own."""
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
    found: list[str] = []
    real = checking.measure
    monkeypatch.setattr(checking, "measure", lambda model: (found.append(model.config.model_type), real(model))[1])
    return found


def test_what_passed_is_remembered_by_weights_and_configuration(measured):
    model = patch_model(copy.deepcopy(stock("llama")))
    assert measured == [], "a type that tests hold against transformers is not checked by patch_model"
    check_model(model, "once")
    check_model(model, "once")
    assert len(measured) == 1
    check_model(model, "always")
    check_model(model, "never")
    assert len(measured) == 2
    known = fingerprint(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    assert fingerprint(model) != known
    check_model(model, "once")
    assert len(measured) == 3


def test_what_failed_is_not_remembered(measured, wrong):
    wrong(0, scaling=0.2)
    for _ in range(2):
        with pytest.raises(ConfigError):
            patch_model(copy.deepcopy(stock("llama")), check="once")
    assert len(measured) == 2


def test_a_folder_is_checked_once_and_an_unknown_type_whenever_it_is_patched_first(measured, tmp_path):
    stock("llama").save_pretrained(tmp_path / "model")
    for _ in range(2):
        load_model(str(tmp_path / "model"), device="cpu")
    assert measured == ["llama"]
    for _ in range(2):
        patch_model(copy.deepcopy(twin("phi")))
    assert len(measured) == 1 + (not traits_of(twin("phi").config).verified)
    random_model("llama", vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, check="always")
    assert measured[-1] == "llama"


@pytest.mark.parametrize("name", ["xglm", "mamba", "bert", "diffllama", "doge", "qwen4_exp"])
def test_a_type_that_cannot_be_served_is_refused_with_the_reason_before_weights(name):
    from transformers import AutoConfig

    why = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        check_type(AutoConfig.for_model(name))
    assert f"model family {name!r} is not supported: " in str(error.value) and why in str(error.value)


GLOBAL = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
VARIANTS = [  # of types whose twins are of one variant
    ("gemma4_text", GLOBAL | EXPERTS | {"hidden_size_per_layer_input": 0}),  # as the 26B, whose keys are its values
    ("gemma4_text", {"num_kv_shared_layers": 4, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}),  # E2B
    ("falcon", {"new_decoder_architecture": False}),  # one kv head, as the 7B
    ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}),
]


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_variants_of_a_type_pass(name, fields, monkeypatch):
    monkeypatch.setitem(twins.SPECIAL, name, twins.SPECIAL.get(name, {}) | fields)
    assert measure(patch_model(twins.twin.__wrapped__(name), check="never")) < 5e-5


def test_a_configuration_whose_heads_differ_between_layers_is_loaded():
    sizes = {"vocab_size": 61, "vocab_size_per_layer_input": 61, "hidden_size": 32, "hidden_size_per_layer_input": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    assert traits_of(random_model("gemma4_text", **sizes, **heads, check="always").config).key_dim == 512
    with pytest.raises(ConfigError, match="2 layers of 2 heads in 3 groups"):
        random_model("gemma4_text", **sizes, **heads | {"num_key_value_heads": 3})


def test_falcon_with_alibi_is_refused():
    """In transformers its eager attention and SDPA differ."""
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=r"'falcon with ALiBi' is not supported: .* twice in eager attention"):
        check_type(AutoConfig.for_model("falcon", alibi=True))


def test_shapes_that_are_not_those_of_the_configuration_are_refused(monkeypatch):
    model = copy.deepcopy(stock("llama"))
    monkeypatch.setattr(type(model.config), "v_head_dim", 15, raising=False)
    with pytest.raises(ConfigError, match="layer 0 has 3 kv heads with keys of 14 and values of 14 numbers, where"):
        patch_model(model, check="always")
