"""What full attention's rows say: how many weights are next to nothing, and how few tokens hold the mass."""

from __future__ import annotations

from torch import Tensor


def nothing(rows: Tensor, below: float) -> Tensor:
    """[L, heads, n, n] probabilities -> [L]: percent of the causal weights under `below` times their row's largest.

    A row's share counts as one whatever its length; the first row, which sees one token, is left out.
    """
    n = rows.shape[-1]
    causal = rows.new_ones(n, n).tril().bool()
    small = (rows < below * rows.amax(-1, keepdim=True)) & causal
    share = small.float().sum(-1) / causal.float().sum(-1)
    return 100 * share[..., 1:].mean((1, 2))


def mass(rows: Tensor, shares: list[float]) -> list[float]:
    """[L, heads, n, n] -> percent of the accumulated attention that the best-scored share of the tokens holds.

    The score of a token is its column's sum, as the methods accumulate it; mean over layers and heads.
    """
    score = rows.sum(-2)
    best = score.sort(dim=-1, descending=True).values.cumsum(-1) / score.sum(-1, keepdim=True)
    n = rows.shape[-1]
    return [100 * float(best[..., max(1, round(share * n)) - 1].mean()) for share in shares]
