"""The noise: its distribution, its independence, and what one pool of draws for all rows does and does not share."""

import math

import pytest
import torch

from kvexp.core.observe.noise import EULER, GUMBEL_STD, POOL_OVERLAP, POOL_SIZE, Noise, pool

CPU = torch.device("cpu")


def drawn(kind="gumbel", seed=5, layer=2, heads=1, queries=1500, keys=1500):
    return Noise(kind).draw(
        torch.tensor([seed]), layer, heads, torch.arange(queries)[None], torch.arange(keys)[None, None]
    )[0]


def cdf(kind, x):
    return (-(-x).exp()).exp() if kind == "gumbel" else 0.5 * (1 + torch.erf((x - EULER) / GUMBEL_STD / math.sqrt(2)))


@pytest.mark.parametrize("kind", ["gumbel", "gaussian"])
def test_the_pool_has_the_distribution(kind):
    """Kolmogorov-Smirnov at 1 in 1000, mean and deviation within four standard errors, over all 2**22 draws."""
    draws = pool(kind, CPU)[:POOL_SIZE].double()
    ranks = cdf(kind, draws.sort().values)
    steps = torch.arange(1, POOL_SIZE + 1, dtype=torch.float64) / POOL_SIZE
    distance = torch.maximum((steps - ranks).abs(), (ranks - steps + 1 / POOL_SIZE).abs()).max()
    assert distance < 1.95 / math.sqrt(POOL_SIZE)
    kurtosis = 5.4 if kind == "gumbel" else 3.0
    assert abs(draws.mean() - EULER) < 4 * GUMBEL_STD / math.sqrt(POOL_SIZE)
    assert abs(draws.var() / GUMBEL_STD**2 - 1) < 4 * math.sqrt((kurtosis - 1) / POOL_SIZE)
    assert draws.isfinite().all()


def test_the_pool_goes_on_behind_its_end():
    table = pool("gumbel", CPU)
    assert len(table) == POOL_SIZE + POOL_OVERLAP
    assert torch.equal(table[POOL_SIZE:], table[:POOL_OVERLAP])


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 128, 1000, 4096])
def test_neighbours_in_the_pool_are_independent(lag):
    """Correlation, and that of the squares, within four and a half standard errors."""
    draws = (pool("gaussian", CPU)[: POOL_SIZE + lag].double() - EULER) / GUMBEL_STD
    for x, spread in ((draws, 1.0), (draws**2 - 1, 2.0)):
        assert abs((x[:-lag] * x[lag:]).mean()) < 4.5 * spread / math.sqrt(POOL_SIZE)


def test_a_row_of_attention_has_no_draw_twice():
    """float32 has few values for 2**22 draws, so by place: those of a row are all different."""
    places = Noise().pool_offsets(torch.tensor([3]), 1, 4, torch.arange(100)[None])[0]
    at = (places[..., None] + torch.arange(5000)) & (POOL_SIZE - 1)
    assert all(len(row.unique()) == 5000 for row in at.flatten(0, 1))


def test_rows_start_anywhere_in_the_pool():
    """Chi-square over 64 equal parts of the pool, of 8 layers x 8 heads x 4096 queries; four sigma."""
    places = torch.cat(
        [Noise().pool_offsets(torch.tensor([9]), i, 8, torch.arange(4096)[None]).flatten() for i in range(8)]
    )
    counts = torch.bincount((places // (POOL_SIZE // 64)).long(), minlength=64).double()
    expected = len(places) / 64
    assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 4 * math.sqrt(2 * 63)


def test_columns_add_up_as_independent_draws_would():
    """What a score sums: the variance of a column's sum is that of its draws added up, and columns are uncorrelated.

    1500 queries of 1500 keys; standard errors of 3.7 % and 2.6 %.
    """
    sums = (drawn().double() - EULER).sum(1)[0] / GUMBEL_STD / math.sqrt(1500)
    assert abs(sums.var() - 1) < 4 * math.sqrt(2 / 1500)
    for lag in (1, 7, 100):
        assert abs((sums[:-lag] * sums[lag:]).mean()) < 4 / math.sqrt(1500)


@pytest.mark.parametrize("other", [{"seed": 6}, {"layer": 3}, {"seed": 5, "kind": "gaussian"}], ids=str)
def test_seeds_layers_and_kinds_are_uncorrelated(other):
    one, two = (x.flatten().double() - EULER for x in (drawn(queries=900), drawn(**{"queries": 900, **other})))
    assert abs((one * two).mean()) / GUMBEL_STD**2 < 4 / math.sqrt(len(one))


def test_shared_draws_are_as_rare_as_chance_has_them():
    """Rows share draws where their places are nearer than their keys are many: 2 keys / POOL of all pairs of rows."""
    rows, keys = 3000, 1500
    places = Noise().pool_offsets(torch.tensor([1]), 0, 1, torch.arange(rows)[None])[0, 0].long().sort().values
    near = (torch.searchsorted(places, places + keys) - torch.arange(rows) - 1).sum()
    expected = rows**2 / 2 * 2 * keys / POOL_SIZE
    assert abs(near - expected) < 4 * math.sqrt(expected)


def test_keys_in_any_order_and_behind_the_end_of_the_pool():
    """Slot order decides nothing; far positions go around the pool."""
    noise, seeds, queries = Noise(), torch.tensor([3, 4]), torch.arange(6).expand(2, 6)
    keys = torch.tensor([[7, 2, 0, POOL_SIZE + 2], [1, 5, 9, 3]])
    by_head = torch.stack([keys, keys.flip(1)], dim=1)
    both = noise.draw(seeds, 1, 4, queries, by_head)
    assert torch.equal(both[:, :2], noise.draw(seeds, 1, 4, queries, keys[:, None])[:, :2])
    assert torch.equal(both[:, 2:], noise.draw(seeds, 1, 4, queries, keys.flip(1)[:, None])[:, 2:])
    assert torch.equal(both[0, 0, :, 1], both[0, 0, :, 3])
    places = noise.pool_offsets(seeds, 1, 4, queries)
    assert torch.equal(both[1, 1, :, 0], pool("gumbel", CPU)[places[1, 1].long() + 1])
    assert torch.equal(noise.pool_offsets(seeds, 1, 2, queries, first=2), places[:, 2:])
