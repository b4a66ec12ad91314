"""Which positions each method keeps: one short function per method, written from its paper, in plain Python.

Each takes a `Past` (everything one kv head has seen) and returns the positions that stay, out of `past.held`.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

Row = dict[int, float]  # key position -> attention of one query, summed over the query heads of a kv head


@dataclass
class Repeat:
    """One chunk of the prompt, fed again behind the prompt's end, as one kv head sees it.

    chunk: positions repeated. rows: of every fed query, in each query head of the kv head; fed tokens stand at the
    positions from the prompt's end on. input_norms: of what the attention layer gets at every fed query.
    """

    chunk: range
    rows: list[list[Row]]
    input_norms: list[float]


@dataclass
class Past:
    """rows[q]: the row of query q. room: how many may stay. budget: k. held: candidates, newest last.

    heads: `rows` of every kv head of this layer. model: what all layers have seen so far, in the order they saw it:
    model[i][kv head] = list of rows. norms: key norms. keys, values: of this kv head, by position. newest_rows: the
    newest query's row in each query head of the kv head. queries: all so far, before RoPE, of the same query heads.
    pairs: of dimensions that RoPE turns, and by how much a position. output_norms: of values behind the output
    projection, slopes: of ALiBi (0: none), both in the same query heads. evictions: the newest position at each earlier
    eviction. directions, query_means, pair_sizes: of a calibration pass's queries in the same query heads, the main
    direction, the mean before RoPE and the mean length of each pair. head_rows: of the prompt's last queries, in each
    query head. output_sizes: as output_norms, of the sum of absolute values. sketch: Compactor's
    draws, a row for each dimension of a key. predicted: by a linear map from what the layer gets. layer: of every kv
    head of the layer. repeats: of the whole prompt.
    """

    rows: list[Row]
    held: list[int]
    room: int
    budget: int
    prompt: int
    heads: list[list[Row]]
    model: list[list[list[Row]]]
    head: int = 0
    norms: Row = field(default_factory=dict)
    keys: dict[int, list[float]] = field(default_factory=dict)
    values: dict[int, list[float]] = field(default_factory=dict)
    newest_rows: list[Row] = field(default_factory=list)
    queries: list[list[list[float]]] = field(default_factory=list)
    pairs: list[tuple[int, int, float]] = field(default_factory=list)
    output_norms: list[Row] = field(default_factory=list)
    slopes: list[float] = field(default_factory=list)
    noise: Row = field(default_factory=dict)
    evictions: list[int] = field(default_factory=list)
    directions: list[list[float]] = field(default_factory=list)
    query_means: list[list[float]] = field(default_factory=list)
    pair_sizes: list[list[float]] = field(default_factory=list)
    head_rows: list[list[Row]] = field(default_factory=list)
    output_sizes: list[Row] = field(default_factory=list)
    sketch: list[list[float]] = field(default_factory=list)
    predicted: Row = field(default_factory=dict)
    layer: list[Past] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return max(self.held)


Oracle = Callable[[Past], set[int]]


def total(rows: Iterable[Row], p: int) -> float:
    return sum(row.get(p, 0.0) for row in rows)


def top(past: Past, value: Callable[[int], float], recent: int = 0, sinks: int = 0) -> set[int]:
    """The first `sinks` tokens, the newest `recent` less the token to come, then the best values; ties to the newer."""
    window = set(past.held[len(past.held) - max(0, recent - 1) :]) if recent > 1 else set()
    must = window | {p for p in past.held if p < sinks}
    rest = sorted((p for p in past.held if p not in must), key=lambda p: (value(p), p), reverse=True)
    return must | set(rest[: max(0, past.room - len(must))])


def full(past: Past) -> set[int]:
    return set(past.held)


def window(past: Past) -> set[int]:
    return set(past.held[-past.room :]) if past.room else set()


def dilated_window(past: Past) -> set[int]:
    return top(past, lambda p: p + 10_000 * (p % 2 == 0))


def streaming_llm(past: Past) -> set[int]:
    return {p for p in past.held if p < 2} | set(past.held[-(past.room - 2) :])


def key_attention(past: Past) -> set[int]:
    return top(past, lambda p: total(past.rows, p))


def h2o(past: Past) -> set[int]:
    return top(past, lambda p: total(past.rows, p), recent=past.budget // 2)


def h2o_c(past: Past) -> set[int]:
    """Four sinks; half of what remains besides them and the coming token is the window (it comes on top)."""
    return top(past, lambda p: total(past.rows, p), recent=1 + (past.budget - 5) // 2, sinks=4)


def h2o_damping(past: Past) -> set[int]:
    def damped(p: int) -> float:
        fades = [sum(at >= q for at in past.evictions) for q in range(len(past.rows))]
        return sum(0.5**n * row.get(p, 0.0) for n, row in zip(fades, past.rows, strict=True))

    return top(past, damped, recent=past.budget // 5)


def keyformer(past: Past) -> set[int]:
    """The rows are already those of the noised, tempered logits."""
    return top(past, lambda p: total(past.rows, p), recent=past.budget * 3 // 10)


def keyformer_shared(past: Past) -> set[int]:
    return top(past, lambda p: sum(total(rows[past.head], p) for rows in past.model), recent=past.budget * 3 // 10)


def forgetting(alpha: float) -> Oracle:
    def a2sf(past: Past) -> set[int]:
        last = len(past.rows) - 1
        return top(past, lambda p: sum(alpha ** (last - q) * row.get(p, 0.0) for q, row in enumerate(past.rows)))

    return a2sf


def keyformer_a2sf(past: Past) -> set[int]:
    last = len(past.rows) - 1
    return top(
        past,
        lambda p: sum(0.9 ** (last - q) * row.get(p, 0.0) for q, row in enumerate(past.rows)),
        recent=past.budget * 3 // 10,
    )


def tova(past: Past) -> set[int]:
    return top(past, lambda p: sum(rows[-1].get(p, 0.0) for rows in past.heads))


def spatten(past: Past) -> set[int]:
    return top(past, lambda p: sum(total(rows, p) for heads in past.model for rows in heads))


def snapkv(past: Past) -> set[int]:
    """Window 2, max pooling over 3 neighbours, chosen once: all of the observing window stays."""
    if past.newest >= past.prompt:
        return set(past.held)
    edge = past.prompt - 2
    votes = [total(past.rows[edge:], p) if p < edge else 0.0 for p in range(past.prompt)]
    pooled = [max(votes[max(0, p - 1) : p + 2]) for p in range(past.prompt)]
    return top(past, lambda p: pooled[p], recent=3)  # the 2 observers and the token to come


def openvino(past: Past, block: int, start: int, recent: int, window: int, norm: bool, crush: int = 0) -> set[int]:
    """Blocks of tokens, by attention pooled over 7 tokens ahead, once the first answer token was read.

    crush: KVCrush's blocks, with the anchor 0, 1, 0, 1, …; its ties are by place.
    """
    held, size = sorted(past.held), past.budget // block * block
    if past.newest < past.prompt or len(held) < size + block:
        return set(held)
    score = dict.fromkeys(held, 0.0)
    for queries in (range(past.prompt - window, past.prompt), *([q] for q in range(past.prompt, past.newest + 1))):
        seen = sorted(past.heads[0][queries[-1]])
        sums = [sum(head[q].get(p, 0.0) for head in past.heads for q in queries) for p in seen]
        for place, p in enumerate(seen):
            if p in score:
                score[p] += max(sums[place : place + 7])
    life = {p: min(past.newest - p + 1, window + past.newest - past.prompt + 1) if norm else 1 for p in held}
    full = len(held) // block
    blocks = [held[block * i : block * i + block] for i in range(start // block, full - recent // block)]
    order = sorted(range(len(blocks)), key=lambda i: (sum(score[p] / life[p] for p in blocks[i]), i))
    gone = sorted(order[: len(blocks) - (size - start - recent) // block])
    if 0 < crush < len(gone):
        tokens = [p for each in blocks for p in each]
        upper = set(sorted(tokens, key=lambda p: -score[p])[: len(tokens) // 2])
        far = [sum((p in upper) != (i % 2 == 1) for i, p in enumerate(each)) for each in blocks]
        ranked = sorted(gone, key=lambda i: far[i])
        gone = [i for i in gone if i not in ranked[:: len(gone) // crush][:crush]]
    elif crush and crush == len(gone):
        gone = []
    return set(held) - {p for i in gone for p in blocks[i]}


def openvino_norm(past: Past) -> set[int]:
    return openvino(past, block=1, start=1, recent=1, window=3, norm=True)


def openvino_crush(past: Past) -> set[int]:
    return openvino(past, block=1, start=1, recent=2, window=4, norm=False, crush=1)


def knorm(past: Past) -> set[int]:
    return top(past, lambda p: -past.norms[p])


def unit(v: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in v))
    return [x / length for x in v]


def keydiff_scores(keys: dict[int, list[float]]) -> Row:
    """Minus the cosine between each key and the mean of the normalised keys."""
    units = {p: unit(key) for p, key in keys.items()}
    anchor = unit([sum(column) / len(units) for column in zip(*units.values(), strict=True)])
    return {p: -sum(a * b for a, b in zip(key, anchor, strict=True)) for p, key in units.items()}


def keydiff(past: Past) -> set[int]:
    scores = keydiff_scores({p: past.keys[p] for p in past.held})
    return top(past, lambda p: scores[p], recent=2)


def moved(alpha: Row, values: dict[int, list[float]], j: int) -> float:
    """How far the output sum alpha v of one query head moves when token j is deleted and the rest sums to 1 again.

    What j had of the output goes, and the others, who had `left`, share what j had.
    """
    whole = sum(alpha.values())
    share = {p: a / whole for p, a in alpha.items()}
    left = sum(a for p, a in share.items() if p != j)
    others = [sum(a * values[p][d] for p, a in share.items() if p != j) for d in range(len(values[j]))]
    return share[j] * math.dist([x / left for x in others], values[j])


def caote(past: Past) -> set[int]:
    """By deletion itself, not by the theorem's formula."""
    return top(past, lambda p: sum(moved(row, past.values, p) for row in past.newest_rows))


