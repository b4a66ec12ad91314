"""Row masks: eviction simulated inside one forward, the protocol behind the papers' lm-eval numbers.

Nothing leaves the cache. From one head's full attention logits a mask says which keys each query row may still use,
every row is attended under its own mask, and the next layer sees the result. Each function maps ``logits [..., n, n]``
(scaled, position-encoded; query row by key column; any leading axes, one per query head) to a causal bool mask
``[..., n, n]``, True where a row attends. Budgets are integers over the whole request (prompt and continuation).

Sources: A2SF arXiv:2407.20485, H2O arXiv:2306.14048, Keyformer arXiv:2403.09054. Departure of the whole file: equal
scores are settled in favour of the newer (larger) index and only living tokens compete, where the releases leave ties
to ``topk`` and may pick a future or dropped token whose score is also zero. In float32 the recorded runs have no
ties. In float16 they do: `recorded`, a release's mask of the same logits, then says which of equal scores it kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, apply_probs, expanded
from kvexp.util.errors import CacheError


def window_mask(n: int, width: int, device: torch.device | None = None) -> Tensor:
    """Bool [n, n]: row i attends to its last `width` keys, itself included (the papers' Local / Window baseline).

    The releases' band of `recent` keys lets `recent + 1` through: ``window_mask(n, recent + 1)``.
    """
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1 - width).tril()


def causal_probs(logits: Tensor, noise: Tensor | None = None, tau: float = 1.0) -> Tensor:
    """Float32 softmax of causal rows [..., n, n]; noise g is Keyformer's (arXiv:2403.09054): softmax((x + g) / tau)."""
    x = _fill(logits, _causal(logits))
    return ((x if noise is None else x + noise) / tau).softmax(-1)


def masked_probs(logits: Tensor, mask: Tensor) -> Tensor:
    """Float32 softmax [..., n, n] over the keys `mask` leaves to each row."""
    return _fill(logits, mask).softmax(-1)


def local_mask(logits: Tensor, heavy: int, recent: int, **how: Any) -> Tensor:
    """The mask of `local_mask_and_scores`, whose arguments these are."""
    return local_mask_and_scores(logits, heavy, recent, **how)[0]


def local_mask_and_scores(
    logits: Tensor,
    heavy: int,
    recent: int,
    *,
    decay: float = 1.0,
    scores: Tensor | None = None,
    block_scores: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    recorded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy causal eviction: A2SF's paper-era code (arXiv:2407.20485 eq. 5).

    With decay 1 it is the mask of H2O's lm-eval code for OPT and NeoX (arXiv:2306.14048). Returns the mask, and A after
    each row, both [..., n, n]; A is in `dtype`, and 0 in rows < heavy - 1, before it exists.

    With S the rows of full attention (never renormalised over survivors) and B = heavy:
        rows < B    attend causally;  A = sum_{q<B} decay^(B-1-q) S_q
        row t >= B  K_t = top-(B-1) of A among K_{t-1}, and t itself;  A = (decay A + S_t) * 1[K_t]
        mask        K_t united with the last recent + 1 keys, causal: at most max(B, 1) + recent keys a row
    A token that only the recent band holds loses its score, so it must win a heavy slot on its first row; that is the
    released H2O baseline.

    scores        [..., n, n] to accumulate instead of softmax(logits), such as Keyformer's `causal_probs` with noise
    block_scores  [..., n, n] stands in for rows < heavy of `scores`: Keyformer's release (arXiv:2403.09054) draws noise
                  once for that block and anew for every later row
    dtype         of S, A and the comparison; float16 repeats the A2SF release up to ties and summation order
    recorded      bool [..., n, n], the release's mask: of equal scores, what it holds stays
    """
    _check(decay, heavy, recent)
    s = (causal_probs(logits) if scores is None else scores).to(dtype)
    block = s if block_scores is None else block_scores.to(dtype)
    band = window_mask(s.shape[-1], recent + 1, s.device)
    # Of what the recent band holds anyway, a recorded mask does not say whether it has won a heavy slot as well.
    ties = None if recorded is None else recorded.int() + (recorded & ~band)
    kept, accumulated = _greedy(s, block, min(heavy, s.shape[-1]), decay, ties)
    mask = (kept | band) & _causal(s)
    return mask, accumulated


def _greedy(s: Tensor, block: Tensor, heavy: int, decay: float, ties: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows s, block [..., n, n] -> the sets K_t (bool) and the accumulators A after each row, both [..., n, n].

    ties: int32 [..., n, n], what decides between equal accumulators in each row, higher stays.
    """
    n = s.shape[-1]
    kept, accumulated = torch.zeros_like(s, dtype=torch.bool), torch.zeros_like(s)
    if heavy == 0:
        return kept, accumulated
    kept[..., :heavy, :heavy] = True
    alive = kept[..., 0, :].clone()
    acc = (block[..., :heavy, :] * _powers(decay, heavy, s)[:, None]).sum(-2).masked_fill(~alive, 0)
    accumulated[..., heavy - 1, :] = acc
    for t in range(heavy, n):
        if ties is None:
            lowest = acc.masked_fill(~alive, torch.inf).argmin(-1, keepdim=True)  # among equals the oldest
            alive = alive.scatter(-1, lowest, torch.zeros_like(lowest, dtype=torch.bool))
        else:  # as in a release dropped and future tokens compete, which tie with living ones at 0
            alive = _top(acc, heavy - 1, ties[..., t, :]) & ((acc > 0) | (ties[..., t, :] > 0))
        alive[..., t] = True
        acc = (decay * acc + s[..., t, :]).masked_fill(~alive, 0)
        kept[..., t, :], accumulated[..., t, :] = alive, acc
    return kept, accumulated


def global_mask(logits: Tensor, heavy: int, recent: int) -> Tensor:
    """H2O's lm-eval mask for LLaMA: one set of heavy columns for every row, found with hindsight.

    Row i keeps the top-`heavy` columns of sum_q softmax(x)[q], q over all rows (later ones too), and its last
    recent + 1 keys; causal. Not a cache policy but an oracle, in the release only (arXiv:2306.14048 is causal).
    """
    _check(1.0, heavy, recent)
    columns = _top(causal_probs(logits).sum(-2), heavy)[..., None, :]
    return (columns | window_mask(logits.shape[-1], recent + 1, logits.device)) & _causal(logits)


def ideal_mask(
    logits: Tensor,
    budget: int,
    *,
    force_self: bool = True,
    dtype: torch.dtype = torch.float32,
    recorded: Tensor | None = None,
) -> Tensor:
    """A2SF's "Ideal" (arXiv:2407.20485 fig. 4): each row keeps the best of its own full row, nothing is evicted.

    Rows < budget are full; then top-(budget - 1) of softmax(row) and the row's own token (budget - 1 keys where it is
    among them already). force_self=False is the release's `ideal_llama`: rows <= budget full, then plain top-budget.
    dtype: of the rows; recorded: bool [..., n, n], the release's mask, of equal scores what it holds stays.
    """
    _check(1.0, budget - 1)
    causal = _causal(logits)
    rows = causal_probs(logits).to(dtype).masked_fill(~causal, -1.0)
    best = _top(rows, budget - 1 if force_self else budget, recorded)
    if recorded is not None:  # in a release, future tokens tie with those whose share is 0
        best = best & (recorded | (rows > 0))
    if force_self:
        best = best | window_mask(logits.shape[-1], 1, logits.device)
    best[..., : budget if force_self else budget + 1, :] = True
    return best & causal


def row_cosine(a: Tensor, b: Tensor, eps: float = 1e-4) -> Tensor:
    """Cosine of matching rows, a.b / (|a||b| + eps): [..., n, K] twice -> [..., n] (A2SF arXiv:2407.20485 table 2).

    The table compares post-softmax attention (`masked_probs`) and averages over rows, heads, layers; rows before the
    first eviction count as 1. Its Local series is cut first to W keys, not renormalised: probs * window_mask(n, W).
    """
    norms: Tensor = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    dots: Tensor = (a * b).sum(-1)
    return dots / (norms + eps)


def _causal(logits: Tensor) -> Tensor:
    """The causal mask of logits [..., n, n]: bool [n, n], True on and below the diagonal."""
    n = logits.shape[-1]
    return window_mask(n, n, logits.device)


def _fill(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits [..., n, n] in float32, float32's lowest number where `mask` is False."""
    return logits.float().masked_fill(~mask, torch.finfo(torch.float32).min)


def _powers(decay: float, count: int, like: Tensor) -> Tensor:
    """decay^(count-1), ..., decay, 1 in the dtype of `like` (0^0 = 1)."""
    exponents = torch.arange(count - 1, -1, -1, dtype=like.dtype, device=like.device)
    return torch.full_like(exponents, decay) ** exponents


def _top(scores: Tensor, count: int, ties: Tensor | None = None) -> Tensor:
    """Bool mask of the `count` largest along the last axis; among equals the highest of `ties`, then the newest."""
    newest_first = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device).expand_as(scores)
    if ties is not None:
        picked = ties.gather(-1, newest_first).int().sort(dim=-1, descending=True, stable=True).indices
        newest_first = newest_first.gather(-1, picked)
    order = scores.gather(-1, newest_first).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = newest_first.gather(-1, order)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))


