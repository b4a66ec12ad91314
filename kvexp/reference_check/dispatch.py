"""Which check fits a file, by its fields."""

from __future__ import annotations

from kvexp.errors import ConfigError
from kvexp.reference_check import (
    baselines,
    beam_check,
    caching,
    generation_check,
    infllm_check,
    quantised,
    row_mask_check,
    tensors,
)
from kvexp.reference_check.comparison import Report
from kvexp.reference_check.recording import Recording


def run(path: str) -> Report:
    """Compare one recording; ConfigError where it is of no known kind."""
    archive, report = Recording(path), Report()
    if "gen1_ideal_mask" in archive:
        tensors.check_rowmask(archive, report)
    elif any(name.startswith(("hh_", "drop_")) and name.endswith("_out") for name in archive):
        tensors.check_decode(archive, report)
    elif any(name.endswith("_selected") for name in archive):
        tensors.check_head(archive, report)
    elif "km_seed" in archive:
        quantised.check(archive, report)
    elif "oracle_out" in archive:
        baselines.check(archive, report)
    elif "q_pre_rope" in archive:
        infllm_check.check(archive, report)
    elif "lfu_slot_after" in archive:
        caching.check_policies(archive, report)
    elif "n_xb" in archive:
        caching.check_iterations(archive, report)
    elif "beam_idx" in archive:
        beam_check.check(archive, report)
    elif "lmeval" in archive.variant or "lm_eval" in archive.variant:
        row_mask_check.check(archive, report)
    elif "new_tokens" in archive:
        generation_check.check(archive, report)
    else:
        raise ConfigError(f"{path}: not a recording this script knows (first fields: {', '.join(list(archive)[:6])})")
    for name in sorted(set(archive) - archive.read - report.skipped):
        report.skip(name, "neither an input nor a result of this comparison")
    return report
