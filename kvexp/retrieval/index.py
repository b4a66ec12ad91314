"""Indexes of keys: product quantisation by k-means."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.retrieval.offload import CopyStreams, empty_host, index_select_host

# The index of a retrieval method for one layer: named tensors that grow, move with the rows and may be offloaded.


@dataclass
class _Entry:
    """A tensor [B, ...] of the index.

    per: positions per entry of axis 2 (0: it does not grow); ship: whether it is kept on the host.
    """

    tensor: Tensor
    per: int = 0
    ship: bool = False


class KVIndex:
    """What a retrieval method has computed of a prompt: named tensors [B, ...], and notes per row.

    Offloaded tensors live on the host and are copied to the device at every step. notes: what a row of results should
    say.
    """

    def __init__(self) -> None:
        self.copy_streams: CopyStreams | None = None  # set once it is known where the prompt is
        self.entries: dict[str, _Entry] = {}
        self.notes: dict[str, list[Any]] = {}  # what a row of results should say, per batch row
        self._in_flight: dict[str, tuple[Tensor, torch.cuda.Event | None]] = {}
        self._pending_writes: list[tuple[str, list[int], Tensor, torch.cuda.Event | None]] = []
        self._read_by: dict[str, torch.cuda.Event | None] = {}  # the last copy to the device that reads a tensor

    def register(self, name: str, tensor: Tensor, *, per: int = 0, home: torch.device | None = None) -> None:
        """Add a tensor [B, ...] to the index.

        per: axis 2 has one entry per so many positions and grows with them (0: it does not grow). home: the device to
        keep it on (pinned CPU memory where the model is on a GPU), from which it is copied over at every step; None: it
        is on the computing device, or is moved there at its first use, so that a job on the host waits for no
        computation.
        """
        if home is not None and self.copy_streams is not None and self.copy_streams.device != home:
            tensor = empty_host(tuple(tensor.shape), tensor, home, pinned=True).copy_(tensor)
        self.entries[name] = _Entry(tensor, per, home is not None)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Tensor:
        """The tensor on the device. Of an offloaded tensor it is a copy for this step only: changes to it are lost."""
        entry, copy_streams = self.entries[name], self.copy_streams
        if copy_streams is None or entry.tensor.device == copy_streams.device:
            return entry.tensor
        if not entry.ship:
            entry.tensor = entry.tensor.to(copy_streams.device)
            return entry.tensor
        if name not in self._in_flight:
            self.prefetch()
        tensor, event = self._in_flight.pop(name)
        copy_streams.wait(event, tensor)
        return tensor

    def write(self, name: str, entries: list[int], value: Tensor) -> None:
        """Write value [B, H, ...] to entries[i] of axis 2, for every row i.

        Offloaded tensors hold it from the next step on.
        """
        entry = self.entries[name]
        if max(entries) >= entry.tensor.shape[2]:
            self.grow(max(entries) * max(entry.per, 1) + 1)
        value, copy_streams = value.to(entry.tensor.dtype), self.copy_streams
        if copy_streams is None or not self._is_remote(entry):
            entry.tensor[torch.arange(len(entries)), :, torch.tensor(entries)] = value
            return
        host_copy = empty_host(tuple(value.shape), value, entry.tensor.device, pinned=True)
        copy_streams.hold("d2h", value)
        with copy_streams.copying("d2h"):
            host_copy.copy_(value, non_blocking=True)
        self._pending_writes.append((name, entries, host_copy, copy_streams.record("d2h")))

    def flush(self) -> None:
        """Wait for pending copies to the host and store them in their tensors, which nothing may read meanwhile."""
        for name, entries, host_copy, event in self._pending_writes:
            for awaited in (event, self._read_by.pop(name, None)):
                if awaited is not None:
                    awaited.synchronize()
            self.entries[name].tensor[torch.arange(len(entries)), :, torch.tensor(entries)] = host_copy
        self._pending_writes.clear()

    def grow(self, positions: int) -> None:
        """Grow to at least so many positions; new entries hold zeros."""
        self.flush()
        for name, entry in self.entries.items():
            old = entry.tensor
            if not entry.per or positions <= old.shape[2] * entry.per:
                continue
            shape = (*old.shape[:2], -(-(positions + 63) // entry.per), *old.shape[3:])
            entry.tensor = empty_host(shape, old, old.device, pinned=self._is_remote(entry))
            entry.tensor[:, :, : old.shape[2]] = old
            entry.tensor[:, :, old.shape[2] :] = 0
            self._in_flight.pop(name, None)  # too short by now

    # -- shipping -----------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start copying the offloaded tensors to the device, during the computation of the previous layer."""
        if self._pending_writes:
            self.flush()
            self._in_flight.clear()  # prefetched copies that the last step did not use lack the newest tokens
        for name, entry in self.entries.items():
            if self._is_remote(entry) and name not in self._in_flight:
                assert self.copy_streams is not None
                with self.copy_streams.copying("h2d"):
                    arriving = entry.tensor.to(self.copy_streams.device, non_blocking=True)
                self._read_by[name] = self.copy_streams.record("h2d")
                self._in_flight[name] = (arriving, self._read_by[name])

    def _is_remote(self, entry: _Entry) -> bool:
        """Whether the tensor is offloaded to another device than the computing one."""
        return entry.ship and self.copy_streams is not None and entry.tensor.device != self.copy_streams.device

    @property
    def pinned(self) -> bool:
        """Whether all tensors that are copied to another device are in pinned memory."""
        return all(entry.tensor.is_pinned() for entry in self.entries.values() if self._is_remote(entry))

    def tensors(self, *, ship: bool) -> list[Tensor]:
        """The offloaded tensors (ship), or those on the device."""
        return [entry.tensor for entry in self.entries.values() if entry.ship == ship]

    def nbytes(self, *, ship: bool) -> int:
        """Bytes of `tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors(ship=ship))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def index_rows(self, rows: Tensor) -> KVIndex:
        """A copy of the index for batch rows `rows` [n], which may repeat."""
        self.flush()
        other = copy.copy(self)
        other._in_flight, other._pending_writes, other._read_by = {}, [], {}
        other.entries = {
            name: replace(entry, tensor=index_select_host(entry.tensor, rows, pinned=self._is_remote(entry)))
            for name, entry in self.entries.items()
        }
        other.notes = {name: [values[i] for i in rows.tolist()] for name, values in self.notes.items()}
        return other


# Lloyd's k-means for N problems at once, deterministic on every device, which no library offers together.


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
    bound = tolerance * torch.stack([cloud.square().mean() for cloud in points])
    centroids = points[:, start.to(points.device)]
    labels = torch.full(points.shape[:2], -1, dtype=torch.int64, device=points.device)
    iterations_done = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    settled = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    active = torch.arange(len(points), device=points.device)
    for _ in range(iterations):
        moving, old = _select(points, active), _select(centroids, active)
        nearest, gap = assign(moving, old)
        moved = _update_centroids(moving, nearest, gap, old)
        same = (nearest == _select(labels, active)).all(1)
        still = (moved - old).square().sum((1, 2)) <= bound[active]
        centroids[active], labels[active] = moved, nearest
        settled[active] = same
        iterations_done[active] += 1
        active = active[~(same | still)]
        if not len(active):
            break
    late = (~settled).nonzero()[:, 0]  # their centroids moved after the last assignment
    if len(late):
        labels[late] = assign(_select(points, late), _select(centroids, late))[0]
    return Clusters(centroids + middle, labels, iterations_done)


def _select(x: Tensor, problems: Tensor) -> Tensor:
    """x [N, ...] at the problems given, without a copy where these are all of them."""
    return x if len(problems) == len(x) else x[problems]


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid [N, n] of points [N, n, d], and the squared distance to it less the point's squared norm."""
    half = centroids.square().sum(-1) / 2
    tiles = points.split(_points_per_tile(centroids), dim=1)
    best = [torch.baddbmm(-half[:, None], tile, centroids.transpose(1, 2)).max(-1) for tile in tiles]
    return torch.cat([tile.indices for tile in best], dim=1), -2 * torch.cat([tile.values for tile in best], dim=1)


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
    tile = _points_per_tile(centroids)
    for tile_points, label in zip(points.split(tile, dim=1), labels.split(tile, dim=1), strict=True):
        member = torch.nn.functional.one_hot(label, clusters).to(points.dtype)
        sums = sums + torch.bmm(member.transpose(1, 2), tile_points)
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


