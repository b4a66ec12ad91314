"""Prompts that are kept whole: what stays, budgets of what is generated, redrawn chance, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import CASES
from test_bounded_prefill import settings
from test_spans import SIX, TRIED
from tiny import LAYERS, Streams, prompts_of, run_core, tiny
from turns import in_turn

from kvexp.core import Budget, CacheConfig, Cadence
from kvexp.core.budget import BytesBudget, PromptSizes
from kvexp.core.budget_resolution import resolve_layer_slots
from kvexp.core.method import Method
from kvexp.generate import generate
from kvexp.generate.inputs import GenerationParams
from kvexp.methods import H2O, TOVA, Full, Keyformer, Random, SnapKV, StreamingLLM, Window
from kvexp.run.store import run_hash
from kvexp.util import ConfigError

DECODING = [name for name in TRIED if CASES[name].method.evicts_while_decoding and not CASES[name].method.in_order]


@pytest.mark.parametrize(("name", "mode"), in_turn(DECODING, ["overwrite", "compact", "mask"], of=2))
def test_every_method_keeps_the_prompt_and_fills_the_rest_of_its_budget(name: str, mode: Any) -> None:
    prompts, case = prompts_of(5, (19, 14)), CASES[name]
    budget = Budget(tokens=13, of="generated")
    made = generate(
        tiny("llama"), prompts, case.method, budget, keep="prompt", mode=mode, select=case.select,
        decoding=GenerationParams(25, eos=None), seeds=[3, 4],
    )  # fmt: skip
    for layer in range(LAYERS):
        for prompt, row in zip(prompts, made.cache.kept_positions(layer), strict=True):
            for head in row:
                assert head[: len(prompt)] == list(range(len(prompt))) and len(head) == len(prompt) + 12


@pytest.mark.parametrize("method", [H2O(), TOVA(protect_recent=3), Random(), Random(redraw=True), Window()])
def test_generated_tokens_compete_as_if_the_prompt_were_sinks(method: Method) -> None:
    """Evicting after blocks of four, in every mode, and naively: by the method's own priorities, prompt apart."""
    streams, prompt, width = Streams.random(2, 42, batch=1), 10, 4
    widths = [prompt] + [width] * 8
    seen = {}
    for mode in ("overwrite", "compact", "mask"):
        config = CacheConfig(
            method,
            Budget(tokens=20),
            Cadence(every=4),
            mode=mode,
            keep="prompt",  # type: ignore[arg-type]
        )
        seen[mode] = run_core(config, streams, widths, max_new_tokens=32, seeds=[7])
    assert seen["overwrite"].kept == seen["compact"].kept == seen["mask"].kept
    for step, kept in enumerate(seen["compact"].kept[1:], 1):
        total = prompt + width * step
        for head in kept[0][0]:
            assert head[:prompt] == list(range(prompt)) and len(head) == min(total, 19)
            if isinstance(method, Window):
                assert head[prompt:] == list(range(total - len(head) + prompt, total))
            if isinstance(method, H2O):  # half of the ten slots that are not the prompt's, one for the coming token
                assert set(range(total - 4, total)) <= set(head)


def test_a_budget_of_what_is_generated_comes_on_top_of_each_prompt() -> None:
    def slots(budget: Budget) -> list[int]:
        config = CacheConfig(Random(), budget, keep="prompt")
        return resolve_layer_slots(config, PromptSizes([30, 20], 30, 64, 2), 0, torch.device("cpu")).slots

    assert slots(Budget(kv_ratio=0.25, of="generated")) == [46, 36]
    assert slots(Budget(tokens=12, of="generated")) == [42, 32]
    assert slots(Budget(kv_ratio=0.5, of="sequence")) == [47, 42]
    assert slots(Budget(tokens=40)) == [40, 40]


def test_redrawn_chance_forgets_geometrically_and_a_fixed_lot_does_not() -> None:
    """K slots, P of the prompt, every 8 tokens: a token older than the window survives with (K - 8 - P) / (K - P)."""
    prompt, slots, every, rounds = 8, 40, 8, 10
    streams = Streams.random(1, prompt + 32 + every * rounds, batch=24, heads=8, group=1, dim=2, value_dim=2)
    widths = [prompt, 32] + [every] * rounds

    def by_age(method: Method) -> list[float]:
        config = CacheConfig(
            method, Budget(tokens=slots, counts_self=False), Cadence(every=every), mode="compact", keep="prompt"
        )
        last = run_core(config, streams, widths, seeds=list(range(24))).kept[-1][0]
        total = sum(widths)
        heads = [head for row in last for head in row]
        ages = [range(total - every * (n + 1), total - every * n) for n in range(rounds)]
        return [sum(p in head for head in heads for p in age) / (len(heads) * every) for age in ages]

    redrawn, fixed = by_age(Random(redraw=True, protect_recent=8)), by_age(Random(protect_recent=8))
    assert redrawn[0] == fixed[0] == 1.0
    survives = (slots - 8 - prompt) / (slots - prompt)
    for rounds_lived, share in enumerate(redrawn[1:7], 1):
        assert abs(share - survives**rounds_lived) < 4 * math.sqrt(0.25 / (24 * 8 * 8))
    # Fixed draws leave a uniform sample of everything behind the window.
    expected = (slots - 8 - prompt) / (sum(widths) - prompt - 8)
    assert all(abs(share - expected) < 4 * math.sqrt(0.25 / (24 * 8 * 8)) for share in fixed[1:])


