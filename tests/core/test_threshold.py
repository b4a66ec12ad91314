"""A threshold in place of a budget (`budget.threshold`): kept sets, all modes and paths alike, the column, refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_conf import composed
from tiny import LAYERS, LETTERS, prompts_of, tiny

from kvexp.core import Budget, CacheConfig, Method
from kvexp.core.method import EvictionContext
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.methods import CAKE, H2O, VATP, ExpectedAttention, KVzap, PyramidKV, StreamingLLM
from kvexp.results.table import ratio_reached
from kvexp.run.settings import settings_of


def test_ends_of_the_scale() -> None:
    """Only protected slots reach infinity; everything reaches the least number, and nothing is lost."""
    prompts, decoding = prompts_of(3, (40, 33)), GenerationParams(1, eos=None)
    none = generate(tiny("llama"), prompts, H2O(), Budget(threshold=1e30, threshold_recent=5), decoding=decoding)
    every = generate(tiny("llama"), prompts, H2O(), Budget(threshold=-1e30), decoding=decoding)
    for row, length in enumerate((40, 33)):
        for layer in range(LAYERS):
            assert none.cache.kept_positions(layer)[row] == [list(range(length - 5, length))] * 3
            assert every.cache.kept_positions(layer)[row] == [list(range(length))] * 3
    assert [one.first_eviction_step for one in receipts(none.cache)] == [0, 0]
    assert [one.first_eviction_step for one in receipts(every.cache)] == [None, None]


@dataclass(frozen=True)
class Parity(Method):
    def priority(self, ctx: EvictionContext) -> torch.Tensor:
        return (ctx.positions % 2).float()


def test_a_slot_that_just_reaches_the_threshold_stays() -> None:
    budget, decoding = Budget(threshold=1.0, threshold_recent=1), GenerationParams(1, eos=None)
    run = generate(tiny("llama"), prompts_of(3, (20,)), Parity(), budget, decoding=decoding)
    assert run.cache.kept_positions(0)[0] == [[*range(1, 20, 2)]] * 3


@pytest.mark.parametrize("threshold", [0.002, 0.02, 0.2])
def test_a_threshold_is_in_the_unit_of_the_score_where_the_priority_is_its_logarithm(threshold: float) -> None:
    """ExpectedAttention ranks by a logarithm without epsilon, and by the score itself with one too small to matter."""

    def kept(epsilon: float) -> list[Any]:
        method, budget = ExpectedAttention(epsilon=epsilon), Budget(threshold=threshold, threshold_recent=2)
        decoding = GenerationParams(1, eos=None)
        run = generate(tiny("llama"), prompts_of(3, (40, 33)), method, budget, decoding=decoding)
        return [run.cache.kept_positions(layer) for layer in range(LAYERS)]

    found = kept(0.0)
    assert found == kept(1e-12)
    sizes = [len(head) for layer in found for row in layer for head in row]
    assert threshold < 0.01 or min(sizes) < 33, "something was evicted"
    assert threshold > 0.1 or max(sizes) > 6, "more is left than sinks and newest tokens"


def test_every_share_reaches_a_threshold_of_zero() -> None:
    assert ExpectedAttention().threshold_as_priority(0.0) == -math.inf
    assert ExpectedAttention(epsilon=0.02).threshold_as_priority(0.1) == H2O().threshold_as_priority(0.1) == 0.1
    assert KVzap().threshold_as_priority(-4.0) == -4.0, "its score is a logarithm as it stands"


def test_the_methods_window_gives_way_to_the_thresholds() -> None:
    """H2O's recent window is half of a budget, and there is none: the newest `threshold_recent` tokens stay."""
    seen = []

    class Watched(H2O):
        def priority(self, ctx: EvictionContext) -> torch.Tensor:
            seen.append(ctx.recent.tolist())
            return super().priority(ctx)

    generate(
        tiny("llama"), prompts_of(3, (40, 33)), Watched(), Budget(threshold=9.0, threshold_recent=35),
        decoding=GenerationParams(1, eos=None),
    )  # fmt: skip
    assert seen == [[35, 33]] * LAYERS


def test_its_identity_and_label() -> None:
    settings = settings_of(*composed("budget=threshold", "budget.threshold=0.02"))
    plain = settings_of(*composed("budget=ratio", "kv_ratio=0.5"))
    assert settings.identity["budget"]["threshold"] == 0.02 and settings.identity["budget"]["threshold_recent"] == 128
    assert "threshold" not in plain.identity["budget"]
    assert settings.labels["kv_ratio"] is settings.labels["tokens"] is None


def test_the_ratio_reached_is_printed_where_there_is_a_threshold() -> None:
    base = {"verdict99": "baseline", "kv_ratio": None, "tokens": None, "kv_ratio_reached": 1.0}
    free = base | {"verdict99": "undecided", "kv_ratio_reached": 0.25}
    fixed, counted = free | {"kv_ratio": 0.5}, free | {"tokens": 128}
    assert [column.cell(free) for column in ratio_reached([base, fixed, free])] == ["0.250"]
    assert ratio_reached([base, fixed, counted]) == []


def test_a_method_leaves_its_own_layers_out_where_it_is_told_to() -> None:
    CacheConfig(PyramidKV(), Budget(threshold=1.0, layers="uniform"))
    CacheConfig(CAKE(), Budget(kv_ratio=0.5, heads="global", layers="uniform"))
    typed = settings_of(*composed("budget=threshold", "budget.threshold=0.01", "method=cake", "budget.layers=uniform"))
    assert typed.cache.budget == Budget(threshold=0.01, layers="uniform")


@pytest.mark.parametrize("method", [VATP(n_sinks=4), StreamingLLM(n_sinks=4)], ids=lambda method: method.name)
@pytest.mark.parametrize("length", [8, 10, 11, 13, 14, 15])
def test_sinks_stay_where_they_and_the_newest_tokens_are_more_than_the_prompt(method: Method, length: int) -> None:
    """Up to 14 tokens the whole prompt stays; from then on as many slots, and with them the sinks, in every mode."""
    for mode in ("overwrite", "compact", "mask"):
        run = generate(
            tiny("llama"), prompts_of(3, (length,)), method, Budget(threshold=1e30, threshold_recent=10),
            decoding=GenerationParams(6, eos=None), mode=mode, tokenizer=LETTERS,  # type: ignore[arg-type]
        )  # fmt: skip
        newest = length + 5  # five tokens are fed
        want = [*range(4), *range(newest - min(length, 14) + 4, newest)]
        for layer in range(LAYERS):
            assert run.cache.kept_positions(layer)[0] == [want] * len(run.cache.kept_positions(layer)[0]), mode
