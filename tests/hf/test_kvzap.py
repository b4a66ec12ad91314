"""KVzap: its training against least squares done otherwise, its file, its command, and what a cache makes of it."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conf import composed
from test_layer_budgets import PROMPTS, kept
from test_selection import filled
from tiny import CONFIGS, LETTERS, tiny
from torch import Tensor

from kvexp.core import Budget, CacheConfig, EvictionContext, SlotSelection, Surrogate
from kvexp.generate import generate
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, MultiMethodCache, patch_model, unpatch_model
from kvexp.hf.calibrate import SURROGATES, train_surrogate
from kvexp.hf.patch import layer_input
from kvexp.methods import H2O, KVzap, KVzipPlus
from kvexp.run.batches import evaluate_run
from kvexp.run.calibrate import calibrate_main as main
from kvexp.run.settings import settings_of
from kvexp.tasks.articles import articles, training_articles
from kvexp.util.errors import CacheError, ConfigError

METHOD = KVzipPlus(n_sinks=2, chunk=200, instruct=False)
TRAIN = [PROMPTS[0], PROMPTS[1]]


def drawn(seed: int = 3, layers: int = 2, heads: int = 3, width: int = 30) -> Surrogate:
    dice = torch.Generator().manual_seed(seed)
    return Surrogate.of(torch.randn(layers, heads, width, generator=dice), torch.randn(layers, heads, generator=dice))


def inputs_of(family: str, ids: list[int]) -> list[Tensor]:
    """What the attention layers of a model get, [N, n] each, seen by hooks of this test."""
    model, seen = tiny(family), []
    modules = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0]),
            with_kwargs=True,
        )
        for module in modules
    ]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return seen


def targets_of(ids: list[int]) -> list[Tensor]:
    """What KVzip+ scores after its second pass, [H, N] each."""
    seen: list[Tensor] = []

    class Noting(KVzipPlus):
        def priority(self, ctx: EvictionContext) -> Tensor:
            made: Tensor = super().priority(ctx)
            seen.append(made[0])
            return made

    noting = Noting(**asdict(METHOD))
    cache = EvictionCache(tiny("llama"), noting, Budget(tokens=9))
    with torch.inference_mode():
        tiny("llama")(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    return seen


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_is_ridge_regression_on_the_logarithm_of_kvzip_plus() -> None:
    made = train_surrogate(tiny("llama"), METHOD, TRAIN, [PROMPTS[2]], LETTERS)
    assert made.fitted_tokens == len(TRAIN[0]) + len(TRAIN[1]) - 4 and made.held_out_tokens == len(PROMPTS[2]) - 2
    inputs, targets = [inputs_of("llama", ids) for ids in TRAIN], [targets_of(ids) for ids in TRAIN]
    tested, truth = inputs_of("llama", PROMPTS[2]), targets_of(PROMPTS[2])
    for layer in range(2):
        x = torch.cat([one[layer][2:] for one in inputs]).double()
        y = torch.cat([one[layer][:, 2:].T for one in targets]).double().log()
        # Ridge regression as least squares with more rows: the bias is not punished, so means go first.
        apart = torch.cat([x - x.mean(0), torch.eye(x.shape[1], dtype=torch.float64)])
        wanted = torch.linalg.lstsq(apart, torch.cat([y - y.mean(0), torch.zeros(x.shape[1], 3)])).solution
        torch.testing.assert_close(made.surrogate.weight[layer].double(), wanted.T, rtol=1e-3, atol=1e-4)
        scores = made.surrogate.layer(layer).scores(tested[layer][None])[0, :, 2:].double()
        y = truth[layer][:, 2:].double().log()
        r2 = 1 - ((y - scores) ** 2).sum(1) / ((y - y.mean(1, keepdim=True)) ** 2).sum(1)
        assert made.r2 is not None and made.r2[layer] == pytest.approx(float(r2.mean()), abs=1e-3)


def test_training_leaves_the_model_as_it_was() -> None:
    model = patch_model(copy.deepcopy(tiny("llama")))
    before = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    train_surrogate(model, METHOD, TRAIN, [], LETTERS)
    assert [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()] == before
    with pytest.raises(ConfigError, match="prompts of more tokens than the method's sinks"):
        train_surrogate(model, METHOD, [[1, 2]], [], LETTERS)


# -- caches ------------------------------------------------------------------------------------------------------------


def cache_after(family: str, rows: list[int], steps: int = 0, **how: Any) -> EvictionCache:
    surrogate = drawn(width=inputs_of(family, [1])[0].shape[1], heads=CONFIGS[family].get("num_key_value_heads", 3))
    return filled(KVzap(n_sinks=2, protect_recent=3), rows, SlotSelection(), steps=steps, surrogate=surrogate, **how)


def test_kept_is_what_the_surrogate_predicts_best() -> None:
    cache, surrogate = cache_after("llama", [0]), drawn()
    for layer, hidden in enumerate(inputs_of("llama", PROMPTS[0])):
        scores = hidden @ surrogate.weight[layer].T + surrogate.bias[layer]  # [N, H]
        last = len(PROMPTS[0])
        for head, held in enumerate(kept(cache, 0)[layer]):
            must = {0, 1, last - 2, last - 1}
            rest = sorted(set(range(last)) - must, key=lambda p: (float(scores[p, head]), p), reverse=True)
            assert held == sorted(must | set(rest[: 29 - len(must)]))


@pytest.mark.parametrize("how", [{"mode": "compact"}, {"mode": "mask"}, {"chunk": 13}], ids=str)
def test_modes_batches_padding_chunks_and_steps_agree(how: dict[str, Any]) -> None:
    together = cache_after("llama", [0, 1, 2], steps=6, **how)
    for row in range(3):
        assert kept(together, row) == kept(cache_after("llama", [row], steps=6), 0)


@pytest.mark.parametrize("family", ["gptj", "mpt", "gpt2", "gpt_neox", "opt", "qwen3"])
def test_every_family_tells_what_its_layers_get(family: str) -> None:
    model, ids = tiny(family), PROMPTS[0][:40]
    hidden = inputs_of(family, ids)
    heads = CONFIGS[family].get("num_key_value_heads", 3)
    surrogate = drawn(heads=heads, width=hidden[0].shape[1])
    cache = EvictionCache(
        model, KVzap(n_sinks=0, protect_recent=0), Budget(tokens=20, counts_self=False), surrogate=surrogate
    )
    with torch.inference_mode():
        model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    for layer in range(2):
        scores = hidden[layer] @ surrogate.weight[layer].T + surrogate.bias[layer]
        want = [sorted(scores[:, head].topk(20).indices.tolist()) for head in range(heads)]
        assert kept(cache, 0)[layer] == want


def test_generation_with_beams_and_a_shared_prefill() -> None:
    model, method, surrogate = tiny("llama"), KVzap(n_sinks=1, protect_recent=2), drawn()
    for beams in (1, 3):
        params = GenerationParams(max_new_tokens=6, eos=None, num_beams=beams)
        whole = generate(model, PROMPTS, method, Budget(kv_ratio=0.5), decoding=params, surrogate=surrogate)
        for row, prompt in enumerate(PROMPTS):
            alone = generate(model, [prompt], method, Budget(kv_ratio=0.5), decoding=params, surrogate=surrogate)
            assert alone.tokens[0] == whole.tokens[row]
    ids = torch.tensor([PROMPTS[0]])
    configs = [CacheConfig(method, Budget(tokens=20), surrogate=surrogate), CacheConfig(H2O(), Budget(tokens=20))]

    def caches() -> list[EvictionCache]:
        return [EvictionCache(model, config, prompt_tokens=ids.shape[1]) for config in configs]

    together, apart = caches(), caches()
    joined = MultiMethodCache(together, 1)
    steps = [[7], [11], [13]]
    with torch.inference_mode():
        model(ids, past_key_values=joined, use_cache=True)
        for step in steps:
            model(torch.tensor([step, step]), past_key_values=joined, use_cache=True)
        for cache in apart:
            model(ids, past_key_values=cache, use_cache=True)
            for step in steps:
                model(torch.tensor([step]), past_key_values=cache, use_cache=True)
    assert [kept(cache, 0) for cache in together] == [kept(cache, 0) for cache in apart]
    fork = together[0].fork([0])
    assert kept(fork, 0) == kept(together[0], 0) and fork.layers[0].layer_input is together[0].layers[0].layer_input


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs scores that a trained surrogate predicts"):
        CacheConfig(KVzap(), Budget(tokens=9))
    with pytest.raises(ConfigError, match="are of another model"):
        EvictionCache(tiny("llama"), KVzap(), Budget(tokens=9), surrogate=drawn(width=31))
    with pytest.raises(ConfigError, match="are not weight and bias of a surrogate"):
        Surrogate.of(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ConfigError, match="finite numbers in float32"):
        Surrogate.of(torch.full((1, 1, 2), torch.nan), torch.ones(1, 1))
    model = patch_model(copy.deepcopy(tiny("llama")))
    cache = EvictionCache(model, KVzap(), Budget(tokens=20), surrogate=drawn())
    unpatch_model(model)
    patch_model(model)
    with pytest.raises(CacheError, match=r"make the cache after kvexp\.hf\.patch_model"):
        model(torch.tensor([PROMPTS[0]]), past_key_values=cache, use_cache=True)


# -- the file and the command ------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))


def test_the_file_is_read_back_with_what_it_was_made_of(empty_cache: None) -> None:
    made = drawn()
    SURROGATES.write(made, "a model", {"articles": ["01"]})
    found = SURROGATES.read("a model")
    assert found == made and SURROGATES.about("a model") == {"articles": ["01"]} and torch.equal(found.bias, made.bias)


def test_the_command_trains_on_held_out_articles_and_a_run_uses_it(
    empty_cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"Run: kvexp calibrate kvzap model=tiny"):
        settings_of(*composed("method=kvzap"))
    assert main(["kvzap", "model=tiny", "tokens=40", "prompts=4"]) == 0
    said = capsys.readouterr().out
    assert "R2 on" in said and "held-out tokens" in said
    settings = settings_of(*composed("method=kvzap", "limit=1", "task.max_new_tokens=3", f"outputs_dir={tmp_path}"))
    surrogate = settings.cache.surrogate
    assert surrogate is not None and settings.identity["method"]["surrogate"] == surrogate.digest
    run = evaluate_run(settings)
    assert run.rows()[0]["surrogate"] == surrogate.digest
    assert main(["kvzap", "model=tiny", "tokens=40", "prompts=2"]) == 0
    assert "nothing was held out" in capsys.readouterr().out
    assert settings_of(*composed("method=kvzap")).cache.surrogate != surrogate


def test_articles_it_was_trained_on_are_not_asked(empty_cache: None, tmp_path: Path) -> None:
    assert main(["kvzap", "model=tiny", "tokens=40", "prompts=4"]) == 0
    for words in (("task=news",), ("task=news_qa", "limit=97"), ("task=news_needle", "limit=1")):
        with pytest.raises(ConfigError, match=r"was trained on \d+ of the \d+ articles that task=news"):
            settings_of(*composed("method=kvzap", *words))
    for words in (("task=news", "limit=24"), ("task=news_qa", "limit=96")):
        settings_of(*composed("method=kvzap", *words))
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": f"Text {n} is about a mill. " * 9}) for n in range(4)))
    assert main(["kvzap", "model=tiny", f"data={other}", "tokens=40"]) == 0
    settings_of(*composed("method=kvzap", "task=news"))


def test_training_articles_are_those_behind_the_first_24() -> None:
    assert [*articles()[:24], *training_articles()] == [*articles()] and len(training_articles()) == 12


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["method=h2o"], "method=h2o: kvexp calibrate kvzap takes model=NAME"),
        (["model=tiny", "tokens=0"], "tokens must be a whole number of at least 1"),
        (["model=tiny", "tokens=3"], "has more than 6 tokens"),
    ],
)
def test_what_the_command_refuses(
    words: list[str], told: str, empty_cache: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvexp.run.calibrate as module

    monkeypatch.setattr(module, "load", lambda spec: pytest.fail("a model was loaded"))
    assert main(["kvzap", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_input_of_a_layer_is_not_kept_beyond_the_forward():
    model = patch_model(copy.deepcopy(tiny("llama")))
    holder = layer_input(model)
    model(torch.tensor([[3, 4, 5]]))
    assert holder.hidden is None

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.tensor([[3, 4, 5]]))
    hook.remove()
    assert holder.hidden is None
    copy.deepcopy(model)
