"""Key attention: the accumulated score alone, no recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.core import AttentionScoreSpec, Method


@dataclass(frozen=True)
class KeyAttention(Method):
    """score[j] = sum over queries q of softmax(x_q)[j]; keep = top k - 1 and the current token.

    Source: "key attention" of Keyformer's section 2.3.1 (arXiv:2403.09054): accumulated attention without a recent
    window. The paper gives no code for it.
    """

    name: ClassVar[str] = "key_attention"

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return AttentionScoreSpec()
