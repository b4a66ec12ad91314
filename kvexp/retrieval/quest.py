"""Quest: pages of keys, each represented by its keys' smallest and largest components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.method import PrefillKV, Retrieval, RetrievalQuery, reduce_group
from kvexp.util.fields import AtLeast


@dataclass(frozen=True)
class Quest(Retrieval):
    """relevance of a token = sum over components of max(q * smallest, q * largest) in its page, which bounds q.k there.

    Source: Tang et al. 2024, arXiv:2406.10774, section 3.3; pages of 16. Departures: the last page is cut so that
    the budget holds to the token; sinks and window as in the other methods here; all layers select (there: not the
    first two).
    """

    name: ClassVar[str] = "quest"
    page: Annotated[int, AtLeast(1)] = 16

    def index_bits_per_token(self, dim: int) -> float:
        return 2 * 16.0 * dim / self.page

    def build(self, index: KVIndex, prompt: PrefillKV) -> None:
        keys, slots = prompt.keys, torch.arange(prompt.keys.shape[2], device=prompt.device)
        nowhere = -(-prompt.capacity // self.page)
        at_page = torch.where(prompt.real(), slots // self.page, nowhere)[:, None, :, None].expand_as(keys)
        for name, how in (("low", "amin"), ("high", "amax")):
            pages = keys.new_zeros(*keys.shape[:2], nowhere + 1, keys.shape[3])
            index.register(
                name, pages.scatter_reduce(2, at_page, keys, how, include_self=False)[:, :, :-1], per=self.page
            )

    def extend(self, index: KVIndex, key: Tensor, value: Tensor, positions: list[int]) -> None:
        index.grow(max(positions) + 1)
        rows, pages = torch.arange(len(positions)), [p // self.page for p in positions]
        first = torch.tensor([p % self.page == 0 for p in positions], device=key.device)[:, None, None]
        for name, pick in (("low", torch.minimum), ("high", torch.maximum)):
            before = index[name][rows, :, torch.tensor(pages)]
            index.write(name, pages, torch.where(first, key, pick(before, key)))

    def relevance(self, retrieval_query: RetrievalQuery) -> Tensor:
        query = retrieval_query.query
        above = torch.matmul(query.clamp(min=0), retrieval_query.index["high"].transpose(-1, -2))
        below = torch.matmul(query.clamp(max=0), retrieval_query.index["low"].transpose(-1, -2))
        dots = (above + below).repeat_interleave(self.page, dim=-1)[..., : retrieval_query.memory.length]
        return reduce_group(retrieval_query.logits(dots), "max")
