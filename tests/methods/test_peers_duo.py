"""Scores of heads and kept sets against NVIDIA's DuoAttentionPress with on-the-fly scoring (tests/peers/export_duo.py).

DuoAttentionPress(head_compression_ratio) is the share of heads that stream; Budget(heads="duo") has as many retrieval
heads as the budget has room for, so the test takes the budget that leaves as many.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer_export import PeerExport, other_sets

from kvexp.core import Budget
from kvexp.hf import EvictionCache, calibrate_heads
from kvexp.methods import H2O, KNorm

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def export() -> PeerExport:
    return PeerExport("duo")


@pytest.fixture(scope="module")
def model(export: PeerExport) -> Any:
    return export.model()


def test_same_scores(export: PeerExport, model: Any) -> None:
    made = calibrate_heads(model, export.file["texts"].tolist())
    torch.testing.assert_close(made.scores, export["scores"], rtol=1e-4, atol=1e-6)
    assert made.scores.flatten().argsort().tolist() == export.file["scores"].flatten().argsort().tolist()
    other = calibrate_heads(model, export.file["texts"][:2].tolist())
    assert not torch.allclose(other.scores, made.scores, rtol=1e-4, atol=1e-6), "the comparison is sharp"


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("method", [H2O(), KNorm()], ids=repr)
@torch.inference_mode()
def test_same_sets(export: PeerExport, model: Any, method: Any, mode: Any) -> None:
    """Whatever the method: it has no say at the end of the prompt."""
    about, scores = export.about, calibrate_heads(model, export.file["texts"].tolist())
    sinks, recent = about["stream"]
    for ratio in about["ratios"]:
        want = export[str(ratio)]  # [L, B, H, T] bool
        heads, length = scores.scores.numel(), want.shape[-1]
        full = int((want.sum(-1) == length)[:, 0].sum())
        assert full == heads - round(heads * ratio)
        slots = sinks + recent + -(-full * (length - sinks - recent) // heads)
        budget = Budget(tokens=slots, counts_self=False, heads="duo", stream_sinks=sinks, stream_recent=recent)
        cache = EvictionCache(model, method, budget, head_scores=scores, mode=mode, max_new_tokens=0)
        model(export["ids"], past_key_values=cache)
        assert other_sets(cache, want, ratio) == []
