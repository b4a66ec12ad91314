"""The authors' own numbers: every recording at hand reproduces, and the check itself can fail."""

from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED

from kvexp.reference_check.__main__ import main
from kvexp.reference_check.run import run

HERE = sorted((Path(__file__).parent / "golden").glob("*.npz"))
OTHERS = sorted((SHARED / "golden").glob("*.npz"))


@pytest.mark.filterwarnings("ignore:.*token_id must be")
@pytest.mark.parametrize("path", [*HERE, *OTHERS], ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_recording(path):
    report = run(str(path))
    assert report.passed, f"\n{report}"


def test_all_recordings_are_there():
    if not OTHERS:
        pytest.skip(f"no recordings at {SHARED / 'golden'}: only the three carried along were compared")
    assert len(OTHERS) >= 23


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


SPOILED = [
    *(("pqcache_pq_mha", f"clean_fp32_{name}") for name in ("out", "centroids", "codes", "topk_idx", "approx_score")),
    ("pqcache_pq_mha", "cleancand_fp32_init_idx"),
    ("pqcache_baselines_mha", "sparq_r2_mv1_out"),
    ("pqcache_baselines_mha", "sparq_r1_mv0_idx"),
    ("pqcache_baselines_mha", "oracle_weights"),
    ("pqcache_baselines_mha", "h2o_scores"),
    ("pqcache_infllm_mha", "perhead0_out"),
    ("pqcache_infllm_mha", "perhead1_selected_blocks"),
    ("pqcache_infllm_mha", "perhead1_repr_keys_end"),
    ("pqcache_lfu", "lfu_slot_after"),
    ("pqcache_adaptive_iters", "v1"),
]


@pytest.mark.parametrize(("file", "field"), SPOILED)
def test_a_spoiled_retrieval_recording_fails(tmp_path, file, field):
    source = SHARED / "golden" / f"{file}.npz"
    if not source.exists():
        pytest.skip(f"no recording at {source}")
    with np.load(source) as data:
        arrays = {name: data[name] for name in data.files}
    value = arrays[field].copy()
    value.flat[0] += 1 if value.dtype.kind == "i" else 0.01
    arrays[field] = value
    np.savez(tmp_path / "spoiled.npz", **arrays)
    report = run(str(tmp_path / "spoiled.npz"))
    assert [name for name, passed, _ in report.lines if not passed], report


@pytest.mark.parametrize("file", ["pq", "baselines", "infllm"])
def test_recordings_with_grouped_heads_are_understood(tmp_path, file):
    """Grouped-head files have the fields of the others, with fewer kv heads; what must agree without them still does.

    Keys and values of every second head are made those of the one before, so that a group of two shares them; then the
    recording of a file with all heads holds for what does not depend on the choice being one for the group.
    """
    source = SHARED / "golden" / f"pqcache_{file}_mha.npz"
    if not source.exists():
        pytest.skip(f"no recording at {source}")
    with np.load(source) as data:
        arrays = {name: data[name] for name in data.files if not name.startswith("released")}
    for name in ("k", "v", "k_pre_rope"):
        if name in arrays:
            arrays[name] = arrays[name][:, :, ::2]
    for name, value in arrays.items():
        heads = value.ndim > 2 and value.shape[0] == 2
        if heads and any(part in name for part in ("idx", "approx_score", "_centroids", "_codes", "h2o_scores")):
            axis = 2 if name.endswith(("idx", "approx_score", "h2o_scores")) else 1
            arrays[name] = np.take(value, [0, 2], axis=axis)
    np.savez(tmp_path / "grouped.npz", **arrays)
    report = run(str(tmp_path / "grouped.npz"))
    passed = {name for name, good, _ in report.lines if good}
    assert not [seen for _, _, seen in report.lines if seen.startswith("shape")], report
    if file == "pq":
        assert {"clean_fp32_centroids", "clean_fp32_codes", "clean_fp32_init_idx"} <= passed
    if file == "infllm":
        assert {"perhead0_n_local", "perhead1_blocks_end"} <= passed


def test_a_folder_stands_for_its_recordings(tmp_path, capsys):
    for name in ("b", "a"):
        np.savez(tmp_path / f"{name}.npz", a=np.zeros(3))
    (tmp_path / "README.md").write_text("no recording")
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.index("a.npz") < shown.index("b.npz") and "2 file(s) failed" in shown and "README" not in shown
    assert main([str(HERE[0])]) == 0


def test_a_folder_without_recordings_is_no_success(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2 and "is a folder without any .npz file" in capsys.readouterr().err
