"""What NVIDIA's DuoAttentionPress scores heads by and keeps, for tests/methods/test_peers_duo.py. Run by `make peers`.

Writes .peers/duo.npz: a tiny Llama model drawn here (weights, config, prompt, texts), the press's scores of its kv
heads [L, H] on these texts, and, per share of heads that stream, the kept positions as a bool mask [L, B, H, T]. The
texts stand in for the press's data set, and sinks and newest tokens are fewer than its 128 and 256, for a short prompt.
"""

from __future__ import annotations

import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress.presses.duo_attention_press as duo
import numpy as np
import torch
from export_kvpress import draw
from torch import Tensor
from transformers import BatchEncoding, DynamicCache, LlamaForCausalLM

OUT = Path(__file__).resolve().parents[2] / ".peers" / "duo.npz"
RATIOS = (0.25, 0.5, 0.9)
SINKS, RECENT = 5, 11
CLEAR = 1e-5  # between scores of heads, so that rounding orders no two of them
CASE: dict[str, Any] = {
    "seed": 3,
    "shape": (2, 83),
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
}


class Texts:
    """Token ids in place of the press's data set and of its tokenizer."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def load_dataset(self, *_: Any, **__: Any) -> Any:
        chapters = SimpleNamespace(tolist=lambda: list(range(len(self.rows))))
        return SimpleNamespace(to_pandas=lambda: SimpleNamespace(sample=lambda *_, **__: {"chapter": chapters}))

    def from_pretrained(self, _: str) -> Any:
        return lambda row, **__: BatchEncoding({"input_ids": self.rows[row][None]})


def scores_of(model: LlamaForCausalLM, rows: Tensor) -> np.ndarray[Any, Any]:
    """The press's scores [L, H] on texts of these token ids."""
    texts = Texts(rows)
    duo.load_dataset, duo.AutoTokenizer = texts.load_dataset, texts
    scores: np.ndarray[Any, Any] = duo.duo_attention_on_the_fly.__wrapped__(model, num_samples=len(rows))
    apart = np.diff(np.sort(scores.flatten())).min()
    if not apart > CLEAR:
        raise SystemExit(f"two heads' scores lie {apart:.1e} apart; take another seed")
    return scores


def kept_positions(model: LlamaForCausalLM, ids: Tensor, ratio: float) -> Tensor:
    """[L, B, H, T] bool: what attention may still see."""
    press = duo.DuoAttentionPress(head_compression_ratio=ratio, on_the_fly_scoring=True)
    with press(model):
        press.sink_size, press.recent_size = SINKS, RECENT
        model(ids, past_key_values=DynamicCache())
        masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    kept = torch.ones(len(masked), ids.shape[0], model.config.num_key_value_heads, ids.shape[1], dtype=torch.bool)
    for layer, indices in enumerate(masked):
        kept[(layer, *indices)] = False
    return kept


@torch.inference_mode()
def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)
    model, ids = draw(CASE, attention="sdpa")
    dice = torch.Generator().manual_seed(1)
    texts = torch.randint(0, CASE["config"]["vocab_size"], (4, 120), generator=dice)
    scores = scores_of(model, texts)
    arrays: dict[str, Any] = {"ids": ids.numpy(), "texts": texts.numpy(), "scores": scores}
    arrays |= {f"weights/{key}": weight.numpy() for key, weight in model.state_dict().items()}
    duo.duo_attention_on_the_fly = lambda _: scores
    for ratio in RATIOS:
        arrays[str(ratio)] = kept_positions(model, ids, ratio).numpy()
    about = {
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "versions": {package: version(package) for package in ("kvpress", "transformers", "torch")},
        "ratios": RATIOS,
        "stream": (SINKS, RECENT),
        "case": CASE,
    }
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, about=json.dumps(about), **arrays)
    print(f"{OUT}: {OUT.stat().st_size >> 10} KiB in {time.perf_counter() - start:.1f} s, {about['versions']}")


if __name__ == "__main__":
    main()
