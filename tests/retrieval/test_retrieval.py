"""Methods that keep everything: choosing all is full attention, choosing few attends to exactly the budget, rows are
independent, and what follows a prompt may come in any of the ways eviction supports."""

from __future__ import annotations

import pytest
import torch
from planted import ID, PLANTS
from test_planted import BUDGET, ask, margin
from tiny import CONFIGS, LAYERS, Streams, feed, later, prompts_of, stock, tiny
from turns import in_turn

from kvexp.core import AttentionParams, Budget, CacheConfig, Cadence, MemoryTracker, SequenceState
from kvexp.generate import GenerationParams, continuation_logprobs, generate, prefill, receipts
from kvexp.generate.loop import generate_from_context as answer
from kvexp.hf import EvictionCache
from kvexp.methods import H2OC, Full
from kvexp.retrieval import InfLLM, Oracle, PQCache, Quest, SparQ
from kvexp.retrieval.layer import LayerGroup, RetrievalLayer
from kvexp.util.errors import CacheError, ConfigError

# Small enough for prompts of a few tokens; block caches of two blocks, so that they fill and are emptied again.
METHODS = {
    "oracle": Oracle(n_sinks=2),
    "sparq": SparQ(n_sinks=2, r=4),
    # Few components, of which some are not rotated, would tie the keys of repeated tokens up to rounding.
    "sparq_mean": SparQ(n_sinks=2, r=5, mean_value=True),
    "quest": Quest(n_sinks=2, page=3),
    "infllm": InfLLM(n_sinks=2, block=3, cache_tokens=6),
    "infllm_kv_head": InfLLM(n_sinks=2, block=2, choice="kv_head", repr_tokens=2, cache_tokens=0),
    "infllm_query_head": InfLLM(n_sinks=2, block=3, choice="query_head", rounding="blocks", cache_tokens=6),
    "infllm_blockwise": InfLLM(
        n_sinks=1, recent_ratio=0.1, block=2, chunk=4, rounding="blocks", prefill="blockwise", cache_tokens=0
    ),
    "pqcache": PQCache(n_sinks=2, m=1, b=2, cache_block=2, cache_tokens=4),
    "pqcache_lru": PQCache(
        n_sinks=1, m=1, b=1, combine="max", cluster="outside_window", cache_block=3, cache_tokens=6, cache_policy="lru"
    ),
    "pqcache_exact": PQCache(n_sinks=2, m=1, b=8, offload=False),
}
EXACT = [name for name in METHODS if name not in ("infllm_query_head", "infllm_blockwise")]  # to the token
# As released; what is far does not stand where it stood, so choosing everything is not full attention.
RELEASED = InfLLM(
    n_sinks=1, block=2, chunk=4, rounding="blocks", prefill="blockwise", far_positions="clamped", cache_tokens=4
)
LENGTHS = (23, 11, 17)
PROMPTS = prompts_of(3, LENGTHS)
SCARCE, AMPLE = Budget(tokens=9), Budget(tokens=60)


def same(a, b):
    assert a.tokens == b.tokens
    for x, y in zip(a.logits, b.logits, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=0)


WIDE = [*((family, 1) for family in CONFIGS), ("llama", 4), ("gptj", 4), ("mpt", 4)]


@pytest.mark.parametrize(("wide", "name"), in_turn(WIDE, METHODS, of=3), ids=str)
def test_choosing_everything_is_full_attention(wide, name):
    family, beams = wide
    options = {"decoding": GenerationParams(7, num_beams=beams, eos=None), "keep_logits": True}
    full = generate(tiny(family), PROMPTS, Full(), **options)
    same(generate(tiny(family), PROMPTS, METHODS[name], AMPLE, **options), full)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_stock_hugging_face_agrees_when_everything_is_chosen(family):
    ids = torch.tensor(PROMPTS[:1])
    model = tiny(family)
    cache = EvictionCache(model, Oracle(), AMPLE)
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    ours = model.generate(ids, past_key_values=cache, use_cache=True, **options)
    assert ours.tolist() == stock(family).generate(ids, use_cache=True, **options).tolist()
    assert cache.get_seq_length() == ids.shape[1] + 6


