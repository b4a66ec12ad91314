"""One prefill for many methods: every cache ends as it would alone, token for token and byte for byte."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from commands import settings as composed_settings
from tiny import prompts_of, tiny

import kvexp.retrieval.infllm as retrieval_infllm
import kvexp.retrieval.method as retrieval_base
from kvexp.core import AttentionParams, Budget, Cadence
from kvexp.core.attention import apply_probs_any_width, compute_attention, decode_logits
from kvexp.core.backends import stackable_width
from kvexp.core.slots import Slots
from kvexp.generate import (
    CacheConfig,
    GenerationParams,
    decode,
    decode_batches,
    generate,
    generate_from_context,
    generate_from_contexts,
    prefill,
    prefill_together,
    receipts,
)
from kvexp.hf import calibrate_queries
from kvexp.hf.cache import MultiMethodCache, bin_by_bytes
from kvexp.methods import (
    A2SF,
    CAOTE,
    CUR,
    D2O,
    GKV,
    H2O,
    RKV,
    TOVA,
    VATP,
    AttentionMatching,
    CaM,
    EpiKV,
    ExpectedAttention,
    Full,
    Ideal,
    KeyDiff,
    Keyformer,
    KNorm,
    KVzip,
    KVzipPlus,
    LagKV,
    QFilters,
    Random,
    SnapKV,
    StreamingLLM,
    TriAttention,
    Window,
)
from kvexp.retrieval import InfLLM, Oracle, PQCache
from kvexp.run.batches import evaluate_run, prefill_groups, run_group, why_alone
from kvexp.run.session import Session
from kvexp.util.errors import ConfigError

# One prefill for many methods: every cache ends as it would alone, token for token and byte for byte.


HALF, FIFTH = Budget(kv_ratio=0.5), Budget(kv_ratio=0.2)
VARIANTS = [
    CacheConfig(H2O(), FIFTH),
    CacheConfig(Full()),
    CacheConfig(H2O(), HALF),
    CacheConfig(Keyformer(), FIFTH),
    CacheConfig(Keyformer(tau_end=3.0), HALF),
    CacheConfig(Keyformer(score_scope="shared"), HALF),
    CacheConfig(A2SF(alpha=0.3), FIFTH),
    CacheConfig(A2SF(), HALF),
    CacheConfig(TOVA(), HALF),
    CacheConfig(Window(), FIFTH),
    CacheConfig(SnapKV(window=4, kernel=3), HALF),
    CacheConfig(KNorm(), HALF),
    CacheConfig(KeyDiff(), HALF),
    CacheConfig(ExpectedAttention(), HALF),
    CacheConfig(CUR(), HALF),
    CacheConfig(LagKV(n_sinks=2, lag=3), HALF),
    CacheConfig(CAOTE(), HALF),
    CacheConfig(KVzip(n_sinks=2, chunk=9, instruct=False), HALF),
    CacheConfig(KVzip(n_sinks=2, chunk=9, instruct=False), FIFTH, mode="mask"),
    CacheConfig(KVzipPlus(instruct=False), HALF),
    CacheConfig(RKV(window=4, kernel=3), HALF),
    CacheConfig(GKV(window=4), HALF),
    CacheConfig(LagKV(against="previous", n_sinks=2, lag=3), HALF),
    CacheConfig(EpiKV(window=4, protect_recent=3), Budget(tokens=5, of="generated"), keep="prompt"),
    CacheConfig(VATP(n_sinks=1), HALF),
    CacheConfig(Random(), HALF),
    CacheConfig(AttentionMatching(window=4, queries=12, reference="prompt"), HALF),
    CacheConfig(
        AttentionMatching(n_sinks=1, window=3, queries=12, reference="prompt", bias="mass", values="kept"), FIFTH
    ),
    CacheConfig(D2O(n_sinks=1), HALF),
    CacheConfig(CaM(n_sinks=1, share=3), HALF),
    CacheConfig(H2O(), Budget(kv_ratio=1.0)),
    CacheConfig(H2O(), HALF, mode="compact"),
    CacheConfig(A2SF(), HALF, mode="mask"),
    CacheConfig(Ideal(), HALF, mode="mask"),
    CacheConfig(StreamingLLM(n_sinks=2), HALF, positions="original"),
    CacheConfig(H2O(), HALF, observe="naive"),
]
PROMPTS = prompts_of(5, (40, 33, 40))
SEEDS = [3, 4, 9]


def alone(model, variant, decoding, **options):
    options |= {"decoding": decoding, "seeds": SEEDS}
    return generate(model, PROMPTS, variant, **options)


def together(model, variants, decoding):
    contexts = prefill_together(model, PROMPTS, variants, max_new_tokens=decoding.max_new_tokens, seeds=SEEDS)
    return decode(model, contexts, decoding, SEEDS, None, start=0.0)


def same(one, other):
    assert one.tokens == other.tokens
    assert torch.equal(one.sequences, other.sequences)
    for a, b in zip(receipts(one.cache), receipts(other.cache), strict=True):
        a, b = dataclasses.asdict(a), dataclasses.asdict(b)
        kept, other_kept = a.pop("attention_kept"), b.pop("attention_kept")
        assert kept == (other_kept if kept is None else pytest.approx(other_kept, abs=1e-6))
        assert a == b


@pytest.mark.parametrize(
    "family", ["llama", "mpt", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gptj", "gpt2", "mistral"))]
)
def test_every_method_is_what_it_is_alone(family):
    model, decoding = tiny(family), GenerationParams(12, eos=None)
    made = calibrate_queries(model, PROMPTS[:1])
    variants = [*VARIANTS, *(CacheConfig(method, HALF, calibration=made) for method in (QFilters(), TriAttention()))]
    for variant, joint in zip(variants, together(model, variants, decoding), strict=True):
        same(alone(model, variant, decoding), joint)


@pytest.mark.parametrize("family", ["llama", pytest.param("mpt", marks=pytest.mark.slow)])
def test_rows_that_end_early_and_caches_that_leave(family):
    """An end token per row: caches finish at different steps, and the others go on."""
    model = tiny(family)
    free = [alone(model, variant, GenerationParams(12, eos=None)) for variant in VARIANTS]
    ends = sorted({free[0].tokens[0][2], free[2].tokens[1][4], free[6].tokens[2][7]})
    decoding = GenerationParams(12, eos=ends, min_new_tokens=2)
    each = [alone(model, variant, decoding) for variant in VARIANTS]
    assert len({g.sequences.shape[1] for g in each}) > 1, "all caches ended at one step: nothing is tested"
    for one, joint in zip(each, together(model, VARIANTS, decoding), strict=True):
        same(one, joint)


@pytest.mark.parametrize("ends", [False, True])
def test_batches_of_other_prompts_decode_in_the_same_steps(ends):
    """Prompts of other lengths, batches of other sizes, rows and caches that end at other steps."""
    model, variants = tiny("llama"), VARIANTS[:12]
    batches, seeds = [PROMPTS, prompts_of(6, (21,)), prompts_of(7, (50, 44))], [SEEDS, [7], [1, 2]]
    each = list(zip(batches, seeds, strict=True))
    decoding = GenerationParams(12, eos=None)
    if ends:
        free = [generate(model, some, CacheConfig(Full()), decoding=decoding, seeds=own).tokens for some, own in each]
        found = sorted({free[0][0][2], free[0][1][5], free[1][0][4], free[2][0][1], free[2][1][6]})
        decoding = GenerationParams(12, eos=found, min_new_tokens=2)
    contexts = [prefill_together(model, some, variants, max_new_tokens=12, seeds=own) for some, own in each]
    together = decode_batches(model, contexts, decoding, seeds, None, start=0.0)
    if ends:
        assert len({g.sequences.shape[1] for g in together[2]}) > 1, "all ended at one step: nothing is tested"
    for (some, own), made in zip(each, together, strict=True):
        for variant, joint in zip(variants, made, strict=True):
            same(generate(model, some, variant, decoding=decoding, seeds=own), joint)


def test_sampling_draws_what_it_draws_alone():
    model, decoding = tiny("llama"), GenerationParams(9, eos=None, sample=True, temperature=1.5, top_k=20)
    greedy = together(model, VARIANTS[:4], GenerationParams(9, eos=None))
    for variant, joint, sure in zip(VARIANTS[:4], together(model, VARIANTS[:4], decoding), greedy, strict=True):
        same(alone(model, variant, decoding), joint)
        assert joint.tokens != sure.tokens


def test_retrieval_methods_join():
    methods = [Oracle(n_sinks=1), PQCache(m=2, b=3, n_sinks=1, max_iter=4), InfLLM(n_sinks=1, block=4)]
    variants = [*(CacheConfig(m, HALF) for m in methods), *VARIANTS[:4]]
    model, decoding = tiny("llama"), GenerationParams(8, eos=None)
    for some in (variants, variants[:3], variants[:1]):
        for variant, joint in zip(some, together(model, some, decoding), strict=True):
            same(alone(model, variant, decoding), joint)


def test_a_prompts_output_is_computed_once(monkeypatch):
    """Retrieval methods attend to a shared prompt only where no other cache does, and then the first of them."""
    prompts, original = [], compute_attention

    def counted(inputs):
        if inputs.query.shape[3] > 1:
            prompts.append(inputs)
        return original(inputs)

    for where in (retrieval_base, retrieval_infllm):
        monkeypatch.setattr(where, "compute_attention", counted)
    model = tiny("llama")
    some = [CacheConfig(m, HALF) for m in (InfLLM(n_sinks=1, block=4), Oracle(n_sinks=1), PQCache(m=2, b=3))]
    for variants, times in (([CacheConfig(Full()), *some], 0), (some, 1), (some[1:], 1)):
        prompts.clear()
        prefill_together(model, PROMPTS, variants, max_new_tokens=5)
        assert len(prompts) == times * model.config.num_hidden_layers


def test_windows_of_infllm_share_the_attention_they_sum_up(monkeypatch):
    """Caches whose heads select alike observe a shared prompt together, each within its own window."""
    calls, original = [], retrieval_infllm.window_attention_masses
    variants = [
        CacheConfig(H2O(), HALF),
        CacheConfig(InfLLM(n_sinks=1, block=4), FIFTH),
        CacheConfig(InfLLM(n_sinks=1, block=4), HALF),
        CacheConfig(InfLLM(n_sinks=1, block=4, choice="kv_head"), HALF),
        CacheConfig(InfLLM(n_sinks=1, block=3, choice="query_head"), HALF),
    ]
    model, decoding = tiny("llama"), GenerationParams(8, eos=None)
    apart = [alone(model, variant, decoding) for variant in variants]
    monkeypatch.setattr(retrieval_infllm, "window_attention_masses", lambda *a: calls.append(len(a[1])) or original(*a))
    for one, joint in zip(apart, together(model, variants, decoding), strict=True):
        same(one, joint)
    assert sorted(calls) == sorted([3, 1] * model.config.num_hidden_layers)


def test_a_method_that_indexes_what_it_attends_to_does_so_in_a_shared_prefill(monkeypatch):
    """Without an `observe_prompt` of its own its output is computed, and not used."""
    calls = []

    def attend_prompt(self, inputs, index, local, counts):
        calls.append((local, counts))
        return compute_attention(inputs)

    mine = type("Mine", (Oracle,), {"attend_prompt": attend_prompt, "__module__": __name__})
    model = tiny("llama")
    prefill_together(model, PROMPTS, [CacheConfig(Full()), CacheConfig(mine(n_sinks=1), HALF)], max_new_tokens=5)
    assert len(calls) == model.config.num_hidden_layers and all(map(all, calls))


def test_questions_share_the_context_too():
    model, decoding = tiny("llama"), GenerationParams(7, eos=None)
    questions = [[5, 6, 7, 8], [9, 8, 7, 6], [1, 2, 3, 4]]
    many = prefill_together(model, PROMPTS, VARIANTS[:9], max_new_tokens=11, seeds=SEEDS)
    for rows in ([0, 1, 2], [2, 2, 0]):
        asked = [questions[row] for row in rows]
        joint = generate_from_contexts(model, [c.fork(rows) for c in many], asked, decoding=decoding, seeds=SEEDS)
        for variant, generation in zip(VARIANTS, joint, strict=False):
            own = prefill(model, PROMPTS, variant, max_new_tokens=11, seeds=SEEDS)
            same(generate_from_context(model, own.fork(rows), asked, decoding=decoding, seeds=SEEDS), generation)


def test_the_model_reads_the_prompt_once_and_shares_its_memory(monkeypatch):
    module = importlib.import_module("kvexp.generate.prefill")  # the package has a function of this name
    model, widths, original = tiny("llama"), [], module.forward_last

    def counted(model, ids, *rest):
        widths.append(tuple(ids.shape))
        return original(model, ids, *rest)

    monkeypatch.setattr(module, "forward_last", counted)
    later = CacheConfig(H2O(), HALF, cadence=Cadence(at_prefill=False, every=2))
    contexts = prefill_together(model, PROMPTS, [later] * 3, max_new_tokens=5)
    assert widths == [(3, 40)]
    first, *others = (c.cache.layer_states[0].slots for c in contexts)
    for slots in others:  # nothing is evicted from the prompt yet: one buffer serves all
        assert slots.keys.data_ptr() == first.keys.data_ptr()
    decode(model, contexts, GenerationParams(5, eos=None), [0, 0, 0], None, start=0.0)
    own = {c.cache.layer_states[0].slots.keys.untyped_storage().data_ptr() for c in contexts}
    assert len(own) in (1, 3)  # parts of one common buffer, or each its own: never the prompt's
    assert first.keys.untyped_storage().data_ptr() in own


def test_equal_views_are_observed_once(monkeypatch):
    import kvexp.core.eviction as eviction

    calls, original = [], eviction.ColumnSums
    monkeypatch.setattr(eviction, "ColumnSums", lambda *a: calls.append(a[1]) or original(*a))
    model = tiny("llama")
    methods = [(H2O(), FIFTH), (H2O(), HALF), (Keyformer(), HALF), (Keyformer(tau_end=5.0), FIFTH)]
    some = [CacheConfig(*pair) for pair in methods]
    prefill_together(model, PROMPTS, some, max_new_tokens=5)
    assert len(calls) == 2 * model.config.num_hidden_layers


def test_buffers_are_common_where_little_is_wasted(monkeypatch):
    def slots(count):
        keys = torch.zeros(2, 3, count, 8)
        return Slots(keys, keys.clone(), torch.zeros(2, 3, count, dtype=torch.int64), torch.zeros(2, 3, count))

    each = {4: slots(10), 7: slots(40), 8: slots(10), 9: slots(38)}
    held = {place: (one.length, one.kv_bytes) for place, one in each.items()}
    assert bin_by_bytes(held) == [[7, 9, 4, 8]]
    monkeypatch.setattr("kvexp.hf.cache.MAX_PAD_BYTES", 2 * 2 * 3 * 2 * 8 * 4 + 1)  # two slots of a cache, and rounding
    assert bin_by_bytes(held) == [[7, 9], [4, 8]]
    monkeypatch.setattr("kvexp.hf.cache.MAX_PAD_BYTES", 0)
    assert bin_by_bytes(held) == [[7], [9], [4, 8]]


def test_what_cannot_be_shared_is_refused():
    model = tiny("llama")
    with pytest.raises(ConfigError, match="in its own way"):
        prefill_together(
            model, PROMPTS, [VARIANTS[0], CacheConfig(InfLLM(prefill="blockwise"), HALF)], max_new_tokens=4
        )
    beams = prefill(model, PROMPTS, H2O(), HALF, num_beams=2, max_new_tokens=4)
    with pytest.raises(ConfigError, match="beam"):
        MultiMethodCache([beams.cache, beams.cache], 6)
    with pytest.raises(ConfigError, match="cannot hold"):
        prefill_together(model, PROMPTS, [VARIANTS[0], CacheConfig(StreamingLLM(), Budget(tokens=3))], max_new_tokens=4)


@pytest.mark.parametrize("method", [H2O(), Keyformer(), A2SF(alpha=0.3), Window()])
def test_a_row_taken_out_of_a_padded_batch_goes_on_as_alone(method):
    """The long row's buffers have places that the short one may not use: they are no room, and nothing to look at."""
    model, decoding = tiny("llama"), GenerationParams(9, eos=None)
    context = prefill(model, PROMPTS, method, HALF, max_new_tokens=12, seeds=SEEDS)
    for row in (1, 0):
        taken = generate_from_context(model, context.fork([row]), [[5, 6, 7]], decoding=decoding, keep_logits=True)
        own = prefill(model, PROMPTS[row : row + 1], method, HALF, max_new_tokens=12, seeds=SEEDS[row : row + 1])
        alone = generate_from_context(model, own, [[5, 6, 7]], decoding=decoding, keep_logits=True)
        assert taken.tokens == alone.tokens
        torch.testing.assert_close(torch.stack(taken.logits), torch.stack(alone.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("waste", [0, 8 << 20])
def test_caches_whose_layers_fill_up_at_different_steps(waste, monkeypatch):
    """Layer 0 of a pyramid overwrites from a later step on than layer 1: the others' books must not be torn apart."""
    monkeypatch.setattr("kvexp.hf.cache.MAX_PAD_BYTES", waste)
    late = [CacheConfig(H2O(), Budget(tokens=tokens, layers="pyramid")) for tokens in (30, 31, 33, 33)]
    variants = [CacheConfig(H2O(), FIFTH), CacheConfig(A2SF(alpha=0.3), FIFTH), *late, CacheConfig(Keyformer(), FIFTH)]
    model, decoding = tiny("llama"), GenerationParams(24, eos=None)
    for made, variant in zip(together(model, variants, decoding), variants, strict=True):
        same(made, alone(model, variant, decoding))


# Head dimensions are a multiple of four, as those of all released models: MKL rounds other ones by where they lie.
WIDE_HEADS = {
    "llama": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gptj": {"n_embd": 48},
    "gpt2": {"n_embd": 36},
    "mpt": {"d_model": 36},
}


@pytest.mark.parametrize("family", WIDE_HEADS)
def test_larger_caches_in_the_same_step_change_no_bit(family):
    """Logits of each step equal those in the company of copies, whatever the widths of the others.

    Copies, because plain linear layers as small as these sum otherwise for another number of rows.
    """
    model, prompt = tiny(family, **WIDE_HEADS[family]), prompts_of(5, (150,))
    decoding = GenerationParams(6, eos=None)

    def logits(slots, *others):
        configs = [CacheConfig(H2O(), Budget(tokens=n)) for n in (slots, *others)]
        contexts = prefill_together(model, prompt, configs, max_new_tokens=6, seeds=[1])
        return torch.stack(decode(model, contexts, decoding, [1], None, start=0.0, keep_logits=True)[0].logits)

    for slots in (41, 50, 51, 63):
        expected = logits(slots, slots, slots)
        for others in ((slots + 1, 42), (slots + 2, 130), (77, 149)):
            assert torch.equal(expected, logits(slots, *others)), (slots, others)


@pytest.mark.parametrize(("groups", "heads", "width"), [(1, 8, 64), (3, 3, 64), (4, 2, 64), (7, 2, 64), (4, 2, 128)])
def test_the_attention_of_a_row_is_the_same_in_any_stack(groups, heads, width):
    """For heads as released models have: logits, probabilities and outputs, alone and before dead slots."""
    draw = torch.Generator().manual_seed(groups)
    params = AttentionParams(scale=width**-0.5)
    for slots, more, rows in [(19, 3, 2), (45, 130, 5), (210, 900, 7), (275, 333, 3), (386, 390, 4), (701, 1203, 2)]:
        own, widest = stackable_width(slots, torch.device("cpu")), stackable_width(slots + more, torch.device("cpu"))
        query = torch.randn(rows, heads, groups, 1, width, generator=draw)
        keys, values = (torch.randn(rows, heads, widest, width, generator=draw) for _ in range(2))
        positions = torch.arange(widest).expand(rows, heads, -1)
        dead = torch.arange(widest) >= slots

        def attended(row, count, query=query, keys=keys, values=values, positions=positions, dead=dead):
            x = decode_logits(query[row], keys[row, :, :count], positions[row, :, :count], torch.zeros(1, 1, 1), params)
            x[-1] = x[-1].masked_fill(dead[:count], -torch.inf)
            probabilities = torch.softmax(x, dim=-1)
            return probabilities[-1:], apply_probs_any_width(probabilities, values[row, :, :count])[-1:]

        keys[-1, :, slots:], values[-1, :, slots:] = 0, 0
        last = slice(rows - 1, rows)
        probabilities, out = attended(last, own)
        in_company, out_in_company = attended(slice(None), widest)
        assert torch.equal(probabilities[..., :slots], in_company[..., :slots]), (slots, widest)
        assert torch.equal(out, out_in_company), (slots, widest)


# Same configuration, same machine, same rows: whatever the batch size, the launcher, the order and the company.
#
# - The same command twice: every byte but times (tests/faults: the same rows through kills).
# - Another batch size or launcher: the same tokens, so the same text, metrics, counts and kept positions; sums in
#   float32 over another shape (attention_kept, log-probabilities) within the tolerances below; bytes and batch_size say
#   what the batch was.
# - Another order of the rows, or some of them left out: the same row for the same example but for its index.
#
# Tokens can differ between batch sizes where two logits are closer than float32 rounding; on the testbed it does not
# happen. In half precision it does, so there, on a CPU, every prompt goes through the model by itself.


ROOT = Path(__file__).resolve().parents[2]
SHAPED = ("kv_bytes", "peak_kv_bytes", "batch_size")  # of a receipt: they say what the batch was
ATTENTION_KEPT = 1e-5  # a share of 1
LOGPROB = 1e-4  # nats, summed over a choice or meant over a continuation


def rows(out, methods, words, launcher="basic"):
    """Method -> its rows, but for times."""
    members = [_settings(out, f"method={method}", *words) for method in methods]
    if launcher == "shared_prefill":
        for group in prefill_groups(members):
            run_group(group, Session())
    return {one.method.name: [_timeless(row) for row in evaluate_run(one).rows()] for one in members}


def _settings(out, *words):
    return composed_settings(*words, "kv_ratio=0.3", f"outputs_dir={out}")


def _timeless(row):
    return {key: value for key, value in row.items() if key != "seconds"}


def assert_alike(one, other):
    """Equal but for the shape of the batch, and for rounding where floats are summed."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        a, b = json.loads(json.dumps(a)), json.loads(json.dumps(b))
        for name in SHAPED:
            del a["receipt"][name], b["receipt"][name]
        kept = [row["receipt"].pop("attention_kept") for row in (a, b)]
        assert kept[0] == pytest.approx(kept[1], abs=ATTENTION_KEPT)
        for place, name in (("choices", "logprobs"), ("metrics", "nll")):
            found = [(row.get(place) or {}).pop(name, None) for row in (a, b)]
            assert found[0] == pytest.approx(found[1], abs=LOGPROB)
        assert a == b


METHODS = ("full", "h2o", "keyformer", "random")  # the last two draw noise
TESTBED = ("model=testbed_rope", "limit=9")


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["greedy", "sampling"])
def test_batch_sizes_and_launchers(tmp_path, generation):
    words = (*TESTBED, "task=testbed_summary", f"generation={generation}", "task.max_new_tokens=10")
    alone = rows(tmp_path / "alone", METHODS, (*words, "batch_size=1"))
    assert alone["h2o"] != alone["keyformer"]
    for size in (1, 3, 8):
        for launcher in ("basic", "shared_prefill"):
            found = rows(tmp_path / f"{launcher}{size}", METHODS, (*words, f"batch_size={size}"), launcher)
            for method in METHODS:
                if (size, launcher) == (1, "basic"):
                    assert found == alone, "the same command: every byte"
                assert_alike(alone[method], found[method])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_on_a_cpu(tmp_path, dtype):
    """Prompts of unequal length, each by itself: whatever the batch size and the launcher, every byte."""
    words = ("model=tiny", f"model.dtype={dtype}", "model.device=cpu", "task=sample", "limit=4")
    words += ("task.max_new_tokens=16", "task.nll=false")
    methods = ("full", "h2o")
    alone = rows(tmp_path / "alone", methods, (*words, "batch_size=1"))
    for launcher in ("basic", "shared_prefill"):
        assert rows(tmp_path / launcher, methods, (*words, "batch_size=4"), launcher) == alone
    assert {row["receipt"]["batch_size"] for row in alone["h2o"]} == {1}
    assert (
        evaluate_run(_settings(tmp_path / "alone", "method=h2o", *words)).hash
        == evaluate_run(_settings(tmp_path / "basic", "method=h2o", *words, "batch_size=4")).hash
    )


def test_half_precision_goes_on_with_the_threads_it_was_begun_with(tmp_path, monkeypatch):
    """Other threads sum its products in another order. float32 rows do not go by them."""
    words = ("model=tiny", "task=sample", "method=full", "task.max_new_tokens=2", "task.nll=false")
    for dtype in ("float32", "bfloat16"):
        half = (*words, f"model.dtype={dtype}", "model.device=cpu")
        evaluate_run(_settings(tmp_path, *half, "limit=1"))
        with monkeypatch.context() as patch:
            patch.setattr("kvexp.run.batches.environment", lambda: {"threads": 77})
            if dtype == "float32":
                assert len(evaluate_run(_settings(tmp_path, *half, "limit=2")).rows()) == 2
                continue
            with pytest.raises(ConfigError, match=r"77 would make others: set threads=\d+, or remove"):
                evaluate_run(_settings(tmp_path, *half, "limit=2"))
        assert len(evaluate_run(_settings(tmp_path, *half, "limit=2")).rows()) == 2


def test_half_precision_on_a_gpu_is_another_run_in_another_batch(tmp_path, monkeypatch):
    """There prompts stay together, for the time it takes; float32 runs are known without their batch size."""
    monkeypatch.setattr("kvexp.run.model_spec.ModelSpec.resolved_device", lambda spec: "cuda:0")

    def identities(dtype):
        each = [_settings(tmp_path, "model=tiny", f"model.dtype={dtype}", f"batch_size={size}") for size in (1, 4)]
        assert [one.batch_size for one in each] == [1, 4] and not any(map(why_alone, each))
        return [str(one.identity) for one in each], [str(one.baseline().identity) for one in each]

    for dtype, different in (("float32", 1), ("bfloat16", 2), ("float16", 2)):
        assert [len(set(found)) for found in identities(dtype)] == [different, different]


# Questions after the eviction are compared between launchers in test_shared_prefill.py too.
@pytest.mark.parametrize("task", ["testbed_choice", pytest.param("testbed_qa", marks=pytest.mark.slow)])
def test_choices_and_questions(tmp_path, task):
    """Questions about one context share its prefill, choices are judged by log-probability."""
    words = (TESTBED[0], "limit=3", f"task={task}", *(["task.question=after_eviction"] if task == "testbed_qa" else []))
    methods = ("full", "keyformer", "random")
    alone = rows(tmp_path / "alone", methods, (*words, "batch_size=1"))
    for size, launcher in ((8, "basic"), (2, "shared_prefill")):
        found = rows(tmp_path / launcher, methods, (*words, f"batch_size={size}"), launcher)
        for method in methods:
            assert_alike(alone[method], found[method])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Rows of a file in several orders; their ids stay theirs."""
    lines = (ROOT / "conf/task/sample.jsonl").read_text().splitlines()[:4]
    folder = tmp_path_factory.mktemp("texts")
    orders = {"given": lines, "reversed": lines[::-1], "some": [lines[3], lines[1]]}
    for name, order in orders.items():
        (folder / f"{name}.jsonl").write_text("\n".join(order) + "\n")
    return folder


def test_orders_and_subsets(tmp_path, texts):
    words = ("model=tiny", "task=sample", "generation=sampling", "task.max_new_tokens=6", "batch_size=1")
    words += ("task.continuation_words=3",)
    methods = ("full", "keyformer")

    def found(name, *more):
        each = rows(tmp_path / f"{name}{len(more)}", methods, (*words, f"task.data_files={texts}/{name}.jsonl", *more))
        return {m: {r["example"]: {k: v for k, v in r.items() if k != "index"} for r in rs} for m, rs in each.items()}

    given = found("given")
    assert [len(made) for made in given.values()] == [4, 4]
    assert found("reversed") == given
    for part in (found("some"), found("reversed", "limit=3")):
        for method, made in part.items():
            assert 2 <= len(made) <= 3 and made.items() <= given[method].items()


def test_draws_differ_between_examples_and_seeds(tmp_path, texts):
    """Else the tests above would hold of draws that never change."""
    (texts / "same.jsonl").write_text(
        "".join(json.dumps({"id": name, "text": "one two three four five six " * 9}) + "\n" for name in "ab")
    )
    words = ["model=tiny", "task=sample", f"task.data_files={texts}/same.jsonl", "generation=sampling"]
    words += ["task.max_new_tokens=8", "task.nll=false"]
    a, b = rows(tmp_path / "0", ["full"], words)["full"]
    (c, _), (d, _) = (rows(tmp_path / f"s{s}", ["full"], [*words, f"seed={s}"])["full"] for s in (0, 1))
    assert a["output"] != b["output"] and a == c and a["output"] != d["output"]
