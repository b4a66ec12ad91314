"""The releases' attention with eviction, one object per layer and row, as their pseudo-code reads; float64.

Each is called with what a forward adds and keeps the fields a recording has, one entry per forward.
"""

from __future__ import annotations

import numpy as np
from golden.naive import Array, softmax

MIN = float(np.finfo(np.float32).min)


def top(x: Array, count: int, apart: float = 1e-4) -> Array:
    """Indices of the largest; a choice nearer than `apart` would depend on rounding, so another seed is needed."""
    order = np.argsort(-x)
    if 0 < count < len(x):
        assert x[order[count - 1]] - x[order[count]] > apart, "a near-tie: take another seed"
    return order[:count]


class Layer:
    """Keys and values of the whole text; `padding` columns of it are pads."""

    def __init__(self, padding: int = 0) -> None:
        self.padding = padding
        self.keys = self.values = np.zeros(0)

    def extend(self, k: Array, v: Array) -> None:
        whole = bool(self.keys.size)
        self.keys = np.concatenate((self.keys, k), axis=1) if whole else k
        self.values = np.concatenate((self.values, v), axis=1) if whole else v

    def logits(self, q: Array) -> Array:
        """Logits, scaled and causal; pads are lowered after, so that the future of a pad row is level with its past."""
        x = q @ self.keys.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        new, total = x.shape[1:]
        future = np.arange(total) > np.arange(total - new, total)[:, None]
        x = np.where(future, MIN, x)
        x[..., : self.padding] += MIN
        return x


class Masked(Layer):
    """All keys stay; after every forward a mask says which of them, and the next token, the next one attends to."""

    def __init__(self, budget: int, recent: int, padding: int = 0) -> None:
        super().__init__(padding)
        self.budget, self.recent = budget, recent
        self.keep: Array | None = None  # [heads, columns], of the next forward
        self.score: Array | None = None
        self.fields: dict[str, list[Array]] = {"step_score": [], "score": [], "keep": []}

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        self.extend(k, v)
        x = self.logits(q)
        if self.keep is not None:
            x = x * self.keep[:, None] + (1 - self.keep[:, None]) * MIN
        out = softmax(x) @ self.values
        observed = self.observed(x).sum(1)
        self.fields["step_score"].append(observed.copy())
        if self.score is not None:
            observed[:, :-1] += self.score
        self.evict(observed)
        assert self.keep is not None and self.score is not None
        self.fields["score"].append(self.score)
        self.fields["keep"].append(self.keep)
        return out

    def observed(self, x: Array) -> Array:
        return softmax(x)

    def evict(self, score: Array) -> None:
        raise NotImplementedError


class Keyformer(Masked):
    """Score: softmax((x + noise) / tau) over all rows. The token that leaves the recent window is lost for good."""

    def __init__(self, budget: int, recent: int, padding: int, noise: list[Array], taus: list[float]) -> None:
        super().__init__(budget, recent, padding)
        self.noise, self.taus = list(noise), list(taus)

    def observed(self, x: Array) -> Array:
        return softmax((x + self.noise.pop(0)) / self.taus.pop(0))

    def evict(self, score: Array) -> None:
        heads, n = score.shape
        mask = np.ones((heads, n + 1))
        if n > self.budget:
            mask[:, : -self.recent] = 0
            for head in range(heads):
                mask[head, top(score[head, : -self.recent], self.budget - self.recent)] = 1
        if self.keep is not None:
            mask[:, :-1] *= self.keep
        self.keep, self.score = mask, score * mask[:, :-1]


class H2O(Masked):
    """Score: softmax of all rows. The token that leaves the window is hidden for one step and keeps its score."""

    def evict(self, score: Array) -> None:
        heads, n = score.shape
        mask = np.ones((heads, n + 1))
        if n > self.budget:
            mask[:, : -self.recent] = 0
            for head in range(heads):
                mask[head, top(score[head, : -self.recent], self.budget - self.recent)] = 1
        counted = mask[:, :-1].copy()
        counted[:, -self.recent :] = 1
        self.keep, self.score = mask, score * counted


class Streaming(Layer):
    """MPT: four first slots and the newest ones remain; ALiBi and its padding mask go by slot, so pads come to life."""

    def __init__(self, budget: int, padding: int) -> None:
        super().__init__(padding)
        self.budget = budget
        self.columns = np.zeros(0, int)
        self.attended: list[Array] = []

    def __call__(self, q: Array, k: Array, v: Array) -> Array:
        self.extend(k, v)
        heads, new, width = q.shape
        seen = self.columns.max(initial=-1) + 1
        self.columns = np.concatenate((self.columns, np.arange(seen, seen + new)))
        self.attended.append(self.columns)
        slots = len(self.columns)
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        x = q @ self.keys.swapaxes(1, 2) / np.sqrt(width) + slopes[:, None, None] * (np.arange(slots) - slots + 1)
        if new > 1:  # the prompt: a pad row sees pads and future alike at the minimum, and attends to all columns
            future = np.arange(slots) > np.arange(slots)[:, None]
            x = np.where(future | (np.arange(slots) < self.padding), MIN, x)
        out = softmax(x) @ self.values
        stay = np.r_[0:4, slots - (self.budget - 4) : slots]
        self.keys, self.values, self.columns = self.keys[:, stay], self.values[:, stay], self.columns[stay]
        return out
