"""DuoAttention's heads (`budget.heads=duo`): scores against plain Python, kept sets, bytes, files, what is refused."""

from __future__ import annotations

import functools
import math
from typing import Any

import oracles
import pytest
import torch
from commands import composed
from test_head_budgets import KV_HEADS, RECENT, SCORES, SINKS, SLOTS, duo
from test_kept_sets import CALIBRATION
from tiny import CONFIGS, LAYERS, prompts_of, stock, tiny

from kvexp.core import Budget, HeadScores, Method
from kvexp.core.budget_shares import retrieval_heads
from kvexp.generate import GenerationParams, generate, generate_from_context, prefill
from kvexp.generate.prefill import decode_step, forward_last
from kvexp.hf import EvictionCache, calibrate_heads
from kvexp.hf.calibrate import HEADS
from kvexp.methods import H2O, KNorm, SnapKV, Window
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError

# -- the scores -------------------------------------------------------------------------------------------------------


@functools.cache
def scores(family: str) -> HeadScores:
    return calibrate_heads(tiny(family), CALIBRATION)


@pytest.mark.parametrize("family", ["llama", "gptj"])
@torch.inference_mode()
def test_scores_are_those_of_plain_python(family: str) -> None:
    """The queries and keys of a stock model before RoPE, laid out and turned by hand."""
    from test_kept_sets import queries_of, rope_pairs

    model, heads = stock(family), CONFIGS[family].get("num_attention_heads", 3)
    kv_heads = CONFIGS[family].get("num_key_value_heads", 3)
    group, pairs = heads // kv_heads, rope_pairs(family)
    want = [[0.0] * kv_heads for _ in range(LAYERS)]
    inputs: list[torch.Tensor] = []
    modules = [m for m in model.modules() if type(m).__name__.endswith("Attention")]

    def note(_: Any, args: Any, kwargs: Any) -> None:
        inputs.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    for ids in CALIBRATION:
        inputs.clear()
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
        model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        for layer, (module, hidden) in enumerate(zip(modules, inputs, strict=True)):
            queries = queries_of(module, heads, hidden).mean(1).tolist()
            keys = module.k_proj(hidden)[0].unflatten(-1, (kv_heads, -1)).double().mean(0).tolist()
            for h in range(kv_heads):
                own = queries[h * group : (h + 1) * group]
                want[layer][h] += oracles.looks_back(own, keys[h], pairs, 500) / len(CALIBRATION)
    torch.testing.assert_close(scores(family).scores, torch.tensor(want), rtol=1e-4, atol=1e-5)


def test_a_head_that_looks_at_the_first_tokens_scores_high() -> None:
    """One pair of dimensions that turns by pi over the positions: the key at the other end is seen best, or worst."""
    far = oracles.looks_back([[30.0, 0.0]], [-1.0, 0.0], [(0, 1, math.pi / 499)], 500)
    near = oracles.looks_back([[30.0, 0.0]], [1.0, 0.0], [(0, 1, math.pi / 499)], 500)
    assert far > 0.9 and near < 0.1


def test_models_without_rope_have_none() -> None:
    for family in ("mpt", "gpt2"):
        with pytest.raises(ConfigError, match=f"under RoPE, which a {family} model does not have"):
            calibrate_heads(tiny(family), CALIBRATION)


def test_the_best_heads_and_ties() -> None:
    assert SCORES.best(2).tolist() == [[False, True, False], [True, False, False]]
    even = HeadScores.of(torch.ones(2, 2))
    assert even.best(3).tolist() == [[True, True], [True, False]]
    assert even.best(0).sum() == 0 and even.best(4).all()
    assert HeadScores.of(torch.ones(2, 2)) == even != SCORES


def test_as_many_as_the_budget_has_room_for() -> None:
    """Six heads of 20 slots: full ones take 40, streaming ones 5; two full ones leave 20 of 120."""
    found = [int(retrieval_heads(duo(), slots, 40, 4, SCORES).sum()) for slots in (5, 10, 11, 20, 39, 40, 99)]
    assert found == [0, 0, 1, 2, 5, 6, 6]
    for slots in (11, 20, 39):
        full = int(retrieval_heads(duo(), slots, 40, 4, SCORES).sum())
        assert full * 40 + (6 - full) * 5 <= 6 * slots < (full + 1) * 40 + (5 - full) * 5