def _check(decay: float, *budgets: int) -> None:
    """ValueError for a decay outside [0, 1] or a budget below 0."""
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must lie in [0, 1], got {decay}")
    if min(budgets) < 0:
        raise ValueError(f"budgets must not be negative, got {budgets}")


# (logits [B, H * G, T, T] with -inf where causality or padding forbids, layer index) -> what each row may see
MaskFn = Callable[[Tensor, int], Tensor]


class MaskedLayer:
    """One layer of the row-mask protocol: rows 0..T-1 attend in one forward through a mask made of their full logits.

    mask_fn: (logits [B, H * G, T, T], layer number) -> bool mask of the same shape. A `LayerCache` that keeps nothing:
    a second forward is a CacheError. mask, probabilities [B, H * G, T, T]: left for inspection. kv_bytes: of all keys
    and values.
    """

    def __init__(self, mask_fn: MaskFn, index: int) -> None:
        self.mask_fn, self.index = mask_fn, index
        self.seq_len = self.kv_bytes = 0
        self.mask: Tensor | None = None
        self.probabilities: Tensor | None = None

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: beams continue a text, and this layer takes a text in one forward."""
        raise CacheError("the row-mask protocol judges a text in one forward: beams cannot be reordered")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Attend with all tokens of a text at once; arguments and result as in `LayerCache.forward`."""
        if params.sinks is not None:
            raise CacheError(
                "row masks score tokens by softmaxes without sinks, and this model's heads have attention sinks: set "
                "task.protocol=prefill_then_step"
            )
        if self.seq_len:
            raise CacheError("the row-mask protocol judges a text in one forward: make a new RowMaskCache for each")
        b, h, count = key.shape[:3]
        self.seq_len, self.kv_bytes = count, key.nbytes + value.nbytes
        positions = torch.arange(count, device=key.device).expand(b, count)
        if padding is not None:
            positions = torch.where(padding.to(torch.bool), positions, -1)
        inputs = AttentionInputs(
            query=query.unflatten(1, (h, query.shape[1] // h)),
            keys=key,
            values=value,
            positions=positions[:, None],
            query_positions=positions,
            params=params,
        )
        inputs = expanded(inputs)
        x = inputs.logits(slice(0, count), count)
        self.mask = self.mask_fn(x.flatten(1, 2), self.index)
        x = x.masked_fill(~self.mask.view_as(x), -torch.inf)
        probabilities = torch.softmax(x, dim=-1)
        self.probabilities = probabilities.flatten(1, 2)
        return apply_probs(probabilities, inputs.values).flatten(1, 2)

    def reset(self) -> None:
        """Forget the text; another one may follow."""
        self.seq_len = 0
