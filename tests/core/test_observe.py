"""Observation at prefill: blocks change nothing, memory stays linear, and hand-computed sums come out."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kvexp.core import (
    AttentionParams,
    AttentionScoreSpec,
    Budget,
    CacheConfig,
    Cadence,
    EvictionLayer,
    Noise,
    SequenceState,
)
from kvexp.core import attention as attending
from kvexp.core import observe as observing
from kvexp.core.attention import AttentionInputs, blocked_attention
from kvexp.core.eviction import CacheState
from kvexp.core.noise import EULER, GUMBEL_STD, POOL_OVERLAP, POOL_SIZE, pool
from kvexp.core.observe import ColumnSums, ObservedRows, naive_column_sums, row_weights
from kvexp.methods import A2SF, H2O, Keyformer, KeyformerA2SF, SnapKV

# Observation at prefill: blocks change nothing, memory stays linear, and hand-computed sums come out.


def tiles_of(rows):
    """Let blocked attention take at most so many query rows per tile; None: as many as it likes."""
    few = {} if rows is None else {"MAX_TILE_ROWS": rows, "MIN_TILE_ROWS": 1}
    return mock.patch.multiple(attending, **few) if few else nullcontext()


def observe(view_method, *, block=None, naive=False, padding=0, alibi=False, window=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    batch, heads, groups, length, dim = 2, 3, 5, 29, 7
    q = torch.randn(batch, heads * groups, length, dim, generator=generator).to(dtype)
    k, v = (torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for _ in "kv")
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[1, :padding] = False
    slopes = torch.arange(1, heads * groups + 1) / 10 if alibi else None
    plan = CacheConfig(view_method, Budget(tokens=40), Cadence(), observe="naive" if naive else "blocked")
    state = EvictionLayer(plan, 0, CacheState(plan, 1, SequenceState(max_new_tokens=4, seeds=9)))
    with tiles_of(block):
        out = state.forward(q, k, v, AttentionParams(dim**-0.5, sliding_window=window, alibi=slopes), mask)
    return out, state.slots.score[:, :, :length]


def test_every_query_row_hands_out_one():
    """Column sums of H2O add up to the number of real query rows times the group; padding neither gives nor takes."""
    _, score = observe(H2O(), padding=11)
    torch.testing.assert_close(score.sum(-1), torch.tensor([[29.0], [18.0]]).expand(2, 3) * 5, atol=1e-4, rtol=0)
    assert (score[1, :, :11] == 0).all()


def test_three_tokens_by_hand():
    """Logits 0 and ln 2 only: rows (1), (1/3, 2/3), (1/4, 1/2, 1/4)."""
    keys = torch.tensor([[0.0], [math.log(2)], [0.0]])[None, None]
    queries = torch.ones(1, 1, 3, 1)
    expected = {
        H2O(): [1 + 1 / 3 + 1 / 4, 2 / 3 + 1 / 2, 1 / 4],
        A2SF(alpha=0.5): [1 / 4 + 1 / 6 + 1 / 4, 1 / 3 + 1 / 2, 1 / 4],
        A2SF(alpha=0.0): [1 / 4, 1 / 2, 1 / 4],
    }
    for method, columns in expected.items():
        config = CacheConfig(method, Budget(tokens=9))
        state = EvictionLayer(config, 0, CacheState(config, 1, SequenceState()))
        out = state.forward(queries, keys, keys, AttentionParams(1.0), None)
        torch.testing.assert_close(state.slots.score[0, 0, :3], torch.tensor(columns))
        assert math.isclose(out[0, 0, 2, 0].item(), math.log(2) / 2, rel_tol=1e-6)


def test_constant_noise_is_no_noise():
    """A softmax does not see a constant (the paper's Table 4 has a column for it all the same)."""
    _, none = observe(Keyformer(noise="none"))
    _, constant = observe(Keyformer(noise="constant"))
    torch.testing.assert_close(constant, none, atol=1e-5, rtol=0)
    _, gumbel = observe(Keyformer())
    assert (gumbel - none).abs().max() > 0.1


def test_noise_depends_on_nothing_but_its_key():
    noise, seeds = Noise("gumbel"), torch.tensor([3, 4])
    queries, keys = torch.arange(6).expand(2, 6), torch.arange(9).expand(2, 1, 9)
    whole = noise.draw(seeds, 1, 4, queries, keys)
    part = noise.draw(seeds[1:], 1, 4, queries[1:, 2:4], keys[1:, :, 5:])
    assert torch.equal(whole[1:, :, 2:4, 5:], part)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, noise.draw(seeds, 2, 4, queries, keys))
    per_key = Noise("gumbel", fresh=False).draw(seeds, 1, 4, queries, keys)
    assert per_key.shape == (2, 4, 1, 9)


