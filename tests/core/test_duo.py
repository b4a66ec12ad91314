"""DuoAttention's heads (`budget.heads=duo`): scores against plain Python, kept sets, bytes, files, what is refused."""

from __future__ import annotations

import functools
import math
from itertools import product
from typing import Any

import oracles
import pytest
import torch
from oracles import Past
from test_conf import composed
from test_head_budgets import FAST, every_tensor, sampled
from test_kept_sets import CALIBRATION, CONTINUATION, LENGTHS, NEW, PROMPTS, SEEDS, Truth, Witness
from test_step import ROWS, alike, both
from tiny import CONFIGS, LAYERS, feed, prompts_of, stock, tiny

from kvexp.core import Budget, CacheConfig, HeadScores, Method
from kvexp.core.budget_shares import retrieval_heads
from kvexp.generate import GenerationParams, generate, generate_from_context, pad_left, prefill
from kvexp.generate.prefill import decode_step, forward_last
from kvexp.hf import EvictionCache, calibrate_heads
from kvexp.hf.calibrate import HEADS
from kvexp.methods import H2O, KNorm, SnapKV, Window
from kvexp.run.settings import settings_of
from kvexp.util import ConfigError

KV_HEADS = 3
SCORES = HeadScores.of(torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.7]]))
SINKS, RECENT, SLOTS = 2, 3, 14


def duo(slots: int | None = None, **changes: Any) -> Budget:
    size: dict[str, Any] = {"kv_ratio": 0.7} if slots is None else {"tokens": slots}
    return Budget(**size, heads="duo", **{"stream_sinks": SINKS, "stream_recent": RECENT, **changes})


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


class DuoWitness(Witness):
    """A `Witness` whose retrieval heads keep everything and whose other heads keep first and newest tokens."""

    def decide(self, layer: int, pasts: list[Past]) -> list[list[int]]:
        size, streams = LAYERS * KV_HEADS, SINKS + RECENT
        room = size if self.prompt <= SLOTS else (SLOTS - streams) * size // (self.prompt - streams)
        ranked = sorted((-float(SCORES.scores[i, j]), i, j) for i in range(LAYERS) for j in range(KV_HEADS))
        full = {(i, j) for _, i, j in ranked[:room]}
        return [
            list(past.held)
            if (layer, h) in full
            else sorted({p for p in past.held if p < SINKS} | set(past.held[-(RECENT - 1) :]))
            for h, past in enumerate(pasts)
        ]


@functools.cache
def truth(row: int) -> Truth:
    return DuoWitness("llama", "key_attention", PROMPTS[row], CONTINUATION[row].tolist(), SEEDS[row]).run()


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("method", [H2O(), KNorm(), Window()], ids=repr)
def test_against_the_oracle(method: Method, mode: Any) -> None:
    """In a padded batch; the method has no say, for retrieval heads have room for all tokens to come."""
    prompt, mask = pad_left(PROMPTS, 0, "cpu")
    cache = EvictionCache(
        tiny("llama"), method, duo(SLOTS), head_scores=SCORES, mode=mode, max_new_tokens=NEW + 1, prompt_tokens=17
    )
    fed = feed(cache, tiny("llama"), prompt, CONTINUATION, mask=mask, chunk=5)
    for row in range(len(LENGTHS)):
        want = truth(row)
        for step in range(NEW + 1):
            for layer in range(LAYERS):
                assert fed.kept[step][layer][row] == want.kept[step][layer], (row, step, layer)
            torch.testing.assert_close(fed.logits[step][row], want.logits[step], rtol=1e-4, atol=1e-4)
    assert {len(head) for head in fed.kept[0][0][0]} == {17, SINKS + RECENT - 1}


@pytest.mark.parametrize(("method", "rows"), sampled([(FAST[1], "padded"), (FAST[7], "equal")], product(FAST, ROWS)))
def test_the_short_step_is_the_general_one(method: Method, rows: str, monkeypatch: Any) -> None:
    plan = {"head_scores": SCORES}
    short, general, taken = both("llama", method, duo(), ROWS[rows], monkeypatch, plan=plan)
    assert taken == 13 * 2
    alike(short, general, peak=False)


