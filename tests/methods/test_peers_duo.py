"""Scores of heads and kept sets against NVIDIA's DuoAttentionPress with on-the-fly scoring (tests/peers/export_duo.py).

DuoAttentionPress(head_compression_ratio) is the share of heads that stream; Budget(heads="duo") has as many retrieval
heads as the budget has room for, so the test takes the budget that leaves as many.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvexp.core import Budget
from kvexp.hf import EvictionCache, calibrate_heads, random_model
from kvexp.methods import H2O, KNorm

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
EXPORT = ROOT / ".peers" / "duo.npz"
SCRIPT = ROOT / "tests" / "peers" / "export_duo.py"


@pytest.fixture(scope="module")
def file() -> Any:
    if not EXPORT.exists():
        pytest.skip(f"no export at {EXPORT.relative_to(ROOT)}; run: make peers")
    found = np.load(EXPORT)
    if json.loads(str(found["about"]))["script"] != hashlib.sha256(SCRIPT.read_bytes()).hexdigest():
        pytest.skip(f"{EXPORT.relative_to(ROOT)} comes from another version of its script; run: make peers")
    return found


@pytest.fixture(scope="module")
def model(file: Any) -> Any:
    made = random_model("llama", **json.loads(str(file["about"]))["case"]["config"])
    names = [key for key in file.files if key.startswith("weights/")]
    made.load_state_dict({key.removeprefix("weights/"): torch.tensor(file[key]) for key in names})
    return made


def test_same_scores(file: Any, model: Any) -> None:
    made = calibrate_heads(model, file["texts"].tolist())
    torch.testing.assert_close(made.scores, torch.tensor(file["scores"]), rtol=1e-4, atol=1e-6)
    assert made.scores.flatten().argsort().tolist() == file["scores"].flatten().argsort().tolist()
    other = calibrate_heads(model, file["texts"][:2].tolist())
    assert not torch.allclose(other.scores, made.scores, rtol=1e-4, atol=1e-6), "the comparison is sharp"


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("method", [H2O(), KNorm()], ids=repr)
@torch.inference_mode()
def test_same_sets(file: Any, model: Any, method: Any, mode: Any) -> None:
    """Whatever the method: it has no say at the end of the prompt."""
    about, scores = json.loads(str(file["about"])), calibrate_heads(model, file["texts"].tolist())
    sinks, recent = about["stream"]
    for ratio in about["ratios"]:
        want = torch.tensor(file[str(ratio)])  # [L, B, H, T] bool
        heads, length = scores.scores.numel(), want.shape[-1]
        full = int((want.sum(-1) == length)[:, 0].sum())
        assert full == heads - round(heads * ratio)
        slots = sinks + recent + -(-full * (length - sinks - recent) // heads)
        budget = Budget(tokens=slots, counts_self=False, heads="duo", stream_sinks=sinks, stream_recent=recent)
        cache = EvictionCache(model, method, budget, head_scores=scores, mode=mode, max_new_tokens=0)
        model(torch.tensor(file["ids"]), past_key_values=cache)
        for layer in range(want.shape[0]):
            kept = [[head.nonzero().flatten().tolist() for head in row] for row in want[layer]]
            assert cache.kept_positions(layer) == kept, (ratio, layer)
