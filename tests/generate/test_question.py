"""Questions after the eviction: equal to the slow truth, to the question in the prompt where nothing is evicted."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import CONFIGS, later, prompts_of, tiny
from turns import in_turn

from kvexp.core import Budget, Cadence
from kvexp.generate import (
    GenerationParams,
    continuation_logprobs,
    forward_last,
    generate,
    generate_from_context,
    prefill,
    receipts,
    score_continuations,
)
from kvexp.hf import EvictionCache
from kvexp.methods import A2SF, H2O, Full, Keyformer, Random, SnapKV, StreamingLLM, Window
from kvexp.util.errors import ConfigError

CONTEXTS = prompts_of(3, [37, 23, 31])
QUESTIONS = later(5, 3, 5).tolist()
SMALL = Budget(kv_ratio=0.3)
METHODS = [H2O(), Keyformer(), A2SF(alpha=0.5), Window(), Random(), StreamingLLM(n_sinks=2), SnapKV(window=4)]
KINDS = {
    "greedy": GenerationParams(7),
    "sampling": GenerationParams(7, sample=True, temperature=0.8),
    "beams": GenerationParams(7, num_beams=3),
}


def slow(model, context, question, method, budget, new, cadence=None):
    """Greedy, one row, one forward per token: the prompt, then every question token, then every answer token."""
    cache = EvictionCache(
        model, method, budget, cadence=cadence, prompt_tokens=len(context), max_new_tokens=len(question) + new, seeds=4
    )
    model(torch.tensor([context]), past_key_values=cache)
    answer: list[int] = []
    for step in range(len(question) + new - 1):
        token = question[step] if step < len(question) else answer[-1]
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
        if step >= len(question) - 1:
            answer.append(int(logits.argmax()))
    return answer, [cache.kept_positions(i) for i in range(2)]


@pytest.mark.parametrize("kind", ["greedy", "beams"])
@pytest.mark.parametrize("family", CONFIGS)
def test_with_full_attention_it_does_not_matter_when_a_question_comes(family, kind):
    model = tiny(family)
    asked = generate(model, CONTEXTS, Full(), questions=QUESTIONS, decoding=KINDS[kind])
    whole = [c + q for c, q in zip(CONTEXTS, QUESTIONS, strict=True)]
    assert asked.tokens == generate(model, whole, Full(), decoding=KINDS[kind]).tokens
    assert asked.sequences.shape == (3, 37 + 5 + 7)


@pytest.mark.parametrize(
    ("family", "cadence"),
    in_turn(["llama", "gptj", "gpt2", "mpt"], [Cadence(), Cadence(every=4), Cadence(at_prefill=False, every=3)], of=3),
)
def test_a_question_is_fed_token_by_token_after_the_eviction(family, cadence):
    model, differs = tiny(family), 0
    for method in METHODS:
        if not method.evicts_while_decoding and cadence != Cadence():
            continue
        if method.positions == "renumbered" and family == "gpt2":  # learned positions cannot be renumbered
            continue
        new = 7
        how = {"questions": QUESTIONS, "decoding": GenerationParams(new), "seeds": 4, "cadence": cadence}
        made = generate(model, CONTEXTS, method, SMALL, **how)
        for row, (context, question) in enumerate(zip(CONTEXTS, QUESTIONS, strict=True)):
            answer, kept = slow(model, context, question, method, SMALL, new, cadence)
            assert made.tokens[row] == answer, method.name
            for layer in (0, 1):
                held = made.cache.kept_positions(layer)[row]
                assert [set(head) for head in held] == [set(head) for head in kept[layer][0]], method.name
        whole = [c + q for c, q in zip(CONTEXTS, QUESTIONS, strict=True)]
        differs += generate(model, whole, method, SMALL, decoding=GenerationParams(new), seeds=4).tokens != made.tokens
    assert differs > 1  # the setting is not a name for the other one


@pytest.mark.parametrize(
    ("method", "kind"), in_turn(METHODS, KINDS, of=3), ids=lambda each: getattr(each, "name", each)
)
def test_a_row_with_a_question_does_not_know_its_neighbours(method, kind):
    model, seeds = tiny("llama"), [5, 6, 7]
    options = {"decoding": KINDS[kind]}
    together = generate(model, CONTEXTS, method, SMALL, questions=QUESTIONS, seeds=seeds, **options)
    for row in range(3):
        alone = generate(
            model, [CONTEXTS[row]], method, SMALL, questions=[QUESTIONS[row]], seeds=[seeds[row]], **options
        )
        assert alone.tokens[0] == together.tokens[row]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beams_after_a_question_carry_their_own_state(family):
    model, method = tiny(family), H2O()
    decoding = GenerationParams(7, num_beams=3, length_penalty=0.0)
    beams = generate(model, CONTEXTS, method, SMALL, questions=QUESTIONS, decoding=decoding)
    alone = continuation_logprobs(model, CONTEXTS, beams.tokens, method, SMALL, questions=QUESTIONS)
    for total, steps in zip(beams.beam_scores, alone, strict=True):
        assert math.isclose(total, sum(steps), abs_tol=2e-4)


def test_a_budget_is_the_contexts_and_question_tokens_are_decode_steps():
    model = tiny("llama")
    made = generate(model, CONTEXTS[:1], H2O(), SMALL, questions=QUESTIONS[:1], decoding=GenerationParams(7))
    receipt = receipts(made.cache)[0]
    assert receipt.slots == int(0.3 * 37) - 1
    assert receipt.first_eviction_step == 0
    late = Cadence(at_prefill=False, every=3)
    made = generate(
        model, CONTEXTS[:1], H2O(), SMALL, questions=QUESTIONS[:1], decoding=GenerationParams(7), cadence=late
    )
    assert receipts(made.cache)[0].first_eviction_step == 3  # the third question token


def test_end_of_text_and_least_length_count_from_the_answer():
    model = tiny("llama")
    free = generate(model, CONTEXTS, Full(), questions=QUESTIONS, decoding=GenerationParams(9, eos=None))
    end = free.tokens[0][1]
    late = generate(
        model, CONTEXTS, Full(), questions=QUESTIONS, decoding=GenerationParams(9, eos=end, min_new_tokens=5)
    )
    assert min(map(len, late.tokens)) >= 5
    assert end not in late.tokens[0][:4]


# -- log-probabilities


@pytest.mark.parametrize("method", [H2O(), Keyformer(), SnapKV(window=4)], ids=lambda m: m.name)
def test_question_tokens_are_fed_and_not_judged(method):
    """They are what the same tokens are at the front of a longer continuation, in schedules too."""
    model, answers = tiny("llama"), later(9, 3, 4, part=1).tolist()
    whole = [q + a for q, a in zip(QUESTIONS, answers, strict=True)]
    longer = continuation_logprobs(model, CONTEXTS, whole, method, SMALL, seeds=4)
    asked = continuation_logprobs(model, CONTEXTS, answers, method, SMALL, questions=QUESTIONS, seeds=4)
    assert [len(row) for row in asked] == [4, 4, 4]
    for row, truth in zip(asked, longer, strict=True):
        assert row == truth[5:]


def test_questions_before_continuations_may_differ_in_length():
    model, answers = tiny("gpt2"), later(9, 3, 4, part=1).tolist()
    answers[1] = answers[1][:2]
    questions = [QUESTIONS[0][:2], QUESTIONS[1], []]
    together = continuation_logprobs(model, CONTEXTS, answers, H2O(), SMALL, questions=questions)
    for row in range(3):
        alone = continuation_logprobs(model, [CONTEXTS[row]], [answers[row]], H2O(), SMALL, questions=[questions[row]])
        torch.testing.assert_close(torch.tensor(together[row]), torch.tensor(alone[0]), rtol=0, atol=2e-5)


# -- one prefill, several questions


@pytest.mark.parametrize(
    ("method", "kind", "mode"),
    in_turn(
        [H2O(), Keyformer(), SnapKV(window=4), Keyformer(score_scope="shared")],
        KINDS,
        ["overwrite", "compact", "mask"],
        of=3,
    ),
    ids=str,
)
def test_a_fork_answers_as_a_context_of_its_own(method, kind, mode):
    model, decoding = tiny("llama"), KINDS[kind]
    how = {"num_beams": decoding.num_beams, "mode": mode}
    shared = prefill(model, CONTEXTS, method, SMALL, seeds=[5, 6, 7], max_new_tokens=30, **how)
    before = [shared.cache.kept_positions(layer) for layer in (0, 1)]
    seeds = [11, 12, 13, 14]
    for rows, width in (([2, 0, 0, 1], 5), ([1, 1], 3)):
        questions = later(8, len(rows), width).tolist()
        forked = generate_from_context(model, shared.fork(rows), questions, decoding=decoding, seeds=seeds[: len(rows)])
        for place, row in enumerate(rows):
            own = prefill(model, [CONTEXTS[row]], method, SMALL, seeds=[5 + row], max_new_tokens=width + 7, **how)
            alone = generate_from_context(model, own, [questions[place]], decoding=decoding, seeds=[seeds[place]])
            assert forked.tokens[place] == alone.tokens[0]
            assert receipts(forked.cache)[place].kept_digest == receipts(alone.cache)[0].kept_digest
    assert [shared.cache.kept_positions(layer) for layer in (0, 1)] == before


@pytest.mark.parametrize("method", [Full(), H2O()], ids=lambda m: m.name)
def test_a_fork_costs_what_a_context_of_its_own_costs(method):
    """A row's bytes do not depend on how many questions share its prefill."""
    model, budget = tiny("llama"), None if method.name == "full" else SMALL

    def cost(rows):
        context = prefill(model, CONTEXTS[:1], method, budget, max_new_tokens=7)
        made = generate_from_context(
            model, context.fork(rows), [QUESTIONS[0]] * len(rows), decoding=GenerationParams(7)
        )
        return [(r.kv_bytes, r.peak_kv_bytes, r.slots) for r in receipts(made.cache)]

    assert len({*cost([0]), *cost([0, 0, 0])}) == 1