# The number of k-means iterations that hide behind a layer's prefill, from a cost model fitted to measured times.


# Iterations timed: the fixed cost of clustering is that of MIN_ITERATIONS, the slope comes from both.
MIN_ITERATIONS, TIMED_ITERATIONS = 3, 9
MAX_SECONDS = 2.0  # seconds: a length that took more to measure is the longest one measured


@dataclass(frozen=True)
class CostModel:
    """Times in seconds as polynomials of the prompt's tokens n, highest power first.

    compute: one layer's prefill; base: clustering one layer's keys with MIN_ITERATIONS; per_iteration: each iteration
    more.
    """

    compute: tuple[float, ...]
    base: tuple[float, ...]
    per_iteration: tuple[float, ...]

    def iterations(self, tokens: int, *, share: float = 1.0, most: int = 300) -> int:
        """int((share * compute - base) / per_iteration + MIN_ITERATIONS), within [MIN_ITERATIONS, most].

        Source: PQCache, arXiv:2407.12820, section 3.3, which leaves the formula open; this is that of its code, with
        coefficients measured here instead of one card's. Defaults are the SIGMOD version's; the first release has
        share=0.5 (it clusters while two layers compute) and most=10.
        """
        spare = share * np.polyval(self.compute, tokens) - np.polyval(self.base, tokens)
        slope = np.polyval(self.per_iteration, tokens)
        wanted = spare / slope + MIN_ITERATIONS if slope > 0 else float(most)
        return max(MIN_ITERATIONS, min(most, int(wanted)))


