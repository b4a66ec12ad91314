"""What NVIDIA's AdaKVPress keeps of a prompt, for tests/methods/test_peers.py. Run by `make peers`.

Writes .peers/adakv.npz: a tiny Llama model drawn here (weights, config, prompt, Compactor's draws, directions for
Q-Filters) and, per press inside, share that every head is sure of and compression ratio, the kept positions as a bool
mask [L, B, H, T]. The press leaves the cache whole and notes what attention is not to see; that note is written.
TOVA is left out: it scores all heads of a layer alike; and LagKV, whose ranks tie between heads.
"""

from __future__ import annotations

import math
from typing import Any

import kvpress
import torch
from common import BIASED, check_clear, draw, drawn_directions, seen_under, weights_of, write
from export_kvpress import DrawnQFilters
from export_wrappers import given_draws
from torch import Tensor
from transformers import LlamaForCausalLM

RATIOS = (0.25, 0.5, 0.75)
FLOORS = (0.0, 0.2)
# The best score dropped must lie this much (relatively) below the worst one kept, so that rounding does not choose.
CLEAR = 4e-5
CASE: dict[str, Any] = {"seed": 3, "shape": (1, 131), "config": BIASED, "directions": 1, "draws": 11, "sketch": 6}
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


def check_choices(scores: Tensor, floor: float, ratio: float, where: str) -> None:
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
        check_clear(apart, CLEAR, where)


def kept_positions(model: LlamaForCausalLM, ids: Tensor, press: Any, where: str) -> Tensor:
    """[L, B, H, T] bool: what attention may still see."""
    original = press.press.score

    def checked(*args: Any) -> Tensor:
        scores: Tensor = original(*args)
        check_choices(scores, press.alpha_safeguard, press.compression_ratio, where)
        return scores

    press.press.score = checked
    with press(model):
        return seen_under(model, ids)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    model, ids = draw(CASE)
    arrays: dict[str, Any] = {"ids": ids.numpy(), **weights_of(model)}
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
    write(__file__, arrays, ratios=RATIOS, floors=FLOORS, presses=list(PRESSES), case=CASE)


if __name__ == "__main__":
    main()
