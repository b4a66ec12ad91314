"""Priorities of single methods on slots small enough to compute by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from commands import composed
from oracles import moved
from torch import Tensor

from kvexp.core import EvictionContext
from kvexp.core.slots import Slots
from kvexp.methods import CAOTE, CUR, RKV, KeyDiff, LagKV
from kvexp.run.settings import settings_of


def context(
    keys: Tensor, values: Tensor | None = None, score: Tensor | None = None, attention: Tensor | None = None
) -> EvictionContext:
    """Slots at positions 0, 1, 2 … of one row: keys [H, S, D], values [H, S, Dv], score [H, S], attention [H, G, S]."""
    h, s = keys.shape[:2]
    positions = torch.arange(s).expand(1, h, s).clone()
    score = torch.zeros(h, s) if score is None else score
    slots = Slots(keys[None], (keys if values is None else values)[None], positions, score[None])
    one = torch.ones(1, dtype=torch.int64)
    return EvictionContext(slots, 0, one * s, one, one * (s - 1), one, None if attention is None else attention[None])


KEYS = torch.tensor([[2.0, 0.0], [1.0, 0.5], [0.0, 1.0], [-3.0, 0.0]])


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


ALPHA, VALUES = [0.5, 0.3, 0.2], torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def test_caote_is_how_far_deletion_moves_the_output() -> None:
    """o = (.7, .5); without token 0 it is (.4, 1), .5831 away. The distance is not squared."""
    ctx = context(VALUES[None], VALUES[None], attention=torch.tensor([[ALPHA]]))
    want = [0.5831, 0.3687, 0.1458]
    assert CAOTE().priority(ctx)[0, 0].tolist() == pytest.approx(want, abs=1e-4)
    values = dict(enumerate(VALUES.tolist()))
    assert [moved(dict(enumerate(ALPHA)), values, j) for j in range(3)] == pytest.approx(want, abs=1e-4)
    assert CAOTE(form="fast").priority(ctx)[0, 0].tolist() == pytest.approx([0.7454, 0.3194, 0.1179], abs=1e-4)
    summed = context(VALUES[None], VALUES[None], score=7 * torch.tensor([ALPHA]))
    assert CAOTE(alpha="accumulated").priority(summed)[0, 0].tolist() == pytest.approx(want, abs=1e-4)


def test_caote_keeps_the_only_slot_that_is_attended() -> None:
    """alpha / (1 - alpha) * 0 would make it worth nothing."""
    alone = torch.tensor([[[0.0, 1.0, 0.0]]])
    assert int(CAOTE().priority(context(VALUES[None], VALUES[None], attention=alone)).argmax()) == 1


def test_lagkv_takes_a_constant_channel_for_nothing() -> None:
    states = torch.tensor([[0.0, 4.0, 7.0], [2.0, 2.0, -5.0], [0.0, 0.0, 1.0], [4.0, 2.0, 1.0]])
    assert LagKV(n_sinks=0, lag=2).priority(context(states[None])).isfinite().all()


def test_cur_by_hand() -> None:
    """Squared norms of keys 1, 4 | 1, 2 and of values 3, 1 | 1, 1, in blocks of two."""
    keys, values = (torch.tensor([norms]).sqrt()[..., None] for norms in ([1.0, 4.0, 1.0, 2.0], [3.0, 1.0, 1.0, 1.0]))
    ctx = context(keys, values)
    got = {how: CUR(block=2, leverage=how).priority(ctx).flatten() for how in ("product", "mean", "key")}
    assert got["product"].tolist() == pytest.approx([0.15, 0.2, 1 / 6, 1 / 3])
    assert got["key"].tolist() == pytest.approx([0.2, 0.8, 1 / 3, 2 / 3])
    assert got["mean"].tolist() == pytest.approx([0.475, 0.525, 5 / 12, 7 / 12])
    compared = CUR(block=2).priority(replace(ctx, compares_heads=True)).flatten()
    assert compared.tolist() == pytest.approx([each / 0.85 for each in (0.15, 0.2, 1 / 6, 1 / 3)])


COMPARES = ("budget.heads=adaptive", "budget.heads=global", "budget.heads=union", "select.by=chunk")


@pytest.mark.parametrize("words", [(word,) for word in COMPARES] + [("budget=threshold", "budget.threshold=0.01"), ()])
def test_heads_are_compared_where_slots_or_chunks_are_shared(words: tuple[str, ...]) -> None:
    assert settings_of(*composed("method=cur", *words)).cache.compares_heads == bool(words)


NEAR = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [1.0, 0.05]])


def logits_context(keys: Tensor, logits: Tensor) -> EvictionContext:
    """As `context`, with the logits [G, n, S] of the last queries in one kv head."""
    return replace(context(keys[None]), last_logits=logits[None, None])


def test_rkv_goes_by_position_and_not_by_slot() -> None:
    """Slots out of order and a free one in between: neighbours and the newest similar key are the same."""
    keys = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(4))
    places = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    for form in ("paper", "release"):
        method = RKV(window=3, kernel=3, importance=0.5, form=form)
        want = method.priority(logits_context(keys, logits))[0, 0]
        ctx = logits_context(torch.cat([keys[places], torch.full((1, 5), 9.0)]),
                             torch.cat([logits[..., places], torch.full((2, 3, 1), -torch.inf)], dim=-1))  # fmt: skip
        ctx.slots.positions[0, 0] = torch.tensor([*places.tolist(), -1])
        got = method.priority(replace(ctx, newest=torch.tensor([8])))[0, 0]
        assert torch.equal(got[:-1], want[places])
