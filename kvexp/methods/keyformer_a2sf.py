"""Keyformer with A2SF's forgetting factor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from kvexp.core import AttentionScoreSpec
from kvexp.methods.keyformer import Keyformer
from kvexp.util.fields import Range


@dataclass(frozen=True)
class KeyformerA2SF(Keyformer):
    """score_t[j] = alpha * score_{t-1}[j] + softmax((x_t + zeta) / tau_t)[j]; the rest as Keyformer.

    Source: A2SF (arXiv:2407.20485) says its factor composes with other scores; eq. 5 over Keyformer's eq. 9
    (arXiv:2403.09054). Neither gives numbers or code.
    """

    name: ClassVar[str] = "keyformer_a2sf"
    alpha: Annotated[float, Range(0, 1)] = 0.9

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return replace(super().score_spec, decay=self.alpha)
