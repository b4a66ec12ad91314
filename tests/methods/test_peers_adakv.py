"""The sets kept after prefill against NVIDIA's AdaKVPress around several presses (tests/peers/export_adakv.py).

AdaKVPress(press, alpha_safeguard) is Budget(heads="adaptive", head_floor) of the press's method: the share is of the
uniform budget, and all heads of a layer together keep that budget times their number. Sinks and windows of a press
have the largest scores there, so they stay in every head as protected slots do here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peer_export import PeerExport, other_sets
from torch import Tensor

import kvexp.methods.compactor as compactor
from kvexp.core import Budget, Method, QueryCalibration
from kvexp.hf import EvictionCache
from kvexp.methods import CUR, TOVA, Compactor, ExpectedAttention, KeyDiff, KNorm, QFilters, SnapKV

pytestmark = pytest.mark.peers

METHODS: dict[str, Method] = {
    "knorm": KNorm(),
    "snapkv": SnapKV(window=7, kernel=5, pool="avg"),
    "expected_attention": ExpectedAttention(n_sinks=3, n_future=3, covariance=False, epsilon=0.02),
    "cur": CUR(n_sinks=4, block=14),
    "cur_mean": CUR(n_sinks=2, block=10, leverage="mean"),
    "keydiff": KeyDiff(protect_recent=0),
    "qfilters": QFilters(protect_recent=0),
    "compactor": Compactor(chunk=17, sketch=6, blending=0.35),
}


class AdaKVExport(PeerExport):
    """adakv.npz, and its model with kvexp installed."""

    def __init__(self) -> None:
        super().__init__("adakv")
        self.made = self.model()

    @torch.inference_mode()
    def differences(self, name: str, method: Method, *, slip: float = 0.0, **how: Any) -> list[str]:
        """Places where kvexp's sets differ from the press called `name`; slip: added to the share of every head."""
        bad = []
        if method.needs.calibration:
            directions = torch.tensor(self.file["directions"])
            none = torch.zeros_like(directions), torch.zeros(*directions.shape[:3], 0)
            how = {"calibration": QueryCalibration.of(directions, *none), **how}
        for floor in self.about["floors"]:
            for ratio in self.about["ratios"]:
                want: Tensor = torch.tensor(self.file[f"{name}/{floor}/{ratio}"])  # [L, B, H, T] bool
                _, _, heads, length = want.shape
                tokens = int(length * (1 - ratio))
                assert want.sum((2, 3)).unique().tolist() == [tokens * heads]
                budget = Budget(tokens=tokens, counts_self=False, heads="adaptive", head_floor=floor + slip)
                cache = EvictionCache(self.made, method, budget, positions="original", **how)
                self.made(torch.tensor(self.file["ids"]), past_key_values=cache)
                bad += other_sets(cache, want, f"floor {floor} ratio {ratio}")
        return bad


@pytest.fixture(scope="module")
def export() -> AdaKVExport:
    return AdaKVExport()


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("name", METHODS)
def test_same_sets(export: AdaKVExport, name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compactor's Gaussian matrix is drawn by kvexp from the run's seed: here it is the one that the press had.
    draws = torch.tensor(export.file["draws"])
    monkeypatch.setattr(compactor, "sketch_matrix", lambda seeds, layer, heads, width, size: draws[layer])
    assert export.differences(name, METHODS[name], mode=mode) == []


def test_heads_hold_different_numbers(export: AdaKVExport) -> None:
    """Else the sets would be those of uniform budgets."""
    for name in export.about["presses"]:
        assert len(np.unique(export.file[f"{name}/0.2/0.5"].sum(-1))) > 3, name


def test_a_near_miss_is_seen(export: AdaKVExport) -> None:
    assert export.differences("knorm", TOVA(protect_recent=1))
    assert export.differences("knorm", KNorm(), slip=0.8)
    assert export.differences("cur", CUR(n_sinks=4, block=13))
