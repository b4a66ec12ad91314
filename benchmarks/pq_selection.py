"""The choice alone: PQCache's approximate scores and top k against exact q.K and top k; and k-means iterations.

    python -m benchmarks.pq_selection --slots 2048 8192 32768 --heads 8 --group 4 --dim 128

Random keys: the numbers say what the arithmetic costs and nothing about what is found. Each time is the median of
several after warm-ups; all sides are measured in turns, so that a busy machine is busy for all. k-means iterations are
per second of a whole layer (kv heads x m problems); scikit-learn's, which clusters one problem after
the other, where it is installed (it is not needed) and on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import in_turns, spent
from kvexp.core.slot_order import topk_slots
from kvexp.retrieval.index import init_rows, lloyd
from kvexp.retrieval.method import reduce_group
from kvexp.retrieval.pqcache import dots
from kvexp.util.output import watch_pipes

FEW, MORE = 2, 6  # iterations timed; the difference leaves out what is done once
_RATES = ("kmeans_iterations_per_s", "scikit_learn_iterations_per_s")


def turns(tasks: dict[str, Callable[[], Any]], device: str, repeats: int, warm: int = 2) -> dict[str, list[float]]:
    """Seconds of each task, measured in turns."""
    timed = {name: lambda task=task: {"wall_s": spent(task, device)[1]} for name, task in tasks.items()}
    return {name: [sample["wall_s"] for sample in samples] for name, samples in in_turns(timed, repeats, warm).items()}


def iterations(points: Tensor, clusters: int, options: argparse.Namespace) -> dict[str, float | None]:
    """k-means iterations per second over all problems of points [N, n, d]: what MORE - FEW of them take."""
    start = init_rows(points.shape[1], clusters, 0)
    tasks: dict[str, Callable[[], Any]] = {
        f"ours {n}": lambda n=n: lloyd(points, start, n, tolerance=0.0) for n in (FEW, MORE)
    }
    if importlib.util.find_spec("sklearn") and points.device.type == "cpu":
        tasks |= {f"scikit-learn {n}": _library(points, start, n, options.threads) for n in (FEW, MORE)}
    taken = turns(tasks, options.device, max(3, options.repeats // 3), 1)
    rates: dict[str, float | None] = {"ours": None, "scikit-learn": None}
    for name in rates:
        if f"{name} {FEW}" in taken:
            pairs = zip(taken[f"{name} {FEW}"], taken[f"{name} {MORE}"], strict=True)
            rates[name] = (MORE - FEW) / max(1e-9, statistics.median(more - few for few, more in pairs))
    return rates


def _library(points: Tensor, start: Tensor, count: int, threads: int) -> Callable[[], None]:
    """K-means of scikit-learn, one problem after the other, as PQCache's release calls it."""
    cluster, pool = importlib.import_module("sklearn.cluster"), importlib.import_module("threadpoolctl")
    parts = [group.contiguous().numpy() for group in points]
    rows = start.numpy()

    def run() -> None:
        with pool.threadpool_limits(threads), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged is the point
            for group in parts:
                options = {"n_init": 1, "tol": 0.0, "max_iter": count, "algorithm": "lloyd", "random_state": 0}
                cluster.KMeans(len(rows), init=group[rows], **options).fit(group)

    return run


def selection(slots: int, options: argparse.Namespace) -> dict[str, Any]:
    """One length: seconds of both ways to choose a fifth of the slots for one query, and of their scores alone."""
    heads, group, dim, device = options.heads, options.group, options.dim, options.device
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    query, keys = random(1, heads, group, dim), random(1, heads, slots, dim)
    clusters = 1 << options.b
    centroids = random(1, heads, options.m, clusters, dim // options.m)
    codes = torch.randint(0, clusters, (1, heads, slots, options.m), generator=generator).to(device, torch.uint8)
    candidates = torch.ones(1, 1, slots, dtype=torch.bool, device=device)
    count = slots // 5
    counts = torch.tensor([count], device=device)

    def top(x: Tensor) -> Tensor:
        return topk_slots(reduce_group(x * dim**-0.5, "softmax_sum"), candidates, counts, count)

    taken = turns(
        {
            "exact": lambda: top(torch.matmul(query, keys.transpose(-1, -2))),
            "pqcache": lambda: top(dots(query, centroids, codes)),
            "exact_scores": lambda: torch.matmul(query, keys.transpose(-1, -2)),
            "pqcache_scores": lambda: dots(query, centroids, codes),
        },
        device,
        options.repeats,
    )
    medians = {name: statistics.median(times) for name, times in taken.items()}
    ratios = {
        "ratio": medians["exact"] / medians["pqcache"],
        "ratio_scores": medians["exact_scores"] / medians["pqcache_scores"],
    }
    points = keys[0].unflatten(-1, (options.m, -1)).transpose(1, 2).flatten(0, 1)
    rates = iterations(points, clusters, options)
    return {
        "slots": slots,
        **medians,
        **ratios,
        "kmeans_iterations_per_s": rates["ours"],
        "scikit_learn_iterations_per_s": rates["scikit-learn"],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pq_selection", description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--heads", type=int, default=8, help="kv heads")
    parser.add_argument("--group", type=int, default=4, help="query heads per kv head")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--m", type=int, default=2)
    parser.add_argument("--b", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the rows to this file too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(
        f"{options.heads} kv heads x {options.group} query heads x {options.dim}, m={options.m} b={options.b}, "
        f"one query, {options.device}, {options.threads} threads"
    )
    print(
        "| slots | exact ms | pqcache ms | ratio | scores alone: exact ms | pqcache ms | ratio "
        "| k-means iterations/s | scikit-learn's |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for slots in options.slots:
        with torch.inference_mode():
            row = selection(slots, options)
        rows.append(row)
        cells = (
            f"{row['exact'] * 1e3:.2f}",
            f"{row['pqcache'] * 1e3:.2f}",
            f"{row['ratio']:.1f}",
            f"{row['exact_scores'] * 1e3:.2f}",
            f"{row['pqcache_scores'] * 1e3:.2f}",
            f"{row['ratio_scores']:.1f}",
            *("-" if row[name] is None else f"{row[name]:.1f}" for name in _RATES),
        )
        print(f"| {slots} | {' | '.join(cells)} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
