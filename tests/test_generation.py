"""kvexp.generate: every way of decoding, rows that do not know their neighbours, timing, end of text."""

import math

import pytest
import torch
from tiny import CONFIGS, tiny

from kvexp.core import Budget, Cadence
from kvexp.core.eviction_backend import stackable_width
from kvexp.errors import CacheError
from kvexp.generate import generate
from kvexp.generate.finish_reason import Ending
from kvexp.generate.generation_params import GenerationParams
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.methods import A2SF, H2O, Full, Keyformer, Random, SnapKV, StreamingLLM, Window
from kvexp.models import EvictionCache, load_model, load_tokenizer

PROMPTS = [list(range(3, 26)), list(range(50, 37, -1)), [7, 7, 9, 7, 7, 9, 7, 7, 9, 11, 13, 11, 13, 17]]
HALF = Budget(kv_ratio=0.5)
METHODS = [H2O(), Keyformer(), A2SF(alpha=0.5), Window(), Random(), StreamingLLM(n_sinks=2)]


@pytest.mark.parametrize(
    "decoding",
    [
        GenerationParams(9),
        GenerationParams(9, sample=True, temperature=0.8, top_k=20),
        GenerationParams(9, num_beams=4),
    ],
)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_row_does_not_know_its_neighbours(method, decoding):
    model = tiny("llama")
    seeds = [5, 6, 7]
    together = generate(model, PROMPTS, method, HALF, decoding=decoding, seeds=seeds)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], method, HALF, decoding=decoding, seeds=[seeds[row]])
        assert alone.tokens[0] == together.tokens[row]


def test_order_of_rows_does_not_matter():
    model = tiny("qwen3")
    decoding = GenerationParams(9, sample=True)
    forth = generate(model, PROMPTS, Keyformer(), HALF, decoding=decoding, seeds=[1, 2, 3])
    back = generate(model, PROMPTS[::-1], Keyformer(), HALF, decoding=decoding, seeds=[3, 2, 1])
    assert forth.tokens == back.tokens[::-1]


def test_sampling_depends_on_the_seed_and_follows_the_distribution():
    model = tiny("gpt2")
    draws = [
        generate(
            model, [[3, 4, 5]] * 50, Full(), decoding=GenerationParams(1, sample=True), seeds=range(i, i + 50)
        ).tokens
        for i in range(0, 2000, 50)
    ]
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=61).float()
    logits = generate(model, [[3, 4, 5]], Full(), decoding=GenerationParams(1), keep_logits=True).logits[0][0]
    expected = logits.softmax(-1) * counts.sum()
    large = expected > 20
    # Each count is binomial: five standard deviations leave no room for a wrong sampler and none for bad luck.
    assert ((counts - expected).abs()[large] < 5 * expected.sqrt()[large]).all()
    assert large.sum() > 5


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_chunked_prefill_gives_the_same_tokens(family, num_beams):
    model, method = tiny(family), H2O()
    whole = generate(model, PROMPTS, method, HALF, decoding=GenerationParams(9, num_beams=num_beams))
    chunked = generate(model, PROMPTS, method, HALF, decoding=GenerationParams(9, num_beams=num_beams, prefill_chunk=5))
    assert whole.tokens == chunked.tokens
    assert [whole.cache.kept_positions(i) for i in (0, 1)] == [chunked.cache.kept_positions(i) for i in (0, 1)]


def test_plain_generate_with_chunks_needs_the_prompt_length():
    model = tiny("llama")
    cache = EvictionCache(model, H2O(), HALF)
    with pytest.raises(CacheError, match="prompt_tokens"):
        model.generate(torch.tensor([PROMPTS[0]]), past_key_values=cache, max_new_tokens=3, prefill_chunk_size=5)


@pytest.mark.parametrize("family", CONFIGS)
def test_beam_state_follows_the_beams(family):
    """The winning beam, fed alone token by token, has the log-probability the beam search gave it."""
    model, method, new = tiny(family), H2O(), 9
    beams = generate(model, PROMPTS, method, HALF, decoding=GenerationParams(new, num_beams=4, length_penalty=0.0))
    alone = continuation_logprobs(model, PROMPTS, beams.tokens, method, HALF)
    for total, steps in zip(beams.beam_scores, alone, strict=True):
        assert math.isclose(total, sum(steps), abs_tol=2e-4)


def test_beams_really_separate_in_that_test():
    """Were beams identical, a cache that forgot to reorder would pass; here forgetting must change the result."""
    model, method = tiny("llama"), A2SF(alpha=0.5)
    decoding = GenerationParams(25, num_beams=4, length_penalty=0.0)
    right = generate(model, PROMPTS, method, HALF, decoding=decoding)

    class Forgetful(EvictionCache):
        forgets = ("keys",)

        def reorder_cache(self, beam_idx):
            held = [{n: s.slots.tensors[n].clone() for n in self.forgets} for s in self.layer_states]
            super().reorder_cache(beam_idx)
            for state, tensors in zip(self.layer_states, held, strict=True):
                for name, tensor in tensors.items():
                    getattr(state.slots, name).copy_(tensor)

    import kvexp.generate.prefilled_context as module

    original = module.EvictionCache
    try:
        for name in ("keys", "values", "positions", "score"):
            Forgetful.forgets = (name,)
            module.EvictionCache = Forgetful
            wrong = generate(model, PROMPTS, method, HALF, decoding=decoding)
            changed = wrong.beam_scores != right.beam_scores or wrong.cache.kept_positions(
                0
            ) != right.cache.kept_positions(0)
            assert changed, f"forgetting to reorder {name} was not noticed"
    finally:
        module.EvictionCache = original


