"""Priorities of single methods on slots small enough to compute by hand."""

from __future__ import annotations

import pytest
import torch
from oracles import keydiff_scores
from torch import Tensor

from kvexp.core import EvictionContext
from kvexp.core.slots import Slots
from kvexp.methods import KeyDiff


def context(keys: Tensor, values: Tensor | None = None, score: Tensor | None = None) -> EvictionContext:
    """Slots at positions 0, 1, 2 … of one row; keys [H, S, D], values [H, S, Dv], score [H, S]."""
    h, s = keys.shape[:2]
    positions = torch.arange(s).expand(1, h, s).clone()
    score = torch.zeros(h, s) if score is None else score
    slots = Slots(keys[None], (keys if values is None else values)[None], positions, score[None])
    one = torch.ones(1, dtype=torch.int64)
    return EvictionContext(slots, 0, one * s, one, one * (s - 1), one)


KEYS = torch.tensor([[2.0, 0.0], [1.0, 0.5], [0.0, 1.0], [-3.0, 0.0]])


def test_keydiff_normalises_before_it_averages() -> None:
    """The unit keys sum to 4 (.2236, .3618); the mean of the keys as they are would give 0, -.4472, -1, 0."""
    want = [-0.5257, -0.8507, -0.8507, 0.5257]
    assert KeyDiff().priority(context(KEYS[None]))[0, 0].tolist() == pytest.approx(want, abs=1e-4)
    assert list(keydiff_scores(dict(enumerate(KEYS.tolist()))).values()) == pytest.approx(want, abs=1e-4)


def test_keydiff_has_no_mean_of_slots_that_are_free_or_evicted() -> None:
    """A slot without a token has position -1; what mask mode has evicted has score -inf and keeps its position."""
    more = torch.cat([KEYS, torch.tensor([[0.0, -9.0], [5.0, 5.0]])])
    ctx = context(more[None], score=torch.tensor([[0, 0, 0, 0, 0, -torch.inf]]))
    ctx.slots.positions[..., 4] = -1
    assert torch.equal(KeyDiff().priority(ctx)[..., :4], KeyDiff().priority(context(KEYS[None])))


def test_keydiff_does_not_tell_equal_keys_apart() -> None:
    """Among equal keys the newer stays, whatever the order in which a product sums."""
    words = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    said = torch.randint(7, (97,), generator=torch.Generator().manual_seed(5))
    priority = KeyDiff().priority(context(words[said][None]))[0, 0]
    assert [len(priority[said == word].unique()) for word in range(7)] == [1] * 7