def test_choices_judged_from_forks_are_those_judged_alone():
    model, choices = tiny("gptj"), [[50], [51, 52, 53], [54, 55]]
    for method in (H2O(), Keyformer()):
        context = prefill(model, CONTEXTS[:1], method, SMALL, seeds=3, max_new_tokens=9)
        forked = score_continuations(model, context.fork([0, 0, 0]), choices, [QUESTIONS[0]] * 3, max_new_tokens=8)
        for choice, found in zip(choices, forked, strict=True):
            alone = continuation_logprobs(
                *(model, CONTEXTS[:1], [choice], method, SMALL), questions=QUESTIONS[:1], seeds=3, max_new_tokens=8
            )
            torch.testing.assert_close(torch.tensor(found), torch.tensor(alone[0]), rtol=0, atol=2e-5)


def test_times_of_an_answer_count_the_prefill_it_shares():
    model = tiny("llama")
    shared = prefill(model, CONTEXTS[:1], Full(), max_new_tokens=12)
    shared.seconds = 1000.0
    timing = generate_from_context(model, shared.fork([0]), QUESTIONS[:1], max_new_tokens=7, eos_token_id=None).timing
    assert 1000 < timing.ttft_s < timing.tt2t_s < 1100 and 0 < timing.tpot_s < 100


