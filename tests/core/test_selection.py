"""Wrappers around priorities: chunks and values, by hand, around methods of every kind, and what is refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES
from commands import composed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layer_budgets import LENGTHS, PROMPTS, kept
from test_method_scores import context
from tiny import CONFIGS, LETTERS, feed, stock, tiny
from torch import Tensor

from kvexp.core import Budget, CacheConfig, EvictionContext, Method, SlotSelection
from kvexp.core.selection import attention_shares, by_chunk, by_values, projected_sizes
from kvexp.core.slot_order import kept_mask, select_keep
from kvexp.generate import generate, pad_left
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache
from kvexp.hf.patch import output_blocks
from kvexp.methods import (
    CAOTE,
    H2O,
    TOVA,
    ExpectedAttention,
    Full,
    Ideal,
    KeyDiff,
    KNorm,
    KVzip,
    Random,
    SnapKV,
    Window,
)
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError

# Wrappers around priorities: chunks and values, by hand, around methods of every kind, and what is refused.


CHUNKS, CRITICAL = SlotSelection(by="chunk", chunk=7), SlotSelection(values="critical")


# -- by hand -----------------------------------------------------------------------------------------------------------


def two_heads(score: list[list[float]]) -> EvictionContext:
    h, s = len(score), len(score[0])
    return context(torch.ones(h, s, 2), torch.ones(h, s, 2), torch.tensor(score))


def test_a_chunk_has_the_mean_of_its_tokens_in_all_heads() -> None:
    """Chunks of 2 over 5 tokens; slot 0 is protected and has no part; the last chunk has one token."""
    ctx = two_heads([[9, 1, 2, 4, 1], [9, 3, 0, 2, 6]])
    protected = torch.zeros(1, 2, 5, dtype=torch.bool)
    protected[..., 0] = True
    made = by_chunk(2, H2O(), ctx, ctx.score, protected, 5)
    assert made.tolist() == [[[9, 2, 2, 2, 3.5], [9, 2, 2, 2, 3.5]]]


def test_a_chunk_knows_neither_evicted_nor_free_slots_nor_their_order() -> None:
    """Slots in another order, one evicted by mask mode (score -inf) and one dead: the same means."""
    ctx = two_heads([[1, 2, 4, 8, -torch.inf, 5]])
    ctx.slots.positions[...] = torch.tensor([3, 2, 1, 0, 4, -1])
    made = by_chunk(2, H2O(), ctx, ctx.score, torch.zeros(1, 1, 6, dtype=torch.bool), 5)
    assert made[0, 0, :4].tolist() == [1.5, 1.5, 6.0, 6.0] and made[0, 0, 4] == -torch.inf


def test_logarithms_are_averaged_as_what_they_are_the_logarithms_of() -> None:
    """Shares .5, .1 | .3, .2 times 1e-200: the first chunk's mean is larger, the mean of its logarithms is not."""
    shares = torch.tensor([[[0.5, 0.1, 0.3, 0.2]]]).double()
    ctx, none = two_heads([[0.0] * 4]), torch.zeros(1, 1, 4, dtype=torch.bool)
    made = by_chunk(2, ExpectedAttention(), ctx, (shares.log() - 460).float(), none, 4)
    assert made[0, 0, 0] > made[0, 0, 2]
    assert shares.log()[0, 0, :2].mean() < shares.log()[0, 0, 2:].mean()


def four_kept() -> Any:
    """What `by_values` reads of a layer's slots, for one row that keeps four."""
    return SimpleNamespace(kept=[4], kept_t=torch.tensor([4]))