def test_logits_are_those_of_a_cache_that_was_cut() -> None:
    """Mode mask hides what the others have dropped; a full budget hides nothing."""
    prompts, decoding = prompts_of(3, (40, 33)), GenerationParams(9, eos=None)
    runs = [
        generate(
            tiny("llama"), prompts, SnapKV(window=2, kernel=3) if once else H2O(), duo(), decoding=decoding,
            mode=mode, head_scores=SCORES, keep_logits=True,
        )
        for once in (False, True)
        for mode in ("overwrite", "compact", "mask")
    ]  # fmt: skip
    for some in (runs[:3], runs[3:]):
        for other in some[1:]:
            torch.testing.assert_close(torch.stack(some[0].logits), torch.stack(other.logits), rtol=1e-4, atol=1e-4)
            for layer in range(LAYERS):
                assert some[0].cache.kept_positions(layer) == other.cache.kept_positions(layer)


def test_beams_forks_and_questions() -> None:
    model, prompts, made = tiny("llama"), prompts_of(3, (40, 33)), []
    for mode in ("overwrite", "compact", "mask"):
        options: dict[str, Any] = {"mode": mode, "head_scores": SCORES}
        beams = generate(model, prompts, H2O(), duo(), decoding=GenerationParams(9, eos=None, num_beams=3), **options)
        context = prefill(model, prompts, H2O(), duo(), max_new_tokens=20, **options)
        asked = generate_from_context(
            model, context.fork([1, 0, 1]), [[3, 5, 7], [2, 4, 6], [8, 9, 1]], decoding=GenerationParams(8, eos=None)
        )
        made.append((beams.tokens, asked.tokens))
    assert made[0] == made[1] == made[2]


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


def test_resident_bytes_are_the_sum_of_the_budgets() -> None:
    lengths, new = (40, 33), 6
    run = generate(
        tiny("llama"),
        prompts_of(3, lengths),
        H2O(),
        duo(),
        decoding=GenerationParams(new, eos=None),
        head_scores=SCORES,
    )
    wanted = allowed = 0
    for length in lengths:
        slots = math.floor(0.7 * length)
        full = int(retrieval_heads(duo(), slots, length, new, SCORES).sum())
        wanted += full * (length + new) + (6 - full) * (SINKS + RECENT)
        allowed += 6 * slots + full * new
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for state in run.cache.layer_states
        for tensor in every_tensor(state.require_slots())
        if tensor.shape[-1:] == (14,)
    }
    assert sum(found.values()) == run.cache.memory_tracker.bytes == wanted * 2 * 14 * 4 <= allowed * 2 * 14 * 4


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
        (lambda: CacheConfig(H2O(), duo()), r"duo needs scores .*head_scores=kvexp\.hf\.calibrate_heads"),
        (lambda: duo(stream_recent=0), "stream_recent must be at least 1"),
        (lambda: duo(stream_sinks=-1), "stream_sinks must be at least 0"),
        (lambda: Budget(kv_ratio=0.5, stream_sinks=3), r"budget\.stream_sinks .* no effect with budget\.heads=unif"),
        (lambda: duo(pyramid=0.5), r"set budget\.pyramid=0"),
        (lambda: retrieval_heads(duo(), 4, 40, 3, SCORES), r"4 slots cannot hold a streaming head's 2 sinks \+ 3"),
        (lambda: retrieval_heads(duo(), 20, 40, None, SCORES), "say max_new_tokens"),
        (lambda: HeadScores.of(torch.ones(3)), r"finite float32 numbers \[L, H\]"),
        (
            lambda: EvictionCache(tiny("llama"), H2O(), duo(), head_scores=HeadScores.of(torch.ones(2, 5))),
            r"\[2, 5\] heads, the model's are \[2, 3\]",
        ),
    ],
)
def test_refusals(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_budget_too_small_is_said_before_the_model_runs() -> None:
    with pytest.raises(ConfigError, match="cannot hold a streaming head"):
        generate(tiny("llama"), prompts_of(3, (40,)), H2O(), Budget(kv_ratio=0.5, heads="duo"), head_scores=SCORES)
