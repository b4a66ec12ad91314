"""The sets kept after prefill against NVIDIA's DMSPress around three presses (tests/peers/export_dms.py).

DMSPress(press, threshold, sliding_window_size) is Budget(threshold, threshold_recent) of the press's method.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_export import PeerExport, other_sets

from kvexp.core import Budget, Method
from kvexp.hf import EvictionCache
from kvexp.methods import CUR, KeyDiff, KNorm

pytestmark = pytest.mark.peers

METHODS: dict[str, Method] = {
    "knorm": KNorm(),
    "keydiff": KeyDiff(protect_recent=0),
    "cur": CUR(n_sinks=4, block=14),
}


@pytest.fixture(scope="module")
def export() -> PeerExport:
    return PeerExport("dms")


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_same_sets(export: PeerExport, name: str, mode: Any) -> None:
    about = export.about
    model = export.model()
    for threshold in about["thresholds"][name]:
        want = export[f"{name}/{threshold}"]  # [L, B, H, T] bool
        assert len(want.sum(-1).unique()) > 3, "heads hold different numbers"
        budget = Budget(threshold=threshold, threshold_recent=about["window"])
        cache = EvictionCache(model, METHODS[name], budget, mode=mode)
        model(export["ids"], past_key_values=cache)
        assert other_sets(cache, want, threshold) == []
