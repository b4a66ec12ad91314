"""The sets kept after prefill against NVIDIA's DMSPress around three presses (tests/peers/export_dms.py).

DMSPress(press, threshold, sliding_window_size) is Budget(threshold, threshold_recent) of the press's method.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvexp.core import Budget, Method
from kvexp.hf import EvictionCache, random_model
from kvexp.methods import CUR, KeyDiff, KNorm

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
EXPORT = ROOT / ".peers" / "dms.npz"
SCRIPT = ROOT / "tests" / "peers" / "export_dms.py"
METHODS: dict[str, Method] = {
    "knorm": KNorm(),
    "keydiff": KeyDiff(protect_recent=0),
    "cur": CUR(n_sinks=4, block=14),
}


@pytest.fixture(scope="module")
def file() -> Any:
    if not EXPORT.exists():
        pytest.skip(f"no export at {EXPORT.relative_to(ROOT)}; run: make peers")
    found = np.load(EXPORT)
    if json.loads(str(found["about"]))["script"] != hashlib.sha256(SCRIPT.read_bytes()).hexdigest():
        pytest.skip(f"{EXPORT.relative_to(ROOT)} comes from another version of its script; run: make peers")
    return found


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_same_sets(file: Any, name: str, mode: Any) -> None:
    about = json.loads(str(file["about"]))
    model = random_model("llama", **about["case"]["config"])
    names = [key for key in file.files if key.startswith("weights/")]
    model.load_state_dict({key.removeprefix("weights/"): torch.tensor(file[key]) for key in names})
    for threshold in about["thresholds"][name]:
        want = torch.tensor(file[f"{name}/{threshold}"])  # [L, B, H, T] bool
        assert len(want.sum(-1).unique()) > 3, "heads hold different numbers"
        budget = Budget(threshold=threshold, threshold_recent=about["window"])
        cache = EvictionCache(model, METHODS[name], budget, mode=mode)
        model(torch.tensor(file["ids"]), past_key_values=cache)
        for layer in range(want.shape[0]):
            kept = [[head.nonzero().flatten().tolist() for head in row] for row in want[layer]]
            assert cache.kept_positions(layer) == kept, (threshold, layer)
