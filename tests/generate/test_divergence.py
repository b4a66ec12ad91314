"""Divergence from the full cache against a slow truth, and against Hugging Face's own models under masks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import prompts_of, stock, tiny, tokens
from transformers import StaticCache
from turns import in_turn

import kvexp.generate.kl as kl
from kvexp.core import Budget
from kvexp.core.eviction import EvictionLayer
from kvexp.core.noise import Noise, uniform
from kvexp.generate import (
    KL,
    CacheConfig,
    Forcing,
    GenerationParams,
    continuation_logprobs,
    divergence_from_full,
    divergence_of_batches,
    generate,
    prefill,
    prefill_together,
)
from kvexp.generate.kl import compare
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.patch import forward_logits
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, SnapKV, StreamingLLM, Window
from kvexp.retrieval import PQCache
from kvexp.util.errors import CacheError, ConfigError

HALF, FIFTH = Budget(kv_ratio=0.5), Budget(kv_ratio=0.2)
REACHED_LATER = Budget(tokens=45)  # which the longest prompts exceed in the middle of their texts
VARIANTS = [
    CacheConfig(H2O(), FIFTH),
    CacheConfig(Full()),
    CacheConfig(Keyformer(), HALF),
    CacheConfig(A2SF(alpha=0.3), HALF, mode="mask"),
    CacheConfig(TOVA(), HALF, mode="compact"),
    CacheConfig(StreamingLLM(n_sinks=2), HALF, positions="original"),
    CacheConfig(Window(), FIFTH),
    CacheConfig(PQCache(), FIFTH),
]
PROMPTS = prompts_of(5, (40, 33, 40))
TEXTS = [tokens(3, 9).tolist(), tokens(4, 12).tolist(), tokens(5, 1).tolist()]
SEEDS = [3, 4, 9]


def measured(model, variants, texts=TEXTS, prompts=PROMPTS, seeds=SEEDS):
    specs = [CacheConfig(Full()), *variants]
    full, *others = prefill_together(model, prompts, specs, max_new_tokens=max(map(len, texts)), seeds=seeds)
    return divergence_from_full(model, full, others, texts)


def logits_alone(model, variant, prompt, text, seed, length):
    """[N, V] in float64: the logits that predict each token of a text, of one prompt by itself, fed one at a time."""
    context = prefill(model, [prompt], variant, max_new_tokens=length, seeds=seed)
    logits, mask = [context.logits], context.mask
    with torch.no_grad():
        for token in text[:-1]:
            mask = torch.cat([mask, torch.ones(1, 1, dtype=mask.dtype)], dim=1)
            logits.append(forward_logits(model, torch.tensor([[token]]), mask, context.cache, keep=1)[:, -1])
    return torch.cat(logits).double()


def truth(full, logits, text):
    """Every quantity from its definition, in float64."""
    p, q = full.softmax(-1), logits.softmax(-1)
    each = torch.arange(len(text))
    return {
        "kl": (p * (p / q).log()).sum(-1).tolist(),
        "full_logprob": p[each, text].log().tolist(),
        "logprob": q[each, text].log().tolist(),
        "same_top1": (p.argmax(-1) == q.argmax(-1)).tolist(),
    }


@pytest.mark.parametrize(
    "family", ["llama", "mpt", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "gpt_neox"))]
)
def test_every_method_against_one_row_at_a_time(family):
    model, length = tiny(family), max(map(len, TEXTS))
    variants = VARIANTS if family == "llama" else VARIANTS[:-1]  # PQCache: heads of 11 components have no halves
    for variant, rows in zip(variants, measured(model, variants), strict=True):
        for prompt, text, seed, row in zip(PROMPTS, TEXTS, SEEDS, rows, strict=True):
            full = logits_alone(model, CacheConfig(Full()), prompt, text, seed, length)
            wanted = truth(full, logits_alone(model, variant, prompt, text, seed, length), text)
            assert row.same_top1 == wanted.pop("same_top1")
            for name, values in wanted.items():
                assert getattr(row, name) == pytest.approx(values, abs=2e-5), (variant.method.name, name)


def test_the_first_token_is_the_prefills_and_the_rest_is_not():
    for row in measured(tiny("llama"), [CacheConfig(H2O(), FIFTH)])[0][:2]:
        assert row.kl[0] == pytest.approx(0, abs=1e-6)
        assert row.same_top1[0]
        assert max(row.kl[1:]) > 1e-3


def test_the_full_caches_own_answer_is_what_it_generates():
    """Written while the variants are fed it, or generated first and forced: the same tokens and numbers."""
    model = tiny("llama")
    specs = [CacheConfig(Full()), CacheConfig(H2O(), FIFTH), CacheConfig(Keyformer(), HALF)]
    answers = generate(model, PROMPTS, Full(), decoding=GenerationParams(10, eos=None)).tokens
    eos = [answers[1][4]]  # as if it ended the second answer, and wherever else it occurs
    texts = [answer[: answer.index(eos[0]) + 1] if eos[0] in answer else answer for answer in answers]
    assert len({len(text) for text in texts}) > 1
    runs = []
    for given in (None, texts):
        full, *others = prefill_together(model, PROMPTS, specs, max_new_tokens=10, seeds=SEEDS)
        runs.append(divergence_from_full(model, full, others, given, max_new_tokens=10, eos=eos))
    for own, forced in zip(*runs, strict=True):
        for a, b, text in zip(own, forced, texts, strict=True):
            assert a.tokens == b.tokens == text
            assert a.kl == pytest.approx(b.kl, rel=1e-5, abs=1e-6) and a.same_top1 == b.same_top1
            assert len(a.kl) == len(a.logprob) == len(text)


@pytest.mark.parametrize("own", [False, True])
def test_batches_of_other_prompts_are_forced_in_the_same_steps(own):
    """Texts of other lengths, batches of other sizes, answers that end at other steps; rows are those of each alone."""
    model, prompts = tiny("llama"), [PROMPTS, prompts_of(6, (31,)), prompts_of(7, (50, 44))]
    texts = [None] * 3 if own else [TEXTS, [tokens(8, 3).tolist()], [tokens(9, 7).tolist(), tokens(10, 2).tolist()]]
    specs, decoding = [CacheConfig(Full()), *VARIANTS], GenerationParams(12, eos=None)
    free = [generate(model, some, CacheConfig(Full()), decoding=decoding).tokens for some in prompts]
    eos = sorted({free[0][0][3], free[0][1][8], free[0][2][5], free[1][0][1], free[2][0][6], free[2][1][9]})

    def batches():
        made = [prefill_together(model, some, specs, max_new_tokens=12, seeds=SEEDS[: len(some)]) for some in prompts]
        return [Forcing(full, others, text) for (full, *others), text in zip(made, texts, strict=True)]

    together = divergence_of_batches(model, batches(), max_new_tokens=12, eos=eos)
    alone = [divergence_of_batches(model, [batch], max_new_tokens=12, eos=eos)[0] for batch in batches()]
    assert len({len(rows[0].tokens) for found in together for rows in found}) > 1, "all ended at one step"
    for one, joint in zip(alone, together, strict=True):
        for rows, same in zip(one, joint, strict=True):
            for row, other in zip(rows, same, strict=True):
                assert row.tokens == other.tokens and row.same_top1 == other.same_top1
                for name in ("kl", "full_logprob", "logprob"):
                    assert getattr(other, name) == pytest.approx(getattr(row, name), abs=2e-6), name


@pytest.mark.parametrize(
    ("method", "heads"), in_turn([H2O(), Keyformer(), TOVA(), SnapKV(window=6)], ["uniform", "adaptive"], of=2)
)
def test_one_cache_by_itself(method, heads, monkeypatch):
    """Its layers are at other tokens of a chunk, and keep no books together."""
    monkeypatch.setattr(kl, "MAX_CHUNK", 5)
    model, variant = tiny("llama"), CacheConfig(method, Budget(kv_ratio=0.5, heads=heads))
    for prompt, text, seed in zip(PROMPTS, TEXTS, SEEDS, strict=True):
        ((row,),) = measured(model, [variant], [text], [prompt], [seed])
        full, logits = (
            logits_alone(model, one, prompt, text, seed, len(text)) for one in (CacheConfig(Full()), variant)
        )
        assert row.kl == pytest.approx(truth(full, logits, text)["kl"], abs=2e-5)


@pytest.mark.parametrize("most", in_turn([5, 2, 3], of=3))
def test_chunks_of_a_text_change_no_bit(most, monkeypatch):
    """A text passes the linear layers in chunks, and where they are cut changes no row."""
    model, runs = tiny("llama"), []
    for width in (kl.MAX_CHUNK, most):
        monkeypatch.setattr(kl, "MAX_CHUNK", width)
        specs = [CacheConfig(Full()), *VARIANTS, CacheConfig(SnapKV(window=6), HALF), CacheConfig(H2O(), REACHED_LATER)]
        full, *others = prefill_together(model, PROMPTS, specs, max_new_tokens=12, seeds=SEEDS)
        rows = divergence_from_full(model, full, others, TEXTS)
        runs.append([[row.line for row in some] for some in rows])
    assert runs[0] == runs[1]


def test_a_text_goes_through_the_model_in_chunks_and_evicting_caches_in_steps(monkeypatch):
    """Nine tokens of one prompt in two forwards; each layer of H2O takes them one by one, the full cache's at once."""
    widths, original = [], EvictionLayer.advance

    def counted(state, key, padding):
        widths.append((state.config.method.name, key.shape[2]))
        return original(state, key, padding)

    monkeypatch.setattr(EvictionLayer, "advance", counted)
    full, variant = prefill_together(
        tiny("llama"), PROMPTS[:1], [CacheConfig(Full()), CacheConfig(H2O(), HALF)], max_new_tokens=9, seeds=1
    )
    widths.clear()
    monkeypatch.setattr(kl, "MAX_CHUNK", 5)
    divergence_from_full(tiny("llama"), full, [variant], TEXTS[:1])
    assert [width for name, width in widths if name == "full"] == [5, 5, 3, 3]
    assert [width for name, width in widths if name == "h2o"] == [1] * 16


