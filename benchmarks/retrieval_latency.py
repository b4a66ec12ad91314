"""One layer's prefill, sending its keys and values home, clustering its keys (PQCache, Fig. 7; arXiv:2407.12820).

    python -m benchmarks.retrieval_latency --lengths 2048 8192 32768 --hidden 4096 --heads 32 --kv-heads 8

Random weights: what is generated means nothing, what it takes does. Times to tokens of whole generations (Fig. 10a, b):
`python -m benchmarks.suite gpu --only retrieval_2k`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvexp.hf import pack_linear, random_model
from kvexp.hf.cache import measure_layer_time
from kvexp.hf.traits import head_dim, num_kv_heads
from kvexp.retrieval.index import clustering_seconds
from kvexp.retrieval.offload import OffloadConfig, OffloadedKV
from kvexp.util.output import watch_pipes


def one_layer(model: Any, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figure 7: seconds of one layer's prefill, of sending its keys and values home, of clustering its keys."""
    config, dtype = model.config, next(model.parameters()).dtype
    heads, dim = num_kv_heads(config), head_dim(config)
    keys = torch.randn(1, heads, length, dim, dtype=dtype, device=options.device)
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        OffloadedKV(keys, keys, [length], OffloadConfig(32, [32], length)).flush()
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
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the rows to this file too")
    options = parser.parse_args(arguments)
    model = random_model(
        "llama",
        dtype=options.dtype,
        device=options.device,
        vocab_size=1000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=1,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=max(options.lengths),
    )
    pack_linear(model)
    print("| prompt | one layer's prefill s | offload s | 10 k-means iterations s |\n|---|---|---|---|")
    layers = [one_layer(model, length, options) for length in options.lengths]
    for row in layers:
        print(f"| {row['length']} | {row['prefill_s']:.4f} | {row['offload_s']:.4f} | {row['kmeans_s']:.4f} |")
    if options.json:
        content = {"options": vars(options), "one_layer": layers}
        Path(options.json).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
