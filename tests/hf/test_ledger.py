"""Models whose layers keep different things: which of them are evicted from, and what all of them take in bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from test_conf import composed
from twins import ids_of, twin

from kvexp.core import Budget, BytesBudget, CacheConfig, Quantization
from kvexp.core.budget import OtherLayers, PromptSizes
from kvexp.generate import receipts
from kvexp.generate.prefill import prefill
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.traits import Layer, held_layers, traits_of
from kvexp.methods import H2O, Full
from kvexp.results.read import read_runs
from kvexp.results.table import bytes_table
from kvexp.results.table import table as quality
from kvexp.results.views import VIEWS
from kvexp.run.batches import evaluate_run
from kvexp.run.settings import settings_of
from kvexp.run.store import run_hash
from kvexp.util.errors import ConfigError

MIXED = (
    "model=tiny",
    "model.family=gemma3_text",
    "model.config.num_hidden_layers=6",
    "+model.config.head_dim=16",
    "+model.config.sliding_window=32",
)
SLIDING = ("model=tiny", "model.family=mistral", "+model.config.sliding_window=32")


def settings(*words):
    return settings_of(*composed(*words))


# -- which layers ------------------------------------------------------------------------------------------------------


def test_which_layers_are_held():
    full, window, chunk, state = Layer("full"), Layer("window", 8), Layer("chunk", 8), Layer("state")
    for layers, auto, always, never in (
        ([full, full], (0, 1), (0, 1), (0, 1)),
        ([window, full, window], (1,), (0, 1, 2), (1,)),
        ([window, window], (0, 1), (0, 1), ()),
        ([chunk, full, state], (1,), (1,), (1,)),
        ([state, window, Layer("hybrid")], (2,), (1, 2), (2,)),
    ):
        assert [held_layers(layers, sliding) for sliding in ("auto", True, False)] == [auto, always, never]


def test_the_option_is_part_of_a_runs_identity_only_where_it_changes_the_layers():
    """Every run of before keeps its hash: of no model does the default, and of a model without windows any value."""
    plain = settings(*MIXED).identity
    assert "evict_sliding" not in plain
    assert settings(*MIXED, "cache.evict_sliding=false").identity == plain
    assert settings(*MIXED, "cache.evict_sliding=true").identity == plain | {"evict_sliding": True}
    for same in (SLIDING, ("model=tiny",)):
        assert settings(*same, "cache.evict_sliding=true").identity == settings(*same).identity
    full = settings(*MIXED, "method=full")
    assert settings(*MIXED, "method=full", "cache.evict_sliding=true").identity == full.identity
    assert settings(*MIXED, "cache.evict_sliding=true").baseline().identity == full.identity
    assert run_hash(settings("model=tiny").identity) == run_hash(
        settings("model=tiny", "cache.evict_sliding=false").identity
    )


def test_where_nothing_is_left_to_evict_the_run_is_refused_before_a_model_loads():
    with pytest.raises(ConfigError, match=r"=false leaves nothing to evict in mistral, .*\(2 of a sliding"):
        settings(*SLIDING, "cache.evict_sliding=false")
    with pytest.raises(ConfigError, match=r"cache\.evict_sliding must be auto or true or false, got 'never'"):
        settings(*SLIDING, "cache.evict_sliding=never")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=kvzip"], "reads the prompt a second time"),
        (["method=sparq"], "method sparq evicts nothing, and windows need no index"),
        (["budget.layers=cake"], r"chosen together \(budget.layers=cake\)"),
        (["method=pyramidkv"], r"chosen together \(method pyramidkv\)"),
        (["budget.heads=global"], "windows hold other numbers of tokens"),
    ],
)
def test_what_windows_cannot_be_evicted_by(words, why):
    with pytest.raises(ConfigError, match=f"{why}.*: leave cache.evict_sliding at auto"):
        settings(*MIXED, "cache.evict_sliding=true", *words)


def test_a_window_with_other_heads_is_refused_when_the_model_is_there():
    model = patch_model(copy.deepcopy(twin("mimo_v2_flash")), check="never")
    with pytest.raises(ConfigError, match="sliding window have other heads than its other layers have"):
        EvictionCache(model, H2O(), Budget(tokens=9), evict_sliding=True)


# -- bytes -------------------------------------------------------------------------------------------------------------


def numbers_of(name, tokens):
    """(numbers of keys and values in layers that keep every token, all numbers) of transformers' own cache."""
    from transformers import DynamicCache

    model, traits = twin(name), traits_of(twin(name).config)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids_of(1, 1, tokens), past_key_values=stock, use_cache=True)
    held = other = 0
    for number, layer in enumerate(stock.layers):
        kept = [getattr(layer, each, None) for each in ("keys", "values")]
        pairs = sum(each.numel() for each in kept if each is not None)
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        held += pairs * (number in traits.held)
        other += pairs * (number not in traits.held) + sum(each.numel() for each in states if each is not None)
    return held, held + other