# -- what a caller gets wrong


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        (QUESTIONS[:2], "got 2 questions for 3 prompts"),
        ([[1], [2, 3], [4]], "questions of 1 to 2 tokens"),
        ([[], [], []], "questions of 0 to 0 tokens"),
        ([[1], [2], [99]], "the question of row 2 holds token id 99"),
        (["a", "b", "c"], "questions must be lists of token ids"),
        ([[1] * 180] * 3, "the prompt has 37 tokens and max_new_tokens=187, the model holds 211"),
    ],
)
def test_questions_that_cannot_be_asked(questions, message):
    with pytest.raises(ConfigError, match=message):
        generate(tiny("llama"), CONTEXTS, H2O(), SMALL, questions=questions, decoding=GenerationParams(7))


def test_contexts_that_cannot_go_on():
    model = tiny("llama")
    context = prefill(model, CONTEXTS, H2O(), Budget(kv_ratio=0.3, of="sequence"), max_new_tokens=10)
    with pytest.raises(ConfigError, match="resolved for max_new_tokens=10, and 12"):
        generate_from_context(model, context, QUESTIONS, decoding=GenerationParams(7))
    with pytest.raises(ConfigError, match="prefilled for num_beams=1, not for 3"):
        generate_from_context(model, context, QUESTIONS, decoding=GenerationParams(7, num_beams=3))


def test_a_forward_of_a_context_alone_is_a_prefill():
    model = tiny("mpt")
    context = prefill(model, CONTEXTS, H2O(), SMALL, max_new_tokens=3)
    assert context.lengths == [37, 23, 31]
    cache = EvictionCache(model, H2O(), SMALL, prompt_tokens=37)
    with torch.no_grad():  # with gradients SDPA attends
        logits = forward_last(model, context.ids, context.mask, cache)
    torch.testing.assert_close(context.logits, logits, rtol=0, atol=0)
