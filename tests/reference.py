"""The slow truth: one token at a time, one kv head at a time, float64, plain Python. Written from the papers.

Axis letters as in the core: B rows, H kv heads, G query heads per kv head, D head dim, L layers; one row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

Vector = Sequence[float]


@dataclass(frozen=True)
class Rule:
    """A method in words of its own: what is summed up, what is protected, what is ranked.

    rank: score, newest, grid (dilated window) or snapkv. birth(layer, head, position, key): score of a new token.
    limbo: H2O's released mask, whose tokens leaving the window are hidden for a step. frozen: Keyformer's release.
    """

    rank: str = "score"
    attention: bool = False
    tau: tuple[float, float] = (1.0, 1.0)
    alpha: float = 1.0
    last_rows: int | None = None
    everything: bool = False  # rows of the score go over all tokens ever seen, not only over the survivors
    pool_heads: bool = False
    across_layers: bool = False
    sinks: int = 0
    recent: int = 0
    recent_ratio: Fraction = Fraction(0)
    recent_without_self: bool = False  # the recent window is made of existing tokens only
    damping: float = 1.0
    dilation: int = 1
    window: int = 1
    kernel: int = 1
    pool: str = "max"
    evicts: bool = True
    decode_evicts: bool = True
    per_query: bool = False
    hidden_next_step: bool = False
    frozen: bool = False
    initial_score: Callable[[int, int, int, Vector], float] | None = None


@dataclass(frozen=True)
class World:
    """What surrounds the method: geometry, cadence, the noise (an input here) and the length of the prompt.

    noise[layer][query head][query position][key position]; rotate(vector, angle position) for renumbered RoPE.
    softcap: of logits; sinks[query head]: one more logit in each softmax; sinks_count: whether scores see it.
    """

    scale: float
    budget: int
    counts_self: bool = True
    at_prefill: bool = True
    every: int | None = 1
    max_new_tokens: int = 1
    alibi: Vector | None = None
    sliding_window: int | None = None
    noise: Sequence[Sequence[Sequence[Vector]]] | None = None
    softcap: float | None = None
    sinks: Vector | None = None
    sinks_count: bool = True
    renumbered: bool = False
    rotate: Callable[[Vector, int], list[float]] | None = None


@dataclass
class Head:
    """One kv head: which positions it holds, which of them are hidden for a step, and their scores."""

    held: list[int] = field(default_factory=list)
    hidden: set[int] = field(default_factory=set)
    score: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """After one forward of one layer: out[token][query head], kept[head], score[head][position]."""

    out: list[list[list[float]]]
    kept: list[list[int]]
    score: list[dict[int, float]]


def softmax(x: Vector, sink: float | None = None) -> list[float]:
    """Over x, and over the sink too, which is left out of what comes back."""
    every = [*x] if sink is None else [*x, sink]
    top = max(every)
    e = [math.exp(v - top) for v in every]
    total = sum(e)
    return [v / total for v in e[: len(x)]]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


class Reference:
    """q[layer][query head][position], k and v[layer][kv head][position]: vectors. widths: tokens per forward.

    prompt: its tokens, which are evicted after every forward; None: the first forward is the whole prompt.
    `steps[forward][layer]` is what came out.
    """

    def __init__(
        self, rule: Rule, world: World, q: list, k: list, v: list, widths: Sequence[int], prompt: int | None = None
    ) -> None:
        self.rule, self.world, self.q, self.k, self.v = rule, world, q, k, v
        self.layers, self.kv_heads = len(q), len(k[0])
        self.group = len(q[0]) // self.kv_heads
        self.heads = [[Head() for _ in range(self.kv_heads)] for _ in range(self.layers)]
        self.total: list[dict[int, float]] = [{} for _ in range(self.kv_heads)]  # score of the whole model
        self.evicted = [False] * self.layers
        self.prompt = prompt or widths[0]
        self.steps: list[list[Step]] = []
        start = 0
        for width in widths:
            tokens = range(start, start + width)
            if rule.across_layers:
                self._fade(self.total, width)
            self.steps.append([self._forward(layer, tokens) for layer in range(self.layers)])
            start += width

    # -- one forward of one layer --------------------------------------------------------------------------------------

    def _forward(self, layer: int, tokens: range) -> Step:
        rule, heads = self.rule, self.heads[layer]
        in_prompt = tokens[0] < self.prompt
        if rule.attention and not rule.across_layers:
            self._fade([head.score for head in heads], len(tokens))
        before = [set(head.held) - head.hidden for head in heads]
        out = []
        for t in tokens:
            for h, head in enumerate(heads):
                head.held.append(t)
                before[h].add(t)
                head.score[t] = rule.initial_score(layer, h, t, self.k[layer][h][t]) if rule.initial_score else 0.0
            out.append(self._token(layer, t, before, tokens))
        for h, head in enumerate(heads):
            if rule.across_layers:
                head.score = {p: self.total[h].get(p, 0.0) for p in head.held}
        last = tokens[-1]
        if self._due(in_prompt, tokens):
            for head in heads:
                self._evict(layer, head, last)
        kept = [sorted(set(head.held) - head.hidden) for head in heads]
        return Step(out, kept, [{p: head.score[p] for p in kept[h]} for h, head in enumerate(heads)])

    def _fade(self, scores: Sequence[dict[int, float]], width: int) -> None:
        for score in scores:
            for p in score:
                score[p] *= self.rule.alpha**width

    def _token(self, layer: int, t: int, visible: list[set[int]], tokens: range) -> list[list[float]]:
        """Attend with token t; add its row to the scores."""
        rule, in_prompt = self.rule, t < self.prompt
        outs, observed = [], []
        for h in range(self.kv_heads):
            seen = [p for p in sorted(visible[h]) if self._in_window(p, t)]
            if rule.per_query and not in_prompt:
                seen = self._own_top(layer, h, t, seen)
            for g in range(self.group):
                probabilities = softmax([self._logit(layer, h, g, t, p, seen) for p in seen], self._sink(h, g))
                width = len(self.v[layer][h][0])
                outs.append(
                    [
                        sum(a * self.v[layer][h][p][d] for a, p in zip(probabilities, seen, strict=True))
                        for d in range(width)
                    ]
                )
            observed.append(self._observe(layer, h, t, seen))
        if rule.attention and (in_prompt or rule.decode_evicts):
            self._add(layer, t, observed, tokens)
        return outs

    def _in_window(self, p: int, t: int) -> bool:
        return self.world.sliding_window is None or t - p < self.world.sliding_window

    def _logit(self, layer: int, h: int, g: int, t: int, p: int, seen: Sequence[int]) -> float:
        world, i = self.world, h * self.group + g
        a, b, at, to = self.q[layer][i][t], self.k[layer][h][p], t, p
        if world.renumbered and self.evicted[layer]:
            at, to = seen.index(t), seen.index(p)
        if world.rotate is not None:
            a, b = world.rotate(a, at), world.rotate(b, to)
        x = world.scale * dot(a, b)
        if world.softcap is not None:
            x = world.softcap * math.tanh(x / world.softcap)
        return x if world.alibi is None else x + world.alibi[i] * (to - at)

    def _sink(self, h: int, g: int, *, seen: bool = True) -> float | None:
        sinks = self.world.sinks
        return None if sinks is None or not seen else sinks[h * self.group + g]

    def _own_top(self, layer: int, h: int, t: int, seen: list[int]) -> list[int]:
        """Ideal: the query itself and its own largest probabilities, summed over the query group."""
        mass = dict.fromkeys(seen, 0.0)
        for g in range(self.group):
            sink = self._sink(h, g, seen=self.world.sinks_count)
            for p, a in zip(seen, softmax([self._logit(layer, h, g, t, p, seen) for p in seen], sink), strict=True):
                mass[p] += a
        others = sorted((p for p in seen if p != t), key=lambda p: (mass[p], p), reverse=True)
        return sorted([t, *others[: self.world.budget - 1]])

    def _observe(self, layer: int, h: int, t: int, seen: list[int]) -> dict[int, float]:
        """The row of token t that the score sees, summed over the query group."""
        rule, world = self.rule, self.world
        if not rule.attention:
            return {}
        over = [p for p in range(t + 1) if self._in_window(p, t)] if rule.everything else seen
        start, end = rule.tau
        step = max(0, t - self.prompt + 1)  # the j-th decode token; 0 for the prompt
        tau = start + step * (end - start) / world.max_new_tokens
        row = dict.fromkeys(over, 0.0)
        for g in range(self.group):
            i = h * self.group + g
            x = [self._logit(layer, h, g, t, p, seen) for p in over]
            if world.noise is not None:
                x = [value + world.noise[layer][i][t][p] for value, p in zip(x, over, strict=True)]
            sink = self._sink(h, g, seen=world.sinks_count)
            for p, a in zip(over, softmax([value / tau for value in x], sink), strict=True):
                row[p] += a
        return row

    def _add(self, layer: int, t: int, observed: list[dict[int, float]], tokens: range) -> None:
        rule = self.rule
        if rule.last_rows is not None and tokens[-1] - t >= rule.last_rows:
            return
        weight = rule.alpha ** (tokens[-1] - t)
        if rule.pool_heads:
            every = sorted({p for row in observed for p in row})
            pooled = {p: sum(row.get(p, 0.0) for row in observed) for p in every}
            observed = [pooled] * self.kv_heads
        for h, row in enumerate(observed):
            held = self.heads[layer][h].held
            score = self.total[h] if rule.across_layers else self.heads[layer][h].score
            for p, a in row.items():
                if p in held:
                    score[p] = score.get(p, 0.0) + weight * a

    # -- evicting ------------------------------------------------------------------------------------------------------

    def _due(self, in_prompt: bool, tokens: range) -> bool:
        rule, world = self.rule, self.world
        if not rule.evicts or rule.per_query:
            return False
        if in_prompt:
            return world.at_prefill
        if not rule.decode_evicts or world.every is None:
            return False
        done = tokens[0] - self.prompt
        return any((done + i + 1) % world.every == 0 for i in range(len(tokens)))

    def _evict(self, layer: int, head: Head, newest: int) -> None:
        rule, world = self.rule, self.world
        keep = world.budget - (1 if world.counts_self else 0)
        if len(head.held) <= keep:
            return
        self.evicted[layer] = True
        recent = rule.recent + math.floor(rule.recent_ratio * world.budget)
        guarded = max(0, recent - 1) if world.counts_self and not rule.recent_without_self else recent
        newest_ones = sorted(head.held)[len(head.held) - guarded :] if guarded else []
        value = self._ranks(head, newest, recent)
        order = sorted(head.held, key=lambda p: (p in newest_ones or p < rule.sinks, *value[p], p), reverse=True)
        stay = sorted(order[:keep])
        head.hidden = set()
        if rule.hidden_next_step:  # the token just outside the window waits a step without being attended
            waiting = newest - (recent - 1)
            if waiting in head.held and waiting not in stay:
                head.hidden = {waiting}
                stay = sorted([*stay, waiting])
        head.held = stay
        head.score = {p: head.score[p] * rule.damping for p in stay}

    def _ranks(self, head: Head, newest: int, recent: int) -> dict[int, tuple[float, ...]]:
        """Higher stays; what the model's own sliding window has passed is worth nothing, whatever the method says."""
        rule = self.rule
        leaving = newest - (recent - 1) if rule.hidden_next_step or rule.frozen else None

        def rank(p: int) -> tuple[float, ...]:
            if not self._in_window(p, newest + 1) or p == leaving:
                return (-math.inf,)
            if rule.rank == "newest":
                return (p,)
            if rule.rank == "grid":
                return (float(p % (rule.dilation + 1) == 0), p)
            return (self._pooled(head, p, newest) if rule.rank == "snapkv" else head.score[p],)

        return {p: rank(p) for p in head.held}

    def _pooled(self, head: Head, p: int, newest: int) -> float:
        """Pool over the neighbours of p that lie before the observing window; places outside count as nothing."""
        rule = self.rule
        around = [
            head.score[n] if 0 <= n <= newest - rule.window else 0.0
            for n in range(p - rule.kernel // 2, p + rule.kernel // 2 + 1)
        ]
        return max(around) if rule.pool == "max" else sum(around) / rule.kernel
