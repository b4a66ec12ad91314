"""The authors' own numbers: every recording reproduces, and the check itself can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import CASES
from reference_check import Report, main, run

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


GPT2, NEOX, MPT = "keyformer_gpt2_leftpad6_gumbel", "h2o_gptneox_hh_mask", "keyformer_mpt_streamingllm_b2"
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
    *((REALDROP.stem, field) for field in ("logits", "hh_score", "slot_orig_pos")),
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
QUICK = {
    *("logits", "keep_mask_next", "w:transformer.wte.weight", "probs_full", "gen3_local_mask", "a10_scores"),
    *("clean_fp32_codes", "h2o_scores", "perhead0_out", "lfu_slot_after", "v1"),
}


@pytest.mark.parametrize(
    ("file", "field"),
    [pytest.param(*one, marks=[] if one[1] in QUICK else pytest.mark.slow) for one in PLANTED],  # each file thrice
)
def test_one_changed_number_in_a_recording_fails(tmp_path, file, field):
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


def test_weights_of_another_shape_or_name_are_refused(tmp_path):
    arrays = recording(NEOX) | {"w:gpt_neox.other.weight": np.zeros(3, np.float32)}
    arrays["w:gpt_neox.embed_in.weight"] = arrays["w:gpt_neox.embed_in.weight"][:, :8]
    with pytest.raises(ConfigError, match=r"unknown: gpt_neox.other.weight; of another shape: gpt_neox.embed_in"):
        checked(tmp_path, arrays)


def test_a_file_of_which_nothing_is_compared_does_not_pass():
    report = Report()
    report.skip("field", "a reason")
    assert not report.passed


def test_the_command_fails_where_a_file_does(tmp_path, capsys):
    spoiled = arrays_of(REALDROP)
    spoiled["w:model.layers.1.self_attn.v_proj.weight"] *= 2
    np.savez(tmp_path / "spoiled.npz", **spoiled)
    assert main([str(REALDROP), str(tmp_path / "spoiled.npz")]) == 1 and "FAIL" in capsys.readouterr().out
    assert main([str(REALDROP)]) == 0