@pytest.mark.parametrize("window", [7, 11])
@pytest.mark.parametrize("name", ["oracle", "pqcache", "quest"])
def test_a_sliding_window_limits_what_can_be_chosen(name, window):
    model = tiny("mistral", sliding_window=window)
    options = {"decoding": GenerationParams(6, eos=None), "keep_logits": True}
    same(generate(model, PROMPTS, METHODS[name], AMPLE, **options), generate(model, PROMPTS, Full(), **options))
    few = generate(model, PROMPTS[:1], METHODS[name], SCARCE, **options)
    newest = LENGTHS[0] + 5 - 1
    for head in few.cache.kept_positions(0)[0]:
        middle = [p for p in head if 2 <= p < newest - 3]
        assert all(p > newest - window for p in middle)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_a_query_attends_to_exactly_the_budget(family, name):
    method = METHODS[name]
    cache = EvictionCache(tiny(family), method, Budget(tokens=9), max_new_tokens=8)
    ids = torch.tensor(PROMPTS[:1])
    fed = feed(cache, tiny(family), ids, later(5, 1, 8))
    local = method.recent(9)  # the current token included
    for step, layers in enumerate(fed.kept[1:]):
        newest = LENGTHS[0] + step
        for heads in layers:
            for head in heads[0]:
                assert len(head) == len(set(head)) == 9
                assert set(range(method.n_sinks)) | set(range(newest - local + 1, newest + 1)) <= set(head)
                assert all(0 <= p <= newest for p in head)
    assert cache.layer_states[0].first_eviction == [1]


def test_whole_blocks_come_on_top_where_that_is_asked_for():
    method = InfLLM(n_sinks=2, block=4, rounding="blocks")
    cache = EvictionCache(tiny("llama"), method, Budget(tokens=10), max_new_tokens=8)
    fed = feed(cache, tiny("llama"), torch.tensor(PROMPTS[:1]), later(5, 1, 8))
    for step, layers in enumerate(fed.kept[1:]):
        newest, local = LENGTHS[0] + step, 3  # 10 - 2 sinks - 1: half of 7 is the window; 4 slots are one block
        blocks = (newest - local - 1 - 2) // 4
        spare = newest - local - (2 + 4 * blocks)
        for head in layers[0][0]:
            assert len(head) == 2 + 4 + spare + local + 1
            chosen = {(p - 2) // 4 for p in head if 2 <= p < 2 + 4 * blocks}
            assert len(chosen) == 1


@pytest.mark.parametrize(("family", "name"), in_turn(["llama", "mpt"], METHODS, of=2))
def test_a_row_is_the_same_alone_and_in_company(family, name):
    model, decoding = tiny(family), GenerationParams(8, eos=None)
    batch = generate(model, PROMPTS, METHODS[name], SCARCE, decoding=decoding)
    turned = generate(model, PROMPTS[::-1], METHODS[name], SCARCE, decoding=decoding)
    assert turned.tokens == batch.tokens[::-1]
    company = receipts(batch.cache)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], METHODS[name], SCARCE, decoding=decoding)
        assert alone.tokens[0] == batch.tokens[row]
        assert [alone.cache.kept_positions(i)[0] for i in range(LAYERS)] == [
            batch.cache.kept_positions(i)[row] for i in range(LAYERS)
        ]
        mine = receipts(alone.cache)[0]
        assert mine.attention_kept == pytest.approx(company[row].attention_kept, abs=1e-5)
        for key in ("attended", "moved_bytes", "fetched_bytes", "cache_hit_rate", "kmeans_iterations", "notes"):
            assert mine.retrieval[key] == pytest.approx(company[row].retrieval[key]), key


