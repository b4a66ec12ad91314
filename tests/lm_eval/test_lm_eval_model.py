"""kvexp as a model of lm-eval: its own numbers at full cache, each request's own under eviction, both protocols."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from tiny import stock, tiny
from transformers import AutoModelForCausalLM
from turns import in_turn

from kvexp import lm_eval as stepwise
from kvexp.core import Budget, CacheConfig, Noise
from kvexp.core.row_mask import causal_probs, global_mask, local_mask
from kvexp.generate import GenerationParams, continuation_logprobs, generate
from kvexp.hf import RowMaskCache, load_tokenizer
from kvexp.hf.load import byte_tokenizer
from kvexp.lm_eval import KNOWN, Ask, Encoder, check_row_mask, draw, fitted, padded
from kvexp.methods import A2SF, H2O, Keyformer, Window
from kvexp.run.lm_eval_model import KvexpLM, main
from kvexp.tasks.lm_eval import SEVEN, LMEval
from kvexp.util.errors import CacheError, ConfigError

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")


ROWS = Path(__file__).resolve().parents[1] / "fixtures" / "lm_eval"
SHARED = Path(__file__).resolve().parents[3] / "shared"
FAMILIES = ("llama", "gpt2", "gptj", "mpt")
HOLDS = 173  # bytes: enough for every item without examples


def sized(family, holds=HOLDS):
    name = {"llama": "max_position_embeddings", "mpt": "max_seq_len"}.get(family, "n_positions")
    return {"vocab_size": 259, name: holds}


def theirs(family, **options):
    return HFLM(stock(family, **sized(family)), tokenizer=byte_tokenizer(), batch_size=3, **options)


def ours(family="llama", **options):
    return KvexpLM(tiny(family, **sized(family)), tokenizer=byte_tokenizer(), **options)


def asked(name, **options):
    """lm-eval's own requests of the synthetic rows."""
    task = LMEval(tasks=(name,), data_dir=str(ROWS), **options)
    return [instance for item in task.examples() for instance in item.instances]


def text_requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("texts", number, 1))
        for number, each in enumerate(arguments)
    ]


def assert_same(one, other, within=1e-4):
    assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
    assert [p for p, _ in one] == pytest.approx([p for p, _ in other], abs=within)


# -- full cache: lm-eval's own numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "protocol"), in_turn(FAMILIES, ["prefill_then_step", "row_mask"], of=2))
def test_full_is_hugging_face_on_all_seven(family, protocol):
    full, stock_lm = ours(family, protocol=protocol, batch_size=2), theirs(family)
    evicting = ours(family, method="h2o", kv_ratio=0.2, protocol=protocol, batch_size=2)
    for name in SEVEN:
        requests = asked(name, limit=1)
        expected = stock_lm.loglikelihood(requests, disable_tqdm=True)
        assert_same(full.loglikelihood(requests), expected)
        changed = [a for a, _ in evicting.loglikelihood(requests)]
        assert max(abs(a - b) for a, (b, _) in zip(changed, expected, strict=True)) > 0.01, name


@pytest.mark.parametrize("protocol", ["prefill_then_step", "row_mask"])
def test_full_is_hugging_face_on_a_real_model(stories260k, protocol):
    """Accuracies too: what lm-eval's scorers make of both is the same, whatever it is."""
    lm, hf = KvexpLM(stories260k, protocol=protocol, device="cpu"), HFLM(stories260k, device="cpu", dtype="float32")
    data = SHARED / "data" / "lm_eval"
    if not data.is_dir():
        pytest.skip(f"no rows at {data}")
    for name in SEVEN:
        task = LMEval(tasks=(name,), data_dir=str(data), limit=1, num_fewshot=1, fewshot_split="validation")
        items = list(task.examples())
        requests = [instance for item in items for instance in item.instances]
        one, other = lm.loglikelihood(requests), hf.loglikelihood(requests, disable_tqdm=True)
        assert_same(one, other)
        for item in items:
            count = len(item.instances)
            assert task.score_item(item, one[:count]) == task.score_item(item, other[:count])
            one, other = one[count:], other[count:]


