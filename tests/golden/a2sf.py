"""A2SF's procedures on bare q, k, v: the paper's row mask in half precision, and grouped heads after the prompt."""

from __future__ import annotations

import numpy as np
from golden.naive import Array, softmax
from golden.releases import top

HALF = np.float16
CLEAR = 2e-4  # how far from the middle between two half numbers a number must be, in steps between them


def halved(x: Array) -> Array:
    """Round to half; a number too near the middle would depend on who adds it up, so another seed is needed."""
    rounded = x.astype(HALF)
    step = np.abs(np.spacing(rounded).astype(np.float64))
    assert (np.abs(np.abs(x - rounded) / step - 0.5) > CLEAR).all(), "near a rounding boundary: take another seed"
    return rounded


def causal(n: int) -> Array:
    return np.arange(n) <= np.arange(n)[:, None]


def attention(logits: Array, mask: Array) -> Array:
    """Softmax of half logits over what the mask leaves, rounded to half."""
    return halved(softmax(np.where(mask, logits.astype(np.float64), -np.inf)))


def greedy(rows: Array, alpha: float, heavy: int, recent: int) -> tuple[Array, Array]:
    """The mask of one head and the accumulator after each row, all in half; rows [n, n]: full attention."""
    n = len(rows)
    mask, noted = np.zeros((n, n), bool), np.zeros((n, n), HALF)
    powers = [HALF(alpha) ** HALF(heavy - 1 - q) for q in range(heavy)]
    weighted = np.array([(power * row).astype(HALF) for power, row in zip(powers, rows, strict=False)])
    acc = halved(weighted.astype(np.float64).sum(0)) if heavy else np.zeros(n, HALF)
    acc[heavy:] = 0
    mask[:heavy, :heavy] = True
    if heavy:
        noted[heavy - 1] = acc
    for t in range(heavy, n):
        if heavy:
            living = np.flatnonzero(mask[t - 1]) if t > heavy else np.arange(heavy)
            mask[t, living[top(acc[living].astype(np.float64), heavy - 1, apart=0)]] = True
            mask[t, t] = True
            acc = ((alpha * acc.astype(np.float64)).astype(HALF) + rows[t]).astype(HALF) * mask[t]
            noted[t] = acc
    return (mask | ~np.tri(n, n, -recent - 1, dtype=bool)) & causal(n), noted


def evicting(x: Array, alpha: float, heavy: int, recent: int) -> Array:
    """The later mask of one head: what a row gives is shared among the living, and one of them goes after each row."""
    n, budget = len(x), heavy + recent
    full = softmax(np.where(causal(n), x.astype(np.float64), -np.inf))
    alive, acc, mask = np.ones(n, bool), np.zeros(n), causal(n)
    for t in range(n):
        mask[t] &= alive
        row = full[t] * alive
        acc = alpha * acc + row / row.sum()
        if t >= budget:
            open_to = np.flatnonzero(alive[: t - recent + 1])
            alive[open_to[top(-acc[open_to], 1, apart=1e-6)]] = False
    return mask


