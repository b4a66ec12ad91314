"""The number of k-means iterations that hide behind a layer's prefill, from a cost model fitted to measured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvexp.retrieval.kmeans import init_rows, lloyd

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

    def iterations(self, tokens: int, *, share: float = 1.0, least: int = MIN_ITERATIONS, most: int = 300) -> int:
        """int((share * compute - base) / per_iteration + MIN_ITERATIONS), within [least, most].

        Source: PQCache, arXiv:2407.12820, section 3.3, which leaves the formula open; this is that of its code, with
        coefficients measured here instead of one card's. Defaults are those of the SIGMOD version; the first release
        has share=0.5 (it clusters while two layers compute) and most=10.
        """
        spare = share * polyval(self.compute, tokens) - polyval(self.base, tokens)
        slope = polyval(self.per_iteration, tokens)
        wanted = spare / slope + MIN_ITERATIONS if slope > 0 else float(most)
        return max(least, min(most, int(wanted)))


def polyval(polynomial: Sequence[float], x: float) -> float:
    """The value of a polynomial, highest power first, at x."""
    value = 0.0
    for coefficient in polynomial:
        value = value * x + coefficient
    return value


def polyfit(lengths: Sequence[int], seconds: Sequence[float], degree: int) -> tuple[float, ...]:
    """Polynomial fitted by least squares, highest power first; errors are relative, so that short prompts fit too."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (lengths, seconds))
    degree = min(degree, len(set(lengths)) - 1)
    scale = x.max()
    powers = torch.stack([(x / scale) ** p for p in range(degree, -1, -1)], dim=1)
    found = torch.linalg.lstsq(powers / y[:, None], torch.ones_like(y)[:, None]).solution[:, 0]
    scales = torch.stack([scale**p for p in range(degree, -1, -1)])
    return tuple((found / scales).tolist())


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
    return CostModel(polyfit(known, compute, 2), polyfit(known, few, 1), polyfit(known, slopes, 1))


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