def test_end_of_text_cuts_the_row_and_min_new_tokens_delays_it():
    model = tiny("llama")
    free = generate(model, PROMPTS, Full(), decoding=GenerationParams(9, eos=None))
    end = free.tokens[0][2]
    cut = generate(model, PROMPTS, Full(), decoding=GenerationParams(9, eos=end))
    assert cut.tokens[0] == free.tokens[0][: free.tokens[0].index(end) + 1]
    for row in (1, 2):
        stop = free.tokens[row].index(end) + 1 if end in free.tokens[row] else 9
        assert cut.tokens[row] == free.tokens[row][:stop]
        assert cut.endings[row] == (Ending("stop", token=end) if stop < 9 else Ending("length"))
    late = generate(model, PROMPTS, Full(), decoding=GenerationParams(9, eos=end, min_new_tokens=6))
    assert len(late.tokens[0]) >= 6
    assert end not in late.tokens[0][:5]


def test_timing_is_recorded_and_ordered():
    result = generate(tiny("llama"), PROMPTS, H2O(), HALF, decoding=GenerationParams(9, eos=None))
    timing = result.timing
    assert 0 < timing.ttft_s < timing.tt2t_s
    assert timing.tpot_s > 0
    one = generate(tiny("llama"), PROMPTS, H2O(), HALF, decoding=GenerationParams(1)).timing
    assert one.ttft_s > 0
    assert math.isnan(one.tt2t_s)
    assert math.isnan(one.tpot_s)


def test_stop_strings(stories260k):
    model, tokenizer = load_model(stories260k), load_tokenizer(stories260k)
    prompt = tokenizer("Once upon a time there was a little girl named Lily.").input_ids
    free = generate(model, [prompt], Full(), decoding=GenerationParams(60), tokenizer=tokenizer)
    cut = generate(model, [prompt], Full(), decoding=GenerationParams(60, stop_strings=(".",)), tokenizer=tokenizer)
    assert len(cut.tokens[0]) < len(free.tokens[0])
    assert tokenizer.decode(cut.tokens[0]).rstrip().endswith(".")
    assert cut.endings == [Ending("stop", text=".")] and free.endings == [Ending("length")]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_row_that_a_stop_string_ends_does_not_know_how_long_its_neighbours_go_on(stories260k, num_beams):
    model, tokenizer = load_model(stories260k), load_tokenizer(stories260k)
    texts = ("Once upon a time there was a little girl named Lily.", "The dog ran to the", "Tom had a red ball. He")
    prompts = [tokenizer(text).input_ids for text in texts]
    decoding = GenerationParams(40, num_beams=num_beams, stop_strings=(".", "and"))
    together = generate(model, prompts, Full(), decoding=decoding, tokenizer=tokenizer)
    alone = [generate(model, [prompt], Full(), decoding=decoding, tokenizer=tokenizer) for prompt in prompts]
    assert len({len(tokens) for tokens in together.tokens}) > 1
    assert together.tokens == [one.tokens[0] for one in alone]
    assert together.endings == [one.endings[0] for one in alone]
    for tokens, ending in zip(together.tokens, together.endings, strict=True):
        assert ending.reason == "stop" and ending.text in tokenizer.decode(tokens[-2:])


def test_first_token_is_full_attention_and_ledger_shows_the_drop():
    model = tiny("llama")
    full = generate(model, PROMPTS[:1], Full(), decoding=GenerationParams(9), keep_logits=True)
    half = generate(model, PROMPTS[:1], H2O(), HALF, decoding=GenerationParams(9), keep_logits=True)
    torch.testing.assert_close(full.logits[0], half.logits[0])
    length = len(PROMPTS[0])
    slots = length // 2
    per_slot = 2 * 3 * 14 * 4  # keys and values, 3 kv heads, 14 dims, float32
    held = stackable_width(slots, torch.device("cpu"))
    assert half.memory_tracker.layer_bytes == [held * per_slot] * 2 and slots <= held < slots + 4
    assert full.memory_tracker.layer_bytes == [(length + 9) * per_slot] * 2
    assert (
        half.memory_tracker.peak_bytes <= (2 * length + held) * per_slot
    )  # layer by layer: never two prompts and two caches
    assert len(half.cache.kept_positions(0)[0][0]) == slots - 1  # one slot is free for the next token


def test_snapkv_keeps_its_prompt_choice():
    result = generate(tiny("llama"), PROMPTS[:1], SnapKV(window=4), HALF, decoding=GenerationParams(9, eos=None))
    kept = result.cache.kept_positions(1)[0][0]
    assert [p for p in kept if p >= 23] == list(range(23, 31))  # all eight tokens fed since are still there
    assert len([p for p in kept if p < 23]) == 10


def test_rarer_eviction_holds_more_slots():
    often = generate(tiny("llama"), PROMPTS[:1], H2O(), HALF, decoding=GenerationParams(9, eos=None))
    rarely = generate(
        tiny("llama"), PROMPTS[:1], H2O(), HALF, decoding=GenerationParams(9, eos=None), cadence=Cadence(every=4)
    )
    assert rarely.memory_tracker.bytes * 12 == often.memory_tracker.bytes * (11 + 3)  # 11 slots are held as 12