@pytest.mark.parametrize(
    "texts",
    [
        [("far " * 50 + "away", " is far"), ("near", " is near"), ("x" * 171, "ab"), ("x" * 172, "ab")],
        [("", "alone"), ("", " also"), ("a  ", "b")],
    ],
    ids=["cut on the left", "empty context"],
)
def test_contexts_are_prepared_as_in_hugging_face(texts):
    requests = text_requests("loglikelihood", *texts)
    assert_same(ours().loglikelihood(requests), theirs("llama").loglikelihood(requests, disable_tqdm=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_hugging_faces(family):
    """Whole texts longer than the model, which are measured in windows; answers with stop texts, cut and uncut."""
    lm, hf = ours(family), theirs(family, max_length=HOLDS)
    rolling = text_requests("loglikelihood_rolling", ("Once there was a sea. " * 11,), ("short",))
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(
        hf.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3
    )
    plain = {"until": ["\n\n"], "max_gen_toks": 11, "do_sample": False}
    uncut = hf.generate_until(text_requests("generate_until", ("One", plain), ("Two birds", plain)), disable_tqdm=True)
    stop = {**plain, "until": [uncut[0][3], "\n\n"]}
    requests = text_requests("generate_until", ("One", plain), ("Two birds", plain), ("One", stop))
    made = lm.generate_until(requests)
    assert made == hf.generate_until(requests, disable_tqdm=True)
    assert made[:2] == uncut
    assert made[2] == uncut[0].split(uncut[0][3])[0]


def test_the_start_token_is_a_switch():
    for wanted in (True, False):
        hf = HFLM(stock("llama", **sized("llama")), tokenizer=byte_tokenizer(), add_bos_token=wanted)
        requests = asked("piqa", limit=1)
        expected = hf.loglikelihood(requests, disable_tqdm=True)
        assert_same(ours(add_bos=wanted).loglikelihood(requests), expected)


def test_encoding_is_lm_evals(stories260k):
    tokenizer = load_tokenizer(stories260k)
    hf = HFLM(stories260k, device="cpu", dtype="float32")
    encoder = Encoder(tokenizer)
    for context, continuation in (("Once upon", " a time"), ("Once  ", "upon"), ("a\n\n", "b c"), ("<s>Once", " upon")):
        assert encoder.pair(context, continuation) == tuple(map(list, hf._encode_pair(context, continuation)))
    whole = encoder.pair("Lily ran.\n\nTom sat", " down")
    context, question, continuation = encoder.triple("Lily ran.", "\n\nTom sat", " down")
    assert (context + question, continuation) == whole
    assert context == encoder.text("Lily ran.")
    with pytest.raises(ConfigError, match="there is nothing to judge in ''"):
        encoder.pair("Once", "")


def test_a_request_without_a_token_counts_as_wrong_and_the_others_are_answered(capsys):
    lm, first, last = ours(), ("Once", " upon"), ("a", " b")
    requests = text_requests("loglikelihood", first, ("Once", ""), last)
    KvexpLM.unanswered.clear()
    made = lm.loglikelihood(requests)
    assert made[1] == (-math.inf, False) and [made[0], made[2]] == lm.loglikelihood([requests[0], requests[2]])
    assert len(KvexpLM.unanswered) == 1 and "there is nothing to judge in ''" in capsys.readouterr().err


# -- under eviction: what each request is by itself --------------------------------------------------------------------

EVICTING = {
    "h2o": ({"method": "h2o", "kv_ratio": 0.2}, H2O()),
    "keyformer": ({"method": "keyformer", "kv_ratio": 0.2, "method.tau_end": 3.0}, Keyformer(tau_end=3.0)),
    "a2sf": ({"method": "a2sf", "kv_ratio": 0.2, "method.alpha": 0.5}, A2SF(alpha=0.5)),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", EVICTING)
def test_each_request_is_measured_as_if_alone(method, batch_size):
    """Against prompt after prompt without sharing: a schedule ends with the item's longest choice, noise by item."""
    options, same = EVICTING[method]
    lm = ours(batch_size=batch_size, seed=5, **options)
    for name in ("openbookqa", "winogrande"):
        requests = asked(name, limit=2)
        made = lm.loglikelihood(requests)
        for request, (logprob, _) in zip(requests, made, strict=True):
            pairs = [lm.scorer.encoder.pair(*r.args) for r in requests if r.doc_id == request.doc_id]
            context, continuation = lm.scorer.encoder.pair(*request.args)
            (alone,) = continuation_logprobs(
                *(lm.scorer.model, [context], [continuation], same, Budget(kv_ratio=0.2)),
                max_new_tokens=max(len(after) for _, after in pairs),
                seeds=5 + request.doc_id,
            )
            assert logprob == pytest.approx(sum(alone), abs=1e-4)


def test_a_context_is_prefilled_once_for_its_choices(monkeypatch):
    prefilled = []
    good = stepwise.prefill
    monkeypatch.setattr(
        stepwise, "prefill", lambda m, ids, *a, **k: prefilled.append(len(ids)) or good(m, ids, *a, **k)
    )
    lm = ours(method="h2o", kv_ratio=0.3, batch_size=4)
    lm.loglikelihood(asked("openbookqa"))
    assert prefilled == [3], "three items of four choices each: three contexts, together"
    prefilled.clear()
    lm.loglikelihood(asked("winogrande", limit=1))
    assert prefilled == [2], "a context for each choice"


@pytest.fixture
def forwards():
    """Counts the forwards of a KvexpLM while it measures requests."""

    def counted(lm, requests):
        seen = []
        hook = lm.scorer.model.register_forward_hook(lambda *_: seen.append(1))
        made = lm.loglikelihood(requests)
        hook.remove()
        return made, len(seen)

    return counted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "h2o", "kv_ratio": 0.4, "cache.evict_every": None},
        {"method": "snapkv", "kv_ratio": 0.9, "method.window": 3},
    ],
    ids=["full", "h2o at prefill", "snapkv"],
)
def test_methods_that_evict_no_more_are_fed_at_once(options, forwards):
    """At full cache, and where eviction ends with the prefill: one forward, the numbers of single steps."""
    lm, requests = ours(**options), asked("piqa", limit=2)
    made, count = forwards(lm, requests)
    assert count == 2 + 4, "a prefill per item and a forward per choice"
    for request, (logprob, _) in zip(requests, made, strict=True):
        context, continuation = lm.scorer.encoder.pair(*request.args)
        (steps,) = continuation_logprobs(lm.scorer.model, [context], [continuation], lm.scorer.cache, max_new_tokens=99)
        assert logprob == pytest.approx(sum(steps), abs=1e-4)


