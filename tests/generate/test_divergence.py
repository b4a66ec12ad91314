"""Divergence from the full cache against a slow truth, and against Hugging Face's own models under masks."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import prompts_of, stock, tiny, tokens

from kvexp.core import Budget
from kvexp.generate import (
    KL,
    CacheConfig,
    Forcing,
    GenerationParams,
    divergence_from_full,
    divergence_of_batches,
    generate,
    prefill,
    prefill_together,
)
from kvexp.generate.kl import compare
from kvexp.hf.patch import forward_logits
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, StreamingLLM, Window
from kvexp.retrieval import PQCache
from kvexp.util import ConfigError

HALF, FIFTH = Budget(kv_ratio=0.5), Budget(kv_ratio=0.2)
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


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt", "gpt_neox"])
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
            assert a.kl == pytest.approx(b.kl, abs=1e-6) and a.same_top1 == b.same_top1
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