def caote_over_h2o(past: Past) -> set[int]:
    whole = {p: total(past.rows, p) for p in past.held}
    alpha = {p: a / sum(whole.values()) for p, a in whole.items()}
    return top(past, lambda p: moved(alpha, past.values, p), recent=past.budget // 2)


def dropkv(past: Past) -> set[int]:
    """The last three queries, whose tokens stay; squares of how far each query head's output would move."""
    rows = [head_logits(past, q) for q in range(past.newest - 2, past.newest + 1)]
    shares = [softmax(row) for each in rows for row in each]
    values = {p: past.values[p] for p in past.held}

    def value(p: int) -> float:
        return sum(moved({**dict.fromkeys(past.held, 0.0), **row}, values, p) ** 2 for row in shares)

    return top(past, value, recent=4)


def attention_matching(past: Past) -> set[int]:
    """One sink, the newest two; the mean square of three queries' attention among the rest; chosen once."""
    if past.newest >= past.prompt:
        return set(past.held)
    inside = [p for p in past.held if 0 < p < past.newest]
    squares = dict.fromkeys(inside, 0.0)
    for rows in past.head_rows:
        for row in rows:
            whole = sum(row.get(p, 0.0) for p in inside)
            for p in inside:
                squares[p] += (row.get(p, 0.0) / whole) ** 2
    return top(past, lambda p: squares[p], recent=2, sinks=1)


def capkv(past: Past) -> set[int]:
    """One sink; five positions to come; the leverage of each value among those that the mean query points to."""
    if past.newest >= past.prompt:
        return set(past.held)
    inside = [p for p in past.held if p > 0]
    width = range(len(past.values[inside[0]]))
    scores = dict.fromkeys(inside, 0.0)
    rotation = mean_rotation(past.pairs, len(past.keys[0]), range(past.newest + 1, past.newest + 6))
    for queries in past.queries:
        mean = [sum(column) / len(queries[1:]) for column in zip(*queries[1:], strict=True)]
        anchor = unit([row[0] for row in product(rotation, [[x] for x in mean])])
        cosine = {p: sum(a * b for a, b in zip(anchor, unit(past.keys[p]), strict=True)) for p in inside}
        weight = {p: math.exp(5 * (x - max(cosine.values()))) for p, x in cosine.items()}
        matrix = [
            [
                float(i == j) + sum((weight[p] + 1e-6) * past.values[p][i] * past.values[p][j] for p in inside)
                for j in width
            ]
            for i in width
        ]
        for p in inside:
            reach = solved(matrix, past.values[p])
            scores[p] += weight[p] * sum(a * b for a, b in zip(reach, past.values[p], strict=True))
    return top(past, lambda p: scores[p], sinks=1)


def fast_caote(past: Past) -> set[int]:
    mean = [sum(column) / len(past.held) for column in zip(*(past.values[p] for p in past.held), strict=True)]
    return top(past, lambda p: sum(row[p] / (1 - row[p]) * math.dist(mean, past.values[p]) for row in past.newest_rows))


def lag_scores(partition: list[list[float]], following: list[list[float]]) -> list[float]:
    """How much each vector of a partition varies over its channels, in units of the next partition's spread."""
    spreads = [(min(column), max(column)) for column in zip(*following, strict=True)]
    deviations = []
    for vector in partition:
        x = [(v - low) / (high - low) for v, (low, high) in zip(vector, spreads, strict=True)]
        mean = sum(x) / len(x)
        deviations.append(math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - 1)))
    most = max(deviations)
    e = [math.exp(d - most) for d in deviations]
    return [v / sum(e) for v in e]