@pytest.mark.parametrize("redraw", [False, True])
def test_draws_are_of_heads_layers_and_blocks_as_asked(redraw: bool) -> None:
    streams = Streams.random(3, 60, layers=2, batch=2)

    def kept(per: Any, block: int = 1) -> list[list[list[int]]]:
        config = CacheConfig(
            Random(redraw=redraw, per=per, block=block), Budget(tokens=28), Cadence(every=5), mode="compact"
        )
        last = run_core(config, streams, [40, 5, 5, 5, 5], seeds=[1, 2]).kept[-1]
        return [heads for layer in last for heads in layer]  # layer 0 row 0, layer 0 row 1, layer 1 ...

    each, layer, model = kept("head"), kept("layer"), kept("model")
    assert all(heads[0] != heads[1] != heads[2] for heads in each)
    assert all(heads[0] == heads[1] == heads[2] for heads in layer) and layer[0] != layer[2]
    assert model[0] == model[2] and model[1] == model[3] and model[0] != model[1]
    for heads in kept("head", block=4):
        for head in heads:
            blocks = {p // 4: sum(q // 4 == p // 4 for q in head) for p in head}
            whole = [n for start, n in blocks.items() if start < 14]  # those that were complete at every eviction
            assert sum(n < 4 for n in whole) <= (5 if redraw else 1)  # each of five evictions cuts one block apart


def test_what_cannot_keep_a_prompt_says_so() -> None:
    tokens = Budget(tokens=40)

    def refused(method: Method, budget: Budget, words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            CacheConfig(method, budget, keep="prompt", **options)

    refused(SnapKV(), tokens, "snapkv evicts at the end of the prompt alone, and keep=prompt leaves it nothing")
    refused(H2O(), tokens, "cache.evict_every=null evicts none", cadence=Cadence(every=None))
    refused(H2O(), tokens, "prefill=bounded evicts between chunks of a prompt", bounded_chunk=8)
    refused(H2O(), Budget(kv_ratio=0.5), "the budget is a share: set budget.of=sequence .* budget.of=generated")
    refused(H2O(), Budget(tokens=40, heads="adaptive"), "leave out keep=prompt")
    refused(Full(), tokens, "evicts nothing that could be spared")
    with pytest.raises(ConfigError, match=r"on top of a prompt that is never evicted: add keep=prompt"):
        CacheConfig(H2O(), Budget(tokens=40, of="generated"))
    with pytest.raises(ConfigError, match=r"budget.of=generated counts slots on top"):
        BytesBudget(bytes_ratio=0.3, of="generated")
    model, prompts = tiny("llama"), prompts_of(1, (30,))
    with pytest.raises(
        ConfigError, match=r"cannot hold the 30 tokens of a prompt that keep=prompt keeps, and recent=5"
    ):
        generate(model, prompts, TOVA(protect_recent=5), Budget(tokens=34), keep="prompt", decoding=SIX)
    with pytest.raises(ConfigError, match=r"budget.of=generated needs max_new_tokens"):
        Budget(kv_ratio=0.5, of="generated").resolve(PromptSizes([3], 3, None, 1), 0)
    generate(model, prompts, StreamingLLM(), Budget(tokens=32), keep="prompt", decoding=SIX)


def test_a_run_that_keeps_its_prompt_and_what_did_not_change(tmp_path: Any) -> None:
    words = ("model=testbed_rope", "task=news", "method=random", "task.max_new_tokens=8", "limit=1")
    kept = settings(tmp_path, *words, "keep=prompt", "budget.of=generated", "method.redraw=true")
    assert kept.identity["keep"] == "prompt" and kept.identity["budget"]["of"] == "generated"
    assert kept.identity["method"] == {"name": "random", "redraw": True}
    plain = settings(tmp_path, *words)
    assert plain.identity["method"] == {"name": "random"}
    assert run_hash(settings(tmp_path, *words, "method.redraw=false").identity) == run_hash(plain.identity)
    settings(tmp_path, *words, "keep=prompt", "budget=tokens", "budget.of=generated")
    with pytest.raises(ConfigError, match=r"set budget\.of=prompt, or questions=each"):
        settings(tmp_path, "questions=all", "method=h2o", "task=news_qa", "keep=prompt", "budget.of=generated")


def test_a_schedule_goes_on_while_the_prompt_is_kept() -> None:
    made = generate(
        tiny("llama"), prompts_of(4, (12,)), Keyformer(), Budget(kv_ratio=0.5, of="generated"), keep="prompt",
        decoding=GenerationParams(20, eos=None),
    )  # fmt: skip
    assert {len(head) for head in made.cache.kept_positions(0)[0]} == {21}