def test_critical_takes_half_by_attention_and_half_by_attention_times_value() -> None:
    """Four slots of six: two by attention (.4, .3), two by (a + 1e-4) |W v|, where the last one's value is large."""
    ctx = two_heads([[4, 3, 1.5, 1.0, 0.4, 0.1]])
    ctx.slots.values[..., 4:, :] = 9.0
    projection = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.5, 0.0]])[None, None]  # of a 2-wide head in a width of 3
    made = by_values(H2O(), ctx, ctx.score, torch.zeros(1, 1, 6, dtype=torch.bool), four_kept(), projection)
    assert made[0, 0, :2].tolist() == [torch.inf] * 2
    assert made[0, 0, 2:].tolist() == pytest.approx(
        [(a + 1e-4) * s for a, s in ((0.15, 2.5), (0.1, 2.5), (0.04, 22.5), (0.01, 22.5))]
    )


def test_what_is_protected_fills_the_first_half_first() -> None:
    ctx = two_heads([[4.0, 3.0, 1.0, 1.0, 1.0, 0.0]])
    protected = torch.tensor([[[False] * 4 + [True] * 2]])
    made = by_values(H2O(), ctx, ctx.score, protected, four_kept(), torch.ones(1, 1, 3, 2))
    assert made[0, 0].isinf().tolist() == [False] * 4 + [True] * 2


def test_projected_sizes_are_those_of_the_models_own_projection() -> None:
    """Through the module itself, one query head at a time, the others' outputs 0; also where blocks are small."""
    model, heads = tiny("llama"), CONFIGS["llama"]["num_attention_heads"]
    values = torch.randn(2, 3, 11, 14, generator=torch.Generator().manual_seed(3))
    attention = stock("llama").model.layers[1].self_attn
    want = torch.zeros(2, 3, 11)
    for head in range(heads):
        each = torch.zeros(2, 11, heads, 14)
        each[:, :, head] = values[:, head // 5]
        with torch.inference_mode():
            want[:, head // 5] += attention.o_proj(each.flatten(2)).abs().sum(-1) / 5
    made = projected_sizes(values, output_blocks(model)[1])
    torch.testing.assert_close(made.float(), want, rtol=1e-4, atol=1e-5)


def test_shares_of_attention_are_those_of_what_queries_had_to_give() -> None:
    ctx = two_heads([[6, 3, -torch.inf, 1]])
    assert attention_shares(H2O(), ctx, ctx.score)[0, 0].tolist() == pytest.approx([0.6, 0.3, 0.0, 0.1])
    logs = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]]).log()
    assert attention_shares(ExpectedAttention(), ctx, logs)[0, 0].tolist() == pytest.approx([0.5, 0.25, 0.0, 0.125])


# -- around methods ----------------------------------------------------------------------------------------------------


def filled(
    method: Method, rows: list[int], select: SlotSelection, *, steps: int = 0, chunk: int | None = None, **how: Any
) -> EvictionCache:
    """A cache after these prompts, padded on the left, and so many tokens more."""
    model = tiny("llama")
    ids, mask = pad_left([PROMPTS[row] for row in rows], 0, "cpu")
    later = torch.tensor([[(3 * PROMPTS[row][0] + 7 * step) % 61 for step in range(steps)] for row in rows])
    later = later.long().view(len(rows), -1)
    place = {"positions": "original", "tokenizer": LETTERS, "select": select} | how
    cache = EvictionCache(model, method, Budget(tokens=30), prompt_tokens=ids.shape[1], **place)  # type: ignore[arg-type]
    return feed(cache, model, ids, later, mask=mask, chunk=chunk).cache


AROUND = [
    H2O(),
    TOVA(),
    SnapKV(window=5),
    KNorm(),
    KeyDiff(),
    ExpectedAttention(weight="none"),
    CAOTE(),
    Random(),
    KVzip(n_sinks=1, chunk=40, instruct=False),
]


