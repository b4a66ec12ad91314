"""Row masks: cases by hand and properties; the recorded runs are compared in `tests/test_golden.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvexp.core import row_mask as rm

# By hand: one head, three or four tokens, softmax rows given as probabilities (their logarithms are logits).


def logits_of(rows: list[list[float]]) -> Tensor:
    """Causal rows of probabilities -> logits, with tempting values above the diagonal to catch a look ahead."""
    x = torch.full((len(rows), len(rows)), 9.0)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row).log()
    return x


THREE = logits_of([[1.0], [0.6, 0.4], [0.25, 0.25, 0.5]])
FOUR = logits_of([[1.0], [0.6, 0.4], [0.1, 0.2, 0.7], [0.3, 0.3, 0.3, 0.1]])


def rows(mask: Tensor) -> list[list[int]]:
    """Kept columns of every row."""
    assert mask.ndim == 2
    return [row.nonzero().flatten().tolist() for row in mask]


@pytest.mark.parametrize(
    ("heavy", "recent", "decay", "want"),
    [
        # decay 0: A = row 1 = (.6, .4), so token 1 goes at row 2
        (2, 0, 0.0, [[0], [0, 1], [0, 2]]),
        # decay 1: A = (1.6, .4), the same
        (2, 0, 1.0, [[0], [0, 1], [0, 2]]),
        (2, 1, 1.0, [[0], [0, 1], [0, 1, 2]]),  # and the band brings it back
        (1, 0, 1.0, [[0], [1], [2]]),  # top-0 and self
        (0, 1, 1.0, [[0], [0, 1], [1, 2]]),  # local: recent + 1 keys
        (0, 0, 1.0, [[0], [1], [2]]),
        (3, 0, 1.0, [[0], [0, 1], [0, 1, 2]]),
        (9, 0, 1.0, [[0], [0, 1], [0, 1, 2]]),
    ],
)
def test_local_by_hand(heavy: int, recent: int, decay: float, want: list[list[int]]) -> None:
    assert rows(rm.local_mask(THREE, heavy, recent, decay=decay)) == want


def test_decay_changes_who_goes() -> None:
    """Row 3 of FOUR, heavy 2: row 2 keeps {0, 2}; A = decay * A_0 + .1 against .7 (full row, not renormalised)."""
    assert rows(rm.local_mask(FOUR, 2, 0, decay=0.1))[3] == [2, 3]  # .16 + .1 = .26 < .7
    mask, acc = rm.local_mask_and_scores(FOUR, 2, 0, decay=1.0)
    assert rows(mask)[3] == [0, 3]  # 1.6 + .1 = 1.7 > .7
    torch.testing.assert_close(acc, torch.tensor([[0, 0, 0, 0], [1.6, 0.4, 0, 0], [1.7, 0, 0.7, 0], [2.0, 0, 0, 0.1]]))


def test_given_scores_replace_softmax() -> None:
    """Rows < heavy come from block_scores, later ones from scores; the noisy rows rank, plain logits would not."""
    block = torch.tensor([[1.0, 0, 0, 0], [0.1, 0.9, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])  # A = (1.1, .9)
    later = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 1], [0.1, 0.1, 0.8, 0], [0.5, 0.5, 0, 0]])
    mask, acc = rm.local_mask_and_scores(FOUR, 2, 0, scores=later, block_scores=block)
    assert rows(mask) == [[0], [0, 1], [0, 2], [0, 3]]
    torch.testing.assert_close(acc[2], torch.tensor([1.2, 0, 0.8, 0]))
    joined = torch.cat((block[:2], later[2:]))
    assert torch.equal(mask, rm.local_mask(FOUR, 2, 0, scores=joined))


def test_global_by_hand() -> None:
    """Column sums of THREE: 1.85, .65, .5. The best column serves every row, with hindsight."""
    assert rows(rm.global_mask(THREE, 1, 0)) == [[0], [0, 1], [0, 2]]
    assert rows(rm.global_mask(THREE, 0, 1)) == [[0], [0, 1], [1, 2]]
    late = logits_of([[1.0], [0.01, 0.99], [0.01, 0.99, 0.0001], [0.01, 0.01, 0.01, 0.97]])
    assert rows(rm.global_mask(late, 1, 0)) == [[0], [1], [1, 2], [1, 3]]  # row 0 still has its only key


def test_ideal_by_hand() -> None:
    """Row 2 of FOUR finds its best key in itself and has one; row 3 ties at .3 and takes the newest."""
    assert rows(rm.ideal_mask(FOUR, 2)) == [[0], [0, 1], [2], [2, 3]]
    assert rows(rm.ideal_mask(FOUR, 1)) == [[0], [1], [2], [3]]
    assert rows(rm.ideal_mask(FOUR, 2, force_self=False)) == [[0], [0, 1], [0, 1, 2], [1, 2]]


def test_ties_keep_the_newer() -> None:
    flat = torch.zeros(4, 4)
    assert rows(rm.ideal_mask(flat, 3)) == [[0], [0, 1], [0, 1, 2], [2, 3]]
    assert rows(rm.local_mask(flat, 2, 0, scores=torch.zeros(4, 4))) == [[0], [0, 1], [1, 2], [2, 3]]


def test_masked_probs_by_hand() -> None:
    """Row 2 without token 1 weighs (.25, .5) / .75."""
    mask = rm.local_mask(THREE, 2, 0)
    v = torch.tensor([[3.0], [100.0], [6.0]])
    torch.testing.assert_close(rm.masked_probs(THREE, mask) @ v, torch.tensor([[3.0], [41.8], [5.0]]))


def test_row_cosine_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[4.0, 3.0], [0.0, 0.0]])
    torch.testing.assert_close(rm.row_cosine(a, b), torch.tensor([24 / 25.0001, 0.0]))
    torch.testing.assert_close(rm.row_cosine(a.flatten(), a.flatten(), eps=0.0), torch.tensor(1.0))


# Properties, on shapes the recorded runs do not have.

N = 23
SHAPES = [(N, N), (3, N, N), (2, 2, 3, N, N)]


def random_logits(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def every_mask(x: Tensor, heavy: int, recent: int, decay: float) -> dict[str, tuple[Tensor, int]]:
    """name -> mask and the most keys a row may have."""
    return {
        "local": (rm.local_mask(x, heavy, recent, decay=decay), max(heavy, 1) + recent),
        "local_half": (rm.local_mask(x, heavy, recent, decay=decay, dtype=torch.float16), max(heavy, 1) + recent),
        "global": (rm.global_mask(x, heavy, recent), heavy + recent + 1),
        "ideal": (rm.ideal_mask(x, heavy + 1), heavy + 1),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heavy", "recent"), [(0, 0), (0, 4), (1, 0), (1, 3), (5, 0), (5, 4), (N, 0), (40, 40)])
@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_causal_self_and_budget(shape: tuple[int, ...], heavy: int, recent: int, decay: float) -> None:
    for name, (mask, most) in every_mask(random_logits(shape), heavy, recent, decay).items():
        assert mask.shape == shape, name
        assert mask.dtype == torch.bool, name
        assert not mask.triu(1).any(), name
        assert mask.diagonal(dim1=-2, dim2=-1).all(), name
        assert mask.sum(-1).max() <= most, name


@pytest.mark.parametrize(("heavy", "recent", "decay"), [(-1, 0, 1.0), (1, -1, 1.0), (1, 1, 1.5), (1, 1, -0.1)])
def test_refuses_nonsense(heavy: int, recent: int, decay: float) -> None:
    with pytest.raises(ValueError, match="must"):
        rm.local_mask(THREE, heavy, recent, decay=decay)
