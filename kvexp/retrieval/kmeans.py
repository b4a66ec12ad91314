"""Lloyd's k-means for N problems at once, deterministic on every device, which no library offers together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILES = {"cpu": 1 << 20, "cuda": 1 << 26}  # distances held at a time: a CPU's cache, 256 MiB


@dataclass(frozen=True)
class Clusters:
    """Clusters of N problems of n points: centroids [N, K, d] float32, labels [N, n] int64, iterations [N] made."""

    centroids: Tensor
    labels: Tensor
    iterations: Tensor


def init_rows(count: int, clusters: int, seed: int) -> Tensor:
    """Indices [K] of distinct points out of `count` to start from: numpy's legacy generator, as in PQCache's release.

    They depend on `count` and `seed` alone, so every layer, head and sub-space of a prompt starts from the same rows.
    """
    return torch.from_numpy(np.random.RandomState(seed).choice(np.arange(count), clusters, replace=False))


def lloyd(points: Tensor, start: Tensor, iterations: int, tolerance: float = 1e-4) -> Clusters:
    """Cluster points [N, n, d], starting from the points start [K], in at most `iterations` iterations.

    A problem ends early when no label changes or when the centroids move less than `tolerance` times the mean variance
    of its components (squared, summed over centroids): the rule of scikit-learn, whose KMeans the release calls. A
    cluster that loses all its points starts again at the point farthest from its centroid. Float32 throughout.
    """
    points = points.float()
    middle = points.mean(1, keepdim=True)
    points = points - middle  # distances lose fewer digits around zero
    bound = tolerance * torch.stack([part.square().mean() for part in points])
    centroids = points[:, start.to(points.device)]
    labels = torch.full(points.shape[:2], -1, dtype=torch.int64, device=points.device)
    made = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    settled = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    active = torch.arange(len(points), device=points.device)
    for _ in range(iterations):
        part, old = _select(points, active), _select(centroids, active)
        nearest, gap = assign(part, old)
        moved = _update_centroids(part, nearest, gap, old)
        same = (nearest == _select(labels, active)).all(1)
        still = (moved - old).square().sum((1, 2)) <= bound[active]
        centroids[active], labels[active] = moved, nearest
        settled[active] = same
        made[active] += 1
        active = active[~(same | still)]
        if not len(active):
            break
    late = (~settled).nonzero()[:, 0]  # their centroids moved after the last assignment
    if len(late):
        labels[late] = assign(_select(points, late), _select(centroids, late))[0]
    return Clusters(centroids + middle, labels, made)


def _select(x: Tensor, problems: Tensor) -> Tensor:
    """x [N, ...] at the problems given, without a copy where these are all of them."""
    return x if len(problems) == len(x) else x[problems]


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid [N, n] of points [N, n, d], and the squared distance to it less the point's squared norm."""
    half = centroids.square().sum(-1) / 2
    if points.shape[1] <= _points_per_tile(centroids):
        closeness, label = torch.baddbmm(-half[:, None], points, centroids.transpose(1, 2)).max(-1)
        return label, -2 * closeness
    labels, gaps = [], []
    for part in points.split(_points_per_tile(centroids), dim=1):
        closeness, label = torch.baddbmm(-half[:, None], part, centroids.transpose(1, 2)).max(-1)
        labels.append(label)
        gaps.append(-2 * closeness)
    return torch.cat(labels, dim=1), torch.cat(gaps, dim=1)


def _update_centroids(points: Tensor, labels: Tensor, gaps: Tensor, centroids: Tensor) -> Tensor:
    """New centroids [N, K, d]: the mean of every cluster; empty clusters start again (`_reseed_empty`)."""
    sums, counts = _cluster_sums(points, labels, centroids)
    empty = (counts == 0).any(1).nonzero()[:, 0].tolist()
    for i in empty:
        _reseed_empty(sums[i], counts[i], points[i], labels[i], gaps[i] + points[i].square().sum(-1))
    return sums / counts.clamp(min=1)[..., None]


def _cluster_sums(points: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum [N, K, d] and number [N, K] of the points of every cluster."""
    n, clusters, dim = centroids.shape
    if points.device.type != "cpu":
        return _cluster_sums_by_product(points, labels, centroids)
    flat = (labels + torch.arange(n)[:, None] * clusters).flatten()
    sums = points.new_zeros(n * clusters, dim).index_add_(0, flat, points.reshape(-1, dim))
    return sums.view_as(centroids), torch.bincount(flat, minlength=n * clusters).view(n, clusters).float()


def _cluster_sums_by_product(points: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """`_cluster_sums` by matrix products: on a GPU scattered additions come in another order every time."""
    n, clusters = centroids.shape[:2]
    sums, counts = torch.zeros_like(centroids), points.new_zeros(n, clusters)
    for part, label in zip(
        points.split(_points_per_tile(centroids), dim=1), labels.split(_points_per_tile(centroids), dim=1), strict=True
    ):
        member = torch.nn.functional.one_hot(label, clusters).to(points.dtype)
        sums = sums + torch.bmm(member.transpose(1, 2), part)
        counts = counts + member.sum(1)
    return sums, counts


def _points_per_tile(centroids: Tensor) -> int:
    """How many points of every problem are processed at a time."""
    tile = TILES.get(centroids.device.type, TILES["cuda"])
    return max(1, tile // max(1, centroids.shape[0] * centroids.shape[1]))


def _reseed_empty(sums: Tensor, counts: Tensor, points: Tensor, labels: Tensor, distances: Tensor) -> None:
    """Give every empty cluster the point farthest from its own centroid, taken out of the cluster it was in."""
    empty = (counts == 0).nonzero()[:, 0]
    far = distances.argsort(descending=True, stable=True)[: len(empty)]
    for cluster, point in zip(empty.tolist(), far.tolist(), strict=True):
        old = labels[point]
        sums[old] -= points[point]
        counts[old] -= 1
        sums[cluster], counts[cluster] = points[point], 1
