"""Oracle: the exact top k of every query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvexp.retrieval.method import Retrieval, RetrievalQuery, group_probs


@dataclass(frozen=True)
class Oracle(Retrieval):
    """selected = top of sum over the query heads of a kv head of softmax(q.K), the softmax over everything so far.

    Source: "Oracle" of PQCache, arXiv:2407.12820, section 4.1.3. It reads every key at every step: a bound of
    quality, not of speed. Departure from the release: a softmax over survivors, as in all methods here.
    """

    name: ClassVar[str] = "oracle"

    def index_bits_per_token(self, dim: int) -> float:
        return 16.0 * dim

    def relevance(self, retrieval_query: RetrievalQuery) -> Tensor:
        return group_probs(retrieval_query.exact_logits(past=True), retrieval_query.params.sinks).sum(2)
