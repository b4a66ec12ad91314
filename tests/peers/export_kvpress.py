"""What NVIDIA's kvpress keeps of a prompt, for tests/methods/test_peers.py. Run by `make peers`, in an environment of
its own.

Writes .peers/kvpress.npz: tiny Llama models drawn here (weights, config, prompt, logits), directions for Q-Filters
[L, H, G, D], and, per press and compression ratio, the kept positions as a bool mask [L, B, H, T]. Positions are read
off the cache that the press leaves behind, by looking each kept key up among the keys of an unpressed run: every kept
key must be there exactly once.
"""

from __future__ import annotations

from typing import Any

import kvpress
import torch
from common import BIASED, GROUPED, check_clear, draw, drawn_directions, held_of, keys_of, weights_of, write
from torch import Tensor
from transformers import DynamicCache


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
        "config": GROUPED | {"vocab_size": 101},
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
        "config": BIASED | {"num_hidden_layers": 4},
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


def checked(press: Any, where: str) -> Any:
    """The press, which refuses a prompt for which it makes a choice within rounding error."""
    original = press.score

    def score(*args: Any) -> Tensor:
        scores: Tensor = original(*args)
        ranked = scores.sort(dim=-1, descending=True).values
        kept = int(scores.shape[-1] * (1 - press.compression_ratio))
        worst, best = ranked[..., kept - 1], ranked[..., kept]
        check_clear((worst - best) / torch.maximum(worst.abs(), best.abs()), CLEAR, where)
        return scores

    press.score = score
    return press


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {}
    for name, case in CASES.items():
        model, ids = draw(case, attention=name)
        cache, directions = DynamicCache(), drawn_directions(case)
        arrays[f"{name}/logits"] = model(ids, past_key_values=cache).logits.numpy()
        arrays |= {f"{name}/ids": ids.numpy(), f"{name}/directions": directions.numpy()}
        arrays |= weights_of(model, f"{name}/")
        for method, options in case["presses"].items():
            for ratio in case["ratios"].get(method, RATIOS):
                press = PRESSES[method](compression_ratio=ratio, **options)
                if method == "qfilters":
                    press.q_filters = -directions.mean(2)  # it stores the filters of make_filters.py, negative
                where, pressed = f"{name}/{method}/{ratio}", DynamicCache()
                with checked(press, where)(model):
                    model(ids, past_key_values=pressed)
                arrays[where] = held_of(pressed, keys_of(cache), where).numpy()
    write(__file__, arrays, ratios=RATIOS, cases=CASES)


if __name__ == "__main__":
    main()