def test_methods_that_evict_while_decoding_are_fed_token_by_token(forwards):
    lm, requests = ours(method="h2o", kv_ratio=0.4), asked("piqa", limit=2)
    _, count = forwards(lm, requests[:1])
    assert count == len(lm.scorer.encoder.pair(*requests[0].args)[1])


def test_generation_under_eviction_is_kvexps_own():
    asked_for = {"until": ["\n\n"], "max_gen_toks": 9}
    lm = ours(method="h2o", kv_ratio=0.3, batch_size=2)
    texts = ["A river runs", "Two birds sat on a wire"]
    made = lm.generate_until(text_requests("generate_until", *((text, asked_for) for text in texts)))
    for text, answer in zip(texts, made, strict=True):
        ids = lm.scorer.encoder.text(text)
        decoding = GenerationParams(max_new_tokens=9, eos=257, stop_strings=("\n\n",))
        alone = generate(
            *(lm.scorer.model, [ids], H2O(), Budget(kv_ratio=0.3)), decoding=decoding, tokenizer=lm.tokenizer
        )
        assert answer == lm.tokenizer.decode(alone.tokens[0], skip_special_tokens=True).split("\n\n")[0]
    full = ours().generate_until(text_requests("generate_until", *((text, asked_for) for text in texts)))
    assert made != full


