"""What no score can show: measurements inside a model, in full attention or under one mask per row.

A measurement takes the model, prompts as token ids and the settings of one job, and returns a row or more per prompt.
The text of this module and of those it imports is part of what a kept measurement is known by (`lib.runner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from kvexp.core import Budget, Method
from kvexp.core.budget import floor_share
from kvexp.core.row_mask import row_cosine, window_mask
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.hf import RowMaskCache
from kvexp.hf.traits import CACHE_ARGUMENT
from kvexp.lm_eval import check_row_mask, mask_fn_of
from kvexp.methods import A2SF, Full, Ideal, Window
from kvexp.retrieval import PQCache
from kvexp.run.settings import Settings
from kvexp.util.errors import ConfigError

Prompts = Sequence[Sequence[int]]
BELOW = 0.01  # of a row's largest weight: what counts as zero
SHARES = [share / 10 for share in range(1, 10)]  # of the tokens
AFTER = 32  # query rows after the reduction, as many as tokens of an answer
RANKS = 20  # parts of the tokens that stay, best first
BINS = 16  # parts of the prompt, oldest first
CELLS = 72  # a map is drawn with so many cells on a side
NEXT = 16  # rows after the pruning point whose attention is to be foreseen
TOKENS = 3  # followed besides the first token
SCORES = ("attention", "A2S", "A2SF")
ALIKE = {
    "cosine": "all rows, as the paper",
    "cosine_pruned": "rows that were pruned",
    "overlap": "keys in common",
}
PLACES = 16  # (layer, head, query) drawn from every prompt
SHOWN = 4  # of them are drawn, as in the paper
TOP = 0.1  # of the tokens
NEW = 48  # tokens decoded after each document


@torch.no_grad()
def attention(model: Any, ids: Sequence[int], method: Method, budget: Budget | None) -> list[tuple[Tensor, Tensor]]:
    """Per layer (mask bool, probabilities float32), each [query heads, n, n]: row by key.

    One forward (arXiv:2407.20485, its 2024 code): deeper layers read what the mask left of the shallower ones.
    """
    cache = RowMaskCache(model, mask_fn_of(method, budget, "local", len(ids), seed=0))
    device = model.get_input_embeddings().weight.device
    model(torch.tensor([list(ids)], device=device), use_cache=True, **{CACHE_ARGUMENT: cache})
    layers = [(state.mask, state.probabilities) for state in cache.layer_states]
    return [(mask[0].cpu(), rows[0].float().cpu()) for mask, rows in layers if mask is not None and rows is not None]


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


def sparsity(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """Percent of each layer's attention weights that are nearly zero."""
    rows = []
    for number, ids in enumerate(prompts):
        shares = near_zero_share(full_attention(model, ids), BELOW).tolist()
        rows += [{"prompt": number, "layer": layer, "sparsity": share} for layer, share in enumerate(shares, 1)]
    return pd.DataFrame(rows)


