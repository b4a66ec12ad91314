"""Two ways to choose the slots of highest priority keep the same ones, whatever ties, dead slots or NaN there are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.core.select import keep_mask, select_keep

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
    assert torch.equal(keep_mask(priority, positions, protected, keep, most), expected)