def test_full_against_full_is_zero():
    for row in measured(tiny("llama"), [CacheConfig(Full()), CacheConfig(H2O(), Budget(kv_ratio=1.0))])[0]:
        assert max(map(abs, row.kl)) < 1e-6
        assert all(row.same_top1)
        assert row.logprob == pytest.approx(row.full_logprob, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_window_is_hugging_faces_model_under_a_mask(family):
    """The other side has nothing of kvexp: stock attention over prompt and text, hidden columns masked away."""
    prompt, text = PROMPTS[0], TEXTS[1]
    keep = round(0.5 * len(prompt))
    (row,) = measured(tiny(family), [CacheConfig(Window(), HALF)], [text], [prompt], [1])[0]
    ids = torch.tensor([[*prompt, *text]])
    n, first = ids.shape[1], len(prompt)
    query, key = torch.arange(n)[:, None], torch.arange(n)
    causal = key <= query
    # The token that is fed takes the place of the oldest: `keep` tokens are left, itself among them.
    held = causal & ((query < first) | (key > query - keep))
    model, found = stock(family), []
    with torch.no_grad():
        for seen in (causal, held):
            mask = torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
            positions = torch.arange(n)[None]
            found.append(model(ids, attention_mask=mask, position_ids=positions).logits[0, first - 1 : -1].double())
    wanted = truth(*found, text)
    assert row.kl == pytest.approx(wanted["kl"], abs=2e-5)
    assert row.logprob == pytest.approx(wanted["logprob"], abs=2e-5)
    assert row.same_top1 == wanted["same_top1"]


def test_compare_agrees_with_torch():
    torch.manual_seed(0)
    full, logits, token = torch.randn(2, 61), torch.randn(70, 61), torch.tensor([5, 60])
    kl, chosen, own, same = compare(full, logits, token)
    reference = full.log_softmax(-1).repeat(35, 1)
    wanted = torch.nn.functional.kl_div(logits.log_softmax(-1), reference, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(kl, wanted, atol=1e-6)
    assert torch.allclose(chosen, -torch.nn.functional.cross_entropy(full, token, reduction="none").repeat(35))
    wanted = -torch.nn.functional.cross_entropy(logits, token.repeat(35), reduction="none")
    assert torch.allclose(own, wanted, atol=1e-6)
    assert math.isclose(float(same.mean()), float((full.argmax(-1).repeat(35) == logits.argmax(-1)).float().mean()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"texts": [[1], [2]]}, "2 texts for 3 prompts"),
        ({"texts": [[1], [], [2]]}, "empty"),
        ({"texts": [[1], [99], [2]]}, "99"),
        ({"variants": []}, "no variant"),
        ({"swap": True}, "full cache"),
        ({"texts": None}, "max_new_tokens"),
    ],
)
def test_refusals(change, words):
    model = tiny("llama")
    specs = [CacheConfig(Full()), CacheConfig(H2O(), HALF)]
    full, other = prefill_together(model, PROMPTS, specs, max_new_tokens=4, seeds=SEEDS)
    if change.get("swap"):
        full, other = other, full
    with pytest.raises(ConfigError, match=words):
        divergence_from_full(model, full, change.get("variants", [other]), change.get("texts", [[1]] * 3))


def test_a_record_as_a_line_and_as_a_mean():
    found = KL([5, 6, 7], [-1e-9, 0.5, 1.5], [-1.0, -2.0, -3.0], [-1.0, -2.5, -4.5], [True, False, True])
    assert found.line == {**vars(found), "same_top1": [1, 0, 1]}
    assert found.mean() == {"kl": 2 / 3, "top1": 2 / 3, "kl_tokens": 3}
    assert found.mean(skip=1) == {"kl": 1.0, "top1": 0.5, "kl_tokens": 2}
    assert found.mean(skip=3) == {"kl": None, "top1": None, "kl_tokens": 0}


# -- each of these gave a wrong number or a bare traceback once; found by trying to break the core as its user ---------


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
