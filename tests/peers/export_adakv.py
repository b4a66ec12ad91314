"""What NVIDIA's AdaKVPress keeps of a prompt, for tests/methods/test_peers_adakv.py. Run by `make peers`.

Writes .peers/adakv.npz: a tiny Llama model drawn here (weights, config, prompt, Compactor's draws, directions for
Q-Filters) and, per press inside, share that every head is sure of and compression ratio, the kept positions as a bool
mask [L, B, H, T]. The press leaves the cache whole and notes what attention is not to see; that note is written.
TOVA is left out: it scores all heads of a layer alike; and LagKV, whose ranks tie between heads.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from export_kvpress import DrawnQFilters, draw, drawn_directions
from export_wrappers import given_draws
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

OUT = Path(__file__).resolve().parents[2] / ".peers" / "adakv.npz"
RATIOS = (0.25, 0.5, 0.75)
FLOORS = (0.0, 0.2)
# The best score dropped must lie this much (relatively) below the worst one kept, so that rounding does not choose.
CLEAR = 4e-5
CASE: dict[str, Any] = {
    "seed": 3,
    "shape": (1, 131),
    "config": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "num_attention_heads": 15,
        "head_dim": 10,
        "hidden_size": 75,
        "intermediate_size": 41,
        "vocab_size": 137,
        "attention_bias": True,
    },
    "directions": 1,
    "draws": 11,
    "sketch": 6,
}
PRESSES: dict[str, Any] = {
    "knorm": lambda ratio: kvpress.KnormPress(compression_ratio=ratio),
    "snapkv": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio, window_size=7, kernel_size=5),
    "expected_attention": lambda ratio: kvpress.ExpectedAttentionPress(
        compression_ratio=ratio, n_sink=3, epsilon=0.02, use_covariance=False, n_future_positions=3
    ),
    "cur": lambda ratio: kvpress.CURPress(compression_ratio=ratio, num_sinks=4, local_window_size=14),
    "cur_mean": lambda ratio: kvpress.CURPress(
        compression_ratio=ratio, num_sinks=2, local_window_size=10, leverage_type="kv_avg"
    ),
    "keydiff": lambda ratio: kvpress.KeyDiffPress(compression_ratio=ratio),
    "qfilters": lambda ratio: DrawnQFilters(compression_ratio=ratio),
    # 131 tokens less 8 + 4 at the ends are seven whole chunks.
    "compactor": lambda ratio: kvpress.CompactorPress(ratio, chunk_size=17, sketch_dimension=6, blending=0.35),
}


def check_clear(scores: Tensor, floor: float, ratio: float, where: str) -> None:
    """Refuse scores [B, H, T] where a choice of the press hangs on rounding, within a head or between heads."""
    kept = int(scores.shape[-1] * (1 - ratio))
    sure = max(1, int(kept * floor)) if floor else 0
    ranked = scores.sort(dim=-1, descending=True).values
    joint = ranked.clone()
    joint[..., :sure] = torch.finfo(joint.dtype).max
    joint = joint.flatten(1).sort(dim=-1, descending=True).values
    last = scores.shape[1] * kept
    for values, place in ((ranked, sure), (joint, last)):
        if not 0 < place < values.shape[-1]:
            continue
        worst, best = values[..., place - 1], values[..., place]
        apart = (worst - best) / torch.maximum(worst.abs(), best.abs())
        apart[best == values[..., 0]] = torch.inf  # the largest of all scores: of sinks and windows, which all stay
        gap = apart.min().item()
        if not gap > CLEAR:
            raise SystemExit(f"{where}: a choice hangs on a relative difference of {gap:.1e}; take another seed")


def kept_positions(model: LlamaForCausalLM, ids: Tensor, press: Any, where: str) -> Tensor:
    """[L, B, H, T] bool: what attention may still see."""
    original = press.press.score

    def checked(*args: Any) -> Tensor:
        scores: Tensor = original(*args)
        check_clear(scores, press.alpha_safeguard, press.compression_ratio, where)
        return scores

    press.press.score = checked
    with press(model):
        model(ids, past_key_values=DynamicCache())
        masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    config = model.config
    kept = torch.ones(len(masked), ids.shape[0], config.num_key_value_heads, ids.shape[1], dtype=torch.bool)
    for layer, indices in enumerate(masked):
        kept[(layer, *indices)] = False
    return kept


@torch.inference_mode()
def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)
    model, ids = draw(CASE, attention="sdpa")
    arrays: dict[str, Any] = {"ids": ids.numpy()}
    arrays |= {f"weights/{key}": weight.numpy() for key, weight in model.state_dict().items()}
    config, directions = CASE["config"], drawn_directions(CASE)
    shape = (config["num_hidden_layers"], 1, config["num_key_value_heads"], config["head_dim"], CASE["sketch"])
    draws = torch.randn(*shape, generator=torch.Generator().manual_seed(CASE["draws"]))
    arrays |= {"directions": directions.numpy(), "draws": draws.numpy() / math.sqrt(CASE["sketch"])}
    for name, make in PRESSES.items():
        for floor in FLOORS:
            for ratio in RATIOS:
                where = f"{name}/{floor}/{ratio}"
                press = kvpress.AdaKVPress(make(ratio), alpha_safeguard=floor)
                if name == "qfilters":
                    press.press.q_filters = -directions.mean(2)  # it stores the filters negative
                with given_draws(draws):
                    arrays[where] = kept_positions(model, ids, press, where).numpy()
    about = {
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {package: version(package) for package in ("kvpress", "transformers", "torch")},
        "ratios": RATIOS,
        "floors": FLOORS,
        "presses": list(PRESSES),
        "case": CASE,
    }
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, about=json.dumps(about), **arrays)
    print(f"{OUT}: {OUT.stat().st_size >> 10} KiB in {time.perf_counter() - start:.1f} s, {about['versions']}")


if __name__ == "__main__":
    main()
