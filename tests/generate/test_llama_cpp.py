"""llama.cpp: in float32 it is transformers' full cache and kvexp's streaming_llm; its layout, types and rotation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from llama_package import needs_package
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvexp.core import Budget
from kvexp.core.codecs import CODECS
from kvexp.generate import llama_cpp as driver
from kvexp.generate import prefill
from kvexp.generate.engine import kl_of, log_softmax, write_gguf
from kvexp.generate.llama_cpp import LOG, TYPES, Eviction, LlamaCpp, LlamaEngine, Weights, check_layout, library
from kvexp.generate.prefill import decode_step
from kvexp.hf import load_model, load_tokenizer, patch_model
from kvexp.hf.gguf import GgufHeader
from kvexp.methods import StreamingLLM
from kvexp.tasks.articles import articles
from kvexp.util.errors import CacheError, ConfigError

TESTBED = "kvexp/tasks/testbed_models/testbed_gqa"
NEW = 24


@pytest.fixture(scope="module")
def model():
    """A trained model that comes with kvexp, in float32."""
    return AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32)


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(model, path, np.float32)
    return Weights(path)


def prompt(length, seed=0):
    return torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@needs_package
@torch.no_grad()
@pytest.mark.parametrize("length", [41, 700])
def test_its_full_cache_in_f32_is_transformers(model, weights, length):
    ids, text = prompt(length), prompt(NEW, 1)
    expected = model(torch.tensor([ids + text[:-1]])).logits[0, length - 1 :].numpy()
    found = LlamaEngine(weights, LlamaCpp()).logits(ids, text)
    assert found.shape == expected.shape
    assert abs(np.mean(kl_of(expected, found))) < 1e-9


@needs_package
@torch.no_grad()
def test_its_greedy_answer_says_the_log_probabilities_and_stops_at_an_end(model, weights):
    ids, engine = prompt(200), LlamaEngine(weights, LlamaCpp())
    answer = engine.answer(ids, NEW)
    expected = model(torch.tensor([ids + answer.tokens[:-1]])).logits[0, 199:].numpy()
    assert answer.tokens == expected.argmax(-1).tolist()
    chosen = log_softmax(expected)[range(NEW), answer.tokens]
    assert np.allclose(answer.logprobs, chosen, atol=5e-5, rtol=0)
    assert (answer.blocks, answer.peak_blocks) == (200 + NEW - 1,) * 2
    assert engine.block_bytes == 2 * 4 * 4 * 32 * 4  # keys and values, layers, kv heads, channels, bytes
    end = answer.tokens[3]
    stopped = engine.answer(ids, NEW, [end])
    assert stopped.tokens == answer.tokens[: answer.tokens.index(end) + 1]
    assert end not in engine.answer(ids, NEW, [end], NEW).tokens


@needs_package
@torch.no_grad()
@pytest.mark.parametrize(("positions", "renumbered"), [("original", False), ("renumbered", True)])
def test_removed_positions_are_kvexps_streaming_llm(weights, positions, renumbered):
    twin = patch_model(AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32))
    ids, text, held = prompt(300), prompt(NEW, 1), 64
    cache = prefill(twin, [ids], StreamingLLM(), Budget(tokens=held), max_new_tokens=NEW, positions=positions)
    rows = [cache.logits]
    for place, token in enumerate(text[:-1]):
        rows.append(decode_step(twin, torch.tensor([[token]]), torch.tensor([[300 + place]]), cache.cache))
    expected = torch.cat(rows).numpy()
    eviction = Eviction(
        lambda _: held - 1, lambda _, places, __: np.arange(4, max(4, len(places) + 5 - held)), renumbered
    )
    engine = LlamaEngine(weights, LlamaCpp(), eviction)
    assert abs(np.mean(kl_of(expected, engine.logits(ids, text)))) < 1e-9
    assert (
        min(kl_of(LlamaEngine(weights, LlamaCpp()).logits(ids, text)[1:], expected[1:])) > 1e-6
    )  # it is no full cache
    assert engine.answer(ids, NEW).blocks == held - 1
    assert (engine.first_eviction(300), engine.first_eviction(63), engine.first_eviction(60)) == (0, 1, 4)


@needs_package
def test_formats_are_stored_as_they_are_asked_for(weights):
    """A coarser format holds fewer bytes and is farther from the full cache."""
    ids, text = prompt(300), prompt(NEW, 1)
    full = LlamaEngine(weights, LlamaCpp()).logits(ids, text)
    sizes = {"f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}
    distances = []
    for name, size in sizes.items():
        engine = LlamaEngine(weights, LlamaCpp(cache_k=name))
        assert engine.block_bytes == 2 * 4 * 4 * 32 * size
        distances.append(np.mean(kl_of(full, engine.logits(ids, text))))
    assert 1e-9 < distances[0] < distances[1] / 10 < distances[2] / 100


@needs_package
def test_blocks_are_rotated_where_heads_are_of_64_unless_it_is_switched_off(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=64
    )
    write_gguf(LlamaForCausalLM(config), tmp_path / "model.gguf", np.float32)
    weights = Weights(tmp_path / "model.gguf")
    for options, size in ((LlamaCpp(cache_k="q8_0"), 64), (LlamaCpp(cache_k="q8_0", rotate=False), 0)):
        LOG.clear()
        LlamaEngine(weights, options).answer(prompt(8), 2)
        lines = [line for line in LOG if "n_rot_" in line]
        assert len(lines) == 2
        assert all(f"= {size}," in line for line in lines)
        monkeypatch.setenv(driver.NO_ROTATION, "1")  # a user's own, which the setting overrules and puts back
    assert driver.os.environ[driver.NO_ROTATION] == "1"


class StoredCache(DynamicCache):
    """transformers' cache with keys and values as formats of kvexp store them, before any query reads them."""

    def __init__(self, formats):
        super().__init__()
        self.formats = formats

    def update(self, keys, values, *more, **options):
        stored = (f.decode(f.encode(x), x.shape[-1]) for f, x in zip(self.formats, (keys, values), strict=True))
        return super().update(*stored, *more, **options)


