"""Files with a model, a prompt and decode steps: Keyformer's and H2O's releases, dropped for real or by mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvexp.core import Budget, Cadence, Method
from kvexp.errors import ConfigError
from kvexp.methods import H2O, StreamingLLM
from kvexp.models import EvictionCache
from kvexp.reference_check.comparison import Report
from kvexp.reference_check.padded_sinks import revive_padding
from kvexp.reference_check.recorded import RecordedKeyformer, recorded_noise
from kvexp.reference_check.recording import Recording
from kvexp.reference_check.trace import Trace, teacher_forced


def setting(archive: Recording) -> tuple[Method, dict[str, Any], tuple[str, ...]]:
    """The method a file was recorded with, how the cache must be set up, and the modes that can reproduce it."""
    c, variant = archive.config, archive.variant
    padding = int(c.get("npad", 0))
    modes: tuple[str, ...] = ("overwrite", "compact", "mask")
    if "heavy_budget" in c:
        k = c["heavy_budget"] + c["recent_budget"]
        method: Method = H2O(recent_ratio=c["recent_budget"] / k, impl="mask", score_batch="per_beam")
        return method, {"budget": Budget(tokens=k)}, ("mask",)
    if "hh_size" in c:
        k = c["hh_size"] + c["recent_size"]
        rolling = {"positions": "renumbered"} if variant.endswith("streaming") else {}
        method = H2O(recent_ratio=c["recent_size"] / k, score_batch="sum_all")
        return method, {"budget": Budget(tokens=k, counts_self=False)} | rolling, modes
    if "stream" in variant:
        budget = Budget(kv_ratio=c["kv_cache"] / 100, of="padded", counts_self=False)
        return StreamingLLM(), {"budget": budget, "positions": "renumbered"}, modes
    if "kv_cache" not in c or "noise_prefill" not in archive:
        fields = ", ".join(list(archive)[:6])
        raise ConfigError(f"{archive.path}: not a recording this script knows (first fields: {fields})")
    steps = int(c["T"])
    real_drop = "bias" in variant
    frozen = not real_drop and not _keeps_leaving_token(archive)
    if real_drop:
        modes = ("overwrite", "compact")  # the recorded noise goes by slot, and mask mode keeps all slots
    method = RecordedKeyformer(
        recent_ratio=c["recent"] / 100,
        tau_init=c["tau_init"],
        tau_end=c["tau_init"] + steps * c["tau_delta"],
        key_window="release_frozen" if frozen else "paper",
        score_batch="sum_all",
        zeta=recorded_noise(archive, padding, by_slot=real_drop),
    )
    options: dict[str, Any] = {"budget": Budget(kv_ratio=c["kv_cache"] / 100, of="padded", counts_self=not real_drop)}
    options["max_new_tokens"] = steps
    if real_drop:
        options["cadence"] = Cadence(at_prefill=False, every=8)
        options["positions"] = "renumbered" if "new" in variant else "original"
    return method, options, modes


def _keeps_leaving_token(archive: Recording) -> bool:
    """Is this the release with its off-by-one mended ("paperfix")? Then the token that leaves the window may stay."""
    if "paperfix" in archive.path or "paperfix" in archive.variant:
        return True
    width, c = archive["input_ids"].shape[1], archive.config
    window = int(int(width * c["kv_cache"] / 100) * c["recent"] / 100)
    return bool((archive["keep_mask_next"][0][..., width - window] == 1).any())


def check(archive: Recording, report: Report) -> None:
    """Replay the recorded tokens in every mode and compare all fields."""
    method, options, modes = setting(archive)
    model, ids = archive.model(), archive.tensor("input_ids").long()
    padding = int(archive.config.get("npad", 0))
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    tokens = archive.tensor("new_tokens").long()
    for mode in modes:
        cache = EvictionCache(model, method, mode=mode, **options)  # type: ignore[arg-type]
        if padding and "stream" in archive.variant:
            revive_padding(cache)
        trace = teacher_forced(cache, model, ids, mask, tokens)
        compare(archive, report, trace, mode, ids.shape[1], padding)


def compare(archive: Recording, report: Report, trace: Trace, mode: str, width: int, padding: int) -> None:
    """All fields of one run; columns of the recording are positions + padding."""
    logits = np.stack(trace.logits)
    report.close(f"{mode}: logits", logits, archive["logits"])
    report.exact(f"{mode}: new_tokens", logits.argmax(-1).T, archive["new_tokens"])
    if "tau" in archive:
        c = archive.config
        steps = np.arange(len(trace.logits))
        report.close(f"{mode}: tau", c["tau_init"] + steps * c["tau_delta"], archive["tau"])
    if "slot_orig_pos" in archive:
        _compare_slots(archive, report, trace, mode, width)
        return
    constant = pad_row_mass(archive.kind, width, padding)
    kept = by_column(trace.kept, archive["keep_mask_next"].shape, width, padding, kept=True)
    theirs = archive["keep_mask_next"]
    report.exact(f"{mode}: keep_mask_next", kept, np.where(np.isnan(theirs), -1, theirs))
    name = "score_fn" if "score_fn" in archive else "previous_scores"
    for field, values in ((name, trace.score), ("step_score", trace.columns)):
        if field in archive:
            ours = by_column(values, archive[field].shape, width, padding, kept=False)
            theirs = archive[field].copy()
            if padding:
                # Real keys got the same constant from every padded query row; kvexp gives those rows no weight.
                from_prompt = slice(padding, width)
                lives = theirs[..., from_prompt] != 0
                first = slice(0, 1) if field == "step_score" else slice(None)
                theirs[first, ..., from_prompt] -= constant * lives[first]
                ours[..., :padding] = theirs[..., :padding] = 0
            report.close(f"{mode}: {field}", ours, theirs)


def pad_row_mass(kind: str, width: int, padding: int) -> float:
    """What the release's padded query rows add to the score of every real key, in all."""
    if kind == "gptj":
        return padding / (width - padding)
    if kind == "gpt2":
        return sum(1 / (width - padding + row + 1) for row in range(padding))
    return padding / width