# -- kept sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [1, 6])
@pytest.mark.parametrize("method", [H2O(), KNorm(), SnapKV(window=2, kernel=3)], ids=repr)
def test_retrieval_heads_keep_everything_after_a_question(method: Method, asked: int) -> None:
    """A prefill announces the answer alone; with the question, what follows the prompt is longer than the room."""
    made = []
    for mode in ("overwrite", "compact", "mask"):
        context = prefill(
            tiny("llama"), prompts_of(3, (20, 17)), method, duo(SLOTS), max_new_tokens=5, mode=mode, head_scores=SCORES
        )
        question = [[7, 3, 5, 2, 4, 6][:asked], [8, 9, 1, 5, 3, 2][:asked]]
        run = generate_from_context(tiny("llama"), context, question, decoding=GenerationParams(5, eos=None))
        made.append((run.tokens, [run.cache.kept_positions(layer) for layer in range(LAYERS)]))
    assert made[0] == made[1] == made[2]
    for row, length in enumerate((20, 17)):
        full = retrieval_heads(duo(), SLOTS, length, 5, SCORES)
        assert 0 < full.sum() < full.numel()
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                kept = made[0][1][layer][row][head]
                if full[layer, head]:
                    assert kept == list(range(length + asked + 4))
                elif method.evicts_while_decoding:
                    last = length + asked + 4
                    assert kept == [*range(SINKS), *range(last - RECENT + 1, last)]


@pytest.mark.parametrize("method", [H2O(), KNorm(), Window()], ids=repr)
@torch.inference_mode()
def test_beyond_what_was_announced(method: Method) -> None:
    """Then retrieval heads evict too, and layers whose heads differ keep their own sinks and newest tokens."""
    ids, kept = torch.tensor([[*prompts_of(3, (20,))[0], *range(30, 48)]]), []
    for mode in ("overwrite", "compact", "mask"):
        cache = EvictionCache(tiny("llama"), method, duo(SLOTS), head_scores=SCORES, mode=mode, max_new_tokens=2)
        cache.allow_multi_token_steps()
        for start, end in ((0, 20), (20, 28)):
            forward_last(tiny("llama"), ids[:, start:end], torch.ones(1, end), cache)
        for at in range(28, 38):
            decode_step(tiny("llama"), ids[:, at : at + 1], torch.tensor([[at]]), cache)
        kept.append([cache.kept_positions(layer) for layer in range(LAYERS)])
    assert kept[0] == kept[1] == kept[2]
    assert {len(head) for layer in kept[0] for head in layer[0]} == {21, SINKS + RECENT - 1}


# -- files and refusals -----------------------------------------------------------------------------------------------


def test_the_file_is_read_back_and_checked(own_cache: Any) -> None:
    assert HEADS.read("some model") is None
    file = HEADS.write(SCORES, "some model", {"data": "texts"})
    assert file == HEADS.path("some model") and HEADS.read("some model") == SCORES
    assert torch.equal(HEADS.read("some model").scores, SCORES.scores)  # type: ignore[union-attr]
    file.rename(HEADS.path("another"))
    with pytest.raises(ConfigError, match="written for another model, by another version, or changed since"):
        HEADS.read("another")


def test_a_run_carries_the_scores_of_its_model(tiny_calibration: Any) -> None:
    words = ("budget.heads=duo", "budget.stream_sinks=1", "budget.stream_recent=4")
    settings = settings_of(*composed("kv_ratio=0.7", *words))
    plain = settings_of(*composed("kv_ratio=0.7"))
    assert settings.identity["head_scores"] == settings.cache.head_scores.digest  # type: ignore[union-attr]
    assert settings.identity["budget"] == plain.identity["budget"] | {
        "heads": "duo", "stream_sinks": 1, "stream_recent": 4,
    }  # fmt: skip
    assert "heads" not in plain.identity["budget"] and "head_scores" not in plain.identity


def test_a_run_without_them_is_refused_with_the_command(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"budget\.heads=duo needs scores .* Run: kvexp calibrate model=tiny"):
        settings_of(*composed("budget.heads=duo"))


def test_a_model_without_rope_is_not_sent_to_calibrate(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"budget\.heads=duo .* under RoPE, which GPT-2 .* take another budget"):
        settings_of(*composed("budget.heads=duo", "model=testbed_learned"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: retrieval_heads(duo(), 4, 40, 3, SCORES), r"4 slots cannot hold a streaming head's 2 sinks \+ 3"),
        (lambda: retrieval_heads(duo(), 20, 40, None, SCORES), "say max_new_tokens"),
        (
            lambda: EvictionCache(tiny("llama"), H2O(), duo(), head_scores=HeadScores.of(torch.ones(2, 5))),
            r"\[2, 5\], are of another model: this one's are \[2, 3\]",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_budget_too_small_is_said_before_the_model_runs() -> None:
    with pytest.raises(ConfigError, match="cannot hold a streaming head"):
        generate(tiny("llama"), prompts_of(3, (40,)), H2O(), Budget(kv_ratio=0.5, heads="duo"), head_scores=SCORES)
