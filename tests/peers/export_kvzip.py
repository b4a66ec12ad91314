"""What NVIDIA's KVzipPress scores a prompt's tokens by, for tests/methods/test_peers_kvzip.py. Run by `make peers`.

Writes .peers/kvzip.npz: tiny Llama models drawn here (weights, config, prompt) and, per case, the press's scores
[L, B, H, T]. The press itself leaves the cache whole and cuts by layer or over all layers; kvexp cuts each kv head
alike (the authors' "uniform"), so the test takes the best of every head.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import kvpress.presses.kvzip_press as kvzip_module
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

OUT = Path(__file__).resolve().parents[2] / ".peers" / "kvzip.npz"
RATIOS = (0.25, 0.5, 0.75, 0.9)
# The best score dropped must lie this much (relatively) below the worst one kept, so that rounding does not choose.
CLEAR = 2e-4
GROUPED = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_attention_heads": 6,
    "head_dim": 14,
    "hidden_size": 66,
    "intermediate_size": 37,
    "vocab_size": 127,
}
BIASED = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "num_attention_heads": 15,
    "head_dim": 10,
    "hidden_size": 75,
    "intermediate_size": 41,
    "vocab_size": 137,
    "attention_bias": True,
}
# template: with a chat template whose words before the user's are as many as the sinks. In 0.5.5 the tokens of a longer
# one are not scored, and go before all others.
CASES: dict[str, dict[str, Any]] = {
    "whole": {"seed": 1, "shape": (2, 97), "config": GROUPED, "template": False, "press": {"n_sink": 0}},
    "chunks": {
        "seed": 2,
        "shape": (1, 131),
        "config": BIASED,
        "template": True,
        "press": {"n_sink": 3, "chunk_size": 50},
    },
    "plus_whole": {
        "seed": 1,
        "shape": (1, 131),
        "config": BIASED,
        "template": True,
        "press": {"n_sink": 3, "kvzip_plus_normalization": True},
    },
    "plus_chunks": {
        "seed": 6,
        "shape": (2, 97),
        "config": GROUPED,
        "template": False,
        "press": {"n_sink": 0, "chunk_size": 40, "kvzip_plus_normalization": True},
    },
}


class Letters:
    """A tokenizer of one token per character, modulo the vocabulary, for the words that the press feeds."""

    def __init__(self, vocabulary: int, template: bool) -> None:
        self.vocabulary, self.chat_template = vocabulary, "[u]{}[]" if template else None

    def encode(self, text: str, **_: Any) -> Tensor:
        return torch.tensor([[ord(letter) % self.vocabulary for letter in text]], dtype=torch.int64)

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return str(self.chat_template).format(turns[0]["content"])


class Scores(kvpress.KVzipPress):
    """KVzipPress up to its scores: found [L, 1, H, T], the sinks highest, as it then sets them."""

    def compress_post(self, model: LlamaForCausalLM) -> None:
        """Keep the scores in place of cutting by them."""
        self.found = self.score_val.clone()
        self.found[..., : self.n_sink] = self.found.amax() + 1.0


def draw(case: dict[str, Any]) -> tuple[LlamaForCausalLM, Tensor]:
    """Model and prompt [B, T] from the seed alone. No token occurs twice in a prompt; norms are uneven."""
    dice = torch.Generator().manual_seed(case["seed"])
    model = LlamaForCausalLM(LlamaConfig(**case["config"], attn_implementation="sdpa")).eval()
    for name, weight in model.named_parameters():
        centre, spread = (1.0, 0.5) if "norm" in name else (0.0, 0.15)
        weight.copy_(centre + spread * torch.randn(weight.shape, generator=dice))
    rows, columns = case["shape"]
    words = [torch.randperm(case["config"]["vocab_size"], generator=dice)[:columns] for _ in range(rows)]
    return model, torch.stack(words)


def scores_of(model: LlamaForCausalLM, ids: Tensor, case: dict[str, Any]) -> Tensor:
    """[L, B, H, T]: the press's, one prompt at a time, which is all it takes."""
    tokenizer = Letters(model.config.vocab_size, case["template"])
    kvzip_module.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: tokenizer)
    rows = []
    for row in ids.split(1):
        press = Scores(compression_ratio=0.5, **case["press"])
        with press(model):
            model(row, past_key_values=DynamicCache())
        rows.append(press.found)
    return torch.cat(rows, dim=1)


def smallest_gap(scores: Tensor) -> float:
    """The smallest relative step from the worst score kept to the best one dropped, over all ratios and heads."""
    ranked = scores.sort(dim=-1, descending=True).values
    gaps = []
    for ratio in RATIOS:
        count = int(scores.shape[-1] * (1 - ratio))
        worst, best = ranked[..., count - 1], ranked[..., count]
        gaps.append(((worst - best) / worst).min().item())
    return min(gaps)


@torch.inference_mode()
def main() -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # a warning of its cost per press
    arrays: dict[str, Any] = {}
    for name, case in CASES.items():
        model, ids = draw(case)
        scores = scores_of(model, ids, case)
        gap = smallest_gap(scores)
        if not gap > CLEAR:
            raise SystemExit(f"{name}: a choice hangs on a relative difference of {gap:.1e}; take another seed")
        arrays[f"{name}/ids"], arrays[f"{name}/scores"] = ids.numpy(), scores.numpy()
        for key, weight in model.state_dict().items():
            arrays[f"{name}/weights/{key}"] = weight.numpy()
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
