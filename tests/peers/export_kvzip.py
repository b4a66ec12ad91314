"""What NVIDIA's KVzipPress scores a prompt's tokens by, for tests/methods/test_peers.py. Run by `make peers`.

Writes .peers/kvzip.npz: tiny Llama models drawn here (weights, config, prompt) and, per case, the press's scores
[L, B, H, T]. The press itself leaves the cache whole and cuts by layer or over all layers; kvexp cuts each kv head
alike (the authors' "uniform"), so the test takes the best of every head.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import kvpress
import kvpress.presses.kvzip_press as kvzip_module
import torch
from common import BIASED, GROUPED, check_clear, draw, weights_of, write
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

RATIOS = (0.25, 0.5, 0.75, 0.9)
# The best score dropped must lie this much (relatively) below the worst one kept, so that rounding does not choose.
CLEAR = 2e-4
FEW, MANY = BIASED | {"num_hidden_layers": 2}, GROUPED | {"vocab_size": 127}
# template: with a chat template whose words before the user's are as many as the sinks. In 0.5.5 the tokens of a longer
# one are not scored, and go before all others.
CASES: dict[str, dict[str, Any]] = {
    "whole": {"seed": 1, "shape": (2, 97), "config": MANY, "template": False, "press": {"n_sink": 0}},
    "chunks": {"seed": 2, "shape": (1, 131), "config": FEW, "template": True, "press": {"n_sink": 3, "chunk_size": 50}},
    "plus_whole": {
        "seed": 1,
        "shape": (1, 131),
        "config": FEW,
        "template": True,
        "press": {"n_sink": 3, "kvzip_plus_normalization": True},
    },
    "plus_chunks": {
        "seed": 6,
        "shape": (2, 97),
        "config": MANY,
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
    torch.set_num_threads(1)
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # a warning of its cost per press
    arrays: dict[str, Any] = {}
    for name, case in CASES.items():
        model, ids = draw(case, norms=0.5, weights=0.15)
        scores = scores_of(model, ids, case)
        check_clear(smallest_gap(scores), CLEAR, name)
        arrays |= {f"{name}/ids": ids.numpy(), f"{name}/scores": scores.numpy(), **weights_of(model, f"{name}/")}
    write(__file__, arrays, ratios=RATIOS, cases=CASES)


if __name__ == "__main__":
    main()