def grid_of(write, prompts):
    """(prompt, stop texts) that prompts and what follows them make: across their border, in the answer, or nowhere."""
    free = write([(prompt, {"until": ["\0"], "max_gen_toks": 12}) for prompt in prompts])
    for prompt, answer in zip(prompts, free, strict=True):
        for stop in {prompt[-n:] + answer[:m] for n in (1, 2) for m in (1, 2)}:
            yield prompt, [stop]
        yield prompt, [answer[1:3]]
        yield prompt, [answer[2:4], answer[2:3]]
        yield prompt, [answer[:1] + "no", answer[3:6]]
        yield prompt, ["\n\n"]
        yield prompt, ["Q:", "\n\n", prompt[-1:] * 2]


@pytest.mark.parametrize("model", ["random bytes", "stories260k"])
def test_texts_end_at_stop_texts_where_lm_evals_own_model_ends_them(model, request):
    """A stop text that began in the prompt is none, whatever it is made of."""
    if model == "random bytes":
        mine, hf = ours(), theirs("llama")
    else:
        path = request.getfixturevalue("stories260k")
        mine = KvexpLM(path)
        hf = HFLM(AutoModelForCausalLM.from_pretrained(path), tokenizer=load_tokenizer(path), batch_size=1)
    hf.batch_size_per_gpu = 1
    prompts = ["Tell me:\n", "Q: who?\nA:", "Once upon a time ", "She said: né", "Q: who?\n\n", "Tom 。"]

    def write(model, asked):
        return model.generate_until(text_requests("generate_until", *asked), disable_tqdm=True)

    grid = list(grid_of(lambda asked: write(hf, asked), prompts))
    asked = [(prompt, {"until": [stop for stop in stops if stop], "max_gen_toks": 12}) for prompt, stops in grid]
    assert len(asked) > 40
    assert write(mine, asked) == write(hf, asked)


def test_a_request_cut_to_the_model_is_measured_beside_one_of_a_long_continuation():
    texts = [("abcdefgh " * 40, " end"), ("Short one", " " + "word " * 20), ("z " * 70, " abc"), ("Question", " tail")]
    for family in ("llama", "gpt2"):
        expected = theirs(family).loglikelihood(text_requests("loglikelihood", *texts), disable_tqdm=True)
        for options in ({}, {"method": "h2o", "kv_ratio": 0.5}):
            alone = ours(family, **options).loglikelihood(text_requests("loglikelihood", *texts))
            for rows in (2, 4):
                lm = ours(family, batch_size=rows, **options)
                made = lm.loglikelihood(text_requests("loglikelihood", *texts))
                assert [one for one, _ in made] == pytest.approx([one for one, _ in alone], abs=1e-3)
                if not options:
                    assert [one for one, _ in made] == pytest.approx([one for one, _ in expected], abs=1e-3)


def test_sampling_draws_anew_when_a_request_comes_again():
    drawn = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    (request,) = text_requests("generate_until", ("A river runs", drawn))
    lm = ours()
    first, second = lm.generate_until([request, request])
    assert first != second
    assert lm.generate_until([request, request]) == [first, second]


def test_a_whole_text_has_a_budget_of_its_length():
    """kv_ratio of a text that follows the start token alone is a share of the text: nothing else could be meant."""
    text = "The sea is salt and wide."
    lm = ours(method="window", kv_ratio=0.4)
    (made,) = lm.loglikelihood_rolling(text_requests("loglikelihood_rolling", (text,)))
    start, ids = lm.scorer.encoder.start(), lm.scorer.encoder.text(text)
    budget = Budget(tokens=math.floor(0.4 * (1 + len(ids))))
    (alone,) = continuation_logprobs(lm.scorer.model, [[start]], [ids], Window(), budget)
    assert made == pytest.approx(sum(alone), abs=1e-4)
    assert abs(made - ours().loglikelihood_rolling(text_requests("loglikelihood_rolling", (text,)))[0]) > 0.01


# -- row mask: masks and budgets by hand -------------------------------------------------------------------------------


