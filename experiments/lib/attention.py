"""What the rows of a model's attention hold, in full and under one mask per row, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvexp.core import Budget, Method
from kvexp.hf import RowMaskCache
from kvexp.lm_eval import mask_fn_of
from kvexp.methods import Full


@torch.no_grad()
def attention(model: Any, ids: Sequence[int], method: Method, budget: Budget | None) -> list[tuple[Tensor, Tensor]]:
    """Per layer (mask bool, probabilities float32), each [query heads, n, n]: row by key.

    One forward (arXiv:2407.20485, its 2024 code): deeper layers read what the mask left of the shallower ones.
    """
    cache = RowMaskCache(model, mask_fn_of(method, budget, "local", len(ids), seed=0))
    device = model.get_input_embeddings().weight.device
    model(torch.tensor([list(ids)], device=device), past_key_values=cache, use_cache=True)
    found = [(state.mask, state.probabilities) for state in cache.layer_states]
    return [(mask[0].cpu(), rows[0].float().cpu()) for mask, rows in found if mask is not None and rows is not None]


def full_attention(model: Any, ids: Sequence[int]) -> Tensor:
    """[layers, query heads, n, n] float32, nothing pruned."""
    return torch.stack([rows for _, rows in attention(model, ids, Full(), None)])


def accumulated(rows: Tensor, alpha: float) -> Tensor:
    """A_n = sum over q <= n of alpha^(n - q) S_q (arXiv:2407.20485, eq. 5), after every row: [..., n, n] twice."""
    total = torch.zeros_like(rows[..., 0, :])
    after = []
    for q in range(rows.shape[-2]):
        total = alpha * total + rows[..., q, :]
        after.append(total)
    return torch.stack(after, dim=-2)


def near_zero_share(rows: Tensor, below: float) -> Tensor:
    """[L, heads, n, n] probabilities -> [L]: percent of the causal weights under `below` times their row's largest.

    A row's share counts as one whatever its length; the first row, which sees one token, is left out.
    """
    n = rows.shape[-1]
    causal = rows.new_ones(n, n).tril().bool()
    small = (rows < below * rows.amax(-1, keepdim=True)) & causal
    share = small.float().sum(-1) / causal.float().sum(-1)
    return 100 * share[..., 1:].mean((1, 2))


def attention_mass(rows: Tensor, shares: list[float]) -> list[float]:
    """[L, heads, n, n] -> percent of the accumulated attention that the best-scored share of the tokens holds.

    The score of a token is its column's sum, as the methods accumulate it; mean over layers and heads.
    """
    score = rows.sum(-2)
    best = score.sort(dim=-1, descending=True).values.cumsum(-1) / score.sum(-1, keepdim=True)
    n = rows.shape[-1]
    return [100 * float(best[..., max(1, round(share * n)) - 1].mean()) for share in shares]
