"""OpenVINO GenAI: it has the model's weights, agrees with itself and, in float32, with transformers' full cache."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvexp.core import Budget
from kvexp.generate.engine import check_family, write_gguf
from kvexp.generate.openvino import WHEEL, Engine, Eviction, OpenVINO, genai
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.cpu_linear import round_weights
from kvexp.hf.gguf import read_header, write_weights
from kvexp.hf.load import random_config
from kvexp.methods import OpenVINO as Policy
from kvexp.util.errors import ConfigError

NEW = 48


@pytest.fixture(scope="module")
def model():
    """A trained model that comes with kvexp, its matrices rounded to float16."""
    made = AutoModelForCausalLM.from_pretrained("kvexp/tasks/testbed_models/testbed_gqa", dtype=torch.float32)
    round_weights(made, "float16")
    return made


@pytest.fixture(scope="module")
def twin():
    """kvexp's run of the same model."""
    made = AutoModelForCausalLM.from_pretrained("kvexp/tasks/testbed_models/testbed_gqa", dtype=torch.float32)
    round_weights(made, "float16")
    return patch_model(made)


@pytest.fixture(scope="module")
def gguf(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(model, path)
    return path


@pytest.fixture(scope="module")
def wheel():
    return pytest.importorskip("openvino_genai", reason=f"needs {WHEEL}: pip install 'kvexp[openvino]'")


def prompt(length, seed=0):
    return torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_written_file_holds_the_models_weights(model, gguf, tmp_path):
    """Read back by kvexp's reader of llama.cpp's files, which knows nothing of the writer."""
    from safetensors.torch import load_file

    write_weights(read_header(gguf), tmp_path, lambda: None)
    found = load_file(tmp_path / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            assert torch.equal(found[name], weight), name


def test_a_family_that_the_engine_cannot_read_is_refused():
    with pytest.raises(ConfigError, match="reads models of type llama, qwen2, qwen3, and this one is gptj"):
        check_family(random_config("gptj"))


def test_without_the_wheel_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openvino_genai", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvexp\[openvino\]'"):
        genai()


@torch.no_grad()
@pytest.mark.parametrize("length", [41, 300, 511, 700])
def test_its_full_cache_is_transformers_in_float32(wheel, model, gguf, length):
    ids = prompt(length)
    engine = Engine(gguf, 1024)
    answer = engine.answer(ids, NEW)
    assert engine.answer(ids, NEW).logprobs == answer.logprobs  # it agrees with itself, to the bit
    expected = model(torch.tensor([ids + answer.tokens])).logits[0, length - 1 : -1].log_softmax(-1)
    assert len(answer.tokens) == NEW
    assert expected.argmax(-1).tolist() == answer.tokens
    chosen = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.logprobs), chosen, atol=5e-5, rtol=0)
    assert answer.peak_blocks == -(-(length + NEW - 1) // 32)
    assert engine.block_bytes == 2 * 4 * 4 * 32 * 32 * 4  # keys and values, layers, heads, tokens, channels, bytes


def test_blocks_are_what_its_sizes_say(wheel, gguf):
    """At most 192 tokens and a partly filled block are held once the prompt has been read."""
    ids = prompt(700)
    answer = Engine(gguf, 1024, Eviction(192, 32, 64)).answer(ids, NEW)
    assert (answer.peak_blocks, answer.blocks) == (22, 7)
    again = Engine(gguf, 1024, Eviction(192, 32, 64, window=0)).answer(ids, NEW)
    assert again.tokens != answer.tokens


@torch.no_grad()
def forced(model, method, size, ids, tokens):
    """Log-probabilities [tokens, V] of kvexp's twin, which is fed the engine's tokens one by one."""
    cache = EvictionCache(model, method, Budget(tokens=size), max_new_tokens=len(tokens))
    logits = [model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]]
    for place, token in enumerate(tokens[:-1]):
        at = torch.tensor([[len(ids) + place]])
        step = model(torch.tensor([[token]]), past_key_values=cache, position_ids=at, use_cache=True)
        logits.append(step.logits[0, -1])
    return torch.stack(logits).log_softmax(-1), len(cache.layer_states[0].kept_positions()[0][0])


def method_of(asked):
    """kvexp's method of the same settings."""
    return Policy(
        aggregation=asked.mode, start_size=asked.start, recent_size=asked.recent, window=asked.window,
        crush=asked.crush, anchor=asked.anchor, crush_seed=asked.seed,
    )  # fmt: skip


SETTINGS = [
    {"mode": "norm_sum"},
    {"mode": "sum", "window": 0},
    {"mode": "norm_sum", "crush": 2},
    {"mode": "norm_sum", "crush": 2, "anchor": "alternating"},
    {"mode": "sum"},
    {"mode": "norm_sum", "window": 0},
    {"mode": "norm_sum", "window": 32},
    {"mode": "sum", "crush": 1, "anchor": "mean"},
    {"mode": "sum", "crush": 3, "anchor": "zeros"},
    {"mode": "norm_sum", "crush": 3, "seed": 11},
]
SIZES = [(192, 32, 64), (256, 64, 32), (128, 32, 64)]
LENGTHS = [100, 300, 511, 700]


def each():
    """Every setting with one size and length in every run of the tests; with all others in the slow ones."""
    for case in product(range(len(SETTINGS)), range(len(SIZES)), LENGTHS):
        number, sizes, length = case
        quick = sizes == number % len(SIZES) and length == LENGTHS[number % len(LENGTHS)]
        yield pytest.param(*case, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("number", "sizes", "length"), list(each()))
def test_kvexps_twin_keeps_what_the_engine_keeps(wheel, twin, gguf, number, sizes, length):
    """Greedy tokens are equal and their log-probabilities as close as without evictions: no other block has gone."""
    (size, start, recent), given = SIZES[sizes], SETTINGS[number]
    asked, ids = Eviction(size, start, recent, **given), prompt(length, seed=length)
    answer = Engine(gguf, 1024, asked).answer(ids, 120)
    found, held = forced(twin, method_of(asked), size, ids, answer.tokens)
    assert answer.blocks == -(-held // 32)
    assert found.argmax(-1).tolist() == answer.tokens
    chosen = found.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.logprobs), chosen, atol=1e-4, rtol=0)


def test_its_default_cache_takes_a_byte_and_scales_for_each_number(wheel, gguf):
    """Per token and head, a scale and a zero point of 4 bytes each."""
    engine = Engine(gguf, 512, None, OpenVINO(cache="u8"))
    engine.answer(prompt(300), 2)
    assert engine.block_bytes == 2 * 4 * 4 * 32 * (32 + 8)


def test_adaptive_rkv_does_not_run_on_a_cpu(wheel, gguf):
    """The wheel never computes the diversity that its eviction asks for. Where this fails, it does: measure it."""
    with pytest.raises(RuntimeError, match="diversity must be registered"):
        Engine(gguf, 512, Eviction(192, 32, 64, "adaptive_rkv")).answer(prompt(300), 4)
