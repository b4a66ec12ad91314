"""SparQ attention: logits from the query's largest components; the mean value stands for what is not attended to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, compute_attention
from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.method import Combine, PrefillKV, Retrieval, RetrievalQuery, Selection, group_probs
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class SparQ(Retrieval):
    """s = q[i].K[:, i] / sqrt(D |q[i]|_1 / |q|_1), i the r components with the largest sum of |q| over a query group.

    Source: Ribar et al. 2023, arXiv:2312.04985, algorithm 1. mean_value: output = a * attention + (1 - a) * mean of
    all values so far, a = softmax(s) summed over what is attended. combine=raw_sum is the authors'. PQCache
    (arXiv:2407.12820) runs it with r=1, mean_value=false; the authors: n_sinks=0, mean_value=true. Departure: the
    scale is the model's, and ALiBi is added to s.
    """

    name: ClassVar[str] = "sparq"
    r: Annotated[int, AtLeast(1)] = 1  # components of the query to score with; PQCache's runs have 1
    mean_value: bool = False  # true: its authors
    combine: Combine = "raw_sum"

    def check_heads(self, dim: int) -> None:
        if self.r > dim:
            raise ConfigError(
                f"method.r={self.r}, but this model's heads have {dim} components: set r to at most {dim}"
            )

    def index_bits_per_token(self, dim: int) -> float:
        return 16.0 * self.r

    def build(self, index: KVIndex, prompt: PrefillKV) -> None:
        if self.mean_value:
            index.register("value_sum", (prompt.values.float() * prompt.real()[:, None, :, None]).sum(2))

    def extend(self, index: KVIndex, key: Tensor, value: Tensor, positions: list[int]) -> None:
        if self.mean_value:
            index["value_sum"].add_(value.float())

    def approximate(self, retrieval_query: RetrievalQuery) -> Tensor:
        """Approximate q.k [B, H, G, S] of every key, before the model's scale."""
        query = retrieval_query.query.float()
        largest = query.abs().sum(2).topk(self.r, dim=-1).indices
        keys = retrieval_query.memory.components(largest).float()
        components = query.gather(-1, largest[:, :, None].expand(-1, -1, query.shape[2], -1))
        share = components.abs().sum(-1, keepdim=True) / query.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        return torch.matmul(components, keys.transpose(-1, -2)) / share.clamp(min=1e-30).sqrt()

    def select(self, retrieval_query: RetrievalQuery) -> Selection:
        dots = self.approximate(retrieval_query)
        chosen = retrieval_query.topk(retrieval_query.reduce_group(retrieval_query.logits(dots), self.combine))
        return Selection(chosen, retrieval_query.logits(dots, past=True) if self.mean_value else None)

    def attend(self, inputs: AttentionInputs, retrieval_query: RetrievalQuery, chosen: Selection) -> Tensor:
        if chosen.extra is None:
            return compute_attention(inputs)
        sinks = inputs.params.sinks  # their share is in the weights, and so not in the attention that is weighted
        out = compute_attention(replace(inputs, params=replace(inputs.params, sinks=None)))
        slots = inputs.positions[:, :, None].expand(-1, -1, out.shape[2], -1)
        weights = group_probs(chosen.extra, sinks)
        covered = weights.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, 0.0).sum(-1)[..., None, None]
        whole = 1 if sinks is None else weights.sum(-1)[..., None, None]
        mean = retrieval_query.index["value_sum"] / (retrieval_query.positions + 1)[:, None, None]
        return (covered * out + (whole - covered) * mean[:, :, None, None]).to(out.dtype)
