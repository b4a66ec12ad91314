"""What `make peers` exported of kvpress, and its model with kvexp installed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvexp.hf import EvictionCache, random_model

ROOT = Path(__file__).resolve().parents[1]


class PeerExport:
    """The file .peers/NAME.npz of tests/peers/export_NAME.py; a test skips where it is not there or not of this script.

    about: what the script says of it; key -> tensor.
    """

    def __init__(self, name: str) -> None:
        path, script = ROOT / ".peers" / f"{name}.npz", ROOT / "tests" / "peers" / f"export_{name}.py"
        if not path.exists():
            pytest.skip(f"no export at {path.relative_to(ROOT)}; run: make peers")
        self.file: Any = np.load(path)
        self.about: dict[str, Any] = json.loads(str(self.file["about"]))
        both = script.read_bytes() + script.with_name("common.py").read_bytes()
        if self.about["script"] != hashlib.sha256(both).hexdigest():
            pytest.skip(f"{path.relative_to(ROOT)} comes from another version of its script; run: make peers")

    def __getitem__(self, key: str) -> Tensor:
        return torch.tensor(self.file[key])

    def model(self, case: str | None = None) -> Any:
        """The model of a case, or of the file where it has one."""
        about, prefix = (
            (self.about["case"], "weights/") if case is None else (self.about["cases"][case], f"{case}/weights/")
        )
        made = random_model("llama", **about["config"])
        names = [key for key in self.file.files if key.startswith(prefix)]
        made.load_state_dict({key.removeprefix(prefix): self[key] for key in names})
        return made


def other_sets(cache: EvictionCache, want: Tensor, where: object) -> list[str]:
    """A line, which begins with `where`, for each head that keeps other positions than want [L, B, H, T] bool says."""
    bad = []
    for layer, rows in enumerate(want):
        kept = cache.kept_positions(layer)
        assert [len(per_head) for per_head in kept] == [want.shape[2]] * want.shape[1]
        for row, head in np.ndindex(*want.shape[1:3]):
            got, wanted = kept[row][head], rows[row, head].nonzero().flatten().tolist()
            if got != wanted:
                bad.append(f"{where} layer {layer} row {row} head {head}: {sorted(set(got) ^ set(wanted))}")
    return bad
