"""Layer budgets: whole numbers that add up, real buffers of that size, and kept sets of each layer's own share."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_kept_sets import masks_by_hand
from tiny import CONFIGS, LETTERS, distinct, feed, stock, tiny

from kvexp.core import Budget, CacheConfig, Cadence, Method
from kvexp.core.budget import PromptSizes
from kvexp.core.budget_resolution import layer_slots, least_slots
from kvexp.core.budget_shares import CakeLayers, LayerBudgets, PyramidLayers, layer_budgets_of
from kvexp.generate import generate, pad_left
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache
from kvexp.hf.cache import MultiMethodCache
from kvexp.methods import CAKE, H2O, Full, Ideal, KVzip, PyramidKV, SnapKV, StreamingLLM, Window
from kvexp.util.errors import ConfigError

DEEP = {"num_hidden_layers": 5}
LENGTHS, BUDGET = (57, 47, 41), 36  # of the last, no layer can have more than 5 above the mean
PROMPTS = [row[:n].tolist() for row, n in zip(distinct(17, 3, 57), LENGTHS, strict=True)]
WITHIN = st.integers(1, 300)


# -- shares ------------------------------------------------------------------------------------------------------------


@given(WITHIN, st.integers(0, 300), WITHIN, st.integers(1, 7), st.floats(1, 50), st.sampled_from(["paper", "kvpress"]))
def test_shares_of_a_pyramid_fall_and_add_up(
    slots: int, more: int, least: int, layers: int, beta: float, form: Any
) -> None:
    least, length = min(least, slots), slots + more
    shares = PyramidLayers(beta, form).share(slots, length, least, layers)
    assert sum(shares) == slots * layers and len(shares) == layers
    assert shares == sorted(shares, reverse=True) and (shares[0] <= length or more == 0)
    assert min(shares) >= least


@given(WITHIN, st.integers(1, 300), WITHIN, st.lists(st.floats(0, 1e9), min_size=2, max_size=7), st.integers(2, 40))
def test_shares_of_cake_add_up_within_the_prompt(
    slots: int, more: int, least: int, preferences: list[float], window: int
) -> None:
    least, length, layers = min(least, slots), slots + more, len(preferences)
    shares = CakeLayers(observed=window).share(slots, length, least, layers, preferences)
    assert sum(shares) == slots * layers
    assert max(shares) <= length and min(shares) >= least
    base = max(least, min(window, slots))
    if slots > base and sum(preferences) > 0:
        assert shares == oracles.cake_budgets(slots, length, base, preferences)


def test_pyramid_of_kvpress() -> None:
    """Numbers recorded from its PyramidKVPress: 4 layers, 4096 tokens, half of them, window 64."""
    assert PyramidLayers(form="kvpress").share(2048, 4096, 64, 4) == [3994, 2697, 1399, 102]
    assert PyramidLayers(form="kvpress").share(1024, 4096, 64, 4) == [1024] * 4  # its top layer would have 51
    assert PyramidLayers().share(1024, 4096, 64, 4) == [64 + each for each in (1872, 1264, 656, 48)]


def test_cake_of_the_authors() -> None:
    """Numbers of adjust_budgets in their cake/utils.py (commit c4675ce): with and without a layer that is full."""
    even, full = CakeLayers().share(128, 1000, 32, 4, [1, 2, 3, 4.5]), CakeLayers().share(128, 150, 32, 4, [1, 1, 1, 9])
    assert [each - 32 for each in even] == [37, 74, 109, 164]
    assert [each - 32 for each in full] == [89, 89, 88, 118]


def test_what_all_layers_share_is_what_a_method_does_not_protect() -> None:
    assert least_slots(SnapKV(window=32), 100, 500, True) == 32
    assert least_slots(StreamingLLM(n_sinks=4), 100, 500, True) == 5  # the token being generated is one
    assert least_slots(H2O(), 100, 500, True) == 1
    budget, prompts = Budget(kv_ratio=0.58, layers="pyramid"), PromptSizes([100], 100, 9, 5)  # 58: 0.58 * 100 < 58
    shares = [layer_slots(SnapKV(), budget, prompts, i)[0] for i in range(5)]
    assert shares == [83, 70, 58, 46, 33]


def test_a_budget_that_holds_the_prompt_is_not_shared_out() -> None:
    for how in (PyramidLayers(), CakeLayers()):
        assert how.share(50, 50, 8, 3, [1, 2, 3]) == [50] * 3
        assert how.share(60, 50, 8, 3, [1, 2, 3]) == [60] * 3
    assert LayerBudgets().share(5, 50, 1, 3) == [5] * 3


# -- caches ------------------------------------------------------------------------------------------------------------


def filled(
    method: Method | CacheConfig, rows: list[int], budget: Budget | None = None, chunk: int | None = None, **how: Any
) -> EvictionCache:
    """A cache of five layers after these prompts, padded on the left."""
    model = tiny("llama", **DEEP)
    ids, mask = pad_left([PROMPTS[row] for row in rows], 0, "cpu")
    cache = EvictionCache(model, method, budget, prompt_tokens=ids.shape[1], tokenizer=LETTERS, **how)
    return feed(cache, model, ids, ids[:, :0], mask=mask, chunk=chunk).cache


def kept(cache: EvictionCache, row: int) -> list[list[list[int]]]:
    return [state.kept_positions()[row] for state in cache.layer_states]


def shares_of(row: int, base: int, tau1: float = 1.0, tau2: float = 1.0) -> list[int]:
    """CAKE's, from what a stock model's last 32 queries look at."""
    model, ids, heads = stock("llama", **DEEP), torch.tensor([PROMPTS[row]]), CONFIGS["llama"]["num_attention_heads"]
    seen: list[torch.Tensor] = []
    causal = torch.ones(ids.shape[1], ids.shape[1]).tril().bool().expand(DEEP["num_hidden_layers"], heads, -1, -1)
    with torch.inference_mode(), masks_by_hand(model, causal, seen, []):
        model(ids)
    preferences = []
    for rows in seen:
        last = [[dict(enumerate(query)) for query in head[-32:].tolist()] for head in rows]
        preferences.append(oracles.cake_preference(last, ids.shape[1], tau1, tau2))
    return oracles.cake_budgets(BUDGET, ids.shape[1], base, preferences)


@pytest.mark.parametrize("method", [H2O(), Window(), KVzip(n_sinks=1, chunk=30)], ids=lambda method: method.name)
def test_cake_around_any_method_keeps_what_the_method_keeps_of_each_share(method: Method) -> None:
    cache = filled(method, [0], Budget(tokens=BUDGET, layers="cake"))
    shares = shares_of(0, 32)
    assert len(set(shares)) > 2
    for layer, share in enumerate(shares):
        alone = filled(method, [0], Budget(tokens=share))
        assert kept(cache, 0)[layer] == kept(alone, 0)[layer]


@pytest.mark.parametrize(("method", "layers"), [(CAKE(tau1=1.6, tau2=0.4), None), (SnapKV(), "cake")])
def test_cake_by_itself_and_around_snapkv(method: Method, layers: Any) -> None:
    cache = filled(method, [1], Budget(tokens=BUDGET, layers=layers))
    shares = shares_of(1, 32, 1.6, 0.4) if layers is None else shares_of(1, 32)
    assert [len(head) + 1 for heads in kept(cache, 1 - 1) for head in heads[:1]] == shares
    uniform = filled(method, [1], Budget(tokens=BUDGET, layers="uniform"))
    assert {len(head) for heads in kept(uniform, 0) for head in heads} == {BUDGET - 1}


METHODS = [
    CAKE(),
    H2O(),
    pytest.param(PyramidKV(), marks=pytest.mark.slow),
    pytest.param(KVzip(n_sinks=1, chunk=30, instruct=False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", [{"mode": "compact"}, {"mode": "mask"}, {"chunk": 13}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_modes_batches_padding_and_chunks_agree(method: Method, how: dict[str, Any]) -> None:
    budget = Budget(tokens=BUDGET, layers="cake" if method.name in ("h2o", "kvzip") else None)
    together = filled(method, [0, 1, 2], budget, **how)
    for row in range(3):
        assert kept(together, row) == kept(filled(method, [row], budget), 0)


def bytes_of(cache: EvictionCache) -> list[int]:
    return [state.slots.keys.nbytes + state.slots.values.nbytes for state in cache.layer_states if state.slots]


@pytest.mark.parametrize("layers", ["pyramid", "cake"])
@pytest.mark.parametrize("mode", ["compact", "overwrite"])
def test_buffers_are_as_large_in_all_as_those_of_uniform_budgets(layers: Any, mode: Any) -> None:
    """Bytes of the tensors. In mode overwrite every layer is rounded up to a multiple of four slots on a CPU."""
    uniform, shared = (filled(H2O(), [0], Budget(tokens=BUDGET, layers=how), mode=mode) for how in ("uniform", layers))
    a_slot = bytes_of(uniform)[0] // (BUDGET if mode == "overwrite" else BUDGET - 1)
    spare = 3 * len(bytes_of(shared)) * a_slot if mode == "overwrite" else 0
    assert abs(sum(bytes_of(shared)) - sum(bytes_of(uniform))) <= spare
    assert len(set(bytes_of(shared))) > 1
    for cache in (uniform, shared):
        assert cache.memory_tracker.layer_bytes == bytes_of(cache)
        assert cache.memory_tracker.bytes == sum(bytes_of(cache))


def test_layers_wait_for_the_last_one_with_the_whole_prompt() -> None:
    shared, uniform = (
        filled(CAKE(), [0], Budget(tokens=BUDGET, layers=how)).memory_tracker for how in (None, "uniform")
    )
    whole = sum(filled(Full(), [0]).memory_tracker.layer_bytes)
    assert shared.peak_bytes >= whole > uniform.peak_bytes


def decoded(method: Method, **options: Any) -> Any:
    budget = Budget(kv_ratio=0.8, layers="cake" if method.name == "h2o" else None)
    params = GenerationParams(max_new_tokens=9, eos=None, **options)
    return generate(tiny("llama", **DEEP), PROMPTS, method, budget, decoding=params)


@pytest.mark.parametrize("method", [CAKE(), H2O(), PyramidKV()], ids=lambda method: method.name)
def test_generation_in_a_batch_in_chunks_and_alone(method: Method) -> None:
    whole = decoded(method)
    assert decoded(method, prefill_chunk=11).tokens == whole.tokens
    for row, prompt in enumerate(PROMPTS):
        budget = Budget(kv_ratio=0.8, layers="cake" if method.name == "h2o" else None)
        params = GenerationParams(max_new_tokens=9, eos=None)
        alone = generate(tiny("llama", **DEEP), [prompt], method, budget, decoding=params)
        assert alone.tokens[0] == whole.tokens[row]


def test_beams_take_the_layer_budgets_of_their_prompt() -> None:
    beams = decoded(H2O(), num_beams=3)
    sizes = [[len(head) for head in heads] for heads in kept(beams.cache, 0)]
    greedy = [[len(head) for head in heads] for heads in kept(decoded(H2O()).cache, 0)]
    assert sizes == greedy


def test_a_shared_prefill_gives_every_cache_its_own_layer_budgets() -> None:
    model, ids = tiny("llama", **DEEP), torch.tensor([PROMPTS[0]])
    configs = [
        CacheConfig(H2O(), Budget(tokens=BUDGET, layers="cake")),
        CacheConfig(CAKE(), Budget(tokens=BUDGET)),
        CacheConfig(SnapKV(), Budget(tokens=BUDGET)),
        CacheConfig(Full()),
    ]
    caches = [EvictionCache(model, config, prompt_tokens=ids.shape[1]) for config in configs]
    with torch.inference_mode():
        model(ids, past_key_values=MultiMethodCache(caches, 1), use_cache=True)
    for config, cache in zip(configs, caches, strict=True):
        assert kept(cache, 0) == kept(filled(config, [0]), 0)


def test_a_fork_and_a_second_prompt_have_budgets_of_their_own() -> None:
    cache = filled(CAKE(), [0, 1], Budget(tokens=BUDGET))
    assert kept(cache.fork([1, 1]), 1) == kept(cache, 1)
    model, ids = tiny("llama", **DEEP), torch.tensor([PROMPTS[2]])
    again = EvictionCache(model, CAKE(), Budget(tokens=BUDGET))
    with torch.inference_mode():
        model(torch.tensor([PROMPTS[0]]), past_key_values=again, use_cache=True)
        again.reset()
        model(ids, past_key_values=again, use_cache=True)
    assert kept(again, 0) == kept(filled(CAKE(), [2], Budget(tokens=BUDGET)), 0)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_is_refused_before_a_model_loads() -> None:
    with pytest.raises(ConfigError, match=r"layers must be one of uniform, pyramid, cake or null, got 'funnel'"):
        Budget(tokens=8, layers="funnel")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="method ideal drops nothing at the end of the prompt"):
        CacheConfig(Ideal(), Budget(tokens=8, layers="cake"), mode="mask")
    with pytest.raises(ConfigError, match=r"set evict_at_prefill=true, or budget\.layers=uniform"):
        CacheConfig(H2O(), Budget(tokens=8, layers="cake"), Cadence(at_prefill=False))
    with pytest.raises(ConfigError, match=r"pyramidkv shares .* budget\.heads=global says otherwise"):
        CacheConfig(PyramidKV(), Budget(tokens=8, heads="global"))
    with pytest.raises(ConfigError, match=r"cake shares .* budget\.threshold=1 says .* give kv_ratio "):
        CacheConfig(CAKE(), Budget(threshold=1.0))
    for method, layers, named in ((H2O(), "cake", r"budget\.layers=cake"), (CAKE(), None, "method cake")):
        with pytest.raises(ConfigError, match=rf"{named} shares slots out among layers by a whole prompt"):
            CacheConfig(method, Budget(tokens=8, layers=layers), bounded_chunk=8)
        with pytest.raises(ConfigError, match=rf"{named} gives layers numbers that no span"):
            CacheConfig(method, Budget(tokens=8, layers=layers), keep="span")
    for wrong in ({"beta": 0.5}, {"form": "paper2"}):
        with pytest.raises(ConfigError, match=r"beta must be at least 1|form must be one of paper, kvpress"):
            PyramidKV(**wrong)
    for wrong in ({"tau1": 0.0}, {"window": 1}, {"kernel": 4}, {"gamma": -1.0}):
        with pytest.raises(ConfigError, match="must be"):
            CAKE(**wrong)  # type: ignore[arg-type]


def test_a_method_goes_by_its_own_settings_where_its_rule_is_named() -> None:
    named = {rule: Budget(tokens=8, layers=rule) for rule in ("uniform", "pyramid", "cake")}  # type: ignore[arg-type]
    assert layer_budgets_of(PyramidKV(beta=2.0), named["pyramid"]) == PyramidLayers(2.0)
    assert layer_budgets_of(CAKE(tau1=2.0, window=8), named["cake"]) == CakeLayers(2.0, 1.0, 8)
    assert layer_budgets_of(PyramidKV(beta=2.0), named["cake"]) == CakeLayers()
    assert layer_budgets_of(H2O(), named["pyramid"]) == PyramidLayers()
    assert layer_budgets_of(PyramidKV(beta=2.0), named["uniform"]) == LayerBudgets()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [1, 2, 18, 33])
def test_a_prompt_within_cakes_window_has_no_preference_and_no_warning(length: int) -> None:
    logits = torch.randn(1, 2, 3, min(length, 32), length, generator=torch.Generator().manual_seed(0))
    (preference,) = CakeLayers().preference(logits, [length])
    assert (preference > 0) == (length > 32)