@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_infllm_as_released_runs_on_rotary_and_alibi_models(family):
    """Rows alone and in company; far tokens are moved, near ones are not, and a prompt within the window is full."""
    model, decoding = tiny(family), GenerationParams(6, eos=None)
    batch = generate(model, PROMPTS, RELEASED, SCARCE, decoding=decoding)
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], RELEASED, SCARCE, decoding=decoding).tokens[0] == batch.tokens[row]
    roomy = {"decoding": GenerationParams(2, eos=None), "keep_logits": True}
    same(generate(model, PROMPTS, RELEASED, AMPLE, **roomy), generate(model, PROMPTS, Full(), **roomy))
    clamped = generate(model, PROMPTS, RELEASED, SCARCE, **roomy).logits[0]
    assert (clamped - generate(model, PROMPTS, Full(), **roomy).logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("name", METHODS)
def test_beams_carry_what_was_indexed(name):
    """The best beam, fed alone token by token, has the score that the search gave it."""
    model, new = tiny("gptj"), 9
    found = generate(model, PROMPTS[:2], METHODS[name], SCARCE, decoding=GenerationParams(new, num_beams=4, eos=None))
    for row in range(2):
        logprobs = continuation_logprobs(model, [PROMPTS[row]], [found.tokens[row]], METHODS[name], SCARCE)
        assert sum(logprobs[0]) / new == pytest.approx(found.beam_scores[row], abs=1e-4)


@pytest.mark.parametrize("name", [n for n in METHODS if not METHODS[n].whole_prompt])
def test_a_prompt_in_chunks_is_the_same_prompt(name):
    whole, chunks = (
        generate(tiny("llama"), PROMPTS, METHODS[name], SCARCE, decoding=decoding, keep_logits=True)
        for decoding in (GenerationParams(6, eos=None), GenerationParams(6, eos=None, prefill_chunk=5))
    )
    same(chunks, whole)


@pytest.mark.parametrize("name", METHODS)
def test_several_tokens_at_once_are_the_same_tokens(name):
    model, ids, new = tiny("llama"), torch.tensor(PROMPTS[:1]), later(5, 1, 12)
    one, three = (EvictionCache(model, METHODS[name], SCARCE, max_new_tokens=12) for _ in "ab")
    single = feed(one, model, ids, new)
    triple = feed(three.allow_multi_token_steps(), model, ids, new, width=3)
    torch.testing.assert_close(single.logits[-1], triple.logits[-1], atol=1e-4, rtol=0)
    assert single.kept[-1] == triple.kept[-1]


@pytest.mark.parametrize("name", METHODS)
def test_contexts_fork_and_answer_questions(name):
    """One prefill for two questions gives what each question gets with a prefill of its own."""
    model, decoding, options = tiny("llama"), GenerationParams(5, eos=None), {"max_new_tokens": 9}
    questions = [list(range(37, 41)), list(range(45, 49))]
    context = prefill(model, [PROMPTS[1]], METHODS[name], SCARCE, **options)
    two = answer(model, context.fork([0, 0]), questions, decoding=decoding)
    for row, question in enumerate(questions):
        alone = generate(model, [PROMPTS[1]], METHODS[name], SCARCE, questions=[question], decoding=decoding)
        assert two.tokens[row] == alone.tokens[0]
        assert two.cache.kept_positions(1)[row] == alone.cache.kept_positions(1)[0]
    again = answer(model, context, questions[:1], decoding=decoding)
    assert again.tokens[0] == two.tokens[0], "the context was not touched by its fork"


def test_a_reset_cache_remembers_nothing_of_the_prompt_before():
    """In PQCache's release the first step of every later prompt attends to rows of the one before."""
    model, method = tiny("llama"), METHODS["pqcache"]
    cache = EvictionCache(model, method, SCARCE, max_new_tokens=6)
    feed(cache, model, torch.tensor(PROMPTS[:1]), later(5, 1, 6))
    cache.reset()
    again = feed(cache, model, torch.tensor([PROMPTS[2]]), later(6, 1, 6))
    fresh = EvictionCache(model, method, SCARCE, max_new_tokens=6)
    first = feed(fresh, model, torch.tensor([PROMPTS[2]]), later(6, 1, 6))
    assert again.kept == first.kept
    assert all(torch.equal(a, b) for a, b in zip(again.logits, first.logits, strict=True))


@pytest.mark.parametrize("budget", [Budget(tokens=9), Budget(tokens=8, counts_self=False), Budget(kv_ratio=0.4)])
def test_the_budget_counts_as_everywhere(budget):
    out = generate(tiny("llama"), PROMPTS[:1], Oracle(n_sinks=2), budget, decoding=GenerationParams(3, eos=None))
    assert receipts(out.cache)[0].slots == 9
    assert receipts(out.cache)[0].retrieval["attended"] == 9
    rows = generate(tiny("llama"), PROMPTS, Oracle(n_sinks=2), Budget(kv_ratio=0.5), decoding=GenerationParams(3))
    assert [receipt.slots for receipt in receipts(rows.cache)] == [11, 5, 8], "each row has a budget of its own"


@pytest.mark.parametrize("plant", PLANTS)
def test_whatever_is_asked_for_is_still_there(plant):
    """Planted models, whose answer needs one slot: Oracle finds it always, whoever looked at it before."""
    make, layouts = PLANTS[plant]
    for layout in layouts:
        planted = make(layout)
        logits, _ = ask(planted, Oracle(), BUDGET)
        assert margin(logits[0], planted.answer) > 0


@pytest.mark.parametrize("method", [PQCache(b=4), SparQ(r=8), Quest(page=4), InfLLM(block=4, choice="kv_head")])
def test_a_needle_nobody_looked_at_is_found_when_it_is_asked_for(method):
    """No eviction method of the table keeps it but the one that knows keys alone."""
    planted = PLANTS["unseen"][0]("llama")
    logits, _ = ask(planted, method, BUDGET)
    assert (margin(logits[0], ID["yes"]) > 0) == (method.name != "infllm"), "InfLLM's blocks go by who was looked at"


# -- receipts ----------------------------------------------------------------------------------------------------------


def test_receipts_count_what_would_move():
    """One layer, 3 kv heads of 7 + 11 components in float64: a token is 3 * 18 * 8 = 432 bytes."""
    method = Oracle(n_sinks=2, recent_ratio=0.5)
    streams = Streams.random(1, 23)
    time = SequenceState(prompt_columns=20, max_new_tokens=3)
    state = RetrievalLayer(
        CacheConfig(method, Budget(tokens=9)), 0, 1, time, memory_tracker := MemoryTracker(1), LayerGroup()
    )
    for rows in (slice(0, 20), *(slice(t, t + 1) for t in range(20, 23))):
        q, k, v = (x[0, :, :, rows] for x in (streams.q, streams.k, streams.v))
        state.forward(q, k, v, AttentionParams(7**-0.5), None)
    for row in state.memory.traffic:
        assert row.d2h == 23 * 432
        # Every key at every step (3 heads of 7 doubles), and 3 tokens chosen per head and step (9 - 2 - 1 - 3).
        assert row.h2d == (21 + 22 + 23) * 3 * 7 * 8 + 3 * 3 * 3 * 18 * 8
        assert (row.lookups, row.hits) == (27, 0)
    assert memory_tracker.offloaded_bytes == 2 * 23 * 432
    assert memory_tracker.bytes == 2 * (2 + 4) * 432  # sinks, window and current token, for both rows
    assert (
        memory_tracker.peak_bytes == memory_tracker.bytes + 2 * 20 * 432
    )  # at the end of the prompt, before it is sent home


def test_a_cache_on_the_device_moves_nothing():
    out = generate(
        tiny("llama"), PROMPTS[:1], PQCache(n_sinks=2, b=1, offload=False), SCARCE, decoding=GenerationParams(5)
    )
    receipt = receipts(out.cache)[0]
    assert receipt.retrieval["moved_bytes"] == receipt.retrieval["offloaded_bytes"] == 0
    assert receipt.retrieval["cache_hit_rate"] is None
    away = generate(tiny("llama"), PROMPTS[:1], PQCache(n_sinks=2, b=1), SCARCE, decoding=GenerationParams(5))
    assert away.tokens == out.tokens
    assert receipts(away.cache)[0].kv_bytes < receipt.kv_bytes


def test_too_few_tokens_for_centroids_are_searched_exactly_and_the_row_says_so():
    """15 keys do not make 16 clusters (17 - 2 sinks); 21 do (23 - 2). Rows decide for themselves."""
    model, decoding = tiny("gptj"), GenerationParams(6, eos=None)
    method, prompts = PQCache(n_sinks=2, m=1, b=4), [PROMPTS[0], PROMPTS[2]]
    mixed = generate(model, prompts, method, SCARCE, decoding=decoding)
    exact = generate(model, prompts, Oracle(n_sinks=2), SCARCE, decoding=decoding)
    many, few = receipts(mixed.cache)
    assert few.retrieval["notes"] == ["no more tokens to cluster than centroids: searched exactly"]
    assert many.retrieval["notes"] == []
    assert few.retrieval["kmeans_iterations"] == 0 < many.retrieval["kmeans_iterations"]
    assert mixed.tokens[1] == exact.tokens[1]


def test_the_share_of_the_search_is_the_papers():
    """m b bits of 16 x 128: 0.586 % < 1/128; SparQ's one component and InfLLM's one key in 128 are 1/128."""
    pairs = ((PQCache(), 2 * 6 / 16 / 128), (SparQ(), 1 / 128), (InfLLM(), 1 / 128), (Oracle(), 1.0), (Quest(), 1 / 8))
    for method, share in pairs:
        assert method.index_bits_per_token(128) / (16 * 128) == share


def test_h2o_c_is_given_more():
    for compensation, slots in (("none", 20), ("codes", 20 + 1), ("codes_and_fetch", 30 + 1)):
        method = H2OC(compensation=compensation)
        out = generate(
            tiny("gptj"), prompts_of(9, [130]), method, Budget(tokens=20), decoding=GenerationParams(3, eos=None)
        )
        assert receipts(out.cache)[0].slots == slots - 1  # the last slot is the coming token's
        held = out.cache.kept_positions(0)[0][0]
        assert set(range(4)) <= set(held)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PQCache(cache_tokens=64), "cache_tokens=64 cannot hold one block of 128"),
        (lambda: InfLLM(cache_tokens=100), "cannot hold one block of 128"),
        (lambda: InfLLM(repr_tokens=200), "lower repr_tokens"),
        (lambda: CacheConfig(Oracle(), None), "needs a budget"),
        (lambda: CacheConfig(Oracle(), SCARCE, mode="mask"), "keeps everything"),
        (lambda: CacheConfig(Oracle(), SCARCE, Cadence(every=2)), "leave cache.mode"),
        (lambda: CacheConfig(Oracle(), SCARCE, positions="renumbered"), "keeps everything"),
        (lambda: EvictionCache(tiny("llama"), PQCache(m=3), SCARCE), r"m=3 does not divide the 14 .*1, 2, 7, 14"),
        (lambda: EvictionCache(tiny("llama"), SparQ(r=15), SCARCE), "heads have 14 components"),
        (lambda: EvictionCache(tiny("gpt2"), InfLLM(far_positions="clamped"), SCARCE), "cannot work on GPT-2"),
    ],
)
def test_bad_settings_say_so(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_bad_use_says_so():
    model = tiny("llama")
    with pytest.raises(ConfigError, match="cannot hold sink=4"):
        generate(model, PROMPTS, Oracle(), Budget(tokens=4))
    with pytest.raises(ConfigError, match="prefill_chunk at null"):
        generate(model, PROMPTS, RELEASED, SCARCE, decoding=GenerationParams(2, prefill_chunk=5))
    cache = EvictionCache(model, Oracle(n_sinks=2), SCARCE)
    ids = torch.tensor(PROMPTS[:1])
    model(ids, past_key_values=cache)
    mask = torch.ones(1, LENGTHS[0] + 1)
    mask[0, -1] = 0
    with pytest.raises(CacheError, match="masked out"):
        model(ids[:, :1], past_key_values=cache, attention_mask=mask)


def test_nan_is_noticed():
    import copy

    model = copy.deepcopy(tiny("llama"))
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(CacheError, match="NaN"):
        generate(model, PROMPTS, Oracle(n_sinks=2), SCARCE, decoding=GenerationParams(3, eos=None))
