"""Keyformer's StreamingLLM release under left padding: padding becomes the sinks, and is seen while decoding.

There a padded query row finds every logit at the same minimum and so attends evenly to all columns, and after the
prompt the bias slice forgets the padding mask. kvexp does neither; this subclass does both, for the comparison only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core import EvictionLayer, Slots
from kvexp.core.attention import AttentionInputs, apply_probs
from kvexp.core.observe.accumulate import PromptSums
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.models import EvictionCache


class PaddedSinks(EvictionLayer):
    """A layer whose position ids are columns of the padded text."""

    def attend(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        if not self.sequence.in_prompt:
            return super().attend(inputs)
        x = inputs.logits(slice(0, inputs.query.shape[3]), inputs.keys.shape[2])
        even = (inputs.query_positions < 0)[:, None, None, :, None]
        return apply_probs(torch.softmax(x.masked_fill(even, 0.0), dim=-1), inputs.values), None

    def _update_score(
        self, slots: Slots, inputs: AttentionInputs, probabilities: Tensor | None, seen: PromptSums
    ) -> None:
        """Nothing to score in StreamingLLM; the end of the prompt is where padding comes to life."""
        if self.sequence.in_prompt and self.sequence.num_real is not None:
            columns = torch.arange(slots.length)
            slots.positions[:, :, : slots.length] = columns
            self.sequence.num_real = torch.full_like(self.sequence.num_real, self.sequence.seq_len)

    def _accumulate(self, slots: Slots, view: AttentionScoreSpec, columns: Tensor, query_positions: Tensor) -> None:
        raise AssertionError("StreamingLLM observes nothing")


def revive_padding(cache: EvictionCache) -> EvictionCache:
    """Make a fresh cache behave so."""
    for state in cache.layer_states:
        state.__class__ = PaddedSinks
    return cache
