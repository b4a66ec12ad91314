"""Each of these gave a wrong number or a bare traceback once; found by trying to break the core as its user."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import stock, tiny
from transformers import StaticCache

from kvexp.core import Budget
from kvexp.core.noise import Noise, uniform
from kvexp.generate import GenerationParams, continuation_logprobs, generate
from kvexp.hf import EvictionCache, patch_model
from kvexp.methods import H2O, Full, Keyformer, StreamingLLM
from kvexp.util import CacheError, ConfigError

PROMPT = list(range(3, 33))
IDS = torch.tensor([PROMPT])


def test_uniform_never_reaches_its_ends():
    ends = uniform(torch.tensor([-1, 0, 511, -512], dtype=torch.int32))
    assert ends.min() > 0
    assert ends.max() < 1
    assert torch.isfinite(-torch.log(-torch.log(ends))).all()
    assert Noise("gumbel").kind == "gumbel"


@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_padded_follow_up_turn_with_renumbered_positions(family):
    """Two rows get new tokens of unequal length at once, padded on the left: each row as if it were alone."""
    model, budget = tiny(family), Budget(tokens=12)
    new = torch.tensor([[0, 0, 40, 41], [42, 43, 44, 45]])
    prompts = torch.tensor([PROMPT, PROMPT[::-1]])

    def follow(ids, tokens, mask):
        cache = EvictionCache(model, StreamingLLM(), budget).allow_multi_token_steps()
        places = {} if family == "mpt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]}
        with torch.no_grad():
            model(ids, past_key_values=cache)
            return model(tokens, attention_mask=mask, past_key_values=cache, **places).logits[:, -1]

    mask = torch.ones(2, 34, dtype=torch.int64)
    mask[0, 30:32] = 0
    both = follow(prompts, new, mask)
    alone = follow(prompts[:1], new[:1, 2:], torch.ones(1, 32, dtype=torch.int64))
    torch.testing.assert_close(both[:1], alone, atol=1e-4, rtol=0)


def test_sinks_are_seen_through_a_sliding_window_once_renumbered():
    model = tiny("mistral", sliding_window=12)
    ids, few = list(range(3, 48)), GenerationParams(3)
    with_sinks, without, changed = (
        generate(model, [prompt], StreamingLLM(n_sinks=n), Budget(tokens=10), decoding=few, keep_logits=True)
        for prompt, n in ((ids, 2), (ids, 0), ([50, 51, *ids[2:]], 2))
    )
    assert with_sinks.cache.kept_positions(0)[0][0][:2] == [0, 1]
    # The two first tokens are far outside the window of 12, but within the cache they are near: they must matter.
    assert (with_sinks.logits[1] - changed.logits[1]).abs().max() > 0.1
    assert without.cache.kept_positions(0)[0][0][0] > 30


def test_static_caches_are_refused():
    model = tiny("llama")
    with pytest.raises(CacheError, match="static cache"):
        model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=64))


def test_blocks_of_nothing():
    with pytest.raises(ConfigError, match="block must be at least 1 or null, got 0"):
        EvictionCache(tiny("llama"), H2O(), Budget(tokens=8), block=0)


def test_tau_schedule_does_not_run_past_its_end():
    model = tiny("llama")
    cache = EvictionCache(model, Keyformer(), Budget(tokens=8), max_new_tokens=3)
    with pytest.raises(ConfigError, match="past max_new_tokens=3"):
        model.generate(IDS, past_key_values=cache, max_new_tokens=20, pad_token_id=0, do_sample=False)


def test_continuations_of_unequal_length_need_a_common_schedule():
    model, lengths = tiny("llama"), [[40, 41, 42], [50] * 12]
    for method, budget in ((H2O(), Budget(kv_ratio=0.4, of="sequence")), (Keyformer(), Budget(tokens=8))):
        with pytest.raises(ConfigError, match="needs max_new_tokens"):
            continuation_logprobs(model, [PROMPT, PROMPT[:9]], lengths, method, budget)
        both = continuation_logprobs(model, [PROMPT, PROMPT[:9]], lengths, method, budget, max_new_tokens=12)
        alone = continuation_logprobs(model, [PROMPT], lengths[:1], method, budget, max_new_tokens=12)
        assert both[0] == pytest.approx(alone[0], abs=1e-5)


def test_num_beams_must_be_the_truth():
    model, method = tiny("llama"), Keyformer(tau_end=1.0)
    options = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    two = torch.tensor([PROMPT, PROMPT[::-1]])
    with pytest.raises(CacheError, match="different prompts"):
        model.generate(two, past_key_values=EvictionCache(model, method, Budget(tokens=8), num_beams=2), **options)
    with pytest.raises(ConfigError, match="not a whole number of samples of num_beams=4"):
        model.generate(IDS, past_key_values=EvictionCache(model, method, Budget(tokens=8), num_beams=4), **options)


def test_an_interrupted_forward_ends_the_cache():
    model = copy.deepcopy(tiny("llama"))
    cache = EvictionCache(model, H2O(), Budget(tokens=8))
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        broken = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            model(IDS[:, :1], past_key_values=cache)
        broken.remove()
        with pytest.raises(CacheError, match="reached 1 of 2 layers"):
            model(IDS[:, :1], past_key_values=cache)


def test_padding_after_the_prompt_counts_whoever_the_neighbour_is():
    model = tiny("llama")

    def step(rows, masks):
        cache = EvictionCache(model, H2O(), Budget(tokens=12))
        prompts = torch.tensor([PROMPT, PROMPT[::-1]])[:rows]
        with torch.no_grad():
            model(prompts, past_key_values=cache)
            for masked in masks:
                mask = torch.ones(rows, cache.get_seq_length() + 1, dtype=torch.int64)
                mask[:, -1] = torch.tensor(masked[:rows])
                places = torch.full((rows, 1), 35)
                out = model(torch.full((rows, 1), 44), attention_mask=mask, past_key_values=cache, position_ids=places)
        return out.logits[0], cache.kept_positions(0)[0]

    both, kept = step(2, [(0, 1), (1, 1)])
    alone, kept_alone = step(1, [(0,), (1,)])
    torch.testing.assert_close(both, alone, atol=1e-4, rtol=0)
    assert kept == kept_alone


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_move_cannot_be_renumbered(kind):
    model = copy.deepcopy(tiny("llama"))
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match=f"rope_type '{kind}'"):
        EvictionCache(model, StreamingLLM(), Budget(tokens=8))


def test_how_a_model_would_search_and_how_long_does_not_leak_in():
    model = patch_model(copy.deepcopy(stock("llama")))
    clean = generate(model, [PROMPT], Full(), decoding=GenerationParams(9, eos=None)).tokens
    model.generation_config.update(do_sample=True, temperature=9.0, num_beams=3, max_new_tokens=2, max_time=1e-9)
    assert generate(model, [PROMPT], Full(), decoding=GenerationParams(9, eos=None)).tokens == clean


def test_a_cache_can_be_continued_by_plain_generate():
    model = tiny("llama")
    first = generate(model, [PROMPT], H2O(), Budget(tokens=8), decoding=GenerationParams(4, eos=None))
    more = model.generate(
        first.sequences, past_key_values=first.cache, max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    whole = generate(model, [PROMPT], H2O(), Budget(tokens=8), decoding=GenerationParams(7, eos=None))
    assert more[0, 30:].tolist() == whole.tokens[0]
