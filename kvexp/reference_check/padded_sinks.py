"""Keyformer's StreamingLLM release under left padding: padding becomes the sinks, and is seen while decoding.

There a padded query row finds every logit at the same minimum and so attends evenly to all columns, and after the
prompt the bias slice forgets the padding mask. kvexp does neither; this subclass does both, for the comparison only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core import EvictionLayer, Slots
from kvexp.core.attention import AttentionInputs, attend_with
from kvexp.core.eviction_layer import Columns
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.models import EvictionCache


class PaddedSinks(EvictionLayer):
    """A layer whose position ids are columns of the padded text."""

    def attend(self, sight: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        if not self.timeline.in_prompt:
            return super().attend(sight)
        x = sight.logits(slice(0, sight.query.shape[3]), sight.keys.shape[2])
        even = (sight.query_positions < 0)[:, None, None, :, None]
        return attend_with(torch.softmax(x.masked_fill(even, 0.0), dim=-1), sight.values), None

    def _score(self, slots: Slots, sight: AttentionInputs, probabilities: Tensor | None, seen: Columns) -> None:
        """Nothing to score in StreamingLLM; the end of the prompt is where padding comes to life."""
        if self.timeline.in_prompt and self.timeline.counts is not None:
            columns = torch.arange(slots.used)
            slots.positions[:, :, : slots.used] = columns
            self.timeline.counts = torch.full_like(self.timeline.counts, self.timeline.end)

    def _accumulate(self, slots: Slots, view: AttentionScoreSpec, columns: Tensor, query_positions: Tensor) -> None:
        raise AssertionError("StreamingLLM observes nothing")


def revive_padding(cache: EvictionCache) -> EvictionCache:
    """Make a fresh cache behave so."""
    for state in cache.states:
        state.__class__ = PaddedSinks
    return cache
