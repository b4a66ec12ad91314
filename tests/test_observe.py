"""Observation at prefill: blocks change nothing, memory stays linear, and hand-computed sums come out."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch

from kvexp.core import (
    AttentionParams,
    AttentionScoreSpec,
    Budget,
    CacheConfig,
    Cadence,
    EvictionLayer,
    MemoryTracker,
    Noise,
    SequenceState,
)
from kvexp.methods import A2SF, H2O, Keyformer


def observe(view_method, *, block=None, naive=False, padding=0, alibi=False, window=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    batch, heads, groups, length, dim = 2, 3, 5, 29, 7
    q = torch.randn(batch, heads * groups, length, dim, generator=generator).to(dtype)
    k, v = (torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for _ in "kv")
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[1, :padding] = False
    slopes = torch.arange(1, heads * groups + 1) / 10 if alibi else None
    plan = CacheConfig(view_method, Budget(tokens=40), Cadence(), observe="naive" if naive else "blocked", block=block)
    state = EvictionLayer(plan, 0, 1, SequenceState(max_new_tokens=4, seeds=9), MemoryTracker(1), None)
    out = state.forward(q, k, v, AttentionParams(dim**-0.5, sliding_window=window, alibi=slopes), mask)
    return out, state.slots.score[:, :, :length]


METHODS = [H2O(), A2SF(alpha=0.7), Keyformer(), Keyformer(noise="gaussian", fresh=False)]


@pytest.mark.parametrize("world", [{}, {"padding": 11}, {"alibi": True, "padding": 4}, {"window": 6}], ids=str)
@pytest.mark.parametrize("block", [1, 3, 7, 16, 29, 64, None])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{getattr(m, 'noise', '')}")
def test_block_size_changes_nothing(method, block, world):
    _, expected = observe(method, naive=True, **world)
    _, got = observe(method, block=block, **world)
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)


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
        state = EvictionLayer(CacheConfig(method, Budget(tokens=9)), 0, 1, SequenceState(), MemoryTracker(1), None)
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


def test_noise_has_the_stated_moments_and_streams_are_independent():
    positions = torch.arange(400)[None]
    for kind in ("gumbel", "gaussian"):
        z = Noise(kind).draw(torch.tensor([5]), 2, 3, positions, positions[None])[0]
        assert abs(z.mean().item() - 0.5772) < 0.01
        assert abs(z.std().item() - 1.2825) < 0.01
        flat = z.flatten(1)
        assert torch.corrcoef(flat).triu(1).abs().max() < 0.01  # heads
        assert abs(torch.corrcoef(torch.stack([z[0, :, 1:].flatten(), z[0, :, :-1].flatten()]))[0, 1]) < 0.01  # keys
        assert abs(torch.corrcoef(torch.stack([z[0, 1:].flatten(), z[0, :-1].flatten()]))[0, 1]) < 0.01  # queries
    skew = (
        (Noise("gumbel").draw(torch.tensor([5]), 0, 1, positions, positions[None]) - 0.5772) ** 3
    ).mean() / 1.2825**3
    assert abs(skew.item() - 1.1395) < 0.1  # a Gumbel is skewed, a Gaussian is not


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
    from kvexp.core import Budget, Cadence, AttentionParams, EvictionLayer, MemoryTracker, CacheConfig, SequenceState
    from kvexp.methods import H2O
    torch.set_num_threads(1)
    length, heads, dim = 16384, 8, 64
    q, k, v = (torch.randn(1, heads, length, dim) for _ in range(3))
    state = EvictionLayer(CacheConfig(H2O(), Budget(kv_ratio=0.5)), 0, 1, SequenceState(), MemoryTracker(1), None)
    small = EvictionLayer(CacheConfig(H2O(), Budget(kv_ratio=0.5)), 0, 1, SequenceState(), MemoryTracker(1), None)
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
