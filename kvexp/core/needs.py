"""What a method looks at beside keys, values, positions and its score: declared, so that nothing else is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.local_attention import LocalChunks
from kvexp.core.second_pass import SecondPass


@dataclass(frozen=True)
class Needs:
    """The declaration of a method's needs. Caches of a method that declares one take the ordinary decode step.

    newest_attention: the attention of the newest query, each query head by itself (a score sums up those of a kv head).
    queries_after: mean and covariance of the prompt's queries before RoPE, in each query head, over the positions from
    this one on; None: not needed. output_norms: the size of every value behind the output projection, in each query
    head. last_queries: the logits of so many newest queries over the slots, each query head by itself; 0: not needed.
    calibration: statistics of the model's queries from a calibration pass (`QueryCalibration`).
    local_chunks: what each token of the prompt gets from the queries of its own chunk, before and behind; None: not
    needed. rope: the model's, with which cached keys are turned back. surrogate: new tokens start with the score that a
    trained `Surrogate` predicts from what the attention layer gets.
    second_pass: the prompt is fed once more before its eviction, and the largest attention of those queries to every
    slot is observed, each query head by itself; None: not needed.
    """

    newest_attention: bool = False
    queries_after: int | None = None
    output_norms: bool = False
    last_queries: int = 0
    calibration: bool = False
    local_chunks: LocalChunks | None = None
    rope: bool = False
    surrogate: bool = False
    second_pass: SecondPass | None = None


NOTHING = Needs()


def output_norms(values: Tensor, factors: Tensor) -> Tensor:
    """||R v_j||_2 [B, H, G, S] of values [B, H, S, Dv]; factors R [H, G, n, Dv], float32.

    With R of W = QR, the block of the output projection that a query head's output goes through, this is ||W v_j||_2.
    """
    sizes = [torch.linalg.vector_norm(values.float() @ each.transpose(-1, -2), dim=-1) for each in factors.unbind(1)]
    return torch.stack(sizes, dim=2)


def newest_attention(inputs: AttentionInputs, probabilities: Tensor | None) -> Tensor:
    """The newest query's softmax over all slots [B, H, G, S], 0 for slots that it does not see.

    probabilities [B, H, G, Q, S]: of this forward, if at hand; None: the last query row is computed from `inputs`.
    """
    if probabilities is not None:
        return probabilities[..., -1, :]
    count = inputs.query.shape[3]
    return torch.softmax(inputs.logits(slice(count - 1, count), inputs.keys.shape[2]), dim=-1)[..., 0, :]
