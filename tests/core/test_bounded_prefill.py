"""Bounded prefill: what is kept is the slow truth's, what is held is the budget and a chunk, what cannot is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import composed
from reference import Reference, World
from test_kept_sets import METHODS
from test_reference import CASES, SCALE, SEEDS, births_of, compare, noise_of, streams_of
from tiny import LAYERS, Streams, prompts_of, run_core, stock, tiny

from kvexp.core import Budget, CacheConfig, Cadence, QueryCalibration, RoPE
from kvexp.core.attention import AttentionParams
from kvexp.core.backends import stackable_width
from kvexp.generate import divergence_from_full, generate, prefill, prefill_together
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import calibrate_queries
from kvexp.methods import H2O, TOVA, ExpectedAttention, Full, KeyDiff, StreamingLLM, Window
from kvexp.results.blocks import print_blocks
from kvexp.results.read import read_runs
from kvexp.results.views import main as results
from kvexp.results.views import shown
from kvexp.run.batches import evaluate_run
from kvexp.run.settings import Settings, settings_of
from kvexp.run.store import Run, run_hash
from kvexp.run.store import runs as runs_under
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import Console

PROMPT, NEW, CHUNKS = 23, 9, (5, 5, 5, 5, 3)
FOUR = GenerationParams(4, eos=None)
REFUSED = {name: case.unbounded for name, case in METHODS.items() if case.unbounded}
ALLOWED = sorted(set(METHODS) - set(REFUSED) - {"kvzap"})  # kvzap: a trained surrogate of a real model


def calibration() -> QueryCalibration:
    return calibrate_queries(tiny("llama"), prompts_of(11, (29, 31)))


def config_of(name: str, budget: Budget, **options: Any) -> CacheConfig:
    method = METHODS[name].method
    needed = calibration() if method.needs.calibration else None
    return CacheConfig(method, budget, calibration=needed, **options)


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [CHUNKS, (1,) * PROMPT, (22, 1)])
@pytest.mark.parametrize(
    "name",
    ["window", "streaming_llm", "h2o", "h2o_damping", "keyformer", "keyformer_gaussian", "a2sf_0.9", "a2sf_0",
     "tova_protected", "knorm", "random"],
)  # fmt: skip
def test_outputs_scores_and_kept_slots_are_the_slow_truths(name: str, widths: tuple[int, ...]) -> None:
    """The reference evicts after every forward of the prompt; decode steps follow."""
    method, rule = CASES[name]
    streams = streams_of(1).rows([0])
    steps = (*widths, *(1,) * NEW)
    config = CacheConfig(method, Budget(tokens=7), bounded_chunk=max(widths))
    seen = run_core(config, streams, steps, max_new_tokens=NEW, seeds=SEEDS[:1], prompt=PROMPT)
    world = World(scale=SCALE, budget=7, max_new_tokens=NEW, noise=noise_of(method, 1, 0, sum(steps)))
    q, k, v = (t[:, 0, :, : sum(steps)].double().tolist() for t in (streams.q, streams.k, streams.v))
    want = Reference(births_of(method, rule, 1, 0, sum(steps)), world, q, k, v, steps, prompt=PROMPT)
    compare(seen, 0, want.steps, out=1e-9, score=None if name == "knorm" else 1e-5)
    held = [len(head) for layers in seen.kept[: len(widths)] for head in layers[0][0]]
    assert max(held) == 6 and min(held) == min(6, widths[0])


def test_survivors_are_renumbered_within_the_prompt_too() -> None:
    """Queries and keys of a rotated model stand at their places among what is left, chunk after chunk."""
    dim = 8
    streams = Streams.random(43, PROMPT + NEW, batch=1, dim=dim)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    rope = RoPE(frequencies, interleaved=False)

    def rotate(vector: Any, angle: int) -> list[float]:
        x = torch.tensor([[list(vector)]], dtype=torch.float64)
        return list(rope.rotate_by(x, torch.tensor([[angle]]))[0, 0].tolist())

    steps, places = (*CHUNKS, *(1,) * NEW), torch.arange(PROMPT + NEW)[None]
    turned = Streams(
        torch.stack([rope.rotate_by(x, places[:, None]) for x in streams.q]),
        torch.stack([rope.rotate_by(x, places[:, None]) for x in streams.k]),
        streams.v,
    )
    config = CacheConfig(H2O(), Budget(tokens=7), positions="renumbered", bounded_chunk=5)
    params = AttentionParams(dim**-0.5, rope=rope)
    seen = run_core(config, turned, steps, params=params, max_new_tokens=NEW, prompt=PROMPT)
    world = World(scale=dim**-0.5, budget=7, max_new_tokens=NEW, renumbered=True, rotate=rotate)
    q, k, v = (t[:, 0].double().tolist() for t in (streams.q, streams.k, streams.v))
    compare(seen, 0, Reference(CASES["h2o"][1], world, q, k, v, steps, prompt=PROMPT).steps, out=1e-5, score=1e-4)


@pytest.mark.parametrize("name", ALLOWED)
def test_tokens_are_the_ordinary_runs_where_the_budget_is_never_exceeded(name: str) -> None:
    prompts, room = prompts_of(3, (41,)), Budget(tokens=41 + 9)
    made = [
        generate(tiny("llama"), prompts, config_of(name, room, bounded_chunk=chunk), decoding=FOUR, seeds=5)
        for chunk in (None, 8)
    ]
    assert made[0].tokens == made[1].tokens
    for layer in range(LAYERS):
        assert made[0].cache.kept_positions(layer) == made[1].cache.kept_positions(layer)


@pytest.mark.parametrize("name", ALLOWED)
def test_every_method_that_may_reads_a_prompt_it_cannot_hold(name: str) -> None:
    prompts = prompts_of(7, (67, 67))
    config = config_of(name, Budget(tokens=12), bounded_chunk=8)
    both = prefill(tiny("llama"), prompts, config, max_new_tokens=4, seeds=[5, 6])
    for layer in range(LAYERS):
        assert {len(head) for row in both.cache.kept_positions(layer) for head in row} == {11}
    alone = prefill(tiny("llama"), prompts[1:], config, max_new_tokens=4, seeds=[6])
    torch.testing.assert_close(both.logits[1:], alone.logits, rtol=1e-4, atol=1e-4)


def test_a_chunk_sees_what_the_chunks_before_it_have_left() -> None:
    """A window of the prompt's last tokens, read in two chunks: the second forward cannot see the first's beginning."""
    prompt, model = prompts_of(5, (24,)), tiny("llama")
    whole = prefill(model, prompt, Window(), Budget(tokens=5))
    halves = prefill(model, prompt, Window(), Budget(tokens=5), bounded_chunk=12)
    assert whole.cache.kept_positions(0) == halves.cache.kept_positions(0)
    assert not torch.allclose(whole.logits, halves.logits, atol=1e-2)
    with torch.inference_mode():
        ids = torch.tensor(prompt)
        hidden = torch.tril(torch.ones(24, 24, dtype=torch.bool))
        hidden[12:, :8] = False  # four are kept: the fifth slot is the next token's
        mask = torch.zeros(1, 1, 24, 24).masked_fill(~hidden, torch.finfo(torch.float32).min)
        want = stock("llama")(ids, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(halves.logits, want, rtol=1e-4, atol=1e-4)


# -- what is held ------------------------------------------------------------------------------------------------------


def peak_of(length: int, budget: int, chunk: int) -> int:
    """Keys and values of the layers together at the worst moment, buffer by buffer: each is copied while old ones last.

    A chunk comes behind what a layer holds (keys, then values, into larger buffers); then what survives is copied out,
    at the prompt's end into the buffers of the decode steps. The other layers hold what they have.
    """
    held, top = [0] * LAYERS, 0
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        last = start + count == length
        for layer in range(LAYERS):
            before, there = held[layer], held[layer] + count
            held[layer] = 0
            others, moments = 2 * sum(held), [2 * before + there, before + 2 * there, 2 * there]
            after = there
            if start + count > budget - 1:
                after = stackable_width(budget, torch.device("cpu")) if last else budget - 1
                moments += [2 * there + after, there + 2 * after]
            top = max(top, others + max(moments))
            held[layer] = after
    return top


@pytest.mark.parametrize("length", [60, 120, 180])
@pytest.mark.parametrize(("budget", "chunk"), [(16, 8), (16, 32), (30, 10)])
def test_the_peak_is_the_budget_and_a_chunk_however_long_the_prompt(length: int, budget: int, chunk: int) -> None:
    model = tiny("llama")
    context = prefill(model, prompts_of(1, (length,)), H2O(), Budget(tokens=budget), bounded_chunk=chunk)
    tracker = context.cache.memory_tracker
    half = 3 * 14 * 4  # bytes of a key, or of a value, of three heads
    assert tracker.peak_bytes == half * peak_of(length, budget, chunk)
    width = stackable_width(budget, torch.device("cpu"))
    assert tracker.peak_bytes <= half * (2 * LAYERS * width + 2 * chunk + width)
    whole = prefill(model, prompts_of(1, (length,)), H2O(), Budget(tokens=budget)).cache.memory_tracker
    assert tracker.peak_bytes < whole.peak_bytes


# -- what cannot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_that_need_the_whole_prompt_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        config_of(name, Budget(tokens=9), bounded_chunk=8)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (H2O(), {"mode": "mask"}, "drops nothing"),
        (H2O(), {"cadence": Cadence(at_prefill=False)}, "evict_at_prefill=true"),
        (H2O(), {"bounded_chunk": 0}, "bounded_chunk must be at least 1 or null, got 0"),
        (ExpectedAttention(), {"positions": "renumbered"}, "turns the prompt's queries back"),
    ],
)
def test_configurations_that_cannot_be_are_refused(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(method, Budget(tokens=9), **{"bounded_chunk": 8, **options})


def test_batches_that_padding_would_cut_are_refused() -> None:
    model, tight = tiny("llama"), Budget(tokens=9)
    with pytest.raises(ConfigError, match="prompts of 11 to 17 tokens"):
        generate(model, prompts_of(1, (17, 11)), TOVA(), tight, bounded_chunk=4, decoding=FOUR)
    with pytest.raises(ConfigError, match="num_beams=2"):
        generate(model, prompts_of(1, (17,)), TOVA(), tight, bounded_chunk=4, decoding=GenerationParams(4, num_beams=2))
    with pytest.raises(ConfigError, match="prefill_chunk=3 has no effect"):
        generate(model, prompts_of(1, (17,)), TOVA(), tight, bounded_chunk=4, decoding=replace(FOUR, prefill_chunk=3))
    streams, mask = Streams.random(1, 12, batch=2).padded([0, 3])
    with pytest.raises(CacheError, match="padding cannot be evicted between chunks"):
        run_core(CacheConfig(H2O(), tight, bounded_chunk=4), streams, (4, 4, 4), mask=mask, prompt=12)


# -- beside other runs -------------------------------------------------------------------------------------------------


def test_prefills_of_several_methods_and_their_divergence() -> None:
    """A bounded context among others is the one it is alone, and its first token is compared like any other."""
    model, prompts = tiny("llama"), prompts_of(9, (53, 53))
    tight = Budget(tokens=16)
    configs = [CacheConfig(Full()), CacheConfig(KeyDiff(), tight), CacheConfig(KeyDiff(), tight, bounded_chunk=8)]
    full, whole, bounded = prefill_together(model, prompts, configs, max_new_tokens=4)
    alone = prefill(model, prompts, configs[2], max_new_tokens=4)
    assert torch.equal(bounded.logits, alone.logits) and torch.equal(full.logits, whole.logits)
    assert bounded.cache.kept_positions(1) == alone.cache.kept_positions(1)
    of_whole, of_bounded = divergence_from_full(model, full, [whole, bounded], max_new_tokens=4)
    assert of_whole[0].kl[0] < 1e-6 < of_bounded[0].kl[0]


MORE: tuple[tuple[str, ...], ...] = (
    (),
    ("prefill=bounded", "prefill.chunk=32"),
    ("prefill=bounded", "prefill.chunk=64"),
)
TESTBED = ("model=testbed_rope", "task=testbed_summary", "limit=3", "task.max_new_tokens=8", "batch_size=1")


def settings(outputs: Any, *words: str) -> Settings:
    taken = {word.partition("=")[0] for word in words}
    overrides = [word for word in TESTBED if word.partition("=")[0] not in taken]
    overrides += [f"outputs_dir={outputs}", *words]
    config, choices = composed(*overrides)
    return settings_of(config, choices, overrides)


def test_a_run_its_identity_and_the_table_of_chunks(tmp_path: Any) -> None:
    import kvexp.run.batches as groups
    from kvexp.run.session import Session

    words = ("method=h2o", "kv_ratio=0.3")
    plain = settings(tmp_path / "alone", *words)
    asked = [settings(tmp_path / "alone", *words, "prefill=bounded", f"prefill.chunk={n}") for n in (32, 64)]
    assert "prefill" not in plain.identity and asked[0].identity["prefill"] == {"bounded_chunk": 32}
    assert run_hash(settings(tmp_path, *words, "prefill=whole").identity) == run_hash(plain.identity)
    assert asked[0].baseline().identity == plain.baseline().identity
    assert "prefill" not in asked[0].baseline().labels["setting"]
    alone = [evaluate_run(one) for one in (plain, *asked)]
    assert len({run.hash for run in alone}) == 3 and len({run.baseline for run in alone}) == 1

    shared = [settings(tmp_path / "shared", *words, *more, "divergence=true") for more in MORE]
    (group,) = groups.prefill_groups(shared)
    groups.run_group(group, Session())
    there = {run.hash: run for run in runs_under(tmp_path / "shared")}
    for run in alone:
        for one, other in zip(run.rows(), there[run.hash].rows(), strict=True):
            assert {**one, "seconds": None} == {**other, "seconds": None}
            assert one["receipt"]["first_eviction_step"] == 0
            assert (one["receipt"]["attention_kept"] is None) == (run is not alone[0])
    frame, blocks, below = shown(read_runs(tmp_path / "shared"), "chunks")
    assert list(frame["chunk"].fillna(0)) == [0, 32, 64]
    peaks = list(frame["peak_kv_bytes"])
    assert peaks[1] < peaks[2] < peaks[0]
    tokens = list(frame["kl_tokens"])  # the first of each text is by the whole prefill, before anything was evicted
    assert (frame["kl"] > 0).all() and tokens == [tokens[0], tokens[0] + 3, tokens[0] + 3]
    console = Console(markup=False, width=200, record=True)
    print_blocks(blocks, below, console)
    text = console.export_text()
    assert "by tokens per chunk" in text and "whole" in text


def test_the_table_says_where_nothing_was_read_in_chunks(tmp_path: Any, capsys: Any) -> None:
    Run.open(tmp_path, {"a": 1}, {"method": "h2o"}, {})
    assert results([str(tmp_path), "--view", "chunks"]) == 1
    assert "kvexp run -m prefill=bounded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("method=snapkv",), "last 32 queries, which have not come when a chunk is evicted: leave prefill=whole"),
        (("method=lagkv",), "leave prefill=whole"),
        (("method=pqcache",), "evicts nothing, so that its prompts have to fit: leave prefill=whole"),
        (("prefill.chunk=0",), "prefill.chunk must be at least 1 or null, got 0"),
        (("prefill.chunk=many",), "prefill.chunk must be a whole number or null, got 'many'"),
        (("batch_size=2",), "batch_size must be 1 with prefill=bounded, got 2"),
        (("generation.prefill_chunk=8",), "set generation.prefill_chunk=null"),
        (("generation=beam4",), "generation.num_beams=4"),
        (("cache.mode=mask",), "cache.mode=mask drops nothing"),
        (("cache.evict_at_prefill=false",), "set cache.evict_at_prefill=true"),
        (("model=tiny", "task=lm_eval", "task.tasks=[copa]"), "does not reach lm-eval's tasks"),
    ],
)
def test_settings_that_exclude_it_are_refused_before_a_model_loads(tmp_path: Any, words: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, "prefill=bounded", *words)
    assert message in str(error.value)


def test_the_full_cache_beside_bounded_runs_is_the_ordinary_one(tmp_path: Any) -> None:
    full = settings(tmp_path, "method=full", "prefill=bounded")
    assert full.identity == settings(tmp_path, "method=full").identity


def test_sinks_and_recent_tokens_survive_every_chunk() -> None:
    prompt = prompts_of(2, (90,))
    made = prefill(tiny("llama"), prompt, StreamingLLM(n_sinks=3), Budget(tokens=10), bounded_chunk=7)
    assert made.cache.kept_positions(0)[0] == [[0, 1, 2, *range(84, 90)]] * 3