def masked_logprob(model, ids, scored, rule, fed=None):
    """Sum of log-probabilities of the last `scored` tokens of ids, in one forward of `fed` of them under the rule."""
    with torch.no_grad():
        logits = model(
            torch.tensor([ids[: fed or len(ids) - 1]]), past_key_values=RowMaskCache(model, rule), use_cache=True
        ).logits[0]
    places = range(len(ids) - scored - 1, len(ids) - 1)
    return float(sum(logits[i].float().log_softmax(-1)[ids[i + 1]] for i in places))


def test_a_text_is_judged_in_one_forward_and_without_beams():
    model = tiny("llama")
    cache = RowMaskCache(model, lambda x, _: local_mask(x, 2, 2))
    with torch.no_grad():
        model(torch.tensor([[3, 5, 7]]), past_key_values=cache, use_cache=True)
        with pytest.raises(CacheError, match="in one forward: make a new RowMaskCache"):
            model(torch.tensor([[9]]), past_key_values=cache, use_cache=True)
    with pytest.raises(CacheError, match="in one forward: beams cannot be reordered"):
        cache.reorder_cache(torch.tensor([0]))


def floor(value):
    return math.floor(value + 1e-9)


def keyformer_rule(n):
    whole = floor(0.2 * n)
    recent = floor(0.3 * whole)

    def rule(x, layer):
        return local_mask(x, whole - recent, recent, scores=causal_probs(x, draw(Noise(), x, 4, layer), 1.0))

    return rule