@pytest.mark.parametrize("method", AROUND, ids=lambda method: method.name)
def test_chunks_are_whole_and_the_same_in_all_heads(method: Method) -> None:
    cache = filled(method, [0], CHUNKS)
    free = range(method.sinks, LENGTHS[0] - method.recent(30))
    for heads in kept(cache, 0):
        assert heads[0] == heads[1] == heads[2] and len(heads[0]) == 29
        held = {p for p in heads[0] if p in free}
        chunks = [{p for p in free if p // 7 == c} for c in {p // 7 for p in held}]
        assert sum(not chunk <= held for chunk in chunks) <= 1, "at most one chunk is kept in part"
    assert kept(filled(method, [0], SlotSelection()), 0) != kept(cache, 0)


@pytest.mark.parametrize("how", [{"mode": "compact"}, {"mode": "mask"}, {"chunk": 13}], ids=str)
@pytest.mark.parametrize("select", [CHUNKS, CRITICAL], ids=["chunk", "critical"])
@pytest.mark.parametrize(
    "method",
    [H2O(), *(pytest.param(each, marks=pytest.mark.slow) for each in (SnapKV(window=5), CAOTE()))],
    ids=lambda method: method.name,
)
def test_modes_batches_padding_and_chunked_prompts_agree(
    method: Method, select: SlotSelection, how: dict[str, Any]
) -> None:
    together = filled(method, [0, 1, 2], select, steps=6, **how)
    for row in range(3):
        assert kept(together, row) == kept(filled(method, [row], select, steps=6), 0)


@pytest.mark.parametrize("select", [CHUNKS, CRITICAL], ids=["chunk", "critical"])
def test_generation_with_beams_and_forks(select: SlotSelection) -> None:
    model, budget = tiny("llama"), Budget(kv_ratio=0.5)
    for beams in (1, 3):
        params = GenerationParams(max_new_tokens=7, eos=None, num_beams=beams)
        whole = generate(model, PROMPTS, H2O(), budget, decoding=params, select=select)
        for row, prompt in enumerate(PROMPTS):
            alone = generate(model, [prompt], H2O(), budget, decoding=params, select=select)
            assert alone.tokens[0] == whole.tokens[row]
    cache = filled(H2O(), [0, 1], select)
    assert kept(cache.fork([1]), 0) == kept(cache, 1)


def test_every_methods_kind_of_priority_is_true() -> None:
    """What says that it is attention is never negative; its logarithm, where no value weighs it, never above 0."""
    looked_at = set()
    for method in {type(case.method): case.method for case in reversed(CASES.values()) if case.oracle}.values():
        name, cls = method.name, type(method)
        if isinstance(method, ExpectedAttention):
            method = replace(method, weight="none")
        needs = method.needs.calibration or method.needs.surrogate
        if not method.evicts or needs or isinstance(method, Ideal) or method.priority_kind == "order":
            continue
        seen: list[Tensor] = []

        class Noting(cls):  # type: ignore[misc, valid-type]
            def priority(self, ctx: EvictionContext, seen: list[Tensor] = seen) -> Tensor:
                made: Tensor = super().priority(ctx)
                seen.append(made[ctx.held() & made.isfinite()])
                return made

        filled(Noting(**asdict(method)), [0], SlotSelection(), max_new_tokens=9)
        assert (seen[0] <= 1e-5).all() if method.priority_kind == "log_share" else (seen[0] >= 0).all(), name
        looked_at.add(method.priority_kind)
    assert looked_at == {"score", "share", "log_share"}


# -- refused -----------------------------------------------------------------------------------------------------------

BUDGET = Budget(tokens=9)
REFUSED: dict[str, tuple[Any, str]] = {
    "by": (lambda: SlotSelection(by="line"), "by must be one of token, chunk, got 'line'"),  # type: ignore[arg-type]
    "values": (lambda: SlotSelection(values="all"), "values must be one of none, critical, got 'all'"),  # type: ignore[arg-type]
    "idle": (lambda: SlotSelection(chunk=4), "select.chunk=4 has no effect with select.by=token"),
    "empty": (lambda: SlotSelection(by="chunk", chunk=0), "chunk must be at least 1 or null, got 0"),
    "half": (lambda: SlotSelection(by="chunk", chunk=1.5), "must be a whole number or null"),  # type: ignore[arg-type]
    "both": (lambda: SlotSelection(by="chunk", values="critical"), "set one of the two"),
    "window": (lambda: CacheConfig(Window(), BUDGET, select=CHUNKS), "method window drops none by priority"),
    "ideal": (lambda: CacheConfig(Ideal(), BUDGET, mode="mask", select=CHUNKS), "method ideal drops none by priority"),
    "order": (lambda: CacheConfig(KNorm(), BUDGET, select=CRITICAL), "the priorities of method knorm are no attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_a_model_loads(case: str) -> None:
    made, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        made()


def test_full_attention_leaves_the_group_alone_and_a_bare_core_knows_no_values() -> None:
    CacheConfig(Full(), select=CRITICAL)
    ctx = two_heads([[1.0, 2.0]])
    with pytest.raises(ConfigError, match=r"make the cache with kvexp\.hf\.EvictionCache"):
        by_values(H2O(), ctx, ctx.score, ctx.held() & False, four_kept(), None)
    assert not replace(CacheConfig(H2O(), BUDGET), select=CHUNKS).select.plain


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_reach_the_cache_and_the_identity_and_defaults_leave_it_as_it_was() -> None:
    plain = settings_of(*composed("method=h2o"))
    assert "layers" not in plain.identity["budget"] and "select" not in plain.identity
    shared = settings_of(*composed("method=h2o", "budget.layers=cake"))
    assert shared.budget is not None and shared.identity["budget"] == {**plain.identity["budget"], "layers": "cake"}
    chunks = settings_of(*composed("method=h2o", "select.by=chunk", "select.chunk=5"))
    assert chunks.cache.select == SlotSelection(by="chunk", chunk=5)
    assert chunks.identity == {**plain.identity, "select": {"by": "chunk", "values": "none", "chunk": 5}}
    full = settings_of(*composed("method=full", "select.by=chunk"))
    assert full.cache.select.plain and full.identity == plain.baseline().identity


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("select.chunk=0 select.by=chunk", "select.chunk must be at least 1 or null, got 0"),
        ("select.by=chunk select.values=critical", "set one of the two"),
        ("budget.layers=steps", r"budget\.layers must be .*uniform, pyramid, cake"),
        ("method=knorm select.values=critical", "the priorities of method knorm are no attention"),
        ("method=pyramidkv method.beta=0.5", r"method\.beta must be at least 1, got 0\.5"),
    ],
)
def test_wrong_settings_are_said_in_the_users_words(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings_of(*composed("method=h2o", *words.split()))


# Two ways to choose the slots of highest priority keep the same ones, whatever ties, dead slots or NaN there are.


PRIORITIES = [0.0, -0.0, 1.0, 0.25, -2.0, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3), slots=st.integers(1, 12), seed=st.integers(0, 10_000), budgets=st.lists(st.integers(0, 12))
)
def test_the_mask_holds_the_slots_that_the_order_keeps_first(dtype, rows, slots, seed, budgets):
    drawn = torch.Generator().manual_seed(seed)
    shape = (rows, 2, slots)
    priority = torch.tensor(PRIORITIES, dtype=dtype)[torch.randint(0, len(PRIORITIES), shape, generator=drawn)]
    positions = torch.rand(shape, generator=drawn).argsort(-1)
    positions = positions.masked_fill(torch.rand(shape, generator=drawn) < 0.2, -1)
    protected = torch.rand(shape, generator=drawn) < 0.2
    keep = torch.tensor([*budgets, 5, 3, 1][:rows])
    most = min(slots, int(keep.max()))
    index, chosen = select_keep(priority, positions, protected, keep, most)
    expected = torch.zeros(shape, dtype=torch.bool).scatter_(-1, index, chosen)
    assert torch.equal(kept_mask(priority, positions, protected, keep, most), expected)
