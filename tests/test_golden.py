"""The authors' own numbers: every recording reproduces, and the check itself can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import CASES
from golden import half
from reference_check import Report, alpha_of, main, run

from kvexp.util.errors import ConfigError

FOLDER = Path(__file__).parent / "golden"
REALDROP = FOLDER / "h2o_llama_realdrop.npz"
pytestmark = pytest.mark.golden


def arrays_of(path):
    with np.load(path) as data:
        return {name: data[name] for name in data.files}


def recording(name):
    return arrays_of(REALDROP.with_name(f"{name}.npz"))


def checked(folder, arrays):
    """The report on these arrays as a file."""
    np.savez(folder / "recording.npz", **arrays)
    return run(str(folder / "recording.npz"))


def failing(report):
    return [name for name, passed, _ in report.lines if not passed]


@pytest.mark.filterwarnings("ignore:.*token_id must be")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.npz")), ids=lambda path: path.stem)
def test_recording(path):
    report = run(str(path))
    assert report.passed, f"\n{report}"


def test_every_recording_is_named_by_a_case():
    """Recordings of retrieval methods, which keep everything, aside."""
    patterns = {pattern for case in CASES.values() for pattern in case.golden} | {"pqcache_*"}
    found = {pattern: set(FOLDER.glob(f"{pattern}.npz")) for pattern in patterns}
    assert all(found.values()) and set().union(*found.values()) == set(FOLDER.glob("*.npz"))


@pytest.mark.parametrize("spoiled", ["logits", "hh_score", "slot_orig_pos", "w:model.layers.1.self_attn.v_proj.weight"])
def test_a_spoiled_recording_fails(tmp_path, spoiled, capsys):
    arrays = arrays_of(REALDROP)
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
    assert main([str(tmp_path / "other.npz"), str(REALDROP)]) == 1
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
    arrays = recording(file)
    arrays[field].flat[0] += 1 if arrays[field].dtype.kind == "i" else 0.01
    report = checked(tmp_path, arrays)
    assert failing(report), report


@pytest.mark.parametrize("file", ["pq", "baselines", "infllm"])
def test_recordings_with_grouped_heads_are_understood(tmp_path, file):
    """Grouped-head files have the fields of the others, with fewer kv heads; what must agree without them still does.

    Keys and values of every second head are made those of the one before, so that a group of two shares them; then the
    recording of a file with all heads holds for what does not depend on the choice being one for the group.
    """
    arrays = {name: value for name, value in recording(f"pqcache_{file}_mha").items() if name[:8] != "released"}
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
    assert main([str(REALDROP)]) == 0


def test_a_folder_without_recordings_is_no_success(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2 and "is a folder without any .npz file" in capsys.readouterr().err


GPT2, NEOX, MPT = "keyformer_gpt2_leftpad6_gumbel", "h2o_gptneox_hh_mask", "keyformer_mpt_streamingllm_b2_leftpad6"
HALF, GROUPED = "a2sf_rowmask_fp16", "a2sf_head_gqa"
PLANTED = [
    *((GPT2, field) for field in ("logits", "new_tokens", "tau", "step_score", "score_fn", "keep_mask_next")),
    *((GPT2, field) for field in ("w:transformer.wte.weight", "w:transformer.h.1.mlp.c_fc.weight", "noise_prefill")),
    *((NEOX, field) for field in ("logits", "new_tokens", "previous_scores", "keep_mask_next", "w:embed_out.weight")),
    *((MPT, field) for field in ("logits", "new_tokens", "slot_orig_pos", "klen", "w:transformer.wte.weight")),
    *((HALF, field) for field in ("logits", "probs_full", "gen1_ideal_probs", "gen1_ideal_out", "ideal_llama_mask")),
    *((HALF, f"gen1_{series}_{end}") for series in ("a2sf_a0", "h2o") for end in ("mask", "acc", "out", "cos")),
    *((HALF, f"gen3_local_{end}") for end in ("mask", "out")),
    *((GROUPED, field) for field in ("a00_scores", "a00_selected", "a01_selected", "a10_scores", "out", "v")),
]


QUICK = ("logits", "keep_mask_next", "w:transformer.wte.weight", "probs_full", "gen3_local_mask", "a10_scores")


@pytest.mark.parametrize(
    ("file", "field"),
    [pytest.param(*one, marks=[] if one[1] in QUICK else pytest.mark.slow) for one in PLANTED],  # each file thrice
)
def test_one_changed_number_in_a_made_recording_fails(tmp_path, file, field):
    """The last number that is one; of a half-precision field, changed by its last bit but one."""
    arrays = recording(file)
    value = arrays[field]
    place = tuple(np.argwhere(~np.isnan(value) & (value != 0) & (value != -1))[-1])
    if value.dtype == bool:
        value[place] = False
    elif value.dtype == np.float16:
        value[place] += 4 * np.spacing(value[place])
    else:
        value[place] += -1 if value.dtype.kind == "i" else 0.01
    assert failing(checked(tmp_path, arrays))


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        *(("a0", 0.0), ("a00", 0.0), ("a01", 0.1), ("a025", 0.25), ("a0.5", 0.5), ("a1", 1.0), ("a10", 1.0)),
        *(("a2sf_a09", 0.9), ("hh_a2sf02", 0.2), ("drop_a2sf01", 0.1), ("a100", 1.0)),
    ],
)
def test_the_forgetting_factor_is_in_the_name(name, alpha):
    assert alpha_of(name) == alpha


@pytest.mark.parametrize("name", ["a", "a2", "a15", "b01", "a2sf", "gen1"])
def test_a_name_without_a_forgetting_factor_is_refused(name):
    with pytest.raises(ConfigError, match=f"the field {name}: expected a forgetting factor from 0 to 1"):
        alpha_of(name)


@pytest.mark.parametrize("said", ["recent", "recent_budget", None])
def test_the_protected_tokens_are_read_from_the_file(tmp_path, said):
    arrays = recording(GROUPED)
    count = arrays.pop("recent")
    assert count == 3
    report = checked(tmp_path, arrays if said is None else arrays | {said: count})
    assert not failing(report), report
    if said:
        assert {f"{name}_selected" for name in ("a00", "a05")} <= {*failing(checked(tmp_path, arrays | {said: 5}))}


def test_two_numbers_of_protected_tokens_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="which of these holds"):
        checked(tmp_path, recording(GROUPED) | {"recent_budget": np.int64(4)})


@pytest.mark.parametrize(("file", "head"), [(NEOX, "embed_out.weight"), (REALDROP.stem, "lm_head.weight")])
def test_a_recording_without_an_output_head_is_refused(tmp_path, file, head):
    arrays = recording(file)
    del arrays[f"w:{head}"]
    with pytest.raises(ConfigError, match=r"not those of a .* model: missing: lm_head.weight"):
        checked(tmp_path, arrays)


def test_weights_of_another_shape_or_name_are_refused(tmp_path):
    arrays = recording(NEOX) | {"w:gpt_neox.other.weight": np.zeros(3, np.float32)}
    arrays["w:gpt_neox.embed_in.weight"] = arrays["w:gpt_neox.embed_in.weight"][:, :8]
    with pytest.raises(ConfigError, match=r"unknown: gpt_neox.other.weight; of another shape: gpt_neox.embed_in"):
        checked(tmp_path, arrays)


def test_buffers_of_older_transformers_are_no_weights(tmp_path):
    old = {"w:gpt_neox.layers.0.attention.bias": np.ones((1, 1, 9, 9), np.float32)}
    old["w:gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    assert checked(tmp_path, recording(NEOX) | old).passed


def test_files_that_cannot_be_compared_do_not_stop_a_folder(tmp_path, capsys):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 no archive")
    (tmp_path / "b.npz").write_bytes(b"")
    broken = recording(GROUPED)
    np.savez(tmp_path / "c.npz", **(broken | {"k": broken["k"][..., :3]}))
    np.savez(tmp_path / "d.npz", **{name: value for name, value in broken.items() if name != "v"})
    np.savez(tmp_path / "e.npz", **(recording(NEOX) | {"config": np.array("{")}))
    np.savez(tmp_path / "f.npz", **broken)
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  cannot be compared: ") for line in shown) == 5, shown
    assert "  cannot be compared: KeyError: 'v'" in shown
    assert shown[-1] == "5 file(s) failed" and any(line.startswith("  pass  a00_scores") for line in shown)


def test_what_no_comparison_reads_is_said(tmp_path):
    report = checked(tmp_path, recording(GROUPED) | {"extra": np.zeros(3)})
    assert (
        report.passed
        and "not compared: neither an input nor a result" in dict((n, s) for n, _, s in report.lines)["extra"]
    )


def test_overlap_has_two_sides():
    report = Report()
    few, many = np.array([True, False, False, False]), np.ones(4, bool)
    report.overlap("too many", many, few, 0.97)
    report.overlap("too few", few, many, 0.97)
    report.overlap("the same", few, few, 0.97)
    assert failing(report) == ["too many", "too few"]


def test_a_file_of_which_nothing_is_compared_does_not_pass():
    report = Report()
    report.skip("field", "a reason")
    assert not report.passed


# Half precision, in which scores tie: which of equal ones was kept is told by the recording alone.


@pytest.mark.parametrize(
    ("make", "seed"),
    [
        (half.rowmask, 8),  # equal accumulators
        (half.rowmask, 11),  # equal shares of one row, too
        (half.quantised, 11),  # a choice other than the recorded one, so another output
        (half.quantised, 16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_recording_in_half_with_ties_is_followed(tmp_path, make, seed):
    report = checked(tmp_path, make(seed))
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("field", ["gen1_ideal_mask", "ideal_llama_mask", "gen1_a2sf_a09_mask", "gen3_a2sf_a1_mask"])
def test_a_recorded_choice_that_was_no_tie_fails(tmp_path, field):
    """The most looked at of the last row's kept tokens is exchanged for the least looked at of the others."""
    arrays = half.rowmask()
    row, shares = arrays[field][0, 0, 0, -1], arrays["probs_full"][0, 0, 0, -1]
    kept, dropped = np.flatnonzero(row), np.flatnonzero(~row)
    row[kept[shares[kept[:-1]].argmax()]], row[dropped[shares[dropped].argmin()]] = False, True
    assert field in failing(checked(tmp_path, arrays))


@pytest.mark.parametrize("field", ["topk_idx", "out", "exact_topk_idx"])
def test_a_wrong_choice_or_output_in_half_fails(tmp_path, field):
    arrays = half.quantised()
    value = arrays[f"clean_fp16_{field}"]
    if field == "out":
        value[0, -1] += 0.1  # of a step whose choice agrees
    else:
        value[:] = np.arange(value.shape[-1])
    assert f"clean_fp16_{field}" in failing(checked(tmp_path, arrays))
