"""Layer budgets, wrappers and Compactor against NVIDIA's kvpress, on the same weights (tests/peers/export_wrappers.py).

kvpress 0.5.5                                 kvexp
PyramidKVPress(window_size, kernel_size)      PyramidKV(window, kernel, pool="avg", form="kvpress")
ChunkKVPress(press, chunk_length)             select=SlotSelection(by="chunk", chunk=...), budgets of whole chunks
CriticalKVPress(press)                        select=SlotSelection(values="critical")
CompactorPress(chunk_size, sketch_dimension)  Compactor(chunk, sketch), with its draws; whole chunks between the ends
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_export import PeerExport, other_sets

import kvexp.methods.compactor as compactor
from kvexp.core import Budget, Method, SlotSelection
from kvexp.hf import EvictionCache
from kvexp.methods import CUR, Compactor, ExpectedAttention, KeyDiff, KNorm, PyramidKV, SnapKV

pytestmark = pytest.mark.peers

CHUNKS, CRITICAL = SlotSelection(by="chunk", chunk=9), SlotSelection(values="critical")
PAIRS: dict[str, tuple[Method, SlotSelection]] = {
    "pyramidkv": (PyramidKV(window=7, kernel=5, pool="avg", form="kvpress"), SlotSelection()),
    "knorm_chunks": (KNorm(), CHUNKS),
    "keydiff_chunks": (KeyDiff(protect_recent=0), CHUNKS),
    "cur_chunks": (CUR(n_sinks=0), CHUNKS),
    "snapkv_critical": (SnapKV(window=7, kernel=5, pool="avg"), CRITICAL),
    "expected_attention_critical": (ExpectedAttention(n_future=31, weight="none"), CRITICAL),
    "compactor": (Compactor(chunk=32, sketch=6), SlotSelection()),
}
NEAR_MISSES: list[tuple[str, Method, SlotSelection]] = [
    ("pyramidkv", SnapKV(window=7, kernel=5, pool="avg"), SlotSelection()),
    ("pyramidkv", PyramidKV(window=7, kernel=5, pool="avg"), SlotSelection()),
    ("knorm_chunks", KNorm(), SlotSelection()),
    ("knorm_chunks", KNorm(), SlotSelection(by="chunk", chunk=10)),
    ("snapkv_critical", SnapKV(window=7, kernel=5, pool="avg"), SlotSelection()),
    ("expected_attention_critical", ExpectedAttention(n_future=31), CRITICAL),
    ("compactor", Compactor(chunk=31, sketch=6), SlotSelection()),
    ("compactor", Compactor(chunk=32, sketch=6, blending=0.0), SlotSelection()),
    ("compactor", Compactor(chunk=32, sketch=6, n_recent=3), SlotSelection()),
]


class Export(PeerExport):
    """wrappers.npz, and its model with kvexp installed."""

    def __init__(self) -> None:
        super().__init__("wrappers")
        self.made = self.model()

    @torch.inference_mode()
    def differences(self, name: str, method: Method, select: SlotSelection, **how: Any) -> list[str]:
        """Prefill under `method` at every ratio: where its sets are not those of the press called `name`."""
        bad = []
        for ratio in self.about["ratios"]:
            want = self[f"{name}/{ratio}"]  # [L, B, H, T] bool
            slots = round(want.shape[-1] * (1 - ratio))
            assert int(want.sum()) == slots * want[..., 0].numel()
            budget = Budget(tokens=slots, counts_self=False)
            cache = EvictionCache(self.made, method, budget, select=select, positions="original", **how)
            self.made(self["ids"], past_key_values=cache)
            bad += other_sets(cache, want, f"ratio {ratio}")
        return bad


@pytest.fixture(scope="module")
def export() -> Export:
    return Export()


@pytest.fixture(autouse=True)
def same_draws(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "sketch_matrix", lambda seeds, layer, *_: export["draws"][layer])


def test_same_model(export: Export) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(export.made(export["ids"]).logits, export["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("name", PAIRS)
def test_same_sets(export: Export, name: str, mode: str) -> None:
    assert export.differences(name, *PAIRS[name], mode=mode) == []


@pytest.mark.parametrize(("name", "other", "select"), NEAR_MISSES)
def test_a_near_miss_is_seen(export: Export, name: str, other: Method, select: SlotSelection) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    assert export.differences(name, other, select)