def test_tau_schedule():
    view = AttentionScoreSpec(tau=(1.0, 2.0))
    assert [view.tau_at(step, 4) for step in range(5)] == [1.0, 1.25, 1.5, 1.75, 2.0]


MEMORY = """
    import resource, sys
    import torch
    from kvexp.core import AttentionParams, Budget, CacheConfig, CacheState, EvictionLayer, SequenceState
    from kvexp.methods import H2O
    torch.set_num_threads(1)
    length, heads, dim = 16384, 8, 64
    q, k, v = (torch.randn(1, heads, length, dim) for _ in range(3))
    config = CacheConfig(H2O(), Budget(kv_ratio=0.5))
    state, small = (EvictionLayer(config, 0, CacheState(config, 1, SequenceState())) for _ in range(2))
    with torch.inference_mode():
        small.forward(q[:, :, :64], k[:, :, :64], v[:, :, :64], AttentionParams(dim**-0.5), None)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        state.forward(q, k, v, AttentionParams(dim**-0.5), None)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_blocked_observation_of_16k_tokens_stays_under_a_tenth_of_naive():
    """Peak memory of a process that observes 16384 tokens, 8 heads of 64, against one materialised [8, n, n] float32.

    The naive form holds at least that one tensor (8.6 GB, more than twice it with the softmax): a lower bound for it.
    """
    grown = subprocess.run([sys.executable, "-c", textwrap.dedent(MEMORY)], capture_output=True, text=True, check=True)
    assert int(grown.stdout) * 1024 < 0.1 * 8 * 16384**2 * 4


# The noise: its distribution, its independence, and what one pool of draws for all rows does and does not share.


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


# Tiles on the processor: the same column sums as all rows at once, whatever the shape, the padding and the company.


METHODS = {
    "h2o": H2O(),
    "a2sf": A2SF(alpha=0.9),
    "newest": A2SF(alpha=0.0),
    "snapkv": SnapKV(window=5),
    "keyformer": Keyformer(),
    "per key": Keyformer(fresh=False),
    "gaussian, warm": Keyformer(noise="gaussian", tau_init=1.7, tau_end=1.7),
    "constant": Keyformer(noise="constant"),
    "both": KeyformerA2SF(alpha=0.8),
}
WORLDS = {
    "plain": {},
    "padding": {"padding": (0, 19, 41)},
    "alibi": {"alibi": True, "padding": (3, 0, 11)},
    "window": {"window": 13, "padding": (0, 2, 31)},
    "wide window": {"window": 500},
    "later chunk": {"ahead": 23, "padding": (0, 7, 5)},
    "upcast": {"dtype": torch.bfloat16, "upcast": True},
}


def sight_of(count=59, padding=(0, 0, 0), alibi=False, window=None, ahead=0, dtype=torch.float32, upcast=False):
    """Three rows, 3 kv heads of 2 query heads, 11 dims, whose scale is no power of two."""
    dice = torch.Generator().manual_seed(1)
    heads, groups, dim, slots = 3, 2, 11, count + ahead
    query = torch.randn(3, heads, groups, count, dim, generator=dice).to(dtype) * 2
    keys = torch.randn(3, heads, slots, dim, generator=dice).to(dtype)
    columns = torch.arange(slots) - torch.tensor(padding)[:, None]
    columns = columns.masked_fill(columns < 0, -1)
    slopes = torch.arange(1, heads * groups + 1) / 7 if alibi else None
    params = AttentionParams(dim**-0.5, sliding_window=window, alibi=slopes, upcast=upcast)
    own = columns[:, ahead:]
    return AttentionInputs(query, keys, keys, columns[:, None], own, params, in_column_order=True, padded=any(padding))


def attended(inputs, observed, block=None):
    """Column sums of a prompt as they are taken while it is attended to."""
    sums = ColumnSums(inputs, observed)
    with tiles_of(block):
        blocked_attention(inputs, [sums])
    return sums.sums


def sums(inputs, method, how, rows_left=0, first_seed=5, **options):
    spec = method.score_spec
    weights = row_weights(spec, inputs.query_positions, rows_left)
    taus = torch.full((inputs.query.shape[3],), spec.tau[0])
    seeds = torch.arange(first_seed, first_seed + inputs.query.shape[0])
    return how(inputs, ObservedRows(spec, weights, taus, seeds, 3, rows_left), **options)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_tiles_are_naive(method, world):
    """Tolerance: logits up to 20 at 2**-24 each, through exp, over 118 rows that add up; ten times what was seen."""
    inputs = sight_of(**WORLDS[world])
    expected = sums(inputs, METHODS[method], naive_column_sums)
    for block in (1, 7, 64, None):
        got = sums(inputs, METHODS[method], attended, block=block)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-5)


def test_half_precision_rounds_products_as_the_truth_does():
    """A product that lies between two numbers of bfloat16 may be summed up to either: one part in 2**8 of a logit."""
    inputs = sight_of(dtype=torch.bfloat16)
    exact = sums(replace(inputs, query=inputs.query.float(), keys=inputs.keys.float()), H2O(), naive_column_sums)
    rounded, got = sums(inputs, H2O(), naive_column_sums), sums(inputs, H2O(), attended, block=7)
    assert (got - rounded).abs().max() < 0.05 * (rounded - exact).abs().max()


def test_a_row_is_the_same_in_any_company():
    """To the bit: neighbours and padding decide neither the tiles nor what is in them."""
    padded = sight_of(padding=(0, 19, 41))
    for method in METHODS.values():
        together = sums(padded, method, attended)
        for row, pad in enumerate((0, 19, 41)):
            at = slice(row, row + 1)
            alone = replace(
                padded,
                query=padded.query[at, :, :, pad:],
                keys=padded.keys[at, :, pad:],
                values=padded.keys[at, :, pad:],
                positions=padded.positions[at, :, pad:],
                query_positions=padded.query_positions[at, pad:],
                padded=False,
            )
            got = sums(alone, method, attended, first_seed=5 + row)
            assert torch.equal(together[row, :, pad:], got[0])
            assert (together[row, :, :pad] == 0).all()


def test_heads_go_in_pieces_where_a_tile_cannot_hold_them(monkeypatch):
    inputs = sight_of()
    for size, least in ((1 << 9, 1), (1 << 12, 1), (1 << 9, 64)):
        monkeypatch.setattr(attending, "MAX_TILE_LOGITS", size)
        monkeypatch.setattr(attending, "MIN_TILE_ROWS", least)
        for method in (H2O(), Keyformer(), Keyformer(fresh=False)):
            expected = sums(inputs, method, naive_column_sums)
            got = sums(inputs, method, attended)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-5)


def test_a_chunk_that_nothing_observes_adds_nothing():
    assert (sums(sight_of(ahead=7), SnapKV(window=5), attended, rows_left=5) == 0).all()


def test_slots_in_no_order_are_naive_too():
    """Slots out of order, a simulation's, float64."""
    dice, inputs = torch.Generator().manual_seed(2), sight_of()
    hidden = torch.rand(3, 3, 59, generator=dice) < 0.8
    hidden[..., 0] = True
    order = torch.randperm(59, generator=dice)
    shuffled = replace(
        inputs, keys=inputs.keys[:, :, order], positions=inputs.positions[..., order], in_column_order=False
    )
    for other in (sight_of(dtype=torch.float64), shuffled, replace(inputs, visible=hidden)):
        for method in (H2O(), Keyformer()):
            expected = sums(other, method, naive_column_sums)
            torch.testing.assert_close(sums(other, method, attended, block=7), expected, atol=1e-5, rtol=2e-5)


