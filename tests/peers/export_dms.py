"""What NVIDIA's DMSPress keeps of a prompt, for tests/methods/test_peers_dms.py. Run by `make peers`.

Writes .peers/dms.npz: a tiny Llama model drawn here (weights, config, prompt) and, per press inside and threshold, the
kept positions as a bool mask [L, B, H, T]. The press leaves the cache whole and notes what attention is not to see.
"""

from __future__ import annotations

import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from export_kvpress import draw
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

OUT = Path(__file__).resolve().parents[2] / ".peers" / "dms.npz"
WINDOW = 9
CLEAR = 1e-4  # the relative distance of every score from the threshold, so that rounding does not choose
SHARES = (0.3, 0.7)  # of all scores, about, that lie below the threshold
CASE: dict[str, Any] = {
    "seed": 11,
    "shape": (2, 83),
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
}
PRESSES: dict[str, Any] = {
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "cur": lambda: kvpress.CURPress(num_sinks=4, local_window_size=14),
}


def kept_positions(model: LlamaForCausalLM, ids: Tensor, make: Any, threshold: float) -> tuple[Tensor, Tensor]:
    """[L, B, H, T] bool: what attention may still see; and the scores [L, B, H, T]."""
    inner, seen = make(), []
    original = inner.score

    def noted(*args: Any) -> Tensor:
        seen.append(original(*args))
        return seen[-1]

    inner.score = noted
    press = kvpress.DMSPress(inner, threshold=threshold, sliding_window_size=WINDOW)
    with press(model):
        model(ids, past_key_values=DynamicCache())
        masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    scores = torch.stack(seen)
    kept = torch.ones(scores.shape, dtype=torch.bool)
    for layer, indices in enumerate(masked):
        if indices is not None:
            kept[(layer, *indices)] = False
    return kept, scores


@torch.inference_mode()
def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)
    model, ids = draw(CASE, attention="sdpa")
    arrays: dict[str, Any] = {"ids": ids.numpy()}
    arrays |= {f"weights/{key}": weight.numpy() for key, weight in model.state_dict().items()}
    thresholds: dict[str, list[float]] = {}
    for name, make in PRESSES.items():
        _, scores = kept_positions(model, ids, make, 0.0)
        ranked = scores.flatten().sort().values
        for share in SHARES:
            at = int(share * len(ranked))
            below, above = ranked[at - 20 : at + 20], ranked[at - 19 : at + 21]
            widest = int((above - below).argmax())
            threshold = float((below[widest] + above[widest]) / 2)
            gap = float((scores - threshold).abs().min() / abs(threshold))
            if not gap > CLEAR:
                raise SystemExit(f"{name}: a score lies {gap:.1e} from the threshold; take another seed")
            thresholds.setdefault(name, []).append(threshold)
            arrays[f"{name}/{threshold}"] = kept_positions(model, ids, make, threshold)[0].numpy()
    about = {
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {package: version(package) for package in ("kvpress", "transformers", "torch")},
        "window": WINDOW,
        "thresholds": thresholds,
        "case": CASE,
    }
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, about=json.dumps(about), **arrays)
    print(f"{OUT}: {OUT.stat().st_size >> 10} KiB in {time.perf_counter() - start:.1f} s, {about['versions']}")


if __name__ == "__main__":
    main()
