"""What NVIDIA's kvpress keeps of a prompt, for tests/methods/test_peers.py. Run by `make peers`, in an environment of
its own.

Writes .peers/kvpress.npz: tiny Llama models drawn here (weights, config, prompt, logits), directions for Q-Filters
[L, H, G, D], and, per press and compression ratio, the kept positions as a bool mask [L, B, H, T]. Positions are read
off the cache that the press leaves behind, by looking each kept key up among the keys of an unpressed run: every kept
key must be there exactly once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

OUT = Path(__file__).resolve().parents[2] / ".peers" / "kvpress.npz"


class DrawnQFilters(kvpress.QFilterPress):
    """The press with filters that are set by hand; its own would come from the hub."""

    def post_init_from_model(self, model: Any) -> None:
        """Leave `q_filters` as they were set."""


RATIOS = (0.25, 0.5, 0.75, 0.9)
PRESSES = {
    "streaming_llm": kvpress.StreamingLLMPress,
    "knorm": kvpress.KnormPress,
    "snapkv": kvpress.SnapKVPress,
    "tova": kvpress.TOVAPress,
    "keydiff": kvpress.KeyDiffPress,
    "lagkv": kvpress.LagKVPress,
    "cur": kvpress.CURPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "qfilters": DrawnQFilters,
}
# The best score dropped must lie this much (relatively) below the worst one kept, so that rounding (the two sides'
# logits differ by some 1e-5 of their spread) does not choose. A seed that comes closer is refused;
# the seeds below are chosen for this.
CLEAR = 2e-4

# eager hands its attention to the press, sdpa makes the press compute its own. In `sdpa` int(T * 0.1) is window_size:
# SnapKV keeps nothing but its window. LagKV's ranks tie between partitions: at its ratios each has the same share.
CASES: dict[str, dict[str, Any]] = {
    "eager": {
        "seed": 37,
        "shape": (2, 97),
        "config": {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "num_attention_heads": 6,
            "head_dim": 14,
            "hidden_size": 66,
            "intermediate_size": 37,
            "vocab_size": 101,
        },
        "presses": {
            "streaming_llm": {},
            "knorm": {},
            "snapkv": {"window_size": 7, "kernel_size": 5},
            "tova": {},
            "keydiff": {},
            "lagkv": {"n_sink": 1, "lag_size": 16},
            "cur": {"num_sinks": 4, "local_window_size": 14},
            "expected_attention": {"n_future_positions": 31},
            "qfilters": {},
        },
        "directions": 1,
        "ratios": {"lagkv": (0.25, 0.512, 0.77, 0.82)},
    },
    "sdpa": {
        "seed": 68,
        "shape": (1, 131),
        "config": {
            "num_hidden_layers": 4,
            "num_key_value_heads": 3,
            "num_attention_heads": 15,
            "head_dim": 10,
            "hidden_size": 75,
            "intermediate_size": 41,
            "vocab_size": 137,
            "attention_bias": True,
        },
        "presses": {
            "streaming_llm": {"n_sink": 3},
            "knorm": {},
            "snapkv": {"window_size": 13, "kernel_size": 7},
            "tova": {},
            "keydiff": {},
            "lagkv": {"n_sink": 3, "lag_size": 16},
            "cur": {"num_sinks": 2, "local_window_size": 10, "leverage_type": "kv_avg"},
            "expected_attention": {"n_sink": 3, "epsilon": 0.02, "use_covariance": False, "n_future_positions": 3},
            "qfilters": {},
        },
        "directions": 1,
        "ratios": {"lagkv": (0.265, 0.53, 0.745, 0.85)},
    },
}


def draw(case: dict[str, Any], attention: str) -> tuple[LlamaForCausalLM, Tensor]:
    """Model and prompt [B, T] from the seed alone. Weights are large, so that attention is far from flat.

    No token occurs twice in a prompt: in layer 0 its keys would have the same norm wherever they stand.
    """
    dice = torch.Generator().manual_seed(case["seed"])
    model = LlamaForCausalLM(LlamaConfig(**case["config"], attn_implementation=attention)).eval()
    for name, weight in model.named_parameters():
        centre, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.3)
        weight.copy_(centre + spread * torch.randn(weight.shape, generator=dice))
    rows, columns = case["shape"]
    words = [torch.randperm(case["config"]["vocab_size"], generator=dice)[:columns] for _ in range(rows)]
    return model, torch.stack(words)


def drawn_directions(case: dict[str, Any]) -> Tensor:
    """Unit vectors [L, H, G, D], one for every query head, from the case's own seed for them."""
    dice, config = torch.Generator().manual_seed(case["directions"]), case["config"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shape = (config["num_hidden_layers"], kv_heads, heads // kv_heads, config["head_dim"])
    return torch.nn.functional.normalize(torch.randn(*shape, generator=dice), dim=-1)


def keys_of(cache: DynamicCache) -> Tensor:
    """[L, B, H, N, D]"""
    return torch.stack([layer.keys for layer in cache.layers])


@contextmanager
def clear_choices(press: Any, where: str) -> Iterator[None]:
    """Refuse a prompt for which the press makes a choice within rounding error."""
    score = press.score

    def checked(*args: Any) -> Tensor:
        scores: Tensor = score(*args)
        ranked = scores.sort(dim=-1, descending=True).values
        kept = int(scores.shape[-1] * (1 - press.compression_ratio))
        worst, best = ranked[..., kept - 1], ranked[..., kept]
        gap = ((worst - best) / torch.maximum(worst.abs(), best.abs())).min().item()
        if not gap > CLEAR:
            raise SystemExit(f"{where}: a choice hangs on a relative difference of {gap:.1e}; take another seed")
        return scores

    press.score = checked
    yield
    del press.score


def kept_positions(model: LlamaForCausalLM, ids: Tensor, press: Any, full: Tensor, where: str) -> Tensor:
    """[L, B, H, T] bool: what the press leaves in the cache; full [L, B, H, T, D] are the keys it chose from."""
    cache = DynamicCache()
    with press(model), clear_choices(press, where):
        model(ids, past_key_values=cache)
    kept = keys_of(cache)
    same = (kept[..., :, None, :] == full[..., None, :, :]).all(-1)  # [L, B, H, N, T]
    if not (same.sum(-1) == 1).all() or same.sum(-2).max() > 1:
        raise SystemExit(f"{where}: a kept key is not exactly one of the full cache's keys")
    return same.any(-2)


@torch.inference_mode()
def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for name, case in CASES.items():
        model, ids = draw(case, attention=name)
        cache = DynamicCache()
        arrays[f"{name}/logits"] = model(ids, past_key_values=cache).logits.numpy()
        arrays[f"{name}/ids"] = ids.numpy()
        for key, weight in model.state_dict().items():
            arrays[f"{name}/weights/{key}"] = weight.numpy()
        full = keys_of(cache)
        directions = drawn_directions(case)
        arrays[f"{name}/directions"] = directions.numpy()
        for method, options in case["presses"].items():
            for ratio in case["ratios"].get(method, RATIOS):
                press = PRESSES[method](compression_ratio=ratio, **options)
                if method == "qfilters":
                    press.q_filters = -directions.mean(
                        2
                    )  # it stores the filters of make_filters.py, which are negative
                where = f"{name}/{method}/{ratio}"
                arrays[where] = kept_positions(model, ids, press, full, where).numpy()
    about = {
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {package: version(package) for package in ("kvpress", "transformers", "torch")},
        "ratios": RATIOS,
        "cases": CASES,
    }
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, about=json.dumps(about), **arrays)
    print(f"{OUT}: {OUT.stat().st_size >> 10} KiB in {time.perf_counter() - start:.1f} s, {about['versions']}")


if __name__ == "__main__":
    main()