def of_32_channels():
    """A trained model with heads of 32 channels, which are not rotated, and three texts."""
    return AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32), [prompt(300, seed) for seed in range(3)]


def of_64_channels(config=LlamaConfig, model=LlamaForCausalLM):
    """A model whose heads are large enough to be rotated; its weights are wide, so that what is stored matters."""
    torch.manual_seed(0)
    given = config(
        **{"vocab_size": 260, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3},
    )
    return model(given).eval(), [prompt(300, seed) for seed in range(3)]


@torch.no_grad()
def losses(model, weights, texts, codec, monkeypatch):
    """Mean KL by text [N, 3]: full cache to the engine's, full cache to kvexp's, the engine's to kvexp's."""
    formats = CODECS[codec].formats(SimpleNamespace(rotate=None, neighbours=True))

    def rounded(module, query, *more, **options):
        query = formats[0].query.decode(formats[0].query.encode(query), query.shape[-1])
        return sdpa_attention_forward(module, query, *more, **options)

    lost = []
    for first, *text in texts:
        ids = torch.tensor([[first, *text[:-1]]])
        full = model(ids).logits[0].numpy()
        with monkeypatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", rounded)
            twin = model(ids, past_key_values=StoredCache(formats)).logits[0].numpy()
        stored = LlamaEngine(weights, LlamaCpp(codec)).logits([first], text)  # every token is read as it is stored
        lost.append([np.mean(kl_of(*pair)) for pair in ((full, stored), (full, twin), (stored, twin))])
    return np.array(lost)


@needs_package
@pytest.mark.parametrize("codec", ["q8_0", "q4_0"])
@pytest.mark.parametrize("load", [of_32_channels, of_64_channels])
def test_kvexps_formats_lose_what_the_engines_do(load, codec, tmp_path, monkeypatch):
    """Mean KL within 3 % on three texts, and each distribution far nearer."""
    model, texts = load()
    write_gguf(model, tmp_path / "model.gguf", np.float32)
    engine, ours, apart = losses(model, Weights(tmp_path / "model.gguf"), texts, codec, monkeypatch).mean(0)
    assert ours == pytest.approx(engine, rel=0.03)
    assert apart < engine / 50