def row_cosines(a: Array, b: Array) -> Array:
    """[..., n, n] twice -> [...], the mean over rows."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return ((a * b).sum(-1) / (norms + 1e-4)).mean(-1)


def ideal(rows: Array, budget: int, own: bool) -> Array:
    """Every row keeps the best of itself: with its own token and budget - 1 others, or simply `budget`."""
    n = len(rows)
    mask = causal(n)
    for t in range(budget if own else budget + 1, n):
        mask[t] = False
        mask[t, top(rows[t, : t + 1], budget - 1 if own else budget, apart=1e-6)] = True
        mask[t, t] |= own
    return mask


def rowmask(seed: int) -> dict[str, Array]:
    """One layer, two heads, 14 tokens; every number that the release computes in half is half here."""
    rng = np.random.default_rng(seed)
    heads, n, width, budget = 2, 14, 16, 4
    q, k = np.round(4 * 1.5 * rng.standard_normal((2, 1, 1, heads, n, width))) / 4  # their products are half numbers
    v = rng.standard_normal((1, 1, heads, n, 5)).astype(HALF).astype(np.float64)
    logits = halved(q @ k.swapaxes(-1, -2) / np.sqrt(width))
    fields: dict[str, Array] = {name: x.astype(np.float32) for name, x in (("q", q), ("k", k), ("v", v))}
    fields |= {"ratio": np.float64(0.3), "T": np.int64(n), "budget": np.int64(budget), "half_budget": np.int64(2)}
    whole = np.broadcast_to(causal(n), logits.shape)
    full = attention(logits, whole)
    fields |= {"logits": logits, "probs_full": full}
    exact = softmax(np.where(whole, logits.astype(np.float64), -np.inf))

    def each(make) -> Array:
        return np.stack([[[make(head) for head in range(heads)]]])

    def out(mask: Array) -> Array:
        return halved(attention(logits, mask).astype(np.float64) @ v)

    best = each(lambda head: ideal(exact[0, 0, head], budget, own=True))
    best_llama = each(lambda head: ideal(exact[0, 0, head], budget, own=False))
    fields |= {"gen1_ideal_mask": best, "gen1_ideal_probs": attention(logits, best), "gen1_ideal_out": out(best)}
    fields["ideal_llama_mask"] = best_llama
    others = [attention(logits, best), full, attention(logits, best_llama)]
    named = {"a0": 0.0, "a01": 0.1, "a02": 0.2, "a05": 0.5, "a09": 0.9, "a1": 1.0}
    series = {f"a2sf_{name}": (alpha, budget, 0) for name, alpha in named.items()}
    for name, (alpha, heavy, recent) in (series | {"h2o": (1.0, 2, 2), "local": (1.0, 0, budget)}).items():
        both = [greedy(full[0, 0, head], alpha, heavy, recent) for head in range(heads)]
        mask, acc = (np.stack([[[pair[i] for pair in both]]]) for i in (0, 1))
        probs = attention(logits, mask).astype(np.float64)
        cut = probs * ~np.tri(n, n, -budget, dtype=bool) if name == "local" else probs
        rows = [row_cosines(cut, other.astype(np.float64)).mean((1, 2)) for other in others]
        flat = [x.astype(np.float64).reshape(1, 1, heads, -1) for x in (probs, full)]
        matrix = (flat[0] * flat[1]).sum(-1) / np.prod([np.linalg.norm(x, axis=-1) for x in flat], axis=0)
        fields |= {f"gen1_{name}_mask": mask, f"gen1_{name}_acc": acc, f"gen1_{name}_out": out(mask)}
        fields[f"gen1_{name}_cos"] = np.stack([*rows, matrix.mean((1, 2))], axis=1)
        late = each(lambda head, a=alpha, h=heavy, r=recent: evicting(logits[0, 0, head], a, h, r))
        fields |= {f"gen3_{name}_mask": late, f"gen3_{name}_out": out(late)}
    return fields


def grouped(seed: int) -> dict[str, Array]:
    """Four query heads on two kv heads, 29 tokens: scores are summed over a group, the newest three are protected."""
    rng = np.random.default_rng(seed)
    layers, heads, shared, n, width, budget, recent = 2, 4, 2, 29, 8, 11, 3
    q = rng.standard_normal((layers, 1, heads, n, width)).astype(np.float32)
    k, v = rng.standard_normal((2, layers, 1, shared, n, width)).astype(np.float32)
    fields: dict[str, Array] = {"q": q, "k": k, "v": v, "budget": np.int64(budget), "recent": np.int64(recent)}
    probs, out = np.zeros((layers, heads, n, n)), np.zeros((layers, 1, heads, n, width))
    for layer in range(layers):
        for head in range(heads):
            kv = head // (heads // shared)
            x = q[layer, 0, head].astype(np.float64) @ k[layer, 0, kv].T / np.sqrt(width)
            probs[layer, head] = softmax(np.where(causal(n), x, -np.inf))
            out[layer, 0, head] = probs[layer, head] @ v[layer, 0, kv]
    for name, alpha in {"a00": 0.0, "a01": 0.1, "a02": 0.2, "a05": 0.5, "a10": 1.0}.items():
        forgetting = np.array([alpha ** (n - 1 - row) for row in range(n)])  # 0 ** 0 is 1: the last row alone
        scores = (probs * forgetting[:, None]).sum(2).reshape(layers, shared, -1, n).sum(2)
        selected = np.zeros((layers, shared, budget), np.int64)
        for layer in range(layers):
            for kv in range(shared):
                heavy = top(scores[layer, kv, : n - recent], budget - recent)
                selected[layer, kv] = [*sorted(heavy), *range(n - recent, n)]
        fields |= {f"{name}_scores": scores.astype(np.float32), f"{name}_selected": selected}
    return fields | {"out": out.astype(np.float32)}