def by_column(states: list[Any], shape: tuple[int, ...], width: int, padding: int, *, kept: bool) -> np.ndarray:
    """[forward, layer, head, column]: values by column, 0 where nothing is; NaN (kept: -1) beyond the text so far."""
    table = np.full(shape, -1.0 if kept else np.nan)
    for step, layers in enumerate(states):
        known = width + step + (1 if kept else 0)
        for layer, rows in enumerate(layers):
            for head, held in enumerate(rows[0]):
                line = np.zeros(shape[-1])
                if kept:
                    line[[p + padding for p in held] + [known - 1]] = 1
                else:
                    for position, value in held.items():
                        line[position + padding] = value if np.isfinite(value) else 0.0
                table[step, layer, head, :known] = line[:known]
    return table


def _compare_slots(archive: Recording, report: Report, trace: Trace, mode: str, width: int) -> None:
    """Real-drop files: what each step attended to, slot by slot in order of position, and the survivors' score."""
    positions: np.ndarray = np.full(archive["slot_orig_pos"].shape, -1)
    for step in range(len(trace.logits)):
        for layer in range(positions.shape[1]):
            for head in range(positions.shape[2]):
                kept = trace.kept[step - 1][layer][0][head] if step else list(range(width - 1))
                line = [*kept, width + step - 1]
                positions[step, layer, head, : len(line)] = line
    report.exact(f"{mode}: slot_orig_pos", positions, archive["slot_orig_pos"])
    lengths = (positions >= 0).sum(-1)[:, :, 0]
    theirs = archive["klen"]
    report.exact(f"{mode}: klen", lengths if theirs.ndim == 2 else lengths[:, 0], theirs)
    rows = len(trace.kept[0][0])
    same = all(row == layers[0] for kept in trace.kept for layers in kept for row in layers)
    report.exact(f"{mode}: one keep set for {rows} rows", same, True)
    for name in ("score_fn", "hh_score"):
        if name in archive:
            score = np.full(archive[name].shape, np.nan)
            for step, layers in enumerate(trace.score):
                for layer, batch in enumerate(layers):
                    for head, held in enumerate(batch[0]):
                        values = [held[p] for p in sorted(held) if np.isfinite(held[p])]
                        score[step, layer, head, : len(values)] = values
            report.close(f"{mode}: {name}", score, archive[name])