@pytest.fixture(scope="module", params=[(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
def family(request, tmp_path_factory):
    """A model whose RoPE turns neighbours in llama.cpp, and one whose does not, with the engine's weights."""
    model, _ = of_64_channels(*request.param)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(model, path, np.float32)
    return model, Weights(path)


def known_keys(model, ids):
    """transformers' keys [L, H, S, D]."""
    layers = model(torch.tensor([ids]), past_key_values=DynamicCache()).past_key_values.layers
    return torch.stack([layer.keys[0] for layer in layers])


KEYS = [("f32", True, 1e-5), ("f16", True, 0.01), ("q8_0", True, 0.01), ("q8_0", False, 0.01), ("q4_0", True, 0.15)]


@needs_package
@torch.no_grad()
@pytest.mark.parametrize("renumbered", [False, True])
@pytest.mark.parametrize(("kind", "rotate", "room"), KEYS)
def test_keys_that_are_read_are_transformers(family, kind, rotate, room, renumbered):
    """Keys are read in the order of positions, also where new tokens lie in cells that others have left.

    In blocks in the first layer alone: later ones are made of what was read from the cache before.
    """
    model, weights = family
    if renumbered and not rotate:
        pytest.skip("llama.cpp cannot move keys in such blocks")
    ids, engine = prompt(40), LlamaEngine(weights, LlamaCpp(kind, rotate=rotate))
    engine.check_keys(model)
    context = weights.context(engine.options, 1, 50)
    context.begin(ids)
    positions, keys = engine.keys(context)
    assert positions.tolist() == list(range(40))
    for found, known in list(zip(keys, known_keys(model, ids), strict=True))[: 3 if kind in driver.PLAIN else 1]:
        assert (found - known).norm() < room * known.norm()
    context.drop(np.array([2, 3, 20]), renumbered=renumbered)
    context.read([7])
    context.read([8])
    positions, keys = engine.keys(context)
    places = [*(place for place in range(40) if place not in (2, 3, 20)), 40, 41]
    assert context.held.tolist() == places
    assert positions.tolist() == (list(range(39)) if renumbered else places)
    text = [*ids, 7, 8]
    at = [text[place] for place in places] if renumbered else text
    first = known_keys(model, at)[0][:, positions]  # a first layer's keys depend on no other token
    assert (keys[0] - first).norm() < room * first.norm()


@needs_package
@torch.no_grad()
@pytest.mark.parametrize(
    ("place", "name", "other", "said"),
    [
        (driver, "STATE", 1, "saved its cache in another way"),
        (LlamaEngine, "layers", 2, "saved its cache in another way"),
        (LlamaEngine, "rows", [256, 256], "saved its cache in another way"),
        (GgufHeader, "architecture", "qwen2", "keys of layer 0 .* are .* of their size from the model's"),
    ],
)
def test_a_cache_that_is_saved_otherwise_is_refused(model, tmp_path, monkeypatch, place, name, other, said):
    write_gguf(model, tmp_path / "model.gguf", np.float32)
    engine = LlamaEngine(Weights(tmp_path / "model.gguf"), LlamaCpp())
    monkeypatch.setattr(engine if place is LlamaEngine else place, name, other)
    with pytest.raises(CacheError, match=said):
        engine.check_keys(model)


@needs_package
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("codec", ["q8_0", "q4_0"])
def test_kvexps_formats_lose_what_the_engines_do_in_a_real_model(smollm2, codec, tmp_path, monkeypatch):
    """Mean KL of twenty texts within 3 %, and no farther than chance allows.

    Thirty layers deep a rounding that falls the other way has changed all later ones, so that both lose as much as they
    are apart: three texts differ by 10 %.
    """
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    model.set_attn_implementation("sdpa")
    write_gguf(model, tmp_path / "model.gguf", np.float32)
    texts = [tokenizer(article.text)["input_ids"][:300] for article in articles()[:20]]
    engine, ours, _ = losses(model, Weights(tmp_path / "model.gguf"), texts, codec, monkeypatch).T
    more = np.log(ours / engine)
    assert more.std(ddof=1) / len(more) ** 0.5 < 0.03
    assert ours.mean() == pytest.approx(engine.mean(), rel=0.03)


@needs_package
def test_another_layout_is_refused():
    real = library()
    moved = real.llama_context_default_params()
    moved.type_k = 7
    other = SimpleNamespace(
        llama_context_default_params=lambda: moved,
        llama_model_default_params=real.llama_model_default_params,
        ggml_type_name=lambda number: b"q9" if number == TYPES["q4_0"] else real.ggml_type_name(number),
    )
    with pytest.raises(ConfigError, match=r"laid out in another way than that of 2026.* \(type_k=7, q4_0\)"):
        check_layout(other)


def test_without_the_package_or_with_another_version_the_error_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise driver.PackageNotFoundError(name)

    for version, said in (
        (absent, "it is not installed here"),
        (lambda _: "2027.1.1", "version 2027.1.1 is installed"),
    ):
        monkeypatch.setattr(driver, "version", version)
        with pytest.raises(ConfigError, match=rf"{said}.*pip install 'kvexp\[llama_cpp\]'"):
            LlamaCpp().identity()


def test_settings_that_are_left_open_are_what_the_format_needs():
    plain, eight = LlamaCpp(), LlamaCpp(cache_k="q8_0")
    assert (plain.cache_v, plain.flash, plain.rotate) == ("f32", False, False)
    assert (eight.cache_v, eight.flash, eight.rotate) == ("q8_0", True, True)
    assert eight.reference() == plain
    assert LlamaCpp(cache_k="q8_0", weights="file").reference() == LlamaCpp(weights="file") != plain
    with pytest.raises(ConfigError, match="cache_v=q4_0 needs flash attention"):
        LlamaCpp(cache_k="q4_0", flash=False)
