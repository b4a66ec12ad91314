"""Files with a beam search: the release sums scores over the beams, and all beams share one keep set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.core import Budget
from kvexp.models import EvictionCache
from kvexp.reference_check.comparison import Report
from kvexp.reference_check.generation_check import by_column
from kvexp.reference_check.recorded import RecordedKeyformer, recorded_noise
from kvexp.reference_check.recording import Recording
from kvexp.reference_check.trace import Trace, note, tapped


class _Watched(EvictionCache):
    """Notes the state after every forward, and how beams were reordered."""

    def watch(self) -> _Watched:
        self.trace, self.taps, self.beams = Trace(), tapped(self.layer_states), []  # type: ignore[var-annotated]
        return self

    def reorder_cache(self, beam_idx: Tensor) -> None:
        note(self.trace, self, self.taps)
        self.beams.append(beam_idx.tolist())
        super().reorder_cache(beam_idx)


@torch.inference_mode()
def check(archive: Recording, report: Report) -> None:
    """Sequences, their scores, the beam order of every step, logits, scores and masks."""
    c, model = archive.config, archive.model()
    ids, steps = archive.tensor("input_ids").long(), int(c["T"])
    method = RecordedKeyformer(
        recent_ratio=c["recent"] / 100,
        tau_init=c["tau_init"],
        tau_end=c["tau_init"] + steps * c["tau_delta"],
        key_window="release_frozen",
        score_batch="sum_all",
        zeta=recorded_noise(archive, 0, by_slot=False),
    )
    for mode in ("overwrite", "compact", "mask"):
        cache = _Watched(
            model,
            method,
            Budget(kv_ratio=c["kv_cache"] / 100),
            mode=mode,
            num_beams=c["num_beams"],
            max_new_tokens=steps,
        ).watch()
        output: Any = model.generate(
            ids,
            past_key_values=cache,
            num_beams=c["num_beams"],
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            early_stopping=True,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
        )
        width = ids.shape[1]
        report.exact(f"{mode}: sequences", output.sequences.numpy(), archive["sequences"])
        # transformers 4 divided a beam's log-probability by the length with the prompt, 5 divides by the new tokens.
        per_total = output.sequences_scores.numpy() * (output.sequences.shape[1] - width) / output.sequences.shape[1]
        report.close(f"{mode}: sequences_scores", per_total, archive["sequences_scores"])
        report.close(f"{mode}: logits", torch.stack(output.logits).numpy(), archive["logits"])
        # No forward follows the last reordering, and transformers 5 orders finished beams differently there.
        report.exact(f"{mode}: beam_idx", np.asarray(cache.beams[:-1]), archive["beam_idx"][: len(cache.beams) - 1])
        count = len(cache.trace.kept)
        kept = by_column(cache.trace.kept, archive["keep_mask_next"][:count].shape, width, 0, kept=True)
        theirs = archive["keep_mask_next"][:count]
        report.exact(f"{mode}: keep_mask_next", kept, np.where(np.isnan(theirs), -1, theirs))
        score = by_column(cache.trace.score, archive["score_fn"][:count].shape, width, 0, kept=False)
        report.close(f"{mode}: score_fn", score, archive["score_fn"][:count])
