"""Linear layers at the speed of memory: the same sums as `nn.Linear` in every shape, and the same model around them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bytes import settings as bytes_settings
from tiny import stock, tokens
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from kvexp.generate import GenerationParams, generate
from kvexp.hf import cpu_linear as module
from kvexp.hf import load_model, patch_model, random_model
from kvexp.hf.cpu_linear import (
    PackedLinear,
    check_weights,
    pack_linear,
    refresh_packed_weights,
    round_weights,
    rounded,
    unpack_linear,
)
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import Full
from kvexp.run.model_spec import ModelSpec, load
from kvexp.util.errors import ConfigError

HERE = torch.backends.mkldnn.is_available()
onednn = pytest.mark.skipif(not HERE, reason="torch without oneDNN")
SHAPES = [(3,), (1, 1), (2, 1), (1, 2), (1, 3), (5, 7), (0, 1), ()]
OUT, IN = 514, 256


class Subclass(torch.Tensor):
    """As libraries put in place of weights that they quantize."""


def quick(out=OUT, inside=IN, bias=True, copied=True):
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Linear(inside, out, bias=bias))
    pack_linear(layer)
    if copied and HERE:
        with torch.no_grad():
            layer[0].refresh(1 << 40)
        assert layer[0]._copy is not None
    return layer[0]


def plainly(layer, x, monkeypatch):
    """The result, and whether torch's own product made it."""
    taken, plain = [], linear
    monkeypatch.setattr("kvexp.hf.cpu_linear.functional.linear", lambda *a: taken.append(a) or plain(*a))
    result = layer(x)
    monkeypatch.undo()
    return result, bool(taken)


def bound(layer, x):
    """What rounding may cost a sum of n products in any order: n * 2**-24 * sum |x| |w|, once more for the bias."""
    weight = layer.weight.detach()
    return (weight.shape[1] + 1) * 2.0**-24 * (linear(x.abs().double(), weight.abs().double()) + 1)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [OUT, OUT + 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_sums(shape, out, bias, copied, monkeypatch):
    layer = quick(out, bias=bias, copied=copied)
    x = torch.randn(*shape, IN, generator=torch.Generator().manual_seed(len(shape)))
    with torch.no_grad():
        result, plain = plainly(layer, x, monkeypatch)
        exact = linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    assert result.shape == exact.shape and result.is_contiguous() and result.dtype == torch.float32
    assert bool(((result - exact).abs() <= bound(layer, x)).all())
    assert plain is (not HERE or x.numel() == 0)


def test_a_transposed_input():
    layer, x = quick(), torch.randn(IN, 2).t()
    with torch.no_grad():
        assert bool(((layer(x) - linear(x.double(), layer.weight.double(), layer.bias.double())).abs() < 1e-4).all())


@onednn
@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="oneDNN's kernels for processors without AVX2 sum otherwise",
)
@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(64, 1100),
    inside=st.sampled_from([1024, 1030, 1408, 2048, 4096]),
    rows=st.integers(2, 90),
    threads=st.sampled_from([1, 2, 3]),
    bias=st.booleans(),
)
def test_a_row_is_the_same_in_any_company(out, inside, rows, threads, bias):
    """Any number of rows beside it, any number of threads, with a copy of the weights or without."""
    layer = quick(out, inside, bias)
    if not layer._agrees:
        pytest.skip("oneDNN's kernels for this processor sum otherwise from a copy")
    x = torch.randn(rows, inside, generator=torch.Generator().manual_seed(rows))
    before = torch.get_num_threads()
    with torch.no_grad():
        together = layer(x)
        try:
            torch.set_num_threads(threads)
            alone = torch.cat([layer(row[None]) for row in x])
            layer._copy = None
            without = layer(x)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(alone, together) and torch.equal(without, together)


def test_what_goes_the_ordinary_way(monkeypatch):
    """Gradients, other dtypes, autocast, weights of another layout or kind; not small ones."""
    x = torch.randn(1, IN)
    result, plain = plainly(quick(), x, monkeypatch)
    assert plain
    result.sum().backward()
    with torch.no_grad():
        assert plainly(quick().double(), x.double(), monkeypatch)[1]
        assert plainly(quick().bfloat16(), x.bfloat16(), monkeypatch)[1]
        layer = quick()
        with torch.autocast("cpu", torch.bfloat16):
            assert plainly(layer, x, monkeypatch)[1]
        transposed, other = quick(), quick()
        transposed.weight = nn.Parameter(torch.randn(IN, OUT).t())
        other.weight = nn.Parameter(torch.randn(OUT, IN).as_subclass(Subclass), requires_grad=False)
        for layer in (transposed, other):
            assert plainly(layer, x, monkeypatch)[1]
            layer.refresh(1 << 40)  # and has no copy to be taken for it
            assert not HERE or layer._copy is None
        assert plainly(quick(out=3), x, monkeypatch)[1] is not HERE


def test_only_plain_linear_layers_change():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Other(2, 2), nn.Bilinear(2, 2, 2))
    keys = list(model.state_dict())
    pack_linear(model)
    pack_linear(model)
    assert [type(part) for part in model] == [PackedLinear if HERE else nn.Linear, Other, nn.Bilinear]
    assert list(model.state_dict()) == keys


