"""CacheConfig: what is decided in it is decided once, and what cannot be is said in the user's words."""

import dataclasses

import pytest
import yaml
from tiny import tiny

from kvexp.build import CACHE, STORAGE, build_cache
from kvexp.core import Budget, CacheConfig, Cadence, Quantization
from kvexp.errors import ConfigError
from kvexp.generate import GenerationParams, continuation_logprobs, generate, prefill
from kvexp.methods import A2SF, H2O, Full, Ideal, SnapKV, StreamingLLM, Window
from kvexp.paths import CONF

HALF = Budget(kv_ratio=0.5)
PROMPT = [list(range(3, 20))]


@pytest.mark.parametrize(
    ("method", "mode"), [(Window(), "overwrite"), (Ideal(), "mask"), (A2SF(score_source="full"), "mask")]
)
def test_auto_is_a_simulation_where_there_is_nothing_else(method, mode):
    assert CacheConfig(method, HALF, mode="auto").mode == mode
    assert build_cache(method, HALF, {}).mode == mode, "as configurations have it"
    if mode == "mask":
        with pytest.raises(ConfigError, match="set mode=mask"):
            CacheConfig(method, HALF)


def test_positions_are_the_papers_unless_told():
    assert not CacheConfig(H2O(), HALF).renumbered and CacheConfig(StreamingLLM(), HALF).renumbered
    assert not CacheConfig(StreamingLLM(), HALF, positions="original").renumbered


def test_a_method_that_evicts_at_prefill_only_has_its_cadence_as_given():
    """The run's hash has the field; what happens goes by evict_every."""
    config = CacheConfig(SnapKV(), HALF)
    assert (config.cadence, config.evict_every) == (Cadence(), None)
    assert CacheConfig(H2O(), HALF, Cadence(every=3)).evict_every == 3


WRONG = {
    "mode": (
        lambda: CacheConfig(H2O(), HALF, mode="masked"),
        "mode must be one of overwrite, compact, mask, auto, got 'm",
    ),
    "positions": (
        lambda: CacheConfig(H2O(), HALF, positions="x"),
        "positions must be one of original, renumbered, got",
    ),
    "observe": (
        lambda: CacheConfig(H2O(), HALF, observe="x"),
        "observe must be one of blocked, naive, triton, got 'x'",
    ),
    "cadence": (lambda: CacheConfig(H2O(), HALF, {"mode": "mask"}), "cadence must be a Cadence such as"),
    "method": (lambda: CacheConfig("h2o", HALF), "method must be a method object such as"),
    "budget": (lambda: CacheConfig(H2O(), 0.5), "budget must be a Budget such as"),
    "no budget": (lambda: CacheConfig(H2O()), "needs a budget"),
    "both": (lambda: CacheConfig.of(CacheConfig(Full()), HALF, mode="mask"), "a CacheConfig holds budget, mode itself"),
    "key": (
        lambda: build_cache(H2O(), HALF, {"modes": "mask"}),
        "cache.modes is not a setting of cache; it has: mode, ",
    ),
    "type": (lambda: build_cache(H2O(), HALF, {"evict_every": "8"}), r"cache\.evict_every"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be(case):
    make, match = WRONG[case]
    with pytest.raises(ConfigError, match=match):
        make()


def test_the_groups_defaults_are_those_of_the_configuration():
    written = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["cache"]
    assert written == CACHE
    fields = {field.name for field in dataclasses.fields(CacheConfig)}
    assert set(CACHE) - {"evict_at_prefill", "evict_every", *STORAGE} <= fields
    assert set(STORAGE) - {"bits"} == {field.name for field in dataclasses.fields(Quantization)}


def test_one_object_stands_for_method_budget_and_keywords():
    model, decoding = tiny("llama"), GenerationParams(5, eos=None)
    config = CacheConfig(H2O(), HALF, Cadence(every=2), mode="compact")
    one = generate(model, PROMPT, config, decoding=decoding)
    other = generate(model, PROMPT, H2O(), HALF, decoding=decoding, cadence=Cadence(every=2), mode="compact")
    assert one.tokens == other.tokens and one.cache.config == other.cache.config == config
    assert prefill(model, PROMPT, config).cache.layer_states[0].config is config
    (mine,), (same,) = (continuation_logprobs(model, PROMPT, [[5, 6, 7]], *what) for what in ((config,), (H2O(), HALF)))
    assert len(mine) == len(same) == 3
    with pytest.raises(ConfigError, match=r"cadance is not a keyword .* did you mean cadence"):
        generate(model, PROMPT, H2O(), HALF, cadance=Cadence(every=2))
