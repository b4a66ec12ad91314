"""The short decode step against the general path and the slower modes: same tokens, kept sets, scores and logits."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import composed
from test_runner import settings
from tiny import CONFIGS, VOCAB, prompts_of, tiny
from turns import in_turn

import kvexp.core.decode_stack as cross_layer
import kvexp.core.noise as noise
import kvexp.core.slots
import kvexp.generate
from kvexp.core import Budget, Cadence, Slots
from kvexp.core.eviction import EvictionLayer
from kvexp.core.selection import SlotSelection
from kvexp.generate import (
    CacheConfig,
    GenerationParams,
    generate,
    generate_from_context,
    prefill,
    prefill_together,
    receipts,
)
from kvexp.generate.loop import batched_cache
from kvexp.generate.prefill import decode_step
from kvexp.hf import EvictionCache
from kvexp.methods import (
    A2SF,
    CAOTE,
    GKV,
    H2O,
    RKV,
    TOVA,
    VATP,
    DilatedWindow,
    ExpectedAttention,
    Full,
    H2ODamping,
    KeyAttention,
    KeyDiff,
    Keyformer,
    KeyformerA2SF,
    KNorm,
    LagKV,
    Random,
    SnapKV,
    StreamingLLM,
    VaSE,
    Window,
)
from kvexp.run.batches import NEW, PROMPT, evaluate_run
from kvexp.run.settings import settings_of
from kvexp.util import machine as free_memory
from kvexp.util.machine import UNKNOWN, available

HALF = Budget(kv_ratio=0.5)
METHODS = [
    H2O(),
    KeyAttention(),
    Keyformer(),
    Keyformer(noise="none", tau_end=3.0),
    Keyformer(noise="gaussian", fresh=False),
    Keyformer(key_window="release_frozen"),
    A2SF(alpha=0.3),
    A2SF(alpha=0.0, protect_recent=3),
    KeyformerA2SF(),
    TOVA(),
    Window(),
    DilatedWindow(),
    StreamingLLM(),
    StreamingLLM(n_sinks=0),
]
LOOKING = [  # at keys, values, newest queries or their attention; with scores from the start, or changed by evictions
    KNorm(),
    KeyDiff(),
    Random(),
    CAOTE(),
    CAOTE(alpha="window", window=4),
    CAOTE(alpha="accumulated", recent_ratio=0.5),
    VATP(n_sinks=2),
    RKV(window=4),
    GKV(window=4),
    LagKV(against="previous", n_sinks=2, lag=8),
    VaSE(window=4, n_sinks=2),
    H2ODamping(),
]
GROWING = [Full(), SnapKV(window=6), LagKV(n_sinks=2, lag=8), ExpectedAttention(n_sinks=2)]
ROWS = {"padded": (40, 33, 40), "equal": (36, 36)}


def both(family, method, budget, lengths, monkeypatch, plan=None, **changes):
    """(short, general, how often the short step was taken)."""
    model, rows = tiny(family, **changes), prompts_of(3, lengths)
    options = {"decoding": GenerationParams(14, eos=None), "seeds": list(range(len(lengths))), "keep_logits": True}
    taken, can_step = [], EvictionLayer.can_step

    def counted(*arguments):
        taken.append(can_step(*arguments))
        return taken[-1]

    made = []
    for which in (counted, lambda *_: False):
        monkeypatch.setattr(EvictionLayer, "can_step", which)
        made.append(generate(model, rows, method, budget, **options, **(plan or {})))
    return *made, sum(taken)


def scores(cache: EvictionCache):
    """Score by layer, row, head and position."""
    found = {}
    for number, state in enumerate(cache.layer_states):
        places, values = state.slots.positions.tolist(), state.slots.score.tolist()
        for b, heads in enumerate(places):
            for h, slots in enumerate(heads):
                found |= {(number, b, h, p): values[b][h][s] for s, p in enumerate(slots) if p >= 0}
    return found


def alike(short, general, *, peak=True):
    """peak: whether both have held as many bytes at most; heads of different width are copied by the general path."""
    assert torch.equal(short.sequences, general.sequences)
    torch.testing.assert_close(torch.stack(short.logits), torch.stack(general.logits), atol=1e-4, rtol=0)
    one, other = scores(short.cache), scores(general.cache)
    assert one.keys() == other.keys()
    for place, value in one.items():
        assert value == pytest.approx(other[place], abs=1e-4), place
    for a, b in zip(receipts(short.cache), receipts(general.cache), strict=True):
        assert a == b or (not peak and a == replace(b, peak_kv_bytes=a.peak_kv_bytes))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("method", [*METHODS, *LOOKING, *GROWING], ids=repr)
def test_short_step_is_the_general_one(method, rows, monkeypatch):
    short, general, taken = both("llama", method, HALF, ROWS[rows], monkeypatch)
    assert taken == 13 * 2, "every decode step of both layers goes the short way, or nothing is tested"
    alike(short, general)


# RoPE in halves, interleaved and partial, ALiBi; learned positions cannot move and stay original.
POSITIONS = {family: "original" if family in ("gpt2", "opt") else "renumbered" for family in CONFIGS}
# Budget 20 is more than the 11 places that a query sees: a sink is hidden once its place is too far.
WINDOW = {"family": "mistral", "sliding_window": 11}
VARIANTS = {
    **{f"{name}, h2o": (H2O(), {"family": name}) for name in CONFIGS},
    **{f"{name}, keyformer": (Keyformer(), {"family": name}) for name in CONFIGS},
    **{f"{name}, full": (Full(), {"family": name}) for name in CONFIGS},
    **{
        f"{name}, sinks, {rows}": (
            StreamingLLM(n_sinks=3),
            {"family": name, "lengths": ROWS[rows], "plan": {"positions": POSITIONS[name]}},
        )
        for name in CONFIGS
        for rows in ROWS
    },
    "sliding window": (A2SF(alpha=0.5), WINDOW),
    "sinks within a sliding window": (StreamingLLM(), WINDOW),
    "full within a sliding window": (Full(), WINDOW),
    "no eviction while decoding": (H2O(), {"plan": {"cadence": Cadence(every=None)}}),
    **{
        f"every {n} steps, {method.name}": (method, {"plan": {"cadence": Cadence(every=n)}})
        for method, n in [(H2O(), 3), (Keyformer(), 4), (KeyDiff(), 4), (TOVA(), 5), (StreamingLLM(n_sinks=2), 3)]
    },
    "every 4 steps, before rows are full": (
        H2O(),
        {"budget": Budget(tokens=30), "lengths": (40, 22, 18), "plan": {"cadence": Cadence(every=4)}},
    ),
    "every 4 steps, heads of different width": (
        H2O(),
        {"budget": Budget(kv_ratio=0.5, heads="adaptive"), "plan": {"cadence": Cadence(every=4)}},
    ),
    "chunks": (H2O(), {"plan": {"select": SlotSelection(by="chunk", chunk=4)}}),
    "values": (H2O(), {"plan": {"select": SlotSelection(values="critical")}}),
    "the prompt stays": (VaSE(window=4), {"budget": Budget(tokens=6, of="generated"), "plan": {"keep": "prompt"}}),
    "chunks within a sliding window": (A2SF(alpha=0.5), {**WINDOW, "plan": {"select": SlotSelection(by="chunk")}}),
    "short rows still grow while the long one overwrites": (
        H2O(),
        {"budget": Budget(tokens=30), "lengths": (40, 22, 18)},
    ),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_short_step_on_every_family(case, monkeypatch):
    method, given = VARIANTS[case]
    given = {"family": "llama", "budget": HALF, "lengths": ROWS["padded"]} | given
    short, general, taken = both(method=method, monkeypatch=monkeypatch, **given)
    assert taken == 13 * 2 or (given["budget"] != HALF and taken > 0)
    alike(short, general, peak=not given["budget"].ragged)


@pytest.mark.parametrize("method", METHODS[:9], ids=repr)
def test_gathering_and_hiding_agree_with_it(method):
    model, rows, decoding = tiny("llama"), prompts_of(3, (40, 33, 40)), GenerationParams(14, eos=None)
    each = [generate(model, rows, method, HALF, decoding=decoding, mode=m) for m in ("overwrite", "compact", "mask")]
    kept = [[generation.cache.kept_positions(number) for number in range(2)] for generation in each]
    assert kept[0] == kept[1] == kept[2]
    assert each[0].tokens == each[1].tokens == each[2].tokens


def test_noise_is_hashed_anew_when_the_steps_ahead_are_used_up(monkeypatch):
    """Four at a time, so that thirteen steps need it three times; rows of several lengths."""
    monkeypatch.setattr(noise, "STEPS_AHEAD", 4)
    short, general, taken = both("llama", Keyformer(), HALF, ROWS["padded"], monkeypatch)
    assert taken == 13 * 2
    alike(short, general)


@torch.no_grad()
def test_all_layers_keep_their_books_together_once_each_has_taken_a_step():
    """From the third step on, and no longer once rows have been selected; a copy of the cache begins anew."""
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    context = prefill(model, rows, Keyformer(), HALF, max_new_tokens=14, seeds=[1, 2])
    cache, token = context.cache, torch.tensor([[5], [6]])
    joint = []
    for step in range(5):
        decode_step(model, token, torch.tensor([[40], [33]]) + step, cache)
        joint.append(cache.layer_states[0].cross_layer_buffers.merged)
    assert joint == [False, True, True, True, True]
    first, second = (state.require_slots().positions for state in cache.layer_states)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    copied = cache.fork([1, 0])
    assert (
        not copied.layer_states[0].cross_layer_buffers.merged
        and copied.layer_states[0].cross_layer_buffers is copied.layer_states[1].cross_layer_buffers
    )
    assert (
        copied.layer_states[0].cross_layer_buffers is not cache.layer_states[0].cross_layer_buffers
        and cache.layer_states[0].cross_layer_buffers.merged
    )
    cache.batch_select_indices(torch.tensor([1]))
    assert not cache.layer_states[0].cross_layer_buffers.merged


@torch.no_grad()
@pytest.mark.parametrize("method", [*METHODS, *GROWING], ids=repr)
def test_rows_selected_between_steps(method, monkeypatch):
    """Rows are exchanged, repeated and dropped while all layers' books lie together; against the general path."""
    model, rows = tiny("llama"), prompts_of(3, (40, 33, 40))
    made = []
    for general in (False, True):
        if general:
            monkeypatch.setattr(EvictionLayer, "can_step", lambda *_: False)
        cache = prefill(model, rows, method, HALF, max_new_tokens=30, seeds=[1, 2, 3]).cache
        places, logits = torch.tensor([[40], [33], [40]]), []
        for picked in ([0, 1, 2], [2, 1, 0], [1, 0], [1, 1, 0]):
            for step in range(4):
                token = (places * 7 + step) % 50 + 1
                logits.append(decode_step(model, token, places, cache))
                places = places + 1
            cache.batch_select_indices(torch.tensor(picked))
            places = places[picked]
        made.append((logits, [cache.kept_positions(number) for number in range(2)]))
    for one, other in zip(made[0][0], made[1][0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    assert made[0][1] == made[1][1]


def test_layers_that_hold_too_much_to_lie_together(monkeypatch):
    """Each layer keeps its own books: the numbers are the same to the bit."""
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    decoding, each = GenerationParams(14, eos=None), []
    for most in (cross_layer.MAX_MERGED_SLOTS, 0):
        monkeypatch.setattr(cross_layer, "MAX_MERGED_SLOTS", most)
        each.append(generate(model, rows, Keyformer(), HALF, decoding=decoding, seeds=[1, 2], keep_logits=True))
    together, apart = each
    assert [one.cache.layer_states[0].cross_layer_buffers.merged for one in each] == [True, False]
    assert torch.equal(torch.stack(together.logits), torch.stack(apart.logits))
    assert scores(together.cache) == scores(apart.cache)


@pytest.mark.parametrize("method", [H2O(), Keyformer(), StreamingLLM()], ids=repr)
def test_layers_with_budgets_of_their_own_keep_books_of_their_own(method, monkeypatch):
    """The first layer holds more than the second."""
    short, general, taken = both("llama", method, Budget(kv_ratio=0.5, layers="pyramid"), ROWS["padded"], monkeypatch)
    assert taken > 13 and not short.cache.layer_states[0].cross_layer_buffers.merged
    alike(short, general)


@torch.no_grad()
def test_caches_that_decode_together_keep_one_set_of_books():
    """Two sizes of each method share their buffers; a window's renumbered sinks are a stack apart."""
    methods = (H2O(), Keyformer(), A2SF(alpha=0.5), Window(), StreamingLLM(), StreamingLLM(n_sinks=2))
    variants = [CacheConfig(method, Budget(kv_ratio=share)) for method in methods for share in (0.3, 0.6)]
    model, rows = tiny("llama"), prompts_of(3, (40, 33))
    contexts = prefill_together(model, rows, variants, max_new_tokens=14, seeds=[4, 5])
    cache = batched_cache(contexts)
    places = torch.tensor([[40], [33]] * len(variants))
    for step in range(4):
        decode_step(model, places % 50 + 1, places + step, cache)
    each = [[stack.buffers for _, stack in layer.state._stacks] for layer in cache.layers]
    assert each[0] == each[1] and len(each[0]) == 2 and all(cross_layer.merged for cross_layer in each[0])


@torch.no_grad()
def test_a_cache_that_grows_is_the_same_to_the_bit_in_any_company(monkeypatch):
    """Beside copies of itself and beside caches that evict or grow by other lengths; buffers grow in the middle."""
    monkeypatch.setattr(kvexp.core.slots, "GROWTH", 5)
    half, most = Budget(kv_ratio=0.5), Budget(kv_ratio=0.8)
    grows = [CacheConfig(Full()), CacheConfig(SnapKV(window=6), half), CacheConfig(LagKV(n_sinks=2, lag=8), most)]
    evicts = [CacheConfig(method, share) for method in (H2O(), Keyformer()) for share in (half, most)]
    model, rows = tiny("llama"), prompts_of(3, (41, 41))

    def stepped(variants):
        contexts = prefill_together(model, rows, variants, max_new_tokens=30, seeds=[4, 5])
        cache, places = batched_cache(contexts), torch.tensor([[41]] * 2 * len(variants))
        logits = [decode_step(model, (places + step) * 7 % 50 + 1, places + step, cache) for step in range(14)]
        peaks = [context.cache.memory_tracker.peak_bytes for context in contexts]
        kept = [[context.cache.kept_positions(number) for number in range(2)] for context in contexts]
        return torch.stack(logits).unflatten(1, (len(variants), 2)).unbind(1), peaks, kept

    together = stepped([*evicts, *grows])
    # Linear layers of a model that is not packed depend on the number of rows and the place among them.
    for place, variant in enumerate(grows, len(evicts)):
        beside_copies = stepped([variant] * (len(evicts) + len(grows)))
        assert torch.equal(together[0][place], beside_copies[0][place])
        assert [x[place] for x in together[1:]] == [x[place] for x in beside_copies[1:]]


# Copies of a prefilled context share keys and values with it until one of them overwrites a slot.


PROMPTS = [[(7 * i + 3 * j) % VOCAB for i in range(40)] for j in range(3)]
QUESTIONS = [[5, 6, 7], [9, 2, 4], [1, 1, 8]]
CASES = [
    pytest.param(H2O(), {}, id="h2o"),
    pytest.param(H2O(), {"mode": "compact"}, id="compact"),
    pytest.param(H2O(), {"mode": "mask"}, id="mask"),
    pytest.param(Window(), {"cadence": Cadence(every=3)}, id="every third step"),
    pytest.param(Window(), {"cadence": Cadence(every=None)}, id="no eviction while decoding"),
    pytest.param(Full(), {}, id="full"),
]


def context_of(method, options):
    budget = Budget(kv_ratio=0.4) if method.evicts else None
    return prefill(tiny("llama"), PROMPTS, method, budget, max_new_tokens=9, **options)


def held(context):
    """Copies of all that the layers hold, to compare with later."""
    return [
        {name: tensor[:, :, : state.slots.length].clone() for name, tensor in state.slots.tensors.items()}
        for state in context.cache.layer_states
    ]


def same(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def pointers(context):
    return [(state.slots.keys.data_ptr(), state.slots.values.data_ptr()) for state in context.cache.layer_states]


def answered(context, questions):
    decoding = GenerationParams(6, eos=None)
    return generate_from_context(tiny("llama"), context, questions, decoding=decoding).tokens


@pytest.mark.parametrize(("method", "options"), CASES)
def test_a_copy_reads_the_same_memory_until_it_writes(method, options) -> None:
    context = context_of(method, options)
    before, copy = held(context), context.fork([0, 1, 2])
    assert pointers(copy) == pointers(context)
    assert same(held(copy), before)
    answered(copy, QUESTIONS)
    assert all(a != b for a, b in zip(pointers(copy), pointers(context), strict=True))
    assert same(held(context), before)  # nobody wrote into it


@pytest.mark.parametrize(("method", "options"), CASES)
def test_a_copy_stays_when_its_original_goes_on(method, options) -> None:
    context = context_of(method, options)
    copy = context.fork([0, 1, 2])
    before = held(copy)
    first = answered(context, QUESTIONS)
    assert same(held(copy), before)
    assert answered(copy, QUESTIONS) == first


@pytest.mark.parametrize(
    ("case", "rows"), in_turn([each.values for each in CASES], [[1], [1, 2], [2, 2, 2], [2, 0, 0]], of=2), ids=str
)
def test_copies_of_copies_answer_as_the_context_does(case, rows: list[int]) -> None:
    method, options = case
    whole = answered(context_of(method, options), QUESTIONS)
    context = context_of(method, options)
    for _ in range(2):
        copy = context.fork(rows)
        again = copy.fork(list(range(len(rows))))
        expected = [whole[row] for row in rows]
        assert answered(copy, [QUESTIONS[row] for row in rows]) == expected
        assert answered(again, [QUESTIONS[row] for row in rows]) == expected
    assert answered(context, QUESTIONS) == whole


def test_bytes_are_counted_as_if_nothing_were_shared() -> None:
    context = context_of(H2O(), {})
    own, copy = context_of(H2O(), {}), context.fork([0, 1, 2])
    trackers = [each.cache.memory_tracker for each in (own, copy)]
    assert trackers[0].bytes == trackers[1].bytes
    for each in (own, copy):
        answered(each, QUESTIONS)
    assert trackers[0].bytes == trackers[1].bytes and trackers[0].peak_bytes == trackers[1].peak_bytes


def test_rows_of_a_shared_copy_can_be_chosen_in_any_order() -> None:
    whole = answered(context_of(H2O(), {}), QUESTIONS)
    context = context_of(H2O(), {})
    before, copy = held(context), context.fork([0, 1, 2])
    turned = copy.fork([0, 1, 2])
    turned.cache.batch_select_indices(torch.tensor([2, 0, 1]))
    assert same(held(copy), before)
    assert [slots["keys"][0].tolist() for slots in held(turned)] == [slots["keys"][2].tolist() for slots in before]
    assert answered(copy, QUESTIONS) == whole


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_shared_prompt_shares_no_position_ids(kv_heads: int) -> None:
    """The sequence's ids, which all layers read, stay when one layer's slots change; with one kv head, too."""
    keys, positions = torch.randn(2, kv_heads, 5, 4), torch.arange(5).repeat(2, 1)
    slots = Slots.empty_like(keys, keys, masked=False)
    slots.alias(keys, keys, positions, torch.zeros(2, kv_heads, 5))
    slots.invalidate(torch.ones(2, kv_heads, 1, dtype=torch.int64))
    assert (slots.positions[..., 1] == -1).all()
    assert torch.equal(positions, torch.arange(5).repeat(2, 1))


# Before the first example that is timed, something like it is generated that no row tells of.


@pytest.fixture
def calls(monkeypatch):
    """(prompt lengths, method, max_new_tokens) of every generation."""
    made, generate = [], kvexp.generate.generate

    def watched(model, prompts, cache, *, decoding, **rest):
        made.append(([len(ids) for ids in prompts], cache.method.name, decoding.max_new_tokens))
        return generate(model, prompts, cache, decoding=decoding, **rest)

    monkeypatch.setattr(kvexp.generate, "generate", watched)
    return made


def test_each_run_warms_up_once_under_its_own_method(tmp_path, calls):
    record = evaluate_run(settings(tmp_path, "limit=3", "batch_size=2", "kv_ratio=0.3", "generation=beam4"))
    assert [(method, new) for _, method, new in calls] == [
        *(("full", NEW), ("full", 4), ("full", 4)),
        *(("h2o", NEW), ("h2o", 4), ("h2o", 4)),
    ]
    assert calls[0][0] == [PROMPT, PROMPT] and min(calls[1][0]) > PROMPT
    rows = record.rows()
    assert [row["example"] for row in rows] == ["sample-0", "sample-1", "sample-2"]
    assert all(row["seconds"]["ttft"] > 0 for row in rows)
    calls.clear()
    evaluate_run(settings(tmp_path, "limit=3", "batch_size=2", "kv_ratio=0.3", "generation=beam4"))
    assert calls == [], "a run with all rows"


def test_rows_are_the_same_without(tmp_path, monkeypatch):
    words = ("limit=2", "kv_ratio=0.3", "generation=sampling", "method=keyformer")

    def rows(name):
        return [
            {k: v for k, v in row.items() if k != "seconds"}
            for row in evaluate_run(settings(tmp_path / name, *words)).rows()
        ]

    with_it = rows("with")
    monkeypatch.setattr("kvexp.run.batches.warm_up", lambda *_: None)
    assert rows("without") == with_it


def test_a_budget_that_so_few_tokens_cannot_hold(tmp_path, calls):
    """0.03 of 128 tokens are three slots, fewer than the sinks; of the whole prompt they are enough."""
    record = evaluate_run(settings(tmp_path, "limit=1", "method=streaming_llm", "kv_ratio=0.03"))
    assert [method for _, method, _ in calls] == ["full", "full", "streaming_llm", "full", "streaming_llm"]
    assert record.rows()[0]["receipt"]["first_eviction_step"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("something else")])
def test_what_goes_wrong_is_left_to_the_run(tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr("kvexp.run.batches._generate_few", fails)
    assert evaluate_run(settings(tmp_path, "limit=1")).finished


def test_choices_hold_no_times_and_need_none(tmp_path, calls):
    words = composed("model=testbed_rope", "task=testbed_choice", "limit=1", f"outputs_dir={tmp_path}")
    assert evaluate_run(settings_of(*words)).finished
    assert calls == []


# Free memory is the least of what the computer, the process's limit and the control groups around it leave.


GIB = 1 << 30
V1, V2 = "1:name=systemd:/\n4:cpu,memory:/jobs/mine\n", "0::/jobs/mine\n"


MINE = "/jobs/mine"
MEMORY = {  # name -> groups of the process, (version, path, limit, used, cached files) of groups, what is available
    "the computer alone": (None, [], 64 * GIB),
    "a container that sees the path of its host": ("0::/../kubepods/pod7\n", [(2, "", 2 * GIB, GIB, 0)], GIB),
    "a limit of another controller": (f"3:pids:{MINE}\n", [(1, MINE, GIB, 0, 0)], 64 * GIB),
}
for version, said, none in ((1, V1, 9223372036854771712), (2, V2, "max")):
    mine, outer = (version, MINE, 8 * GIB, 5 * GIB, GIB), (version, "/jobs", 10 * GIB, 9 * GIB, 0)
    MEMORY |= {
        f"v{version}": (said, [(version, MINE, 8 * GIB, 5 * GIB, 0)], 3 * GIB),
        f"v{version}, pages of files go first": (said, [mine], 4 * GIB),
        f"v{version}, the group around it is fuller": (said, [mine, outer], GIB),
        f"v{version}, more is used than allowed": (said, [mine, outer, (version, "", 10 * GIB, 11 * GIB, 0)], 0),
        f"v{version}, without a limit": (said, [(version, MINE, none, 5 * GIB, 0)], 64 * GIB),
    }


@pytest.mark.parametrize("case", MEMORY)
def test_available_memory(case, tmp_path, monkeypatch):
    """Under a /proc and a /sys/fs/cgroup of our own; the computer has 64 GiB left."""
    groups, written, expected = MEMORY[case]
    files = {"proc/meminfo": f"MemTotal: {99 << 20} kB\nMemAvailable: {64 << 20} kB\n"}
    if groups is not None:
        files["proc/self/cgroup"] = groups
    for version, path, limit, used, cached in written:
        names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
        root = "cgroup" + ("/memory" if version == 1 else "") + path
        files |= {f"{root}/{name}": f"{number}\n" for name, number in zip(names, (limit, used), strict=True)}
        files[f"{root}/memory.stat"] = f"anon 5\n{'total_' * (version == 1)}inactive_file {cached}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path / "cgroup")
    assert available() == expected


def test_a_system_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "none")
    assert available() == UNKNOWN


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_limit_of_the_process():
    """In a process of its own, with room for 300 MiB of addresses more than it has."""
    code = (
        "import resource, runpy\n"
        f"available = runpy.run_path({free_memory.__file__!r})['available']\n"  # without all that the package imports
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))\n"
        "print(available() >> 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 200 < int(done.stdout) <= 300


@pytest.mark.skipif("glibc" not in platform.libc_ver()[0], reason="other allocators have their own way")
def test_what_nothing_holds_goes_back_to_the_system(stage, tmp_path):
    """In a process of its own: 400 MiB in pieces, each below a small one that stays."""
    code = (
        "import sys, torch\n"
        "from kvexp.run.rows import free_memory\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4 >> 10\n"
        "pieces = [(torch.ones(25_600), torch.ones(64)) for _ in range(4096)]\n"
        "kept = [small for _, small in pieces]\n"
        "del pieces\n"
        "before = resident()\n"
        "free_memory()\n"
        "print(before - resident(), flush=True)\n"
        "sys.exit(0)"
    )
    done, said = stage.run([], tmp_path / "log", code)
    assert done == 0 and int(said) > 300, said