def lagkv(past: Past) -> set[int]:
    """One sink, partitions of 2: the last one and what follows, then the better token of each, newer ones first."""
    if past.newest >= past.prompt:
        return set(past.held)
    parts = [[p, p + 1] for p in range(1, past.prompt - 1, 2)]
    places = {}
    for part, following in pairwise(parts):
        each = [lag_scores([x[p] for p in part], [x[p] for p in following]) for x in (past.keys, past.values)]
        better = part[0] if sum(e[0] for e in each) > sum(e[1] for e in each) else part[1]
        places |= {p: int(p == better) for p in part}
    return top(past, lambda p: places.get(p, 2), sinks=1)


def lagkv_causal(past: Past) -> set[int]:
    """Two newest, partitions of three of what is held, each in units of the spread of the one before it."""
    parts = [past.held[i : i + 3] for i in range(0, len(past.held), 3)]
    worth = dict.fromkeys(past.held, 0.0)
    for place, part in enumerate(parts):
        for x in (past.keys, past.values):
            spread = [(min(column), max(column)) for column in zip(*(x[p] for p in parts[place - 1]), strict=True)]
            for p in part:
                each = [(v - low) / (high - low + 1e-9) for v, (low, high) in zip(x[p], spread, strict=True)]
                each = each if place else x[p]
                mean = sum(each) / len(each)
                worth[p] += math.sqrt(sum((v - mean) ** 2 for v in each) / (len(each) - 1))
    return top(past, lambda p: worth[p], recent=3)  # the 2 and the token to come