ORDERS = ("prompt", "padded", "alibi", "window", "ahead", "hidden", "shuffled", "bfloat16")


@pytest.mark.parametrize("case", ORDERS)
def test_blocked_attention_is_a_masked_softmax_times_the_values(case):
    """Against logits and masks of all query rows at once, whatever the tiles; padded rows give 0."""
    worlds = {"padded": {"padding": (0, 19, 41)}, "alibi": {"alibi": True}, "window": {"window": 9}}
    worlds |= {"ahead": {"ahead": 12}, "bfloat16": {"dtype": torch.bfloat16}}
    dice, inputs = torch.Generator().manual_seed(2), sight_of(**worlds.get(case, {}))
    if case == "hidden":
        visible = torch.rand(3, 3, 59, generator=dice) < 0.8
        visible[..., 0] = True
        inputs = replace(inputs, visible=visible)
    if case == "shuffled":
        order = torch.randperm(59, generator=dice)
        parts = {"keys": inputs.keys[:, :, order], "values": inputs.values[:, :, order]}
        inputs = replace(inputs, **parts, positions=inputs.positions[..., order], in_column_order=False)
    count, slots = inputs.query.shape[3], inputs.keys.shape[2]
    probabilities = torch.softmax(inputs.logits(slice(0, count), slots), dim=-1)
    expected = torch.einsum("bhgqs,bhsd->bhgqd", probabilities, inputs.values.float())
    real = (inputs.query_positions >= 0)[:, None, None, :, None]
    near = {"atol": 2e-2, "rtol": 2e-2} if case == "bfloat16" else {"atol": 5e-6, "rtol": 1e-5}
    for block in (1, 7, 64, None):
        with tiles_of(block):
            got = blocked_attention(inputs)
        torch.testing.assert_close(got.float(), expected * real, **near)


