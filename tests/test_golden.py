"""The authors' own numbers: every recording at hand reproduces, and the check itself can fail."""

from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED

from kvexp.reference_check.__main__ import main
from kvexp.reference_check.run import run

HERE = sorted((Path(__file__).parent / "golden").glob("*.npz"))
OTHERS = sorted(p for p in (SHARED / "golden").glob("*.npz") if not p.name.startswith("pqcache"))


@pytest.mark.filterwarnings("ignore:.*token_id must be")
@pytest.mark.parametrize("path", [*HERE, *OTHERS], ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_recording(path):
    report = run(str(path))
    assert report.passed, f"\n{report}"


def test_all_recordings_are_there():
    if not OTHERS:
        pytest.skip(f"no recordings at {SHARED / 'golden'}: only the three carried along were compared")
    assert len(OTHERS) >= 18


@pytest.mark.parametrize("spoiled", ["logits", "hh_score", "slot_orig_pos", "w:model.layers.1.self_attn.v_proj.weight"])
def test_a_spoiled_recording_fails(tmp_path, spoiled, capsys):
    with np.load(HERE[0]) as data:
        arrays = {name: data[name] for name in data.files}
    value = arrays[spoiled].copy()
    index = (0,) * (value.ndim - 1) + (1,)
    value[index] += 1 if value.dtype.kind == "i" else 0.01 + abs(value).max() * (spoiled[0] == "w")
    arrays[spoiled] = value
    path = tmp_path / "spoiled.npz"
    np.savez(path, **arrays)
    assert main([str(path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_an_unknown_file_says_so(tmp_path, capsys):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    assert main([str(tmp_path / "other.npz"), str(HERE[0])]) == 1
    out = capsys.readouterr().out
    assert "not a recording this script knows" in out
    assert "1 file(s) failed" in out