@onednn
@pytest.mark.parametrize("change", ["in place", "behind the version counter", "another tensor", "loaded"])
def test_weights_that_changed(change):
    """A copy is never of weights that were: whatever begins anew looks."""
    layer = quick()
    with torch.no_grad():
        if change == "in place":
            layer.weight[400, 3] += 0.25
        elif change == "behind the version counter":
            layer.weight.data[400, 3] += 0.25
        elif change == "another tensor":
            layer.weight = nn.Parameter(torch.randn(OUT, IN))
        else:
            layer.load_state_dict({key: value + 1 for key, value in layer.state_dict().items()})
        x = torch.randn(3, IN)
        exact = linear(x.double(), layer.weight.double(), layer.bias.double())
        assert not bool(((layer(x) - exact).abs() <= bound(layer, x)).all())
        refresh_packed_weights(layer)
        assert layer._copy is not None and bool(((layer(x) - exact).abs() <= bound(layer, x)).all())


@onednn
def test_copies_take_no_more_than_a_share_of_the_memory(monkeypatch):
    model = nn.Sequential(*(nn.Linear(IN, OUT) for _ in range(4)))
    pack_linear(model)
    size = model[0].weight.nbytes
    monkeypatch.setattr(module, "available", lambda: int(2.5 * size / module.MAX_MEMORY_SHARE))
    refresh_packed_weights(model)  # gradients are on: these layers take the ordinary way, and need none
    assert all(layer._copy is None for layer in model)
    with torch.no_grad():
        refresh_packed_weights(model)
        copies = [layer._copy for layer in model]
        assert [copy is not None for copy in copies] == [True, True, False, False]
        refresh_packed_weights(model)  # those there are stay
        assert [layer._copy is before for layer, before in zip(model, copies, strict=True)][:2] == [True, True]


@onednn
def test_copies_that_disagree_are_not_used(monkeypatch):
    layer, x = quick(copied=False), torch.randn(3, IN)
    monkeypatch.setattr(PackedLinear, "_same", lambda self, copy: False)
    with torch.no_grad():
        expected = layer(x)
        assert layer.refresh(1 << 40) == 1 << 40 and layer._copy is None and not layer._agrees
        assert torch.equal(layer(x), expected)


def test_unpacking_gives_back_what_was_there():
    """A copy of the model has hooks of its own, which the original keeps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, 2))
    x = torch.randn(3, IN)
    with torch.no_grad():
        wanted, before = model(x), [(type(part), sorted(vars(part))) for part in model.modules()]
        assert pack_linear(pack_linear(model)) is model
        assert len(model._forward_pre_hooks) == int(HERE)
        packed = model(x)
        assert not HERE or model[0]._copy is not None, "a forward made the copy"
        other = copy.deepcopy(model)
        assert unpack_linear(other) is other and [type(part) for part in other] == [nn.Linear, nn.Linear]
        assert not other._forward_pre_hooks and len(model._forward_pre_hooks) == int(HERE)
        assert torch.equal(model(x), packed)
        for _ in range(2):
            unpack_linear(model)
            assert [(type(part), sorted(vars(part))) for part in model.modules()] == before
            assert not model._forward_pre_hooks and torch.equal(model(x), wanted)


BIG = {"hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 3}


@onednn
def test_run_py_packs_what_it_loads_and_python_does_not(tmp_path):
    """What a recorded row was computed with, to the bit: patched and packed; a model loaded in Python is patched."""
    plain = random_model("llama", num_hidden_layers=1, vocab_size=259, **BIG)
    plain.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    random = {"kind": "random", "family": "llama", "config": {"num_hidden_layers": 1, "vocab_size": 259, **BIG}}
    folder = {"kind": "pretrained", "path": str(tmp_path)}
    ids = torch.randint(0, 259, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = pack_linear(copy.deepcopy(plain))(ids).logits
        ordinary = plain(ids).logits
        assert not torch.equal(wanted, ordinary), "weights so large that the order of sums shows"
        for node in (random, folder):
            for pack in ({}, {"pack_linear": True}, {"pack_linear": False}):
                model, _ = load(ModelSpec.of({"device": "cpu", **node, **pack}))
                packed = pack.get("pack_linear", True)
                assert isinstance(model.lm_head, PackedLinear) is packed
                assert torch.equal(model(ids).logits, wanted if packed else ordinary)
    assert not any(isinstance(part, PackedLinear) for part in load_model(str(tmp_path), device="cpu").modules())


def test_the_hash_of_a_run_knows_only_of_layers_that_are_not_packed():
    def identity(**node):
        return ModelSpec.of({"kind": "random", "family": "llama", "config": {}, "device": "cpu", **node}).identity()

    assert "pack_linear" not in identity() and identity(pack_linear=True) == identity()
    assert identity(pack_linear=False) == {**identity(), "pack_linear": False}
    half = identity(dtype="bfloat16")
    assert identity(dtype="bfloat16", pack_linear=False) == half, "nothing is packed in half precision"
    with pytest.raises(ConfigError, match=r"model\.pack_linear"):
        identity(pack_linear="yes")


@onednn
def test_a_copied_or_stored_layer_makes_its_own():
    layer, x = quick(), torch.randn(3, IN)
    with torch.no_grad():
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other._copy is None and torch.equal(other(x), layer(x))


def test_a_model_writes_what_it_wrote():
    """Weights large enough for every way; Hugging Face's own generate() beside, and the stock model stays as it was."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=1031,
        initializer_range=0.1,
    )
    stock = LlamaForCausalLM(config).eval()
    ours = pack_linear(patch_model(copy.deepcopy(stock)))
    for rows in (1, 2, 5):
        prompt = torch.randint(0, 1031, (rows, 9), generator=torch.Generator().manual_seed(rows))
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        theirs = stock.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        made = generate(ours, prompt.tolist(), Full(), decoding=GenerationParams(12, eos=None), keep_logits=True)
        assert torch.equal(made.sequences, theirs)
        with torch.no_grad():
            logits = stock(theirs[:, :-1]).logits[:, 8:]
        torch.testing.assert_close(torch.stack(made.logits, 1), logits, atol=1e-4, rtol=0)
        assert not HERE or ours.lm_head._copy is not None
    assert not any(isinstance(module, PackedLinear) for module in stock.modules())
    with torch.no_grad():  # the next prompt sees other weights
        ours.lm_head.weight.data *= -1
    again = generate(ours, prompt.tolist(), Full(), decoding=GenerationParams(1, eos=None), keep_logits=True)
    torch.testing.assert_close(again.logits[0], -made.logits[0], atol=1e-4, rtol=0)


