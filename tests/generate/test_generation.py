"""kvexp.generate: every way of decoding, rows that do not know their neighbours, timing, end of text."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import re
import weakref

import pytest
import torch
from tiny import CONFIGS, prompts_of, stock, tiny
from transformers import BatchEncoding
from turns import in_turn

from kvexp.core import Budget, CacheConfig, Cadence, Noise
from kvexp.core.backends import stackable_width
from kvexp.generate import (
    decode,
    divergence_from_full,
    generate,
    generate_from_context,
    generate_from_contexts,
    prefill,
    prefill_together,
)
from kvexp.generate.inputs import Ending, GenerationParams
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.hf import EvictionCache, load_model, load_tokenizer, patch_model
from kvexp.hf.cache import KeptText
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import A2SF, H2O, DilatedWindow, Full, Ideal, Keyformer, Random, SnapKV, StreamingLLM, Window
from kvexp.retrieval.infllm import InfLLM
from kvexp.retrieval.pqcache import PQCache
from kvexp.retrieval.quest import Quest
from kvexp.retrieval.sparq import SparQ
from kvexp.util.errors import CacheError, ConfigError

PROMPTS = [list(range(3, 26)), list(range(50, 37, -1)), [7, 7, 9, 7, 7, 9, 7, 7, 9, 11, 13, 11, 13, 17]]
HALF = Budget(kv_ratio=0.5)
METHODS = [H2O(), Keyformer(), A2SF(alpha=0.5), Window(), Random(), StreamingLLM(n_sinks=2)]


DECODINGS = [
    GenerationParams(9),
    GenerationParams(9, sample=True, temperature=0.8, top_k=20),
    GenerationParams(9, num_beams=4),
]


@pytest.mark.parametrize(("method", "decoding"), in_turn(METHODS, DECODINGS, of=3))
def test_a_row_does_not_know_its_neighbours(method, decoding):
    model = tiny("llama")
    seeds = [5, 6, 7]
    together = generate(model, PROMPTS, method, HALF, decoding=decoding, seeds=seeds)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], method, HALF, decoding=decoding, seeds=[seeds[row]])
        assert alone.tokens[0] == together.tokens[row]


def test_sampling_depends_on_the_seed_and_follows_the_distribution():
    model = tiny("gpt2")
    once = GenerationParams(1, sample=True)
    draws = [generate(model, [[3, 4, 5]] * 50, Full(), decoding=once, seeds=range(i, i + 50)).tokens
             for i in range(0, 2000, 50)]  # fmt: skip
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=61).float()
    logits = generate(model, [[3, 4, 5]], Full(), decoding=GenerationParams(1), keep_logits=True).logits[0][0]
    expected = logits.softmax(-1) * counts.sum()
    large = expected > 20
    # Each count is binomial: five standard deviations leave no room for a wrong sampler and none for bad luck.
    assert ((counts - expected).abs()[large] < 5 * expected.sqrt()[large]).all()
    assert large.sum() > 5


@pytest.mark.parametrize(("family", "num_beams"), in_turn(CONFIGS, [1, 4], of=2))
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


def test_beams_really_separate_in_that_test(monkeypatch):
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

    for name in ("keys", "values", "positions", "score"):
        Forgetful.forgets = (name,)
        monkeypatch.setattr(importlib.import_module("kvexp.generate.prefill"), "EvictionCache", Forgetful)
        wrong = generate(model, PROMPTS, method, HALF, decoding=decoding)
        kept = [made.cache.kept_positions(0) for made in (wrong, right)]
        assert wrong.beam_scores != right.beam_scores or kept[0] != kept[1], f"forgetting {name} was not noticed"


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
    assert rarely.memory_tracker.bytes * 12 == often.memory_tracker.bytes * 16  # 11 and 11 + 3 slots, in fours


# -- only what is generated ends an answer ---------------------------------------------------------------------------

ENDS = ("\n", "Q:", "tell me", "né", "。")


def bytes_model():
    """Random weights that speak bytes, and their tokenizer."""
    return tiny("llama", vocab_size=259, max_position_embeddings=173), byte_tokenizer()


def across(text, answer):
    """Texts that begin in `text` and end in its answer, of every length of the first part up to 3."""
    return [text[-n:] + answer[:m] for n in (1, 2, 3) for m in (1, 2)]


@pytest.mark.parametrize(("end", "sample"), in_turn(ENDS, [False, True], of=2))
def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(end, sample):
    model, tokenizer = bytes_model()
    ids = tokenizer(f"Once there was {end}").input_ids
    options = {"tokenizer": tokenizer, "seeds": 3}
    (free,) = generate(model, [ids], Full(), decoding=GenerationParams(12, sample=sample), **options).tokens
    answer = tokenizer.decode(free)
    for stop in (stop for stop in across(end, answer) if stop not in answer):
        decoding = GenerationParams(12, sample=sample, stop_strings=(stop,))
        made = generate(model, [ids], Full(), decoding=decoding, **options)
        assert (made.tokens, made.endings) == ([free], [Ending("length")]), stop
    for stop in (answer[:1], answer[1:3], answer[2:5]):
        decoding = GenerationParams(12, sample=sample, stop_strings=("never", stop, stop + "no"))
        made = generate(model, [ids], Full(), decoding=decoding, **options)
        written = tokenizer.decode(made.tokens[0])
        assert free[: len(made.tokens[0])] == made.tokens[0] and made.endings == [Ending("stop", text=stop)]
        assert stop in written and stop not in tokenizer.decode(made.tokens[0][:-1])


@pytest.mark.parametrize("way", ["beams", "asked", "asked with beams", "beside another context"])
def test_no_way_of_generating_takes_the_prompt_for_an_answer(way):
    model, tokenizer = bytes_model()
    prompt, question = tokenizer("Once there was").input_ids, tokenizer(" a\n", add_special_tokens=False).input_ids
    num_beams = 3 if "beams" in way else 1

    def tokens(*stops):
        decoding = GenerationParams(9, num_beams=num_beams, stop_strings=stops)
        if way == "beside another context":
            configs = [CacheConfig(Full()), CacheConfig(H2O(), HALF)]
            contexts = prefill_together(model, [prompt], configs, max_new_tokens=len(question) + 9)
            made = generate_from_contexts(model, contexts, [question], decoding=decoding, tokenizer=tokenizer)
            return made[0].tokens[0]
        ids, questions = ([prompt], [question]) if "asked" in way else ([prompt + question], None)
        return generate(model, ids, Full(), questions=questions, decoding=decoding, tokenizer=tokenizer).tokens[0]

    free = tokens()
    text = tokenizer.decode(free)
    for stop in across(" a\n", text):
        assert tokens(stop) == free, stop
    assert len(tokens(text[:2])) < len(free)


def test_stop_strings_of_the_model_itself_end_an_answer_unless_others_are_asked_for():
    model, tokenizer = bytes_model()
    model, ids = copy.deepcopy(model), tokenizer("Once").input_ids
    (free,) = generate(model, [ids], Full(), decoding=GenerationParams(12)).tokens
    model.generation_config.stop_strings = tokenizer.decode(free[1:3])
    for num_beams in (1, 2):
        with pytest.raises(ConfigError, match="pass tokenizer="):
            generate(model, [ids], Full(), decoding=GenerationParams(12, num_beams=num_beams))
    (cut,) = generate(model, [ids], Full(), decoding=GenerationParams(12), tokenizer=tokenizer).tokens
    assert cut == free[:3]
    decoding = GenerationParams(12, stop_strings=("never",))
    assert generate(model, [ids], Full(), decoding=decoding, tokenizer=tokenizer).tokens == [free]


# -- the words of transformers ---------------------------------------------------------------------------------------


def test_generate_takes_the_keywords_of_transformers():
    model, tokenizer = bytes_model()
    ids = tokenizer("Once").input_ids
    asked = {
        **{"max_new_tokens": 7, "min_new_tokens": 2, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        **{"eos_token_id": [5, 6], "stop_strings": "xyz", "prefill_chunk_size": 2, "num_beams": 1},
    }
    same = {
        **{"max_new_tokens": 7, "min_new_tokens": 2, "sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        **{"eos": [5, 6], "stop_strings": ("xyz",), "prefill_chunk": 2},
    }
    named = generate(model, [ids], H2O(), HALF, tokenizer=tokenizer, seeds=4, cadence=Cadence(True), **asked)
    params = GenerationParams(**same)
    whole = generate(model, [ids], H2O(), HALF, tokenizer=tokenizer, seeds=4, cadence=Cadence(True), decoding=params)
    assert named.tokens == whole.tokens
    more = generate(model, [ids], Full(), decoding=GenerationParams(9), max_new_tokens=3, top_k=None)
    assert len(more.tokens[0]) == 3, "a keyword goes before decoding, and None leaves what is there"
    context = prefill(model, [ids], Full(), max_new_tokens=5)
    assert len(generate_from_context(model, context, [[4]], max_new_tokens=4).tokens[0]) == 4


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("max_tokens", "max_tokens is not a keyword that is known here; did you mean max_new_tokens"),
        ("eos_token_ids", "did you mean eos_token_id"),
        ("temprature", "did you mean temperature"),
        ("cadense", "did you mean cadence"),
        ("xyzzy", "there are beyond_context, "),
    ],
)
def test_an_unknown_keyword_is_named_beside_those_that_look_like_it(keyword, message):
    model = tiny("llama")
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        generate(model, PROMPTS, Full(), **{keyword: 3})
    assert "__init__" not in str(error.value) and "CacheConfig" not in str(error.value)


@pytest.mark.parametrize("call", [prefill, EvictionCache, continuation_logprobs])
def test_other_calls_that_take_options_of_the_cache_name_an_unknown_one(call):
    places = {prefill: (PROMPTS, Full()), EvictionCache: (Full(),), continuation_logprobs: (PROMPTS, [[1]] * 3, Full())}
    with pytest.raises(ConfigError, match="cadense is not a keyword that is known here; did you mean cadence"):
        call(tiny("llama"), *places[call], cadense=3)


# -- padding is no prompt --------------------------------------------------------------------------------------------


def padded(side, pad=258, rows=PROMPTS):
    width = max(map(len, rows))
    pads = [[pad] * (width - len(row)) for row in rows]
    return [more + row if side == "left" else row + more for row, more in zip(rows, pads, strict=True)]


def masks(side, rows=PROMPTS):
    return [[int(each != -1) for each in row] for row in padded(side, -1, rows)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_leaves_padding_out(side):
    model, tokenizer = bytes_model()
    expected = generate(model, PROMPTS, H2O(), HALF, max_new_tokens=6).tokens
    tensor = torch.tensor(padded(side)), torch.tensor(masks(side))
    whole = {"input_ids": tensor[0], "attention_mask": tensor[1]}
    for prompts, mask in ((padded(side), masks(side)), tensor, (whole, None), (BatchEncoding(whole), None)):
        made = generate(model, prompts, H2O(), HALF, attention_mask=mask, max_new_tokens=6, tokenizer=tokenizer)
        assert made.tokens == expected
    words = [[4, 5], [6], [7, 8, 9]]
    scored = continuation_logprobs(model, PROMPTS, words, Full())
    assert continuation_logprobs(model, padded(side), words, Full(), attention_mask=masks(side)) == scored


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["own", "end token"])
@pytest.mark.parametrize("by", [1, 2, 9])
def test_token_lists_that_look_padded_are_refused_without_a_mask(side, pad, by):
    model, tokenizer = bytes_model()
    rows = [list(range(40, 60)), list(range(40, 60 - by))]
    if pad == "end token":
        tokenizer.pad_token = tokenizer.eos_token
    prompts = padded(side, tokenizer.pad_token_id, rows)
    with pytest.raises(
        ConfigError, match=rf"row 1 of the prompts has {by} padding tokens .* on the {side}.*attention_m"
    ):
        generate(model, prompts, Full(), tokenizer=tokenizer, max_new_tokens=2)
    with pytest.raises(ConfigError, match="attention_mask"):
        continuation_logprobs(model, prompts, [[4], [5]], Full(), tokenizer=tokenizer)
    if by > 1:  # one row by itself, padded to a length
        with pytest.raises(ConfigError, match=f"row 0 of the prompts has {by} padding tokens"):
            generate(model, prompts[1:], Full(), tokenizer=tokenizer, max_new_tokens=2)
    generate(model, prompts, Full(), tokenizer=tokenizer, max_new_tokens=2, attention_mask=[[1] * 20] * 2)


def test_a_start_or_end_token_that_pads_too_may_begin_or_end_a_text():
    model, tokenizer = bytes_model()
    tokenizer.pad_token = tokenizer.bos_token
    start = tokenizer.bos_token_id
    for prompts in (
        [[start, 4, 5], [start, 6, 7]],
        [[start, 4, 5], [6, 7]],
        [[start]],
        [[start], [5]],
        [[4, 5, start]],
    ):
        generate(model, prompts, Full(), tokenizer=tokenizer, max_new_tokens=2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1] * 5] * 3, "attention_mask must have a 1 or 0 for every token of the prompts: they have [23, 13, 14]"),
        ([[1] * 23, [1] * 13, [2] * 14], "attention_mask must hold 1 for tokens and 0 for padding, got 2"),
        ([[1] * 23, [1] * 13, [0] * 14], "row 2 of the batch has an empty prompt"),
    ],
)
def test_a_mask_that_fits_no_prompts_is_refused(mask, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        generate(tiny("llama"), PROMPTS, Full(), attention_mask=mask, max_new_tokens=2)


# -- a batch is as long as its rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "method"), in_turn(["llama", "gpt2"], [Full(), H2O()], of=2))
def test_a_long_prompt_beside_a_long_continuation_is_no_row_too_long(family, method):
    model = tiny(family, **{"max_position_embeddings" if family == "llama" else "n_positions": 71})
    prompts = [[*range(3, 60)] + [5] * 10, [7, 8, 9, 10], [11] * 30, [12] * 33]
    words = [[4, 5, 6], [*range(2, 60)], [13] * 42, [14]]
    budget = None if method.name == "full" else HALF
    together = continuation_logprobs(model, prompts, words, method, budget)
    for prompt, word, row in zip(prompts, words, together, strict=True):
        (alone,) = continuation_logprobs(model, [prompt], [word], method, budget)
        assert row == pytest.approx(alone, abs=1e-4)
    with pytest.raises(ConfigError, match="the prompt has 67 tokens and max_new_tokens=6, the model holds 71"):
        continuation_logprobs(model, prompts[:2], [[4] * 6, [5]], method, budget)
    full, other = prefill_together(model, prompts, [CacheConfig(Full()), CacheConfig(H2O(), HALF)], max_new_tokens=3)
    (rows,) = divergence_from_full(model, full, [other], words)
    assert [row.tokens for row in rows] == words
    for row, one in zip(rows, together, strict=True):
        measured = row.full_logprob if method.name == "full" else row.logprob
        assert measured == pytest.approx(one, abs=1e-4)


def test_prompts_may_be_tensors_arrays_or_rows_of_them() -> None:
    model, rows = tiny("llama"), prompts_of(3, (9, 9))
    wanted = generate(model, rows, Full(), max_new_tokens=3).tokens
    given = torch.tensor(rows)
    for each in (given, list(given), given.numpy(), [row.numpy() for row in given], {"input_ids": given}):
        assert generate(model, each, Full(), max_new_tokens=3).tokens == wanted
    for mask in (torch.ones_like(given), torch.ones_like(given).numpy(), list(torch.ones_like(given))):
        assert generate(model, given, Full(), max_new_tokens=3, attention_mask=mask).tokens == wanted


# What a user gets wrong must be said in the user's words, before a number comes out.


PROMPT = [list(range(3, 20))]
SETTINGS = {  # what is made -> the settings or the words that a user looks for; each setting's own range: tests/run
    "kv_ratio nan": (lambda: Budget(kv_ratio=float("nan")), "kv_ratio.*nan"),
    "tokens 2.5": (lambda: Budget(tokens=2.5), "tokens must be a whole number"),
    "tokens 10**30": (lambda: Budget(tokens=10**30), r"tokens must be below 2\*\*62"),
    "every 2.5": (lambda: Cadence(every=2.5), "every must be"),
    "noise": (lambda: Noise("uniform"), "gumbel.*got 'uniform'"),
    "key window": (lambda: Keyformer(key_window="new"), "one of paper, release_frozen, got 'new'"),
    "score_batch": (lambda: Keyformer(score_batch="x"), "one of per_beam, per_sample, sum_all, got 'x'"),
    "dilation": (lambda: DilatedWindow(dilation=0), "dilation must be at least 1"),
    "kernel": (lambda: SnapKV(kernel=4), "kernel must be odd"),
    "num_beams": (lambda: GenerationParams(num_beams=1 << 20), "num_beams must be in"),
    "max_new_tokens": (lambda: GenerationParams(max_new_tokens=2.5), "max_new_tokens must be a whole number, got 2.5"),
    "min above max": (lambda: GenerationParams(5, min_new_tokens=6), "between 0 and max_new_tokens=5, got 6"),
    "sampling beams": (lambda: GenerationParams(num_beams=2, sample=True), "set sample=false or num_beams=1"),
    "temperature": (lambda: GenerationParams(sample=True, temperature=0), "temperature must be positive, got 0"),
    "stop_strings": (lambda: GenerationParams(stop_strings="abc"), "stop_strings must be a list, got 'abc'"),
    "an empty stop string": (lambda: GenerationParams(stop_strings=("a", "")), "stop_strings must be"),
    "two places": (lambda: load_model("x", device="cpu", device_map="auto"), "not both"),
    "hub": (lambda: load_model("no-such/model"), "cannot load no-such/model: it is not in the Hugging Face cache"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    make, message = SETTINGS[case]
    with pytest.raises(ConfigError, match=message):
        make()


CALLS = {
    "too small": (dict(method=StreamingLLM(), budget=Budget(tokens=3)), "3 slots cannot hold sink=4"),
    "sinks and recent": (dict(method=SnapKV(window=9), budget=Budget(tokens=8)), "cannot hold sink=0 \\+ recent=9"),
    "no room": (dict(method=StreamingLLM(), budget=Budget(tokens=4)), r"recent=0 \+ the token being generated"),
    "zero slots": (dict(method=H2O(), budget=Budget(kv_ratio=0.05)), "0 slots for a prompt of 17 tokens"),
    "ideal drops nothing": (dict(method=Ideal(), budget=Budget(tokens=8)), "set mode=mask"),
    "full rows": (dict(method=A2SF(score_source="full"), budget=Budget(tokens=8)), "set mode=mask"),
    "too long": (dict(method=Full(), decoding=GenerationParams(300)), "max_new_tokens=300, the model holds 211"),
    "frozen": (
        dict(method=Keyformer(recent_ratio=0, key_window="release_frozen"), budget=Budget(tokens=8)),
        "needs a recent window",
    ),
    "never": (dict(method=H2O(), budget=Budget(tokens=8), cadence=Cadence(False, None)), "cadence|evict"),
    "not at prefill": (dict(method=SnapKV(window=4), budget=Budget(tokens=8), cadence=Cadence(False)), "cadence|evict"),
    "while decoding": (
        dict(method=SnapKV(window=4), budget=Budget(tokens=8), cadence=Cadence(every=3)),
        "cadence|evict",
    ),
    "seeds": (dict(method=Full(), seeds=[1, 2]), "got 2 seeds for a batch of 1 rows"),
    "half a seed": (dict(method=Full(), seeds=1.5), "seeds must be a whole number"),
    "a text without a tokenizer": (dict(method=Full(), prompts=["Once"]), "give tokenizer="),
    "no prompts": (dict(method=Full(), prompts=[]), "no prompts"),
    "an empty prompt": (dict(method=Full(), prompts=[[3, 4], []]), "row 1 of the batch has an empty prompt"),
    "unknown token": (dict(method=Full(), prompts=[[3, 99]]), "row 0 holds token id 99, the model knows 0 to 60"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    options, message = CALLS[case]
    with pytest.raises(ConfigError, match=message):
        generate(tiny("llama"), **{"prompts": PROMPT, "decoding": GenerationParams(4), **options})


FORWARDS = {  # of the model itself -> (ids, mask), what is said
    "padding on the right": ([[1, 1, 1]], [[1, 1, 0]], ConfigError, "pad on the left"),
    "an empty row": ([[1, 1, 1]] * 2, [[1, 1, 1], [0, 0, 0]], ConfigError, "row 1 of the batch has an empty prompt"),
    "too long": ([[1] * 212], None, CacheError, "212 tokens, the model holds 211"),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_forwards(case):
    ids, mask, error, message = FORWARDS[case]
    model, mask = tiny("llama"), None if mask is None else torch.tensor(mask)
    with pytest.raises(error, match=message):
        model(torch.tensor(ids), attention_mask=mask, past_key_values=EvictionCache(model, Full()))


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_learned_positions_cannot_be_renumbered_and_tables_not_exceeded(family):
    if family != "gptj":
        with pytest.raises(ConfigError, match="positions=renumbered cannot work"):
            EvictionCache(tiny(family), StreamingLLM(), Budget(tokens=8))
    EvictionCache(tiny(family), StreamingLLM(), Budget(tokens=8), positions="original")
    with pytest.raises(ConfigError, match="table of positions for 211 tokens"):
        EvictionCache(tiny(family), Full(), beyond_context=True)


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


def test_what_a_filled_cache_refuses():
    model = tiny("llama")
    cache = EvictionCache(model, Full())
    model(torch.tensor(PROMPT), past_key_values=cache)
    with pytest.raises(CacheError, match="cannot be cropped"):
        cache.crop(3)
    with pytest.raises(CacheError, match="holds a batch of 1 rows, the forward has 2"):
        model(torch.tensor([[3], [4]]), past_key_values=cache)


def test_beams_without_num_beams_where_scores_are_added_up():
    model = tiny("llama")
    cache = EvictionCache(model, Keyformer(tau_end=1.0), Budget(kv_ratio=0.5))
    with pytest.raises(CacheError, match="beam search needs num_beams"):
        model.generate(torch.tensor(PROMPT), past_key_values=cache, num_beams=4, max_new_tokens=4, pad_token_id=0)


def test_caches_that_cannot_be_made():
    with pytest.raises(ConfigError, match="tau schedule needs max_new_tokens"):
        EvictionCache(tiny("llama"), Keyformer(), Budget(kv_ratio=0.5))
    with pytest.raises(ConfigError, match=r"call kvexp\.hf\.patch_model"):
        EvictionCache(stock("llama"), Window(), Budget(tokens=8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights(bad):
    model = copy.deepcopy(stock("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = bad
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.k_proj.weight holds NaN or inf"):
        patch_model(model)


def test_a_saved_folder_loads(tmp_path):
    stock("gpt2").save_pretrained(tmp_path)
    ours = generate(load_model(str(tmp_path)), PROMPT, H2O(), Budget(kv_ratio=0.5), decoding=GenerationParams(5))
    again = generate(tiny("gpt2"), PROMPT, H2O(), Budget(kv_ratio=0.5), decoding=GenerationParams(5))
    assert ours.tokens == again.tokens


# -- cache.show(): the prompt's tokens by how many heads hold them ----------------------------------------------


FIVE = Budget(tokens=5)


class Numbers:
    """Every token is its number."""

    def decode(self, ids, **_):
        return "".join(f"{token} " for token in ids)


def test_by_hand():
    shown = KeptText(["a", " <b>", "\n", "\u65e5"], [3, 1, 0, 1], 3)
    assert repr(shown).splitlines() == ["a <b>\u21b5\u65e5", "#3333.33", "# all 3 heads, 9-1 tenths of them, . none"]
    assert all(line.isprintable() for line in repr(KeptText(["\x1b[2J", "\r"], [1, 1], 2)).splitlines())


def test_each_row_shows_its_own_prompt_and_what_its_heads_hold():
    model, prompts = tiny("llama"), prompts_of(5, [17, 31, 23])
    result = generate(model, prompts, Window(), Budget(tokens=9), decoding=GenerationParams(4, eos=None))
    heads = 2 * 3  # layers, kv heads
    for sample, prompt in enumerate(prompts):
        shown = result.cache.show(Numbers(), sample)
        assert "".join(shown.texts).split() == [str(token) for token in prompt]
        # of 9 slots 8 are held between steps, 3 of them by the new tokens that were fed
        assert shown.counts == [0] * (len(prompt) - 5) + [heads] * 5
    h2o = generate(model, prompts, H2O(), Budget(tokens=9), decoding=GenerationParams(4, eos=None)).cache
    counts = h2o.show(Numbers(), 1).counts
    held = [h2o.kept_positions(layer)[1] for layer in range(2)]
    assert counts == [sum(place in head for layer in held for head in layer) for place in range(31)]
    assert len(set(counts)) > 2, "heads choose for themselves, or the sums show nothing"


def test_whoever_feeds_the_prompt():
    model, prompts = tiny("llama"), prompts_of(5, [17, 23])
    beams = generate(model, prompts, Window(), FIVE, decoding=GenerationParams(4, num_beams=3, eos=None)).cache
    assert len(beams.show(Numbers(), 1).texts) == 23
    context = prefill(model, prompts, Full(), max_new_tokens=4)
    assert len(context.fork([1, 1, 0]).cache.show(Numbers(), 2).texts) == 17
    assert len(context.cache.show(Numbers(), 1).texts) == 23
    both = prefill_together(model, prompts, [CacheConfig(Full()), CacheConfig(Window(), FIVE)], max_new_tokens=4)
    made = decode(model, both, GenerationParams(4, eos=None), [0, 0], None, start=0.0)
    assert made[1].cache.show(Numbers()).counts == [0] * 16 + [6]
    assert made[0].cache.show(Numbers()).counts == [6] * 17


def test_under_the_models_own_generate_the_words_are_given():
    model, (prompt,) = tiny("llama"), prompts_of(5, [17])
    cache = EvictionCache(model, Window(), FIVE, max_new_tokens=3)
    ids = torch.tensor([prompt])
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3, do_sample=False)
    with pytest.raises(ConfigError, match=r"give the prompt's token ids, without padding, as in cache\.show"):
        cache.show(Numbers())
    assert cache.show(Numbers(), prompt=prompt).counts == [0] * 15 + [6] * 2


@pytest.mark.parametrize("family", ["llama", "mpt", "mistral"])
def test_a_budget_that_holds_everything_is_the_full_cache_to_the_bit(family):
    """Observed or not, with noise or without, prompts are attended in the same tiles."""
    options = {"decoding": GenerationParams(4, eos=None), "keep_logits": True}
    full = generate(tiny(family), PROMPTS, Full(), **options)
    for method in (H2O(), Keyformer(), A2SF(), SnapKV(), Window()):
        kept = generate(tiny(family), PROMPTS, method, Budget(tokens=99), **options)
        assert all(map(torch.equal, kept.logits, full.logits)), method.name


KEEPING_ALL = [PQCache(b=2), Quest(page=4), SparQ(), InfLLM(block=4)]


@pytest.mark.parametrize("method", [Full(), H2O(), Keyformer(), Window(), *KEEPING_ALL], ids=lambda m: m.name)
def test_a_dropped_cache_frees_its_memory_without_pythons_search_for_cycles(method):
    model, budget = tiny("llama"), None if method.name == "full" else Budget(kv_ratio=0.6)

    def used() -> list[weakref.ref]:
        full, own = prefill_together(
            model, PROMPTS[:1], [CacheConfig.of(Full()), CacheConfig.of(method, budget)], max_new_tokens=6
        )
        fork = own.fork([0])
        generate_from_context(model, fork, [[5, 6]], decoding=GenerationParams(4))
        assert divergence_from_full(model, full, [own], [[4, 5, 6]])[0][0].tokens == [4, 5, 6]
        made = generate(model, PROMPTS[:1], method, budget, decoding=GenerationParams(4))
        caches = [full.cache, own.cache, fork.cache, made.cache]
        return [weakref.ref(each) for cache in caches for each in (cache, *cache.layer_states)]

    gc.collect()
    gc.disable()
    try:
        assert [found for each in used() if (found := each()) is not None] == []
    finally:
        gc.enable()
