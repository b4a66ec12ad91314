"""What NVIDIA's DMSPress keeps of a prompt, for tests/methods/test_peers.py. Run by `make peers`.

Writes .peers/dms.npz: a tiny Llama model drawn here (weights, config, prompt) and, per press inside and threshold, the
kept positions as a bool mask [L, B, H, T]. The press leaves the cache whole and notes what attention is not to see.
"""

from __future__ import annotations

from typing import Any

import kvpress
import torch
from common import BIASED, check_clear, draw, seen_under, weights_of, write
from torch import Tensor
from transformers import LlamaForCausalLM

WINDOW = 9
CLEAR = 1e-4  # the relative distance of every score from the threshold, so that rounding does not choose
SHARES = (0.3, 0.7)  # of all scores, about, that lie below the threshold
CASE: dict[str, Any] = {"seed": 11, "shape": (2, 83), "config": BIASED}
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
        return seen_under(model, ids), torch.stack(seen)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    model, ids = draw(CASE)
    arrays: dict[str, Any] = {"ids": ids.numpy(), **weights_of(model)}
    thresholds: dict[str, list[float]] = {}
    for name, make in PRESSES.items():
        _, scores = kept_positions(model, ids, make, 0.0)
        ranked = scores.flatten().sort().values
        for share in SHARES:
            at = int(share * len(ranked))
            below, above = ranked[at - 20 : at + 20], ranked[at - 19 : at + 21]
            widest = int((above - below).argmax())
            threshold = float((below[widest] + above[widest]) / 2)
            check_clear((scores - threshold).abs() / abs(threshold), CLEAR, f"{name}, threshold {threshold}")
            thresholds.setdefault(name, []).append(threshold)
            arrays[f"{name}/{threshold}"] = kept_positions(model, ids, make, threshold)[0].numpy()
    write(__file__, arrays, window=WINDOW, thresholds=thresholds, case=CASE)


if __name__ == "__main__":
    main()