# `model.weights`: weights rounded after loading, a model with a full cache of its own.


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_eight_bits_are_those_of_linear_layers(family: str) -> None:
    model = copy.deepcopy(stock(family))
    before = copy.deepcopy(model.state_dict())
    round_weights(model, "int8")
    tied = model.get_input_embeddings().weight
    for each in model.modules():
        if isinstance(each, nn.Linear | Conv1D) and each.weight is not tied:
            rows = each.weight if isinstance(each, nn.Linear) else each.weight.T
            assert all(len(row.unique()) <= 255 for row in rows)
            torch.testing.assert_close(rounded(rows, 8), rows, rtol=1e-6, atol=1e-7)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    kinds = {name.rpartition(".")[0].rpartition(".")[2] for name in changed}
    assert changed and not any(
        "norm" in name or "ln_" in name or "embed" in name or "wte" in name for name in changed
    ), kinds
    assert torch.equal(tied, before[next(name for name in before if "embed_tokens" in name or "wte" in name)])


@torch.no_grad()
def test_sixteen_bits_are_of_all_weights_and_move_the_logits_less() -> None:
    ids, plain = tokens(1, 1, 20), stock("llama")
    full = plain(ids).logits
    moved = {}
    for weights in ("bfloat16", "int8"):
        model = copy.deepcopy(plain)
        round_weights(model, weights)
        moved[weights] = float((model(ids).logits - full).abs().max())
        if weights == "bfloat16":
            assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    assert 0 < moved["bfloat16"] < moved["int8"]


def test_a_rounded_model_is_another_with_a_baseline_of_its_own() -> None:
    plain, rounded_run = (
        bytes_settings("method=h2o"),
        bytes_settings("method=h2o", "model.weights=int8"),
    )
    assert "weights" not in plain.identity["model"] and rounded_run.identity["model"]["weights"] == "int8"
    assert bytes_settings("method=h2o", "model.weights=float32").identity == plain.identity
    assert bytes_settings("model.dtype=bfloat16", "model.weights=bfloat16").model.weights is None
    assert rounded_run.baseline().identity["model"] == rounded_run.identity["model"]
    assert rounded_run.baseline().labels["setting"] == "model.weights=int8"


def test_what_is_loaded_is_rounded() -> None:
    spec = bytes_settings("method=h2o", "model.weights=int8", "model.pack_linear=false").model
    model, _ = load(spec)
    weight = next(module.weight for module in model.modules() if isinstance(module, nn.Linear))
    torch.testing.assert_close(rounded(weight, 8), weight, rtol=1e-6, atol=1e-7)
    other, _ = load(bytes_settings("method=h2o", "model.pack_linear=false").model)
    assert len(next(m.weight for m in other.modules() if isinstance(m, nn.Linear))[0].unique()) > 60
    load.cache_clear()


@pytest.mark.parametrize(
    ("weights", "dtype", "words"),
    [
        ("int4", "float32", "weights must be float32, float16, bfloat16, int8 or null"),
        ("bfloat16", "float16", "weights=bfloat16 needs model.dtype=float32, got float16"),
        ("float32", "bfloat16", "weights=float32 needs model.dtype=float32, got bfloat16"),
    ],
)
def test_weights_that_a_model_cannot_have(weights: str, dtype: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_weights(weights, dtype)
    with pytest.raises(ConfigError, match=rf"model\.{words[:7]}"):
        bytes_settings(f"model.weights={weights}", f"model.dtype={dtype}")
