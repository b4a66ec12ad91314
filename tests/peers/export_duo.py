"""What NVIDIA's DuoAttentionPress scores heads by and keeps, for tests/methods/test_peers.py. Run by `make peers`.

Writes .peers/duo.npz: a tiny Llama model drawn here (weights, config, prompt, texts), the press's scores of its kv
heads [L, H] on these texts, and, per share of heads that stream, the kept positions as a bool mask [L, B, H, T]. The
texts stand in for the press's data set, and sinks and newest tokens are fewer than its 128 and 256, for a short prompt.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kvpress.presses.duo_attention_press as duo
import numpy as np
import torch
from common import BIASED, draw, seen_under, weights_of, write
from torch import Tensor
from transformers import BatchEncoding, LlamaForCausalLM

RATIOS = (0.25, 0.5, 0.9)
SINKS, RECENT = 5, 11
CLEAR = 1e-5  # between scores of heads, so that rounding orders no two of them
CASE: dict[str, Any] = {"seed": 3, "shape": (2, 83), "config": BIASED | {"num_hidden_layers": 4}}


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
        return seen_under(model, ids)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    model, ids = draw(CASE)
    dice = torch.Generator().manual_seed(1)
    texts = torch.randint(0, CASE["config"]["vocab_size"], (4, 120), generator=dice)
    scores = scores_of(model, texts)
    arrays: dict[str, Any] = {"ids": ids.numpy(), "texts": texts.numpy(), "scores": scores}
    arrays |= weights_of(model)
    duo.duo_attention_on_the_fly = lambda _: scores
    for ratio in RATIOS:
        arrays[str(ratio)] = kept_positions(model, ids, ratio).numpy()
    write(__file__, arrays, ratios=RATIOS, stream=(SINKS, RECENT), case=CASE)


if __name__ == "__main__":
    main()
