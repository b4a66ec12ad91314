"""Copies of a prefilled context share keys and values with it until one of them overwrites a slot."""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB, tiny
from turns import in_turn

from kvexp.core import Budget, Cadence, Slots
from kvexp.generate import GenerationParams, generate_from_context, prefill
from kvexp.methods import H2O, Full, Window

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
    """With one kv head, too: the sequence's ids, which all layers read, stay when one layer's slots change."""
    keys, positions = torch.randn(2, kv_heads, 5, 4), torch.arange(5).repeat(2, 1)
    slots = Slots.empty_like(keys, keys, masked=False)
    slots.alias(keys, keys, positions, torch.zeros(2, kv_heads, 5))
    slots.invalidate(torch.ones(2, kv_heads, 1, dtype=torch.int64))
    assert (slots.positions[..., 1] == -1).all()
    assert torch.equal(positions, torch.arange(5).repeat(2, 1))