def mass(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """Percent of the attention that each of SHARES of the tokens holds, the best first."""
    rows = []
    for number, ids in enumerate(prompts):
        held = attention_mass(full_attention(model, ids), SHARES)
        rows += [{"prompt": number, "share": s, "mass": m} for s, m in zip(SHARES, held, strict=True)]
    return pd.DataFrame(rows)


def reduction(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """Scores of the kept tokens over the last AFTER rows, as percent of those rows' attention, and what changes hands.

    Tokens are chosen by the attention accumulated before those rows; "before" is full attention, "after" the softmax
    over the kept tokens and those that came since, in the same rows: one layer's reduction by itself (eq. 3).
    """
    if settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement needs a method with a kv_ratio: how many tokens stay")
    rows_of_ranks = []
    for number, ids in enumerate(prompts):
        rows = full_attention(model, ids)
        split = rows.shape[-1] - AFTER
        keep = int(settings.budget.kv_ratio * split)
        kept = rows[..., :split, :split].sum(-2).topk(keep, dim=-1).indices
        later = rows[..., split:, :]
        stays = torch.zeros(later.shape[:2] + later.shape[-1:]).scatter(-1, kept, 1.0)
        stays[..., split:] = 1.0
        reduced = later * stays[..., None, :]
        reduced = reduced / reduced.sum(-1, keepdim=True).clamp(min=1e-12)
        before, after = (100 * scores.mean(-2).gather(-1, kept) for scores in (later, reduced))
        shares = [scores / scores.sum(-1, keepdim=True) for scores in (before, after)]
        uneven = float(50 * (shares[1] - shares[0]).abs().sum(-1).mean())
        lost = 100 - 100 * float((later * stays[..., None, :]).sum(-1).mean())
        order = before.argsort(dim=-1, descending=True)
        for name, scores in (("before", before), ("after", after)):
            ranked = scores.gather(-1, order).mean((0, 1)).tensor_split(RANKS)
            row = {"prompt": number, "of": name, "uneven": uneven, "lost": lost}
            rows_of_ranks += [row | {"rank": place, "score": float(piece.sum())} for place, piece in enumerate(ranked)]
    return pd.DataFrame(rows_of_ranks)


def by_age(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """Percent of the score, and of the tokens a budget would keep by it, in each of BINS parts of the prompt.

    Mean over layers and heads, each of which shares out 100. The first token, the sink, is left out: it is kept by any
    score, and would hide the rest.
    """
    method = settings.method
    if not isinstance(method, A2SF) or settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement is of method=a2sf with a kv_ratio; method.alpha=1 is plain accumulation")
    rows = []
    for number, ids in enumerate(prompts):
        score = accumulated(full_attention(model, ids), method.alpha)[..., -1, 1:]
        keep = max(1, int(settings.budget.kv_ratio * len(ids)))
        kept = torch.zeros_like(score).scatter(-1, score.topk(keep, dim=-1).indices, 1.0)
        for name, values in (("score", score), ("kept", kept)):
            parts = (100 * values / values.sum(-1, keepdim=True)).mean((0, 1)).tensor_split(BINS)
            rows += [{"prompt": number, "of": name, "bin": i, "percent": float(p.sum())} for i, p in enumerate(parts)]
    return pd.DataFrame(rows)


def maps(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """Per prompt, over pruned rows, all layers and heads, in percent: rows that see the first token, attention to the
    middle half of a row's past. Of the first prompt also the maps of the first and the last layer, mean over heads."""
    check_row_mask(settings.cache, "local")
    if settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement is of row masks with a kv_ratio")
    rows: list[dict[str, Any]] = []
    for number, ids in enumerate(prompts):
        layers = attention(model, ids, settings.method, settings.budget)
        first = int(settings.budget.kv_ratio * len(ids)) + 1
        seen, held = (torch.stack(matrices) for matrices in zip(*layers, strict=True))
        sink = 100 * float(seen[..., first:, 0].float().mean())
        rows.append({"prompt": number, "sink": sink, "middle": 100 * float(_middle(held)[..., first:].mean())})
        if number == 0:
            rows += [{"prompt": 0, "layer": i + 1, "map": _map(held[i])} for i in (0, len(layers) - 1)]
    return pd.DataFrame(rows)


def _middle(held: Tensor) -> Tensor:
    """[..., n]: of every row, the attention on keys between a quarter and three quarters of its past."""
    n = held.shape[-1]
    key, row = torch.arange(n), torch.arange(n)[:, None]
    return (held * ((4 * key >= row) & (4 * key < 3 * row))).sum(-1)


def _map(held: Tensor) -> str:
    """CELLS x CELLS thousandths, rows parted by semicolons: the largest attention in each cell."""
    cells = adaptive_max_pool2d(held.mean(0)[None, None], min(CELLS, held.shape[-1]))[0, 0]
    return ";".join(" ".join(f"{1000 * value:.0f}" for value in row) for row in cells.tolist())


def foresight(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """Per prompt and score: percent of the attention of the NEXT rows, to tokens born before, that its top B hold.

    Mean over layers and heads; the first token counts like any other. Of the first prompt also the curves, in the head
    whose next rows differ most from its accumulated past: a row per token, from its birth on.
    """
    method = settings.method
    if not isinstance(method, A2SF) or settings.budget is None or settings.budget.kv_ratio is None:
        raise ConfigError("this measurement is of method=a2sf with a kv_ratio; A2S is measured along with it")
    rows: list[dict[str, Any]] = []
    for number, ids in enumerate(prompts):
        now = full_attention(model, ids)
        scores = dict(zip(SCORES, (now, accumulated(now, 1.0), accumulated(now, method.alpha)), strict=True))
        at, keep = len(ids) - NEXT, max(1, int(settings.budget.kv_ratio * len(ids)))
        for name, score in scores.items():
            held = _foreseen(now, score[..., at - 1, :at], at, keep).mean()
            rows.append({"prompt": number, "score": name, "held": 100 * float(held)})
        if number == 0:
            rows += _curves(now, scores, at, keep)
    return pd.DataFrame(rows)


def _foreseen(now: Tensor, score: Tensor, at: int, keep: int) -> Tensor:
    """[layers, heads]: the share of later rows' attention to the first `at` tokens that lies on the top of score."""
    later = now[..., at:, :at].sum(-2)
    return later.gather(-1, score.topk(keep, dim=-1).indices).sum(-1) / later.sum(-1)


def _curves(now: Tensor, scores: dict[str, Tensor], at: int, keep: int) -> list[dict[str, Any]]:
    missed = 1 - _foreseen(now, scores["A2S"][..., at - 1, :at], at, keep)
    layer, head = divmod(int(missed.argmax()), now.shape[1])
    later = now[layer, head, at:, 1:at].sum(0)
    tokens = [0, *sorted((later.topk(TOKENS).indices + 1).tolist())]
    return [
        {"prompt": 0, "score": name, "layer": layer, "head": head, "token": token, "pruned": at}
        | {"curve": " ".join(f"{value:.4g}" for value in score[layer, head, token:, token].tolist())}
        for name, score in scores.items()
        for token in tokens
    ]


def likeness(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """One row per prompt, means over layers, heads and query rows.

    cosine: over all rows, of which those before the budget is full are equal by construction; cosine_pruned: over the
    others alone; overlap: the share of the ideal keys of those that the method's rows attend to.
    """
    check_row_mask(settings.cache, "local")
    return pd.DataFrame([{"prompt": i, **_alike(model, ids, settings)} for i, ids in enumerate(prompts)])


def _alike(model: Any, ids: Sequence[int], settings: Settings) -> dict[str, float]:
    assert settings.budget is not None and settings.budget.kv_ratio is not None
    first = floor_share(settings.budget.kv_ratio, len(ids))
    ideal = attention(model, ids, Ideal(), settings.budget)
    mine = attention(model, ids, settings.method, settings.budget)
    values_by_name: dict[str, list[float]] = {name: [] for name in ALIKE}
    for (wanted, best), (mask, rows) in zip(ideal, mine, strict=True):
        if isinstance(settings.method, Window):  # the paper's series is cut to the budget first: it lets one more in
            mask = mask & window_mask(len(ids), first)
            rows = rows * window_mask(len(ids), first)
        cosine = row_cosine(best, rows)
        values_by_name["cosine"].append(float(cosine.mean()))
        values_by_name["cosine_pruned"].append(float(cosine[:, first:].mean()))
        common = (wanted & mask).sum(-1) / wanted.sum(-1)
        values_by_name["overlap"].append(float(common[:, first:].mean()))
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def power_law(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """One row per place, drawn from the later half of each prompt; `top`: the percent that the TOP tokens hold.

    How well a power law and an exponential fit the sorted scores: R2 of a line in log-log and in semi-log axes.
    """
    rows = []
    for number, ids in enumerate(prompts):
        rng, held = Random(f"{settings.seed} {number}"), full_attention(model, ids).numpy()
        for place in range(PLACES):
            layer, head = rng.randrange(held.shape[0]), rng.randrange(held.shape[1])
            query = rng.randrange(len(ids) // 2, len(ids))
            scores = np.sort(held[layer, head, query, : query + 1].astype(np.float64))[::-1]
            top = 100 * float(scores[: max(1, round(TOP * len(scores)))].sum())
            row = {"prompt": number, "layer": layer, "head": head, "query": query, "top": top, **_fits(scores)}
            if number == 0 and place < SHOWN:
                row["scores"] = " ".join(f"{score:.3g}" for score in scores)
            rows.append(row)
    return pd.DataFrame(rows)


def _fits(scores: np.ndarray) -> dict[str, float]:
    """R2 of straight lines through log score, against log rank and against rank; of scores that float32 resolves."""
    kept = scores[scores > 1e-12]
    rank, height = np.arange(1, len(kept) + 1), np.log(kept)
    power, exponential = (float(np.corrcoef(x, height)[0, 1] ** 2) for x in (np.log(rank), rank))
    return {"power": power, "exponential": exponential, "power_better": 100.0 * (power > exponential)}


def hit_rate(model: Any, prompts: Prompts, settings: Settings) -> pd.DataFrame:
    """One row per prompt: the share of chosen (kv head, token) pairs that were in the cache, all steps and layers."""
    if not isinstance(settings.method, PQCache):
        raise ConfigError(f"only method=pqcache has this block cache, got {settings.method.name}")
    rows = []
    for number, ids in enumerate(prompts):
        answer = generate(model, [list(ids)], settings.cache, decoding=GenerationParams(NEW, eos=None))
        account = receipts(answer.cache)[0].retrieval
        assert account is not None
        rows.append({"prompt": number, "rate": account["cache_hit_rate"], "prompt_tokens": len(ids)})
    return pd.DataFrame(rows)
