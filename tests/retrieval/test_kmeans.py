"""Clustering: small cases by hand, scikit-learn's rule where it is installed, and the cap that hides it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import prompts_of, tiny

from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.hf import cache as adapter
from kvexp.retrieval import PQCache, index
from kvexp.retrieval.index import CostModel, fitted, init_rows, lloyd, profile_kmeans


def test_two_clusters_on_a_line():
    """Points 0 1 2 10 11 from rows 0 and 1: {0} {1 2 10 11} -> means 0 and 6 -> {0 1 2} {10 11} -> 1 and 10.5."""
    points = torch.tensor([[0.0, 1.0, 2.0, 10.0, 11.0]])[..., None]
    one, two, more = (lloyd(points, torch.tensor([0, 1]), n, tolerance=0.0) for n in (1, 2, 9))
    assert one.centroids[0, :, 0].tolist() == pytest.approx([0, 6])
    assert one.labels.tolist() == [[0, 0, 0, 1, 1]]  # assigned again once the centroids have moved
    assert two.centroids[0, :, 0].tolist() == pytest.approx([1, 10.5])
    assert more.iterations.tolist() == [3], "the third changes nothing and is the last"
    assert torch.equal(more.labels, two.labels)


def test_a_cluster_without_points_takes_the_farthest_one():
    """Rows 0 and 1 are the same point: the second cluster stays empty and takes 9, the point farthest from its own."""
    points = torch.tensor([[1.0, 1.0, 2.0, 9.0]])[..., None]
    found = lloyd(points, torch.tensor([0, 1]), 5, tolerance=0.0)
    assert found.labels.tolist() == [[0, 0, 0, 1]]
    assert found.centroids[0, :, 0].tolist() == pytest.approx([4 / 3, 9])


def test_fewer_different_points_than_centroids_do_not_break_it():
    points = torch.tensor([[3.0] * 7 + [5.0] * 4])[..., None]
    found = lloyd(points, torch.arange(5), 10)
    assert torch.isfinite(found.centroids).all()
    nearest = found.centroids[0, found.labels[0], 0]
    torch.testing.assert_close(nearest, points[0, :, 0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), clusters=st.integers(1, 7), iterations=st.integers(1, 6))
def test_labels_are_the_nearest_centroids_and_problems_do_not_know_each_other(seed, clusters, iterations):
    points = torch.randn(3, 23, 5, generator=torch.Generator().manual_seed(seed))
    start = init_rows(23, clusters, seed)
    together = lloyd(points, start, iterations)
    far = torch.cdist(points.double(), together.centroids.double())
    chosen = far.gather(2, together.labels[..., None])[..., 0]
    # A problem that settled holds the labels its centroids are the means of; they are the nearest, too.
    torch.testing.assert_close(chosen, far.min(-1).values, atol=1e-4, rtol=0)
    for i in range(3):
        alone = lloyd(points[i : i + 1], start, iterations)
        assert torch.equal(alone.labels[0], together.labels[i])
        assert alone.iterations[0] == together.iterations[i]
        torch.testing.assert_close(alone.centroids[0], together.centroids[i], atol=1e-5, rtol=0)


def test_tiles_change_nothing(monkeypatch):
    points = torch.randn(2, 101, 3, generator=torch.Generator().manual_seed(1))
    whole = lloyd(points, init_rows(101, 7, 0), 5)
    monkeypatch.setitem(index.TILES, "cpu", 100)
    parts = lloyd(points, init_rows(101, 7, 0), 5)
    assert torch.equal(whole.labels, parts.labels)
    assert torch.equal(whole.centroids, parts.centroids)


def test_the_sums_of_a_gpu_are_those_of_a_cpu():
    """The product that a GPU uses, so that two runs agree to the bit, on a CPU."""
    points, labels = torch.randn(2, 37, 3), torch.randint(0, 5, (2, 37))
    centroids = torch.zeros(2, 5, 3)
    mine = index._cluster_sums(points, labels, centroids)
    product = index._cluster_sums_by_product(points, labels, centroids)
    for a, b in zip(mine, product, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_starts_are_those_of_the_release():
    """As recorded: RandomState(4321) over 44 keys and 8 centroids, the same for every layer, head and sub-space."""
    assert init_rows(44, 8, 4321).tolist() == [13, 36, 23, 5, 32, 25, 12, 16]


@pytest.mark.parametrize("seed", range(5))
def test_scikit_learn_agrees(seed):
    cluster = pytest.importorskip("sklearn.cluster", reason="scikit-learn is not installed")
    points = torch.randn(1, 97, 4, generator=torch.Generator().manual_seed(seed))
    start = init_rows(97, 6, seed)
    theirs = cluster.KMeans(6, init=points[0][start].numpy(), n_init=1, max_iter=8, tol=1e-4, algorithm="lloyd")
    theirs.fit(points[0].numpy())
    ours = lloyd(points, start, 8)
    assert ours.labels[0].tolist() == theirs.labels_.tolist()
    assert ours.iterations.item() == theirs.n_iter_
    torch.testing.assert_close(ours.centroids[0], torch.from_numpy(theirs.cluster_centers_), atol=1e-5, rtol=0)


# -- how many iterations hide ------------------------------------------------------------------------------------------


def test_iterations_that_hide():
    """A layer takes n ms; three iterations take 2 n ms / 10, each more n / 10 ms: (1 - 0.2) / 0.1 + 3 = 11."""
    profile = CostModel((1e-3, 0.0), (2e-4, 0.0), (1e-4, 0.0))
    assert profile.iterations(1000) == 11
    assert profile.iterations(1000, share=0.5) == 6
    assert profile.iterations(1000, most=10) == 10
    slow = CostModel((1e-6, 0.0), (2e-4, 0.0), (1e-4, 0.0))
    assert slow.iterations(1000) == 3, "never fewer than the least"


def test_fits_return_the_polynomial_they_were_made_of():
    lengths = [256, 512, 1024, 2048]
    for wanted in ((3e-9, 2e-6, 1e-3), (2e-6, 1e-3)):
        found = fitted(lengths, [np.polyval(wanted, n) for n in lengths], len(wanted) - 1)
        assert found == pytest.approx(wanted, rel=1e-6)
    assert len(fitted([128], [0.5], 2)) == 1, "one length is a constant"


def test_a_machine_is_measured_and_a_length_that_takes_long_is_the_last_one(monkeypatch):
    profile = profile_kmeans(lambda n: n * 1e-4, 4, 8, 16, [64, 128], "cpu")
    assert np.polyval(profile.compute, 100) == pytest.approx(0.01)
    assert np.polyval(profile.base, 128) > 0 and 3 <= profile.iterations(128) <= 300
    asked = []
    monkeypatch.setattr(index, "MAX_SECONDS", 0.0)
    profile = profile_kmeans(lambda n: asked.append(n) or n * 1e-4, 2, 4, 4, [32, 64, 128], "cpu")
    assert asked == [32]
    assert np.polyval(profile.compute, 32) == np.polyval(profile.compute, 999) == pytest.approx(0.0032)


def test_adaptive_is_measured_once_per_model_and_used(monkeypatch):
    calls = []  # nothing takes long enough
    monkeypatch.setattr(adapter, "measure_layer_time", lambda model, n: calls.append(n) or 1.0)
    method = PQCache(n_sinks=2, m=1, b=2, max_iter="adaptive")
    model, prompts = tiny("gptj"), prompts_of(3, [29])
    for _ in range(2):
        out = generate(model, prompts, method, Budget(tokens=9), decoding=GenerationParams(3, eos=None))
    assert calls == [211], "the model holds fewer tokens than the shortest length, so that is its longest"
    assert receipts(out.cache)[0].retrieval["kmeans_iterations"] >= 1


def test_one_layer_is_timed():
    for family in ("llama", "mpt", "gptj"):
        assert 0 < adapter.measure_layer_time(tiny(family), 17, repeats=1) < 10