def test_a_softmax_may_be_written_over_its_logits():
    """PyTorch does not promise it in words; tiles rely on it."""
    x = torch.randn(5, 3, 1031) * 9
    expected = torch.softmax(x, dim=-1)
    assert torch.equal(torch.softmax(x, dim=-1, out=x), expected)


@pytest.mark.parametrize(("batch", "groups"), [("per_beam", 6), ("per_sample", 2), ("sum_all", 1)])
def test_rows_that_share_a_score_add_up_theirs(batch, groups):
    """Two samples of three beams: each group of rows has its sum in all of its rows, computed here row by row."""
    sums = torch.rand(6, 2, 5, generator=torch.Generator().manual_seed(0))
    sequence = SimpleNamespace(num_beams=3, prompt_lengths=[5] * 6)
    found = observing.pool_sums(AttentionScoreSpec(batch=batch), sums, sequence)
    size = 6 // groups
    for row in range(6):
        first = row - row % size
        torch.testing.assert_close(found[row], sum(sums[first + other] for other in range(size)))


@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (1, 8), (8, 1)])
def test_the_number_of_threads_moves_no_bit(heads, groups):
    """A product of one matrix would be split among threads, and its sums with it: with one kv head as well."""
    dice, count = torch.Generator().manual_seed(4), 1500
    query = torch.randn(1, heads, groups, count, 64, generator=dice)
    keys = torch.randn(1, heads, count, 64, generator=dice)
    places = torch.arange(count)[None]
    inputs = AttentionInputs(query, keys, keys, places[:, None], places, AttentionParams(0.1), in_column_order=True)
    made, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            observers = [sums(inputs, method, lambda *both: ColumnSums(*both)) for method in (H2O(), Keyformer())]
            made.append([blocked_attention(inputs, observers), *(each.sums for each in observers)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in made[1:] for one, other in zip(made[0], others, strict=True))
