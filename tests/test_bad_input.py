"""What a user gets wrong must be said in the user's words, before a number comes out."""

import json

import pytest
import torch
from tiny import CONFIGS, tiny

from kvexp.core import Budget, Cadence, Noise
from kvexp.errors import CacheError, ConfigError
from kvexp.generate import generate
from kvexp.generate.generation_params import GenerationParams
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.methods import A2SF, H2O, DilatedWindow, Full, Ideal, Keyformer, SnapKV, StreamingLLM, Window
from kvexp.models import EvictionCache, load_model, patch_model, random_model

PROMPT = [list(range(3, 20))]
SETTINGS = {
    "kv_ratio 0": (lambda: Budget(kv_ratio=0), r"kv_ratio must be in \(0, 1\], got 0"),
    "kv_ratio 1.5": (lambda: Budget(kv_ratio=1.5), r"kv_ratio must be in \(0, 1\], got 1.5"),
    "kv_ratio nan": (lambda: Budget(kv_ratio=float("nan")), "got nan"),
    "both budgets": (lambda: Budget(kv_ratio=0.5, tokens=8), "exactly one of kv_ratio and tokens"),
    "no budget": (lambda: Budget(), "exactly one of kv_ratio and tokens"),
    "tokens 0": (lambda: Budget(tokens=0), "at least 1, got 0"),
    "tokens 2.5": (lambda: Budget(tokens=2.5), "whole number of slots, got 2.5"),
    "tokens 10**30": (lambda: Budget(tokens=10**30), r"tokens must be below 2\*\*62"),
    "budget of": (lambda: Budget(kv_ratio=0.5, of="text"), "prompt, padded or sequence, got 'text'"),
    "pyramid": (lambda: Budget(tokens=8, pyramid=1), r"pyramid must be in \[0, 1\), got 1"),
    "cadence": (lambda: Cadence(every=0), "at least 1 decode step or null, got 0"),
    "cadence 2**20": (lambda: Cadence(every=1 << 20), "at most 65536 decode steps"),
    "many beams": (lambda: GenerationParams(num_beams=1 << 20), "num_beams may be at most 1024"),
    "alpha": (lambda: A2SF(alpha=1.5), r"alpha must be in \[0, 1\], got 1.5"),
    "tau": (lambda: Keyformer(tau_init=0).score_spec, "tau must be positive, got tau_init=0"),
    "noise": (lambda: Noise("uniform"), "gumbel, gaussian, constant, none, got 'uniform'"),
    "recent": (lambda: H2O(recent_ratio=-0.1), r"recent_ratio must be in \[0, 1\], got -0.1"),
    "key window": (lambda: Keyformer(key_window="new"), "paper or release_frozen, got 'new'"),
    "dilation": (lambda: DilatedWindow(dilation=0), "dilation must be at least 1"),
    "kernel": (lambda: SnapKV(kernel=4), "kernel must be odd"),
    "new tokens": (lambda: GenerationParams(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "min above max": (lambda: GenerationParams(5, min_new_tokens=6), "between 0 and max_new_tokens=5, got 6"),
    "beams": (lambda: GenerationParams(num_beams=0), "num_beams must be at least 1, got 0"),
    "sampling beams": (lambda: GenerationParams(num_beams=2, sample=True), "set sample=false or num_beams=1"),
    "temperature": (lambda: GenerationParams(sample=True, temperature=0), "temperature must be positive, got 0"),
    "family": (lambda: random_model("bert"), "'bert' is not supported; supported: .*llama"),
    "dtype": (lambda: load_model("x", dtype="int8"), "float32, bfloat16, float16, got 'int8'"),
    "no folder": (lambda: load_model("./nowhere"), "folder ./nowhere does not exist"),
    "hub": (lambda: load_model("no-such/model"), "cannot load no-such/model: it is not in the Hugging Face cache"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    make, message = SETTINGS[case]
    with pytest.raises(ConfigError, match=message):
        make()


CALLS = {
    "needs a budget": (dict(method=H2O()), "method h2o needs a budget"),
    "too small": (dict(method=StreamingLLM(), budget=Budget(tokens=3)), "3 slots cannot hold sink=4"),
    "sinks and recent": (dict(method=SnapKV(window=9), budget=Budget(tokens=8)), "cannot hold sink=0 \\+ recent=9"),
    "zero slots": (dict(method=H2O(), budget=Budget(kv_ratio=0.05)), "0 slots for a prompt of 17 tokens"),
    "ideal drops nothing": (dict(method=Ideal(), budget=Budget(tokens=8)), "set mode=mask"),
    "official mask": (dict(method=H2O(impl="mask"), budget=Budget(tokens=8)), "set mode=mask"),
    "full rows": (dict(method=A2SF(score_source="full"), budget=Budget(tokens=8)), "set mode=mask"),
    "mode": (dict(method=H2O(), budget=Budget(tokens=8), mode="drop"), "overwrite, compact, mask, auto, got 'drop'"),
    "positions": (dict(method=H2O(), budget=Budget(tokens=8), positions="new"), "original, renumbered, got 'new'"),
    "too long": (
        dict(method=Full(), decoding=GenerationParams(300)),
        "17 tokens and max_new_tokens=300, the model holds 211",
    ),
    "seeds": (dict(method=Full(), seeds=[1, 2]), "got 2 seeds for a batch of 1 rows"),
    "frozen": (
        dict(method=Keyformer(recent_ratio=0, key_window="release_frozen"), budget=Budget(tokens=8)),
        "needs a recent window",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    options, message = CALLS[case]
    with pytest.raises(ConfigError, match=message):
        generate(tiny("llama"), PROMPT, **{"decoding": GenerationParams(4), **options})


def test_empty_prompts():
    with pytest.raises(ConfigError, match="no prompts"):
        generate(tiny("llama"), [], Full())
    with pytest.raises(ConfigError, match="row 1 of the batch has an empty prompt"):
        generate(tiny("llama"), [[3, 4], []], Full())
    model = tiny("llama")
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(ConfigError, match="row 1 of the batch has an empty prompt"):
        model(torch.ones_like(mask), attention_mask=mask, past_key_values=EvictionCache(model, Full()))
    with pytest.raises(ConfigError, match="continuation is empty"):
        continuation_logprobs(model, [[3]], [[]], Full())


def test_padding_on_the_right():
    model = tiny("llama")
    mask = torch.tensor([[1, 1, 0]])
    with pytest.raises(ConfigError, match="pad on the left"):
        model(torch.ones_like(mask), attention_mask=mask, past_key_values=EvictionCache(model, Full()))


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_cannot_be_renumbered_or_exceeded(family):
    with pytest.raises(ConfigError, match="positions=renumbered cannot work"):
        EvictionCache(tiny(family), StreamingLLM(), Budget(tokens=8))
    EvictionCache(tiny(family), StreamingLLM(), Budget(tokens=8), positions="original")
    with pytest.raises(ConfigError, match="table of positions for 211 tokens"):
        EvictionCache(tiny(family), Full(), beyond_context=True)


def test_prompt_longer_than_the_model_holds_without_our_generate():
    model = tiny("llama")
    with pytest.raises(CacheError, match="212 tokens, the model holds 211"):
        model(torch.ones(1, 212, dtype=torch.int64), past_key_values=EvictionCache(model, Full()))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_cache_is_for_one_prompt(family):
    model = tiny(family)
    cache = EvictionCache(model, H2O(), Budget(kv_ratio=0.5))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    first = model.generate(torch.tensor(PROMPT), past_key_values=cache, **options)
    for other in ([PROMPT[0][::-1]], [list(range(30, 60))], [PROMPT[0][:9]]):
        with pytest.raises(CacheError, match="already holds a prompt of 17 columns"):
            model.generate(torch.tensor(other), past_key_values=cache, **options)
    cache.reset()
    assert torch.equal(model.generate(torch.tensor(PROMPT), past_key_values=cache, **options), first)


def test_crop_is_refused():
    model = tiny("llama")
    cache = EvictionCache(model, H2O(), Budget(kv_ratio=0.5))
    model.generate(torch.tensor(PROMPT), past_key_values=cache, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(CacheError, match="cannot be cropped"):
        cache.crop(3)


def test_another_batch_size():
    model = tiny("llama")
    cache = EvictionCache(model, Full())
    model(torch.tensor(PROMPT), past_key_values=cache)
    with pytest.raises(CacheError, match="holds a batch of 1 rows, the forward has 2"):
        model(torch.tensor([[3], [4]]), past_key_values=cache)


def test_beams_without_num_beams_where_scores_are_added_up():
    model = tiny("llama")
    cache = EvictionCache(model, Keyformer(tau_end=1.0), Budget(kv_ratio=0.5))
    with pytest.raises(CacheError, match="beam search needs num_beams"):
        model.generate(torch.tensor(PROMPT), past_key_values=cache, num_beams=4, max_new_tokens=4, pad_token_id=0)


def test_tau_schedule_without_its_end():
    with pytest.raises(ConfigError, match="tau schedule needs max_new_tokens"):
        EvictionCache(tiny("llama"), Keyformer(), Budget(kv_ratio=0.5))


def test_model_that_was_not_installed():
    from tiny import stock

    with pytest.raises(ConfigError, match=r"call kvexp\.models\.patch_model"):
        EvictionCache(stock("llama"), Window(), Budget(tokens=8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights(bad):
    import copy

    from tiny import stock

    model = copy.deepcopy(stock("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = bad
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.k_proj.weight holds NaN or inf"):
        patch_model(model)


def test_model_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match="'bert' is not supported"):
        load_model(str(tmp_path))
    config = tiny("llama").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ConfigError, match="has no weights"):
        load_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="only pickled weights"):
        load_model(str(tmp_path))


def test_a_saved_folder_loads(tmp_path):
    from tiny import stock

    stock("gpt2").save_pretrained(tmp_path)
    ours = generate(load_model(str(tmp_path)), PROMPT, H2O(), Budget(kv_ratio=0.5), decoding=GenerationParams(5))
    again = generate(tiny("gpt2"), PROMPT, H2O(), Budget(kv_ratio=0.5), decoding=GenerationParams(5))
    assert ours.tokens == again.tokens
