"""TT2T, TPOT and device memory of retrieval methods against the length of the prompt (arXiv:2407.12820, Fig. 10a, b).

    python -m benchmarks.retrieval_latency --lengths 2048 8192 32768 --layers 32 --hidden 4096 --heads 32 --kv-heads 8

Random weights: what is generated means nothing, what it takes does. Per length, methods run in turns and full attention
is the first of them; times are medians, and each stands beside its ratio to full. A method that runs out of memory is a
row that says so. Figure 7's three times for one layer (prefill, offload, clustering) end the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvexp.core import Budget, Method
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.hf import pack_linear, random_model
from kvexp.hf.cache import measure_layer_time
from kvexp.hf.patch import head_dim, num_kv_heads
from kvexp.methods import H2O, Full
from kvexp.retrieval import InfLLM, PQCache, SparQ
from kvexp.retrieval.index import clustering_seconds
from kvexp.retrieval.offload import OffloadConfig, OffloadedKV
from kvexp.util import watch_pipes

METHODS: dict[str, Method] = {
    "full": Full(),
    "h2o": H2O(),
    "sparq": SparQ(n_sinks=32),
    "infllm": InfLLM(n_sinks=32),
    "pqcache": PQCache(n_sinks=32),
    "pqcache, adaptive": PQCache(n_sinks=32, max_iter="adaptive"),
    "pqcache, clustered on the model's device": PQCache(n_sinks=32, cluster_on="model"),
}


def one(model: Any, method: Method, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of one generation, or what went wrong."""
    cuda = options.device.startswith("cuda")
    prompt = torch.randint(0, 100, (1, length), generator=torch.Generator().manual_seed(0)).tolist()
    budget = None if method.name == "full" else Budget(kv_ratio=options.kv_ratio)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    try:
        made = generate(
            model, prompt, method, budget, decoding=GenerationParams(options.new, eos=None), beyond_context=True
        )
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    receipt = receipts(made.cache)[0]
    return {
        "tt2t_s": made.timing.tt2t_s,
        "tpot_s": made.timing.tpot_s,
        "kv_bytes": receipt.kv_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else receipt.peak_kv_bytes,
        **(receipt.retrieval or {}),
    }


def table(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per length and method, medians over the repeats."""
    rows = []
    for length in options.lengths:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.methods}
        for turn in range(options.repeats + 1):  # the first warms up
            for name in options.methods:
                result = one(model, METHODS[name], length, options)
                if turn:
                    runs[name].append(result)
        full = None
        for name, found in runs.items():
            row: dict[str, Any] = {"length": length, "method": name, **found[-1]}
            if "error" not in row:
                for key in ("tt2t_s", "tpot_s"):
                    row[key] = statistics.median(run[key] for run in found)
                full = row if name == "full" else full
                cells = [f"{row['tt2t_s']:.3f}", _ratio(row, full, "tt2t_s"), f"{row['tpot_s'] * 1e3:.1f}"]
                cells += [_ratio(row, full, "tpot_s"), f"{row['kv_bytes'] / 2**20:.1f}", _rate(row)]
                print(f"| {length} | {name} | {' | '.join(cells)} |", flush=True)
            else:
                print(f"| {length} | {name} | {row['error']} | | | | | |", flush=True)
            rows.append(row)
    return rows


def _ratio(row: dict[str, Any], full: dict[str, Any] | None, key: str) -> str:
    return "" if full is None else f"{row[key] / full[key]:.2f}"


def _rate(row: dict[str, Any]) -> str:
    return "" if row.get("cache_hit_rate") is None else f"{row['cache_hit_rate']:.2f}"


def one_layer(model: Any, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figure 7: seconds of one layer's prefill, of sending its keys and values home, of clustering its keys."""
    config, dtype = model.config, next(model.parameters()).dtype
    heads, dim = num_kv_heads(config), head_dim(config)
    keys = torch.randn(1, heads, length, dim, dtype=dtype, device=options.device)
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        OffloadedKV(keys, keys, [length], OffloadConfig(32, [32], length)).settle()
        taken.append(time.perf_counter() - start)
    clustering = clustering_seconds(length, heads * 2, dim // 2, 64, 10, "cpu", repeats=1)
    return {
        "length": length,
        "prefill_s": measure_layer_time(model, length),
        "offload_s": min(taken),
        "kmeans_s": clustering,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval_latency", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kv-ratio", type=float, default=0.2)
    parser.add_argument("--new", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--json", help="write the rows to this file too")
    options = parser.parse_args(arguments)
    model = random_model(
        "llama",
        dtype=options.dtype,
        device=options.device,
        vocab_size=1000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=max(options.lengths) + options.new,
    )
    pack_linear(model)
    print("| prompt | method | TT2T s | to full | TPOT ms | to full | KV on the device MiB | hit rate |")
    print("|---|---|---|---|---|---|---|---|")
    rows = table(model, options)
    print("\n| prompt | one layer's prefill s | offload s | 10 k-means iterations s |\n|---|---|---|---|")
    layers = [one_layer(model, length, options) for length in options.lengths]
    for row in layers:
        print(f"| {row['length']} | {row['prefill_s']:.4f} | {row['offload_s']:.4f} | {row['kmeans_s']:.4f} |")
    if options.json:
        found = {"options": vars(options), "rows": rows, "one_layer": layers}
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