def leverages(past: Past) -> Row:
    """The product of key's and value's share of the squared norms in their block of 4, as shares of the head's sum."""

    def share(x: dict[int, list[float]], p: int) -> float:
        block = [i for i in past.held if i // 4 == p // 4]
        return sum(v * v for v in x[p]) / sum(v * v for i in block for v in x[i])

    row = {p: share(past.keys, p) * share(past.values, p) for p in past.held}
    return {p: value / sum(row.values()) for p, value in row.items()}


def cur(past: Past) -> set[int]:
    """One sink, and the largest leverages."""
    if past.newest >= past.prompt:
        return set(past.held)
    return top(past, leverages(past).__getitem__, sinks=1)


Matrix = list[list[float]]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def mean_rotation(pairs: list[tuple[int, int, float]], width: int, places: range) -> Matrix:
    """The mean of RoPE's matrices over some positions."""
    rotation = [[float(i == j) for j in range(width)] for i in range(width)]
    for i, j, turn in pairs:
        cos = sum(math.cos(place * turn) for place in places) / len(places)
        sin = sum(math.sin(place * turn) for place in places) / len(places)
        rotation[i][i], rotation[i][j], rotation[j][i], rotation[j][j] = cos, -sin, sin, cos
    return rotation


def expected_logits(queries: list[list[float]], keys: dict[int, list[float]], rotation: Matrix) -> Row:
    """log E exp(q.k / sqrt d) for a normal q with the mean and covariance of these queries, rotated."""
    count, width = len(queries), range(len(queries[0]))
    mean = [sum(column) / count for column in zip(*queries, strict=True)]
    apart = [[x - m for x, m in zip(query, mean, strict=True)] for query in queries]
    sigma = [[sum(a[i] * a[j] for a in apart) / count for j in width] for i in width]
    mean = [row[0] for row in product(rotation, [[m] for m in mean])]
    sigma = product(product(rotation, sigma), [list(column) for column in zip(*rotation, strict=True)])
    result = {}
    for p, key in keys.items():
        turned = [sum(sigma[i][j] * key[j] for j in width) for i in width]
        linear, square = (sum(x * k for x, k in zip(v, key, strict=True)) for v in (mean, turned))
        result[p] = linear / math.sqrt(len(width)) + square / len(width) / 2
    return result


def expected_shares(past: Past) -> list[Row]:
    """Per query head, the log of each token's share of exp(expected logit); one sink, which is no query either."""
    keys = {p: past.keys[p] for p in past.held if p >= 1}
    rotation = mean_rotation(past.pairs, len(past.keys[0]), range(past.prompt, past.prompt + 5))
    heads = []
    for queries in past.queries:
        z = expected_logits(queries[1:], keys, rotation)
        most = max(z.values())
        whole = most + math.log(sum(math.exp(v - most) for v in z.values()))
        heads.append({p: v - whole for p, v in z.items()})
    return heads


def expected_attention(past: Past) -> set[int]:
    """Five positions to come; shares may be too small for a float, so their logarithms are added up."""
    if past.newest >= past.prompt:
        return set(past.held)
    heads = expected_shares(past)

    def value(p: int) -> float:
        most = max(head[p] for head in heads)
        return most + math.log(sum(math.exp(head[p] - most) for head in heads)) + math.log(math.hypot(*past.values[p]))

    return top(past, value, sinks=1)


def expected_attention_paper(past: Past) -> set[int]:
    if past.newest >= past.prompt:
        return set(past.held)
    each = list(zip(expected_shares(past), past.output_norms, strict=True))
    return top(past, lambda p: sum((math.exp(share[p]) + 0.02) * norm[p] for share, norm in each), sinks=1)


def repeated(past: Past, sinks: int, weight: Callable[[Repeat, int, int, int], float]) -> Row:
    """The largest of each repeated token's shares of the sinks, its chunk and what is fed, in all heads, weighed.

    weight: of a repeat, a query head, a fed query and a position.
    """
    best: Row = {}
    for repeat in past.repeats:
        for head, rows in enumerate(repeat.rows):
            for q, row in enumerate(rows):
                near = sum(a for p, a in row.items() if p < sinks or p in repeat.chunk or p >= past.prompt)
                for p in repeat.chunk:
                    best[p] = max(best.get(p, 0.0), row[p] / near * weight(repeat, head, q, p))
    return best


def kvzip(past: Past) -> set[int]:
    """One sink, which is not repeated."""
    if past.newest >= past.prompt:
        return set(past.held)
    best = repeated(past, 1, lambda *_: 1.0)
    return top(past, lambda p: best.get(p, 0.0), sinks=1)


def kvzip_plus(past: Past) -> set[int]:
    if past.newest >= past.prompt:
        return set(past.held)
    best = repeated(past, 1, lambda repeat, head, q, p: past.output_norms[head][p] / repeat.input_norms[q])
    return top(past, lambda p: best.get(p, 0.0), sinks=1)


def kvzap(past: Past) -> set[int]:
    return top(past, lambda p: past.predicted[p], recent=2, sinks=1)


def vatp(past: Past) -> set[int]:
    """Two sinks; half of the budget is the window; every row of attention times the sum of the value's sizes."""
    size = {p: sum(abs(v) for v in past.values[p]) for p in past.held}
    return top(past, lambda p: total(past.rows, p) * size[p], recent=past.budget // 2, sinks=2)


def largest_logits(past: Past, q: int) -> Row:
    """What query q says of each token that it sees: the largest logit over the query heads."""
    result: Row = {}
    for queries, slope in zip(past.queries, past.slopes, strict=True):
        turned = [row[0] for row in product(mean_rotation(past.pairs, len(queries[q]), range(q, q + 1)),
                                            [[x] for x in queries[q]])]  # fmt: skip
        for p in past.held:
            if p <= q:
                x = sum(a * b for a, b in zip(turned, past.keys[p], strict=True)) / math.sqrt(len(turned))
                result[p] = max(result.get(p, -math.inf), x + slope * (p - q))
    return result


def head_logits(past: Past, q: int) -> list[Row]:
    """What query q says of each token that it sees, in each query head by itself."""
    return [
        largest_logits(replace(past, queries=[queries], slopes=[slope]), q)
        for queries, slope in zip(past.queries, past.slopes, strict=True)
    ]


def window_shares(past: Past, window: int, among: list[int]) -> list[list[Row]]:
    """[query heads][queries]: the last queries' attention, softmax over the tokens of `among`, without the window."""
    older = past.held[:-window]
    rows = [head_logits(past, q) for q in range(past.newest - window + 1, past.newest + 1)]
    shares = [
        [softmax({p: x for p, x in row.items() if p in among}) for row in each] for each in zip(*rows, strict=True)
    ]
    return [[{p: row[p] for p in older} for row in head] for head in shares]


def nearby(row: Row, held: list[int], p: int, kernel: int) -> list[float]:
    """The values of p and of the tokens held around it, `kernel` in all; 0 where there are none."""
    at, half = held.index(p), kernel // 2
    return [row[held[i]] if 0 <= i < len(held) else 0.0 for i in range(at - half, at + half + 1)]


def worst(rows: list[list[Row]], older: list[int], kernel: int) -> Row:
    """DefensiveKV: each row smoothed and brought to its sum; the largest of all rows, at least their mean."""
    smooth = []
    for row in (row for head in rows for row in head):
        mean = {p: sum(nearby(row, older, p, kernel)) / kernel for p in older}
        smooth.append({p: mean[p] * sum(row.values()) / sum(mean.values()) for p in older})
    most = {p: max(row[p] for row in smooth) for p in older}
    floor = sum(most.values()) / len(older)
    return {p: max(x, floor) for p, x in most.items()}


def snapkv_decoding(past: Past) -> set[int]:
    """The last three queries, whose tokens stay; kernel 3, mean; over all that each sees."""
    older = past.held[:-3]
    rows = window_shares(past, 3, past.held)
    mean = {p: sum(row[p] for head in rows for row in head) for p in older}
    return top(past, lambda p: sum(nearby(mean, older, p, 3)), recent=4)


def snapkv_defensive(past: Past) -> set[int]:
    older = past.held[:-3]
    made = worst(window_shares(past, 3, older), older, 1)
    return top(past, lambda p: made[p], recent=4)


def defensivekv(past: Past) -> set[int]:
    """Three queries, whose tokens stay; no smoothing; sizes as shares of the layer's kv heads; nine tenths first."""
    if past.newest >= past.prompt:
        return set(past.held)
    older = past.held[:-3]
    rows = [window_shares(head, 3, head.held) for head in past.layer]
    sizes = [{p: sum(row[p] for row in head.output_sizes) for p in older} for head in past.layer]
    scores = [
        {p: x * size[p] / sum(each[p] for each in sizes) for p, x in worst(shares, older, 1).items()}
        for shares, size in zip(rows, sizes, strict=True)
    ]
    every = [row for shares in rows for head in shares for row in head]
    bias = sum(row[p] for row in every for p in older[-3:]) / len(every)
    mine = {p: sum(row[p] for head in rows[past.head] for row in head) for p in older}
    first, mass = set[int](), 0.0
    for p in sorted(older, key=lambda p: (mine[p], p), reverse=True):
        mass += mine[p] / sum(mine.values())
        if mass >= 0.9 - bias or len(first) >= math.floor(len(older) * past.budget / past.prompt) - 3:
            break
        first.add(p)
    most = max(x for score in scores for x in score.values())
    return top(past, lambda p: most if p in first else scores[past.head].get(p, 0.0), recent=4)


def rkv_defensive(past: Past) -> set[int]:
    older = past.held[:-3]
    made = worst(window_shares(past, 3, past.held), older, 3)
    repeated = redundancy({p: past.keys[p] for p in past.held})
    return top(past, lambda p: 0.9 * made[p] - 0.1 * repeated[p], recent=4)


def vase(past: Past) -> set[int]:
    """Two queries, whose tokens stay; kernel 3; the sink and the widest values are 4 tenths of the budget."""
    older = past.held[:-2]
    rows = window_shares(past, 2, older)
    mean = {p: sum(row[p] for head in rows for row in head) / len(rows) / 2 for p in older}
    width = {p: math.inf if p < 1 else max(past.values[p]) - min(past.values[p]) for p in older}
    large = sorted(older, key=lambda p: (width[p], p), reverse=True)[: past.budget * 4 // 10]

    def value(p: int) -> float:
        return 1000 + width[p] if p in large else math.log(sum(nearby(mean, older, p, 3)) / 3) + past.noise[p]

    return top(past, value, recent=3, sinks=1)


def softmax(x: Row) -> Row:
    most = max(x.values())
    e = {p: math.exp(v - most) for p, v in x.items()}
    return {p: v / sum(e.values()) for p, v in e.items()}


def redundancy(keys: dict[int, list[float]]) -> Row:
    """How much other tokens' keys resemble each one's; each spares the newest of those with a cosine above a half."""
    units = {p: unit(key) for p, key in keys.items()}
    columns = dict.fromkeys(keys, 0.0)
    for i in keys:
        row = {j: sum(a * b for a, b in zip(units[i], units[j], strict=True)) for j in keys if j != i}
        spared = max((j for j, cosine in row.items() if cosine > 0.5), default=None)
        for j, cosine in row.items():
            columns[j] += 0.0 if j == spared else cosine / len(keys)
    return softmax(columns)


def around(row: Row, held: list[int], p: int) -> float:
    """The largest share among p and the tokens held right before and after it."""
    at = held.index(p)
    return max(row.get(j, 0.0) for j in held[max(0, at - 1) : at + 2])


def rkv(past: Past) -> set[int]:
    """The last 3 queries, whose tokens stay; kernel 3; nine parts of importance to one of redundancy."""
    rows = [softmax(largest_logits(past, q)) for q in range(past.newest - 2, past.newest + 1)]
    repeated = redundancy({p: past.keys[p] for p in past.held})

    def score(p: int) -> float:
        return 0.9 * sum(around(row, past.held, p) for row in rows) / 3 - 0.1 * repeated[p]

    return top(past, score, recent=4)  # the 3 and the token to come


def gkv(past: Past) -> set[int]:
    """The last 3 queries, whose tokens stay; half of each score remembered; nine parts to one of redundancy.

    All evictions so far, one after the other: what stays of one is what the next one looks at.
    """
    score: Row = {}
    held: list[int] = []
    for newest in [*past.evictions, past.newest]:
        held = [*held, *range(max(held, default=-1) + 1, newest + 1)]
        then, older_tokens = replace(past, held=held), held[:-3]
        mean = dict.fromkeys(older_tokens, 0.0)
        for q in range(newest - 2, newest + 1):
            heads = [softmax(logits) for logits in head_logits(then, q)]
            mean = {p: mean[p] + max(row[p] for row in heads) / 3 for p in older_tokens}
        score = {p: max(score.get(p, 0.0) / 2, mean[p] / max(mean.values())) for p in older_tokens}
        alike = redundancy({p: past.keys[p] for p in held})
        most = max(alike[p] for p in older_tokens)
        worth = {p: 0.9 * score[p] - 0.1 * alike[p] / most for p in older_tokens}
        held = sorted(top(then, lambda p, worth=worth: worth.get(p, math.inf), recent=4))
    return set(held)


def rkv_release(past: Past) -> set[int]:
    """Attention among the tokens before the window, its mean pooled."""
    older = past.held[:-3]
    rows = [largest_logits(past, q) for q in range(past.newest - 2, past.newest + 1)]
    shares = [softmax({p: row[p] for p in older}) for row in rows]
    mean = {p: sum(row[p] for row in shares) / 3 for p in older}
    repeated = redundancy({p: past.keys[p] for p in past.held})
    return top(past, lambda p: 0.07 * around(mean, older, p) - 0.93 * repeated[p], recent=4)


def rotated(vector: list[float], position: int, pairs: list[tuple[int, int, float]]) -> list[float]:
    """A query or key before RoPE as RoPE turns it at this position."""
    turned = list(vector)
    for a, b, turn in pairs:
        cos, sin = math.cos(position * turn), math.sin(position * turn)
        turned[a], turned[b] = vector[a] * cos - vector[b] * sin, vector[b] * cos + vector[a] * sin
    return turned


def main_direction(vectors: list[list[float]]) -> list[float]:
    """The first right singular vector of these rows, on the side of their mean: M^(2^40) of M = the rows' squares."""
    width = range(len(vectors[0]))
    power = [[sum(row[i] * row[j] for row in vectors) for j in width] for i in width]
    for _ in range(40):
        size = max(abs(x) for row in power for x in row)
        power = [[sum(power[i][k] * power[k][j] for k in width) / size**2 for j in width] for i in width]
    main = unit(max(power, key=lambda row: math.hypot(*row)))
    side = sum(sum(a * b for a, b in zip(row, main, strict=True)) for row in vectors)
    return main if side > 0 else [-x for x in main]


def qfilters(past: Past) -> set[int]:
    filters = [sum(column) / len(past.directions) for column in zip(*past.directions, strict=True)]
    return top(past, lambda p: sum(a * b for a, b in zip(filters, past.keys[p], strict=True)), recent=2)


def series(past: Past, p: int, mean: list[float], sizes: list[float]) -> float:
    """TriAttention's score of one key in one query head, from the key before RoPE, over four distances to come."""
    key = rotated(past.keys[p], -p, past.pairs)
    turned = {d for a, b, _ in past.pairs for d in (a, b)}
    result = sum(mean[d] * key[d] for d in range(len(key)) if d not in turned)
    for (a, b, turn), size in zip(past.pairs, sizes, strict=True):
        q, k = complex(mean[a], mean[b]), complex(key[a], key[b])
        phase = cmath.phase(q * k.conjugate())
        waves = [math.cos(turn * (past.newest + 1 - p + d) + phase) for d in (1, 2, 4, 8)]
        result += abs(q) * abs(k) * sum(waves) / 4 + (size - abs(q)) * abs(k)
    return result


def triattention(past: Past) -> set[int]:
    best = dict.fromkeys(past.held, -math.inf)
    for mean, sizes in zip(past.query_means, past.pair_sizes, strict=True):
        score = {p: series(past, p, mean, sizes) for p in past.held}
        centre = sum(score.values()) / len(score)
        spread = math.sqrt(sum((s - centre) ** 2 for s in score.values()) / len(score))
        best = {p: max(best[p], (score[p] - centre) / spread) for p in past.held}
    return top(past, lambda p: best[p], recent=2)


def h2o_chunks(past: Past) -> set[int]:
    """Chunks of 3: what all kv heads of the layer looked at in those of a chunk's tokens that are not in the window."""
    recent = past.budget // 2
    inside = past.held[: len(past.held) - (recent - 1)] if recent > 1 else past.held

    def value(p: int) -> float:
        chunk = [t for t in inside if t // 3 == p // 3]
        return sum(total(rows, t) for rows in past.heads for t in chunk) / len(chunk)

    return top(past, value, recent=recent)


def h2o_critical(past: Past) -> set[int]:
    """Half by attention, half by attention (a share, and a little) times the mean size of the projected value."""
    whole, recent = sum(total(past.rows, p) for p in past.held), past.budget // 2
    first = top(replace(past, room=past.room // 2), lambda p: total(past.rows, p), recent=recent)

    def value(p: int) -> float:
        size = sum(sizes[p] for sizes in past.output_sizes) / len(past.output_sizes)
        return math.inf if p in first else (total(past.rows, p) / whole + 1e-4) * size

    return top(past, value, recent=recent)


def looked_at_nearby(past: Past, inside: range, size: int) -> Row:
    """What tokens get from those of their own chunk, before and behind, unscaled, times the size of their value."""
    found = dict.fromkeys(inside, 0.0)
    for queries in past.queries:
        turned = {p: rotated(queries[p], p, past.pairs) for p in inside}
        for q in inside:
            first = inside[(inside.index(q) // size) * size]
            chunk = [p for p in inside if first <= p < first + size]
            row = softmax({p: sum(a * b for a, b in zip(turned[q], past.keys[p], strict=True)) for p in chunk})
            for p, share in row.items():
                found[p] += share / len(past.queries) * math.hypot(*past.values[p])
    return {p: (found.get(p - 1, 0.0) + found[p] + found.get(p + 1, 0.0)) / 3 for p in inside}


def solved(matrix: Matrix, right: list[float]) -> list[float]:
    """x of matrix x = right, by elimination; matrix is positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    x = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        x[i] = (rows[i][-1] - sum(rows[i][j] * x[j] for j in range(i + 1, len(rows)))) / rows[i][i]
    return x


def key_leverages(past: Past, inside: range) -> Row:
    """How far each key before RoPE lies out among these, seen through the sketch."""
    keys = [rotated(past.keys[p], -p, past.pairs) for p in inside]
    mean = [sum(column) / len(keys) for column in zip(*keys, strict=True)]
    x = product([[a - b for a, b in zip(key, mean, strict=True)] for key in keys], past.sketch)
    gram = product([list(column) for column in zip(*x, strict=True)], x)
    gram = [[a + 0.01 * (i == j) for j, a in enumerate(row)] for i, row in enumerate(gram)]
    return {
        p: sum(a * b for a, b in zip(row, solved(gram, row), strict=True)) for p, row in zip(inside, x, strict=True)
    }


def compactor(past: Past) -> set[int]:
    """One sink, the last 2, chunks of 5; standardised over the heads and tokens between the ends."""
    if past.newest >= past.prompt:
        return set(past.held)
    inside = range(1, past.prompt - 2)
    parts = [[f(head) for head in past.layer] for f in (
        lambda head: looked_at_nearby(head, inside, 5), lambda head: key_leverages(head, inside))]  # fmt: skip
    score = dict.fromkeys(inside, 0.0)
    for part, weight in zip(parts, (1.0, 1 - past.budget / past.prompt), strict=True):
        every = [x for row in part for x in row.values()]
        centre, spread = sum(every) / len(every), math.sqrt(variance(every))
        for p in inside:
            score[p] += weight * (part[past.head][p] - centre) / spread
    return top(past, lambda p: score.get(p, math.inf), recent=3, sinks=1)


def variance(x: list[float]) -> float:
    """Variance of a sample: n - 1 below."""
    mean = sum(x) / len(x)
    return sum((v - mean) ** 2 for v in x) / (len(x) - 1)


def cake(past: Past) -> set[int]:
    """The last 3 queries, whose tokens stay; 200 variances beside the mean, averaged over 3 neighbours."""
    if past.newest >= past.prompt:
        return set(past.held)
    edge = past.prompt - 3

    def votes(rows: list[Row], p: int) -> float:
        if not 0 <= p < edge:
            return 0.0
        seen = [row[p] for row in rows]
        return sum(seen) / 3 + 200 * variance(seen)

    def score(p: int) -> float:
        return sum(votes(rows, p + d) for rows in past.head_rows for d in (-1, 0, 1))

    return top(past, score, recent=4)  # the 3 and the token to come


def pyramid_budgets(mean: int, prompt: int, least: int, layers: int, beta: float) -> list[int]:
    """Slots of each layer: a line through the mean, in the middle, from the bottom layer's to the top one's."""
    top = (mean - least) / beta
    bottom = 2 * (mean - least) - top
    if bottom > prompt - least:
        bottom = prompt - least
        top = 2 * (mean - least) - bottom
    line = [bottom + (top - bottom) * layer / (layers - 1) for layer in range(layers)]
    return [least + round(x) for x in line]


def cake_preference(heads: list[list[Row]], prompt: int, tau1: float = 1.0, tau2: float = 1.0) -> float:
    """Preference of one layer by the last queries' rows in each of its query heads."""
    before = range(prompt - len(heads[0]))
    entropy = -sum(row[p] * math.log(row[p] + 1e-10) for rows in heads for row in rows for p in before)
    shift = sum(variance([row[p] for row in rows]) for rows in heads for p in before)
    return entropy ** (1 / tau1) * shift ** (1 / tau2)


def cake_budgets(mean: int, prompt: int, base: int, preferences: list[float]) -> list[int]:
    """Every layer has `base` slots and its share of the rest; what it cannot use, and what is left over, one by one."""
    most, rest = prompt - base, (mean - base) * len(preferences)
    exact = [Fraction(p) for p in preferences]
    wanted = [math.floor(rest * p / sum(exact)) for p in exact]
    shares = [min(most, w) for w in wanted]
    for more in (sum(wanted) - sum(shares), rest - sum(wanted)):
        layer = 0
        while more:
            if shares[layer] < most:
                shares[layer] += 1
                more -= 1
            layer = (layer + 1) % len(shares)
    return [base + share for share in shares]


def random(past: Past) -> set[int]:
    return top(past, lambda p: past.noise[p])


def random_recent(past: Past) -> set[int]:
    return top(past, lambda p: past.noise[p], recent=3)


def tempered(row: Row, noise: Row, tau: float) -> Row:
    """softmax((x + noise) / tau) of one query head, from its softmax(x)."""
    x = {p: (math.log(a) + noise.get(p, 0.0)) / tau if a > 0 else -math.inf for p, a in row.items()}
    most = max(x.values())
    e = {p: math.exp(v - most) for p, v in x.items()}
    return {p: v / sum(e.values()) for p, v in e.items()}


# -- budgets of kv heads ----------------------------------------------------------------------------------------------


def top_of(value: Row, must: set[int], room: int) -> set[int]:
    """What must stay, and the best of the others; ties to the newer."""
    rest = sorted((p for p in value if p not in must), key=lambda p: (value[p], p), reverse=True)
    return must | set(rest[: room - len(must)])


def union_of_heads(values: list[Row], must: set[int], room: int) -> set[int]:
    """One set for all heads: what must stay, then the best mean value; ties to the newer."""
    return top_of({p: sum(row[p] for row in values) for p in values[0]}, must, room)


def shared_out(values: list[Row], must: list[set[int]], room: int, floor: float) -> list[set[int]]:
    """AdaKV's sets, written as a draft: every head picks its floor, then one token after the other goes to the best.

    values, must: per head. All heads together keep room * heads tokens.
    """
    ranked = [
        [p for _, _, p in sorted(((p in sure, row[p], p) for p in row), reverse=True)]
        for row, sure in zip(values, must, strict=True)
    ]
    taken = [max(math.floor(floor * room + 1e-9), len(sure)) for sure in must]
    while sum(taken) < room * len(values):
        open_heads = [h for h, n in enumerate(taken) if n < len(ranked[h])]
        best = max(open_heads, key=lambda h: (values[h][ranked[h][taken[h]]], ranked[h][taken[h]], -h))
        taken[best] += 1
    return [set(order[:n]) for order, n in zip(ranked, taken, strict=True)]


def looks_back(queries: list[list[float]], key: list[float], pairs: list[tuple[int, int, float]], length: int) -> float:
    """kvpress's score of a kv head: the area under the cumulated attention of its mean query to its mean key.

    queries: the mean of each query head, key: of the kv head, before RoPE; both laid out over `length` positions.
    """
    area = 0.0
    for query in queries:
        last = rotated(query, length - 1, pairs)
        logits = [
            sum(a * b for a, b in zip(last, rotated(key, place, pairs), strict=True)) / math.sqrt(len(key))
            for place in range(length)
        ]
        top_logit = max(logits)
        weights = [math.exp(x - top_logit) for x in logits]
        running, whole = 0.0, sum(weights)
        for weight in weights:
            running += weight / whole
            area += running / length / len(queries)
    return area
