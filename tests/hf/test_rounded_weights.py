"""`model.weights`: weights rounded after loading, a model with a full cache of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from test_bytes import settings
from tiny import stock, tokens
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvexp.hf.cpu_linear import check_weights, round_weights, rounded
from kvexp.run.model_spec import load
from kvexp.util import ConfigError


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_eight_bits_are_those_of_linear_layers(family: str) -> None:
    model = copy.deepcopy(stock(family))
    before = copy.deepcopy(model.state_dict())
    round_weights(model, "int8")
    tied = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module.weight is not tied:
            rows = module.weight if isinstance(module, nn.Linear) else module.weight.T
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
    plain, rounded_run = settings("method=h2o"), settings("method=h2o", "model.weights=int8")
    assert "weights" not in plain.identity["model"] and rounded_run.identity["model"]["weights"] == "int8"
    assert settings("method=h2o", "model.weights=float32").identity == plain.identity
    assert settings("model.dtype=bfloat16", "model.weights=bfloat16").model.weights is None
    assert rounded_run.baseline().identity["model"] == rounded_run.identity["model"]
    assert rounded_run.baseline().labels["setting"] == "model.weights=int8"


def test_what_is_loaded_is_rounded() -> None:
    spec = settings("method=h2o", "model.weights=int8", "model.pack_linear=false").model
    model, _ = load(spec)
    weight = next(module.weight for module in model.modules() if isinstance(module, nn.Linear))
    torch.testing.assert_close(rounded(weight, 8), weight, rtol=1e-6, atol=1e-7)
    other, _ = load(settings("method=h2o", "model.pack_linear=false").model)
    assert len(next(m.weight for m in other.modules() if isinstance(m, nn.Linear))[0].unique()) > 60
    load.cache_clear()


@pytest.mark.parametrize(
    ("weights", "dtype", "words"),
    [
        ("int4", "float32", "weights must be float32, bfloat16, int8 or null"),
        ("bfloat16", "float16", "weights=bfloat16 needs model.dtype=float32, got float16"),
        ("float32", "bfloat16", "weights=float32 needs model.dtype=float32, got bfloat16"),
    ],
)
def test_weights_that_a_model_cannot_have(weights: str, dtype: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_weights(weights, dtype)
    with pytest.raises(ConfigError, match=rf"model\.{words[:7]}"):
        settings(f"model.weights={weights}", f"model.dtype={dtype}")