# case -> (arguments at kv_ratio=0.2, tokens of the budget -> the mask by hand)
MASKS = {
    "h2o": ({"method": "h2o"}, lambda n: lambda x, layer: local_mask(x, floor(0.1 * n), floor(0.1 * n))),
    "h2o global": (
        {"method": "h2o", "mask": "global"},
        lambda n: lambda x, layer: global_mask(x, floor(0.1 * n), floor(0.1 * n)),
    ),
    "keyformer": ({"method": "keyformer", "seed": 4}, keyformer_rule),
    "a2sf": ({"method": "a2sf"}, lambda n: lambda x, layer: local_mask(x, floor(0.2 * n), 0, decay=0.1)),
    "window": ({"method": "window"}, lambda n: lambda x, layer: local_mask(x, 0, floor(0.2 * n))),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", MASKS)
def test_row_masks(family, case):
    """Ratios of context and continuation together; the last token not fed (lm-eval), or fed and counted (H2O)."""
    options, rule_for = MASKS[case]
    context, continuation = "The mill by the river turns", " all night long"
    (request,) = text_requests("loglikelihood", (context, continuation))
    for whole_text in (False, True):
        lm = ours(family, protocol="row_mask", kv_ratio=0.2, whole_text=whole_text, **options)
        ids = lm.scorer.encoder.text(context + continuation)
        count = len(ids) if whole_text else len(ids) - 1
        expected = masked_logprob(lm.scorer.model, ids, len(continuation), rule_for(count), count)
        ((made, _),) = lm.loglikelihood([request])
        assert made == pytest.approx(expected, abs=1e-4)
        full = masked_logprob(lm.scorer.model, ids, len(continuation), lambda x, layer: local_mask(x, 999, 0))
        assert abs(made - full) > 1e-3


def test_a_paper_scores_the_mean_per_token():
    requests = asked("piqa", limit=1)
    lm, plain = (ours(protocol="row_mask", add_bos=False, whole_text=True, per_token=p) for p in (True, False))
    counts = [len(lm.scorer.encoder.pair(*request.args)[1]) for request in requests]
    sums = [p for p, _ in plain.loglikelihood(requests)]
    expected = [p / n for p, n in zip(sums, counts, strict=True)]
    assert [p for p, _ in lm.loglikelihood(requests)] == pytest.approx(expected)
    assert [p for p, _ in ours(protocol="keyformer").loglikelihood(requests)] == pytest.approx(expected, abs=1e-5)


def test_padded_batches_by_hand():
    """Longest first, two at a time; the last token is not fed. Equal lengths go by their ids."""
    asks = [Ask((1,) * n, (2,)) for n in (3, 9, 5, 8, 4)]
    assert [ask.base for ask in padded(asks, 2, whole_text=False)] == [3, 9, 5, 9, 5]
    assert [ask.base for ask in padded(asks, 2, whole_text=True)] == [4, 10, 6, 10, 6]
    assert [ask.base for ask in padded(asks, 5, whole_text=False)] == [9] * 5


def test_padded_budgets_reach_the_mask():
    requests = text_requests("loglikelihood", ("The mill", " turns"), ("The mill by the river turns", " at night"))
    lm = ours(protocol="row_mask", method="window", kv_ratio=0.3, budget_length="padded")
    long = len(lm.scorer.encoder.text("The mill by the river turns at night")) - 1
    for request, (made, _) in zip(requests, lm.loglikelihood(requests), strict=True):
        ids = lm.scorer.encoder.text("".join(request.args))
        expected = masked_logprob(
            *(lm.scorer.model, ids, len(request.args[1])), lambda x, layer: local_mask(x, 0, floor(0.3 * long))
        )
        assert made == pytest.approx(expected, abs=1e-4)


def test_half_precision_scores_are_a_switch():
    lm = ours(protocol="row_mask", method="a2sf", kv_ratio=0.2, score_dtype="float16")
    (ask,) = [lm.scorer.ask("The mill by the river", "", " turns all night")]
    (made,) = lm.scorer.measure([ask])
    n = len(ask.ids) - 1
    rule = lambda x, layer: local_mask(x, floor(0.2 * n), 0, decay=0.1, dtype=torch.float16)  # noqa: E731
    assert made.total == pytest.approx(
        masked_logprob(lm.scorer.model, list(ask.ids), len(ask.continuation), rule), abs=1e-4
    )


def test_receipts_of_a_mask():
    lm = ours(protocol="row_mask", method="window", kv_ratio=0.25)
    (judged,) = lm.scorer.measure([lm.scorer.ask("The mill by the river", "", " turns")])
    n = 1 + len("The mill by the river turns") - 1
    assert judged.receipt.slots == floor(0.25 * n) + 1
    assert judged.receipt.first_eviction_step == 0
    model = lm.scorer.model.config
    assert judged.receipt.kv_bytes == 2 * 4 * n * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    (full,) = ours(protocol="row_mask").scorer.measure([lm.scorer.ask("The mill by the river", "", " turns")])
    assert full.receipt.first_eviction_step is None
    assert full.receipt.slots == n


# -- edges and bad input -----------------------------------------------------------------------------------------------


def test_fitting_by_hand():
    ask = Ask((1, 2, 3, 4), (7, 8), (5, 6))
    assert fitted(ask, 7) == ask
    assert fitted(ask, 5) == Ask((3, 4), (7, 8), (5, 6), cut=2)
    assert fitted(ask, 3) is None


def test_a_context_too_short_is_told_from_what_no_context_could_have():
    lm = ours(method="h2o", kv_ratio=0.1)
    asks = [lm.scorer.ask("a context of thirty characters", "", " x"), lm.scorer.ask("short", "", " x")]
    assert lm.scorer.obstacle(asks[:1]) is None
    assert "the budget of layer 0 is 0 slots for a prompt of 6 tokens" in lm.scorer.obstacle(asks)
    whole = ours(method="h2o", kv_ratio=0.1).scorer.windows("a text of thirty characters...")
    assert lm.scorer.obstacle(whole) is None, "its context is one token, its budget a share of the whole"
    with pytest.raises(ConfigError, match="positions=renumbered cannot work on GPT-2"):
        ours("gpt2", method="streaming_llm", kv_ratio=0.5).scorer.obstacle(asks)


RATIO = {"kv_ratio": 0.5}
MASK = {"protocol": "row_mask", "method": "h2o", **RATIO}
BAD = [
    ({"method": "h20"}, "method must be one of a2sf, "),
    ({"method": "h2o"}, "method=h2o needs a budget: give kv_ratio=RATIO, budget.tokens"),
    ({"method": "h2o", **RATIO, "budget.threshold": 0.1}, "give exactly one of kv_ratio, tokens and threshold"),
    ({"method": "h2o", "kv_ratio": 1.5}, "kv_ratio must be in (0, 1]"),
    ({"method": "h2o", "kv_ratio": "half"}, "kv_ratio must be a number or null, got 'half'"),
    ({"method": "h2o", **RATIO, "method.alpha": 1}, "method.alpha is not a setting of H2O"),
    ({"cache.colour": 1}, "cache.colour is not a setting of cache; it has: mode, positions"),
    ({"kvratio": 0.5}, "model_args: kvratio is not known; there are pretrained, method, kv_ratio"),
    ({"protocol": "rowmask"}, "protocol must be one of prefill_then_step, row_mask, a2sf, h2o, keyformer"),
    ({"mask": "global"}, "mask=global belongs to protocol=row_mask"),
    ({"protocol": "row_mask", "whole_text": "yes"}, "whole_text must be true or false, got 'yes'"),
    ({"batch_size": "auto"}, "batch_size must be a number of rows, at least 1, got 'auto'"),
    (MASK | {"kv_ratio": None, "budget.threshold": 0.1}, "heads and threshold alone"),
    (MASK | {"method": "tova"}, "protocol=row_mask has no mask for method tova; it has for full, window, h2o"),
    (MASK | {"method": "a2sf", "mask": "global"}, "mask=global is H2O's alone"),
    (MASK | {"method": "keyformer", "method.key_window": "release_frozen"}, "method.key_window=release_frozen means"),
    (MASK | {"budget.layers": "pyramid"}, "takes kv_ratio (or tokens) and nothing else of a budget"),
    (MASK | {"cache.evict_every": 2}, "leave cache.evict_at_prefill and cache.evict_every alone"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arguments_are_refused_before_a_model_loads(options, message, monkeypatch):
    monkeypatch.setattr("kvexp.run.lm_eval_model.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr("kvexp.run.lm_eval_model.load_tokenizer", lambda *_, **__: byte_tokenizer())
    with pytest.raises(ConfigError) as error:
        KvexpLM("somewhere", **options)
    assert message in str(error.value)


LM_EVALS_CACHES = (
    *(["--use_cache", "answers"], ["-c", "answers"], ["--use_c=answers"]),
    *(["--cache_requests"], ["--cache_requests", "refresh"], ["--cache_req", "true"]),
)


@pytest.mark.parametrize("words", LM_EVALS_CACHES, ids=" ".join)
def test_lm_evals_caches_are_refused_before_a_model_loads(words, monkeypatch, tmp_path, capsys):
    """They know answers and prompts by too little: a second method would get the first one's."""
    monkeypatch.setattr("kvexp.run.lm_eval_model.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    asked = ["--model", "kvexp", "--model_args", "pretrained=somewhere,method=h2o,kv_ratio=0.5", "--tasks", "piqa"]
    assert main([*asked, *words]) == 1
    named = "--use_cache" if "answers" in words[-1] else "--cache_requests"
    assert re.match(rf"error: {named} keeps .* leave it out", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["use_cache: answers", "cache_requests: {cache_requests: true}"])
def test_lm_evals_caches_are_refused_in_a_file_of_settings(line, tmp_path, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text(f"model: kvexp\ntasks: [piqa]\n{line}\n")
    assert main(["run", "--config", str(file)]) == 1
    assert re.match(rf"error: --{line.partition(':')[0]} keeps .* leave it out", capsys.readouterr().err)


def test_lm_evals_cache_is_refused_in_python_too(tmp_path):
    with pytest.raises(ConfigError, match="another model, method or budget would be answered from them"):
        CachingLM(ours(), str(tmp_path / "answers.db"))


def test_generation_settings_that_are_not_offered():
    with pytest.raises(ConfigError, match="generation_kwargs num_beams is not offered"):
        ours().generate_until(text_requests("generate_until", ("a", {"num_beams": 4})))
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        ours().generate_until(text_requests("generate_until", ("a", {"max_gen_toks": HOLDS})))


def test_every_maskable_method_passes_its_check():
    for cls in KNOWN:
        check_row_mask(CacheConfig(cls(), Budget(kv_ratio=0.5), mode="auto"), "local")
