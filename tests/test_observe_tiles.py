"""Tiles on the processor: the same column sums as all rows at once, whatever the shape, the padding and the company."""

from dataclasses import replace

import pytest
import torch

from kvexp.core import AttentionParams, Noise
from kvexp.core.attention import AttentionInputs
from kvexp.core.observe import blocked, naive, tiles
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.methods import A2SF, H2O, Keyformer, KeyformerA2SF, SnapKV

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


def sums(inputs, method, how, rows_left=0, **options):
    spec = method.score_spec
    weights = naive.row_weights(spec, inputs.query_positions, rows_left)
    taus = torch.full((inputs.query.shape[3],), spec.tau[0])
    seeds = torch.arange(5, 5 + inputs.query.shape[0])
    return how(inputs, spec, weights, taus, seeds, 3, **options)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_tiles_are_naive(method, world):
    """Tolerance: logits up to 20 at 2**-24 each, through exp, over 118 rows that add up; ten times what was seen."""
    inputs = sight_of(**WORLDS[world])
    expected = sums(inputs, METHODS[method], naive.column_sums)
    for block in (1, 7, 64, None):
        got = sums(inputs, METHODS[method], tiles.tiled_column_sums, block=block)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-5)


def test_half_precision_rounds_products_as_the_truth_does():
    """A product that lies between two numbers of bfloat16 may be summed up to either: one part in 2**8 of a logit."""
    inputs = sight_of(dtype=torch.bfloat16)
    exact = sums(replace(inputs, query=inputs.query.float(), keys=inputs.keys.float()), H2O(), naive.column_sums)
    rounded, got = sums(inputs, H2O(), naive.column_sums), sums(inputs, H2O(), tiles.tiled_column_sums, block=7)
    assert (got - rounded).abs().max() < 0.05 * (rounded - exact).abs().max()


def test_a_row_is_the_same_in_any_company():
    """To the bit: neighbours and padding decide neither the tiles nor what is in them."""
    padded = sight_of(padding=(0, 19, 41))
    for method in METHODS.values():
        together = sums(padded, method, tiles.tiled_column_sums, block=None)
        for row, pad in enumerate((0, 19, 41)):
            alone = AttentionInputs(
                padded.query[row : row + 1, :, :, pad:],
                padded.keys[row : row + 1, :, pad:],
                padded.keys[row : row + 1, :, pad:],
                padded.positions[row : row + 1, :, pad:],
                padded.query_positions[row : row + 1, pad:],
                padded.params,
                in_column_order=True,
                padded=False,
            )
            spec = method.score_spec
            weights = naive.row_weights(spec, alone.query_positions, 0)
            taus = torch.full((59 - pad,), spec.tau[0])
            got = tiles.tiled_column_sums(alone, spec, weights, taus, torch.tensor([5 + row]), 3, None)
            assert torch.equal(together[row, :, pad:], got[0])
            assert (together[row, :, :pad] == 0).all()


def test_heads_go_in_pieces_where_a_tile_cannot_hold_them(monkeypatch):
    inputs = sight_of()
    for size, least in ((1 << 9, 1), (1 << 12, 1), (1 << 9, 64)):
        monkeypatch.setattr(tiles, "MAX_TILE_LOGITS", size)
        monkeypatch.setattr(tiles, "MIN_PRODUCT_ROWS", least)
        for method in (H2O(), Keyformer(), Keyformer(fresh=False)):
            expected = sums(inputs, method, naive.column_sums)
            got = sums(inputs, method, tiles.tiled_column_sums, block=None)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-5)


def test_a_chunk_that_nothing_observes_adds_nothing():
    assert (sums(sight_of(ahead=7), SnapKV(window=5), tiles.tiled_column_sums, rows_left=5, block=None) == 0).all()


@pytest.mark.parametrize(("count", "tiled"), [(31, False), (300, True)])
def test_short_prompts_are_observed_at_once_and_long_ones_in_tiles(count, tiled, monkeypatch):
    called = []
    monkeypatch.setattr(tiles, "tiled_column_sums", lambda *_: called.append(1) or torch.zeros(()))
    sums(sight_of(count), H2O(), blocked.column_sums)
    assert bool(called) == tiled


def test_recorded_noise_never_comes_in_tiles():
    """Its table knows rows by their number in the whole batch."""

    class Recorded(Noise):
        pass

    assert tiles.supports(sight_of(), AttentionScoreSpec(noise=Noise()))
    assert not tiles.supports(sight_of(), AttentionScoreSpec(noise=Recorded()))


def test_slots_out_of_order_and_float64_never_come_in_tiles():
    inputs = sight_of()
    assert not tiles.supports(sight_of(dtype=torch.float64), H2O().score_spec)
    assert not tiles.supports(replace(inputs, in_column_order=False), H2O().score_spec)
    assert not tiles.supports(replace(inputs, visible=torch.ones(3, 3, 59, dtype=torch.bool)), H2O().score_spec)


def test_a_softmax_may_be_written_over_its_logits():
    """PyTorch does not promise it in words; tiles rely on it."""
    x = torch.randn(5, 3, 1031) * 9
    expected = torch.softmax(x, dim=-1)
    assert torch.equal(torch.softmax(x, dim=-1, out=x), expected)