@pytest.mark.parametrize(
    "name", ["gemma3_text", "qwen3_next", "falcon_h1", "llama4_text", "mimo_v2_flash", "gemma3n_text"]
)
def test_a_share_of_bytes_is_of_all_layers(name):
    """What is left after a prompt is the share of transformers' own whole cache, to the slot."""
    tokens = 80
    held, whole = numbers_of(name, tokens)
    model = patch_model(copy.deepcopy(twin(name)), check="never")
    traits = traits_of(model.config)
    for part in (0.5, 0.83):
        ratio = 1 - (1 - part) * held / whole
        budget = BytesBudget(bytes_ratio=ratio, key_dim=traits.key_dim, value_dim=traits.value_dim)
        context = prefill(model, ids_of(1, 1, tokens).tolist(), H2O(), budget, max_new_tokens=4)
        (row,) = receipts(context.cache)
        slots = int(part * tokens + 1e-6)
        assert {state.layer_slots.slots[0] for state in context.cache.layer_states} == {slots}
        assert row.slots == slots - 1, "one is the next token's"
    assert sum(now for now, _ in context.cache.ledger.values()) == row.kv_bytes


def test_what_windows_and_states_take_may_be_more_than_the_share():
    budget = BytesBudget(
        bytes_ratio=0.5, key_dim=4, value_dim=4, others=OtherLayers(2, ((16, 30), (16, 30)), states=100)
    )
    # 100 tokens: 2 layers of 2 heads take 2 * 2 * 100 * 8 * 2 = 6400 bytes, windows 2 * 2 * 16 * 30 = 1920, states 200.
    prompts = PromptSizes([100], 100, None, 2)
    (slots,) = budget.resolve(prompts, 0)
    assert slots == (0.5 * (6400 + 2120) - 2120) // (2 * 2 * 8 * 2) == 33
    tight = BytesBudget(bytes_ratio=0.2, key_dim=4, value_dim=4, others=budget.others)
    with pytest.raises(ConfigError, match=r"0\.2 of the 8520 bytes of a full cache of 100 tokens is 1704, and wind"):
        tight.resolve(prompts, 1)


def test_a_share_of_bytes_in_windows_that_are_evicted_from_is_each_layers_own():
    prompts = PromptSizes([100], 100, None, 3, (16, None, 16))
    budget = BytesBudget(bytes_ratio=0.5, key_dim=4, value_dim=4)
    assert [budget.resolve(prompts, layer) for layer in range(3)] == [[8], [50], [8]]
    assert [Budget(kv_ratio=0.5).resolve(prompts, layer) for layer in range(3)] == [[8], [50], [8]]
    assert [Budget(tokens=20).resolve(prompts, layer) for layer in range(3)] == [[16], [20], [16]]


def test_bits_count_windows_and_states_too():
    """kv_bytes_at_16 of quantised slots is of the whole cache, as kv_bytes is."""
    model = patch_model(copy.deepcopy(twin("gemma3_text")), check="never")
    config = CacheConfig(Full(), quantization=Quantization(4, 4, group=8, residual=4))
    (row,) = receipts(prefill(model, ids_of(1, 1, 60).tolist(), config, max_new_tokens=4).cache)
    held, whole = numbers_of("gemma3_text", 60)
    assert row.ledger["window"] == [4 * (whole - held)] * 2  # float32
    assert 2 * (whole - held) < row.kv_bytes_at_16 < 2 * whole


def test_rows_hold_a_ledger_and_tables_say_which_layers(tmp_path):
    few = ("task=sample", "limit=2", "task.max_new_tokens=4", "kv_ratio=0.3", f"outputs_dir={tmp_path}")
    for words in (
        ["method=full"],
        ["method=h2o"],
        ["method=h2o", "cache.evict_sliding=true"],
        ["method=h2o", "bytes_ratio=0.6"],
    ):
        made = evaluate_run(settings(*MIXED, *few, *words))
        for row in made.rows():
            receipt = row["receipt"]
            ledger = dict(receipt["ledger"])
            assert (ledger.pop("evicted_layers"), ledger.pop("layers")) == (
                6 if "cache.evict_sliding=true" in words else 1,
                6,
            )
            assert sum(now for now, _ in ledger.values()) == receipt["kv_bytes"]
            peaks = [peak for _, peak in ledger.values()]
            assert max(peaks) <= receipt["peak_kv_bytes"] <= sum(peaks)
            assert all(now <= peak for now, peak in ledger.values())
            assert ledger["state"] == ledger["latent"] == [0, 0]
    frame = quality(tmp_path)
    assert set(frame["layers"]) == {"1 of 6", "6 of 6"}
    lines = bytes_table(read_runs(tmp_path))
    by_line = {name: part["of_full"].tolist() for name, part in lines.groupby("line")}
    assert sorted(by_line) == ["layers that keep every token", "sliding windows, chunks"]
    shares = sorted(by_line["sliding windows, chunks"])
    assert shares[1:] == [100] * 3 and 20 < shares[0] < 50, "of one run the windows were evicted from"
    assert VIEWS["ledger"].applies(read_runs(tmp_path).ran[0])
