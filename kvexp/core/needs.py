"""What a method looks at beside keys, values, positions and its score: declared, so that nothing else is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs


@dataclass(frozen=True)
class Needs:
    """The declaration of a method's needs. Caches of a method that declares one take the ordinary decode step.

    newest_attention: the attention of the newest query, each query head by itself (a score sums up those of a kv head).
    queries_after: mean and covariance of the prompt's queries before RoPE, in each query head, over the positions from
    this one on; None: not needed.
    """

    newest_attention: bool = False
    queries_after: int | None = None


NOTHING = Needs()


def newest_attention(inputs: AttentionInputs, probabilities: Tensor | None) -> Tensor:
    """The newest query's softmax over all slots [B, H, G, S], 0 for slots that it does not see.

    probabilities [B, H, G, Q, S]: of this forward, if at hand; None: the last query row is computed from `inputs`.
    """
    if probabilities is not None:
        return probabilities[..., -1, :]
    count = inputs.query.shape[3]
    return torch.softmax(inputs.logits(slice(count - 1, count), inputs.keys.shape[2]), dim=-1)[..., 0, :]
