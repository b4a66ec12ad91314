"""What kvpress's wrappers and Compactor keep of a prompt, for tests/methods/test_peers.py. Run by `make
peers`.

Writes .peers/wrappers.npz: a tiny Llama model drawn here (weights, config, prompt, logits), the Gaussian draws that
Compactor was given [L, B, H, D, sketch], and, per press and compression ratio, the kept positions as a bool mask
[L, B, H, T]. The prompt's length makes every kept number, chunk and tile a whole one, for kvpress rounds otherwise
than kvexp. Each set is computed in float32 and in float64; a prompt for which the two differ is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import kvpress
import numpy as np
import torch
from common import BIASED, draw, held_of, keys_of, weights_of, write
from torch import Tensor
from transformers import DynamicCache

RATIOS = (0.25, 0.5, 0.75)
CASE: dict[str, Any] = {
    "seed": 5,
    "shape": (1, 108),
    "config": BIASED | {"num_hidden_layers": 5, "attention_bias": False},
    "window": 7,
    "kernel": 5,
    "chunk": 9,
    "n_future_positions": 31,
    "tile": 32,
    "sketch": 6,
    "draws": 11,
}


def presses(ratio: float) -> dict[str, Any]:
    """Every press by its name here, with this compression ratio."""
    snapkv = {"compression_ratio": ratio, "window_size": CASE["window"], "kernel_size": CASE["kernel"]}
    expected = {"compression_ratio": ratio, "n_future_positions": CASE["n_future_positions"], "use_vnorm": False}
    return {
        "pyramidkv": kvpress.PyramidKVPress(**snapkv),
        "knorm_chunks": kvpress.ChunkKVPress(kvpress.KnormPress(ratio), chunk_length=CASE["chunk"]),
        "keydiff_chunks": kvpress.ChunkKVPress(kvpress.KeyDiffPress(ratio), chunk_length=CASE["chunk"]),
        "cur_chunks": kvpress.ChunkKVPress(kvpress.CURPress(ratio, num_sinks=0), chunk_length=CASE["chunk"]),
        "snapkv_critical": kvpress.CriticalKVPress(kvpress.SnapKVPress(**snapkv)),
        "expected_attention_critical": kvpress.CriticalKVPress(kvpress.ExpectedAttentionPress(**expected)),
        "compactor": kvpress.CompactorPress(ratio, chunk_size=CASE["tile"], sketch_dimension=CASE["sketch"]),
    }


@contextmanager
def given_draws(draws: Tensor) -> Iterator[None]:
    """In the block torch.randn gives the draws [L, B, H, D, sketch] layer by layer, in the dtype asked for."""
    left = iter(draws)

    def randn(*shape: int, **options: Any) -> Tensor:
        made = next(left)
        assert made.shape == shape
        return made.to(options.get("dtype"))

    with mock.patch.object(torch, "randn", randn):
        yield


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    model, ids = draw(CASE)
    arrays: dict[str, Any] = {"ids": ids.numpy(), "logits": model(ids).logits.numpy(), **weights_of(model)}
    config, rows = CASE["config"], CASE["shape"][0]
    shape = (config["num_hidden_layers"], rows, config["num_key_value_heads"], config["head_dim"], CASE["sketch"])
    draws = torch.randn(*shape, generator=torch.Generator().manual_seed(CASE["draws"]))
    arrays["draws"] = draws.numpy() / math.sqrt(CASE["sketch"])
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        full = keys_of(cache)
        for ratio in RATIOS:
            for name, press in presses(ratio).items():
                where, pressed = f"{name}/{ratio}", DynamicCache()
                with given_draws(draws), press(model):
                    model(ids, past_key_values=pressed)
                kept = held_of(pressed, full, where).numpy()
                if not np.array_equal(arrays.setdefault(where, kept), kept):
                    raise SystemExit(f"{where}: a choice hangs on rounding; take another seed")
    write(__file__, arrays, ratios=RATIOS, case=CASE)


if __name__ == "__main__":
    main()
