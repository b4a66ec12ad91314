"""Recordings in half precision in which scores tie, made anew by each test: half sums are the machine's choice.

The releases' arithmetic as described, in torch's half on the CPU, where equal scores go to the older token (kvexp's
core takes the newer one). Nothing is shared with kvexp.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
HALF = torch.float16
LEAST = torch.finfo(HALF).min


def best(scores: Tensor, count: int) -> Tensor:
    """Bool mask of the largest along the last axis, the older of equal ones."""
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1, dtype=torch.float32).to(HALF)


def greedy(full: Tensor, alpha: float, heavy: int, recent: int) -> tuple[Tensor, Tensor]:
    """The paper's mask and its accumulators from half rows [..., n, n]."""
    n = full.shape[-1]
    mask, noted = torch.zeros_like(full, dtype=torch.bool), torch.zeros_like(full)
    if heavy:
        powers = torch.tensor([alpha], dtype=HALF) ** torch.arange(heavy - 1, -1, -1, dtype=HALF)
        acc = (full[..., :heavy, :] * powers[:, None]).sum(-2)
        mask[..., :heavy, :heavy], noted[..., heavy - 1, :] = True, acc
        for t in range(heavy, n):
            mask[..., t, :] = best(acc, heavy - 1)
            mask[..., t, t] = True
            acc = (alpha * acc + full[..., t, :]) * mask[..., t, :]
            noted[..., t, :] = acc
    band = torch.ones(n, n, dtype=torch.bool).triu(-recent)
    return (mask | band).tril(), noted


def evicting(x: Tensor, alpha: float, budget: int, recent: int, *, between: bool = False) -> Tensor:
    """The later code's mask: half rows, shared among the living in half, into a float32 accumulator.

    between: the code between, which takes the softmax of the living's logits and counts the next token as recent.
    """
    n, full, early = x.shape[-1], softmax(x), int(between and recent > 0)
    budget, recent = budget - early, recent - early
    mask, acc = torch.ones_like(full, dtype=torch.bool), torch.zeros(full[..., 0, :].shape)
    for t in range(n - 1):
        row = full[..., t, :]
        if t >= budget:
            row = row * mask[..., t, :]
            living = x[..., t, :].masked_fill(~mask[..., t, :], LEAST)
            row = softmax(living) if between else row / row.sum(-1, keepdim=True)
        acc = torch.where(acc == torch.inf, acc, alpha * acc) + row
        mask[..., t + 1, :] = mask[..., t, :]
        if t >= budget:
            lowest = acc[..., : t - recent + 1].argmin(-1, keepdim=True)
            acc = acc.scatter(-1, lowest, torch.inf)
            mask[..., t + 1, :].scatter_(-1, lowest, False)
    return mask.tril()


def ideal(full: Tensor, budget: int, own: bool) -> Tensor:
    n = full.shape[-1]
    mask = torch.ones_like(full, dtype=torch.bool)
    for t in range(budget if own else budget + 1, n):
        mask[..., t, :] = best(full[..., t, :], budget - 1 if own else budget)
        mask[..., t, t] |= own
    return mask.tril()


