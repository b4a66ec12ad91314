"""An eviction that is due, with what it goes by besides the slots."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams
from kvexp.core.needs import Needs, newest_attention
from kvexp.core.retained_attention import RetainedAttention


@dataclass(frozen=True)
class DueEviction:
    """What an eviction goes by besides the slots: tensors of the forward that it follows, None where not needed.

    params: of that forward; newest_attention, last_logits: as in `EvictionContext`; before: None while decoding.
    """

    params: AttentionParams
    newest_attention: Tensor | None
    last_logits: Tensor | None
    before: RetainedAttention | None

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        probabilities: Tensor | None,
        needs: Needs,
        logits: Tensor | None,
        before: RetainedAttention | None,
    ) -> DueEviction:
        """After a forward with these inputs, as its method needs; logits: of the newest queries, at least `needs`'.

        probabilities: as of `newest_attention`.
        """
        return cls(
            inputs.params,
            newest_attention(inputs, probabilities) if needs.newest_attention else None,
            None if logits is None or not needs.last_queries else logits[..., -needs.last_queries :, :],
            before,
        )
