"""How many k-means iterations hide behind a layer's prefill: measured times, fitted, turned into a cap."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvexp.retrieval.kmeans import lloyd, starting_rows

FEW, MORE = 3, 9  # iterations timed: the fixed part of clustering is that of `FEW`, the slope comes from both
PATIENCE = 2.0  # seconds: a length that took more to measure is the longest one measured


@dataclass(frozen=True)
class Profile:
    """Seconds as polynomials of the prompt's tokens n, highest power first.

    compute: of one layer's prefill; base: of clustering one layer's keys with FEW iterations; per_iteration: of each
    one more.
    """

    compute: tuple[float, ...]
    base: tuple[float, ...]
    per_iteration: tuple[float, ...]

    def iterations(self, tokens: int, *, share: float = 1.0, least: int = FEW, most: int = 300) -> int:
        """int((share * compute - base) / per_iteration + FEW), within [least, most].

        Source: PQCache, arXiv:2407.12820, section 3.3, which leaves the formula open; this is that of its code, with
        coefficients measured here instead of one card's. Defaults are those of the SIGMOD version; the first release
        has share=0.5 (it clusters while two layers compute) and most=10.
        """
        spare = share * at(self.compute, tokens) - at(self.base, tokens)
        slope = at(self.per_iteration, tokens)
        wanted = spare / slope + FEW if slope > 0 else float(most)
        return max(least, min(most, int(wanted)))


def at(polynomial: Sequence[float], x: float) -> float:
    """Its value at x."""
    value = 0.0
    for coefficient in polynomial:
        value = value * x + coefficient
    return value


def fitted(lengths: Sequence[int], seconds: Sequence[float], degree: int) -> tuple[float, ...]:
    """Least squares, highest power first; points count by their share of the time, so that short prompts fit too."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (lengths, seconds))
    degree = min(degree, len(set(lengths)) - 1)
    scale = x.max()
    powers = torch.stack([(x / scale) ** p for p in range(degree, -1, -1)], dim=1)
    found = torch.linalg.lstsq(powers / y[:, None], torch.ones_like(y)[:, None]).solution[:, 0]
    scales = torch.stack([scale**p for p in range(degree, -1, -1)])
    return tuple((found / scales).tolist())


def measured(
    layer_seconds: Callable[[int], float], problems: int, dim: int, clusters: int, lengths: Sequence[int], device: str
) -> Profile:
    """Time one layer and the clustering of its keys (`problems` = kv heads x sub-spaces, `dim` components each).

    lengths: ascending; those after one that takes longer than PATIENCE are left to the fit.
    """
    known: list[int] = []
    compute, few, slopes = [], [], []
    for n in lengths:
        start = time.perf_counter()
        known.append(n)
        compute.append(layer_seconds(n))
        few.append(clustering_seconds(n, problems, dim, clusters, FEW, device))
        more = clustering_seconds(n, problems, dim, clusters, MORE, device)
        slopes.append(max(1e-9, (more - few[-1]) / (MORE - FEW)))
        if time.perf_counter() - start > PATIENCE:
            break
    return Profile(fitted(known, compute, 2), fitted(known, few, 1), fitted(known, slopes, 1))


def clustering_seconds(
    tokens: int, problems: int, dim: int, clusters: int, iterations: int, device: str, repeats: int = 3
) -> float:
    """Seconds that exactly so many iterations over random points take: the fastest of a few."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(problems, max(tokens, clusters), dim, generator=generator).to(device)
    start, best = starting_rows(points.shape[1], clusters, 0), float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        lloyd(points, start, iterations, tolerance=0.0).labels.sum().item()  # reading it waits for the device
        best = min(best, time.perf_counter() - begin)
    return best