def rowmask(seed: int = 0) -> dict[str, Array]:
    """A2SF's masks of two heads and 60 tokens, 12 of them kept."""
    dice, n, budget = torch.Generator().manual_seed(seed), 60, 12
    q, k, v = torch.randn(3, 1, 1, 2, n, 16, generator=dice).to(HALF)
    q = 2 * q
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    x = ((q @ k.transpose(-1, -2)) / 4).masked_fill(~causal, LEAST)
    full = softmax(x)
    fields = {"q": q, "k": k, "v": v, "logits": x, "probs_full": full}
    fields |= {"gen1_ideal_mask": ideal(full, budget, True), "ideal_llama_mask": ideal(full, budget, False)}
    for name, alpha in {"a2sf_a0": 0.0, "a2sf_a05": 0.5, "a2sf_a09": 0.9, "a2sf_a1": 1.0}.items():
        fields[f"gen1_{name}_mask"], fields[f"gen1_{name}_acc"] = greedy(full, alpha, budget, 0)
        fields[f"gen2_{name}_mask"] = evicting(x, alpha, budget, 0, between=True)
        fields[f"gen3_{name}_mask"] = evicting(x, alpha, budget, 0)
    fields["gen1_h2o_mask"], _ = greedy(full, 1.0, budget // 2, budget // 2)
    fields["gen2_h2o_mask"] = evicting(x, 1.0, budget, budget // 2, between=True)
    fields["gen3_h2o_mask"] = evicting(x, 1.0, budget, budget // 2)
    for name in [name for name in fields if name.endswith("_mask")]:
        fields[f"{name[:-5]}_out"] = softmax(x.masked_fill(~fields[name], LEAST)) @ v
    counts = {"ratio": np.float64(0.2), "budget": np.int64(budget), "half_budget": np.int64(budget // 2)}
    return {name: tensor.numpy() for name, tensor in fields.items()} | counts


def clusters(points: Array, start: Array, iterations: int) -> tuple[Array, Array, int]:
    """Lloyd's k-means in float64: centroids, labels, iterations made."""
    centres, labels, made = points[start], np.zeros(0), 0
    for _ in range(iterations):
        made += 1
        nearest = ((points[:, None] - centres) ** 2).sum(-1).argmin(1)
        moved = [points[nearest == c].mean(0) if (nearest == c).any() else centres[c] for c in range(len(start))]
        shift = ((np.stack(moved) - centres) ** 2).sum()
        settled, labels, centres = np.array_equal(nearest, labels), nearest, np.stack(moved)
        if settled or shift <= 1e-4 * points.var(0).mean():
            break
    return centres, ((points[:, None] - centres) ** 2).sum(-1).argmin(1), made


def quantised(seed: int = 0) -> dict[str, Array]:
    """PQCache of four query heads on two kv heads, in one layer: 48 tokens at once, 16 one by one."""
    dice, prompt, steps, sink, recent, kept, m, b = torch.Generator().manual_seed(seed), 48, 16, 4, 11, 11, 2, 3
    total, part, shared, group = prompt + steps, 8, 2, 2
    q = torch.randn(shared * group, total, 16, generator=dice).to(HALF)
    k, v = torch.randn(2, shared, total, 16, generator=dice).to(HALF)
    start = np.random.RandomState(4321).choice(np.arange(prompt - sink), 1 << b, replace=False)
    centroids, codes = torch.zeros(shared, m, 1 << b, part, dtype=HALF), np.full((shared, m, total), -1)
    made = np.zeros((shared, m), np.int64)
    for head in range(shared):
        for j in range(m):
            points = k[head, sink:, j * part : (j + 1) * part].double().numpy()
            centres, labels, made[head, j] = clusters(points[: prompt - sink], start, 10)
            centroids[head, j] = torch.tensor(centres).to(HALF)
            later = ((points[prompt - sink :, None] - centroids[head, j].double().numpy()) ** 2).sum(-1).argmin(1)
            codes[head, j, : total - sink] = [*labels, *later]
    out = torch.zeros(total, shared * group, 16, dtype=HALF)
    logits = np.full((steps, shared * group, total), np.nan, np.float32)
    scores = np.full((steps, shared, total), np.nan, np.float32)
    chosen, exact = np.zeros((2, steps, shared, kept), np.int64)
    held = np.tri(total, total, dtype=bool).repeat(shared, 0).reshape(total, shared, total)
    for step in range(steps):
        end = prompt + step - recent
        codes_now = torch.tensor(codes[:, :, : end - sink])
        for head in range(shared):
            score, true = torch.zeros(2, end - sink, dtype=HALF)
            for query in range(head * group, (head + 1) * group):
                asked = q[query, prompt + step]
                tables = [centroids[head, j] @ asked[j * part : (j + 1) * part] for j in range(m)]
                dots = sum(table[codes_now[head, j]] for j, table in enumerate(tables))
                logits[step, query, : end - sink] = dots.float()
                score = score + (dots / 4).softmax(0)
                true = true + ((k[head, sink:end] @ asked) / 4).softmax(0)
            scores[step, head, : end - sink] = score.float()
            chosen[step, head], exact[step, head] = (best(x, kept).nonzero()[:, 0].numpy() for x in (score, true))
            held[prompt + step, head, sink:end] = False
            held[prompt + step, head, chosen[step, head] + sink] = True
    for t in range(total):
        for query in range(shared * group):
            among = torch.tensor(held[t, query // group])
            x = (k[query // group, among] @ q[query, t]) / 4
            out[t, query] = softmax(x) @ v[query // group, among]
    recall = np.mean(
        [np.isin(a, b).mean() for a, b in zip(chosen.reshape(-1, kept), exact.reshape(-1, kept), strict=True)]
    )
    fields = {"prompt": prompt, "steps": steps, "sink": sink, "m": m, "b": b, "max_iter": 10, "km_seed": 4321}
    fields |= {"cache_size": 16, "cache_block": 8, "cache_topk": 1}
    run = {
        "recent": recent,
        "topk": kept,
        "init_idx": start,
        "centroids": centroids.float()[None],
        "codes": codes[None],
    }
    run |= {
        "km_iters": made[None],
        "approx_logits": logits[None],
        "approx_score": scores[None],
        "out": out.float()[None],
    }
    run |= {"topk_idx": chosen[None], "exact_topk_idx": exact[None], "recall": recall}
    fields |= {"q": q[None, None], "k": k[None, None], "v": v[None, None]} | {
        f"clean_fp16_{n}": x for n, x in run.items()
    }
    return {name: np.asarray(value) for name, value in fields.items()}