def fitted(lengths: Sequence[int], seconds: Sequence[float], degree: int) -> tuple[float, ...]:
    """Polynomial fitted by least squares, highest power first; errors are relative, so that short prompts fit too."""
    weights = 1 / np.asarray(seconds)
    return tuple(np.polyfit(lengths, seconds, min(degree, len(set(lengths)) - 1), w=weights).tolist())


def profile_kmeans(
    layer_seconds: Callable[[int], float], problems: int, dim: int, clusters: int, lengths: Sequence[int], device: str
) -> CostModel:
    """Time one layer and the clustering of its keys (`problems` = kv heads x sub-spaces, `dim` components each).

    lengths: prompt lengths, ascending; the first that takes longer than MAX_SECONDS is the last one measured.
    """
    known: list[int] = []
    compute, few, slopes = [], [], []
    for n in lengths:
        start = time.perf_counter()
        known.append(n)
        compute.append(layer_seconds(n))
        few.append(clustering_seconds(n, problems, dim, clusters, MIN_ITERATIONS, device))
        more = clustering_seconds(n, problems, dim, clusters, TIMED_ITERATIONS, device)
        slopes.append(max(1e-9, (more - few[-1]) / (TIMED_ITERATIONS - MIN_ITERATIONS)))
        if time.perf_counter() - start > MAX_SECONDS:
            break
    return CostModel(fitted(known, compute, 2), fitted(known, few, 1), fitted(known, slopes, 1))


def clustering_seconds(
    tokens: int, problems: int, dim: int, clusters: int, iterations: int, device: str, repeats: int = 3
) -> float:
    """Seconds that exactly `iterations` iterations over random points take: the fastest of `repeats`.

    tokens: points per problem; problems, dim, clusters: as of `profile_kmeans`.
    """
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(problems, max(tokens, clusters), dim, generator=generator).to(device)
    start, best = init_rows(points.shape[1], clusters, 0), float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        lloyd(points, start, iterations, tolerance=0.0).labels.sum().item()  # reading it waits for the device
        best = min(best, time.perf_counter() - begin)
    return best
