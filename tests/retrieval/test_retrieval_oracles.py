"""What each method chooses, against rules written from the papers in plain Python over one head, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import softmax
from tiny import Streams

from kvexp.core import AttentionParams, Budget, CacheConfig, MemoryTracker, SequenceState
from kvexp.retrieval import InfLLM, Oracle, PQCache, Quest, SparQ
from kvexp.retrieval.layer import LayerGroup, RetrievalLayer
from kvexp.retrieval.method import Retrieval

PROMPT, STEPS, DIM, GROUP, HEADS = 29, 11, 6, 5, 3
LONG = 31  # steps: pages and blocks that begin while decoding are chosen from, and rings come round
SCALE = DIM**-0.5


def run(
    method: Retrieval, streams: Streams, tokens: int, prompt: int = PROMPT, **geometry
) -> tuple[list, list, RetrievalLayer]:
    """Attended positions [step][row][head], outputs [step], and the state, of one layer without padding."""
    total = streams.q.shape[3]
    time = SequenceState(prompt_columns=prompt, max_new_tokens=total - prompt)
    state = RetrievalLayer(CacheConfig(method, Budget(tokens=tokens)), 0, 1, time, MemoryTracker(1), LayerGroup())
    kept, outs = [], []
    for rows in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, total))):
        q, k, v = (x[0, :, :, rows] for x in (streams.q, streams.k, streams.v))
        outs.append(state.forward(q, k, v, AttentionParams(SCALE, **geometry), None))
        kept.append(state.kept_positions())
    return kept[1:], outs[1:], state


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def best(score, candidates, count):
    """The newer of equals."""
    return set(sorted(candidates, key=lambda p: (score[p], p), reverse=True)[:count])


class Past:
    """One kv head at one step: queries [G][D], keys [t + 1][D], values, position t, and the window's start.

    softcap, sinks: of the model; None: none.
    """

    def __init__(
        self, streams: Streams, row: int, head: int, t: int, method: Retrieval, tokens: int, softcap=None, sinks=None
    ) -> None:
        group = streams.q.shape[2] // streams.k.shape[2]
        heads = range(head * group, (head + 1) * group)
        self.softcap, self.sink_of = softcap, [None] * group if sinks is None else [float(sinks[h]) for h in heads]
        self.queries = [streams.q[0, row, h, t].tolist() for h in heads]
        self.all_queries = [streams.q[0, row, h, : t + 1].tolist() for h in heads]
        self.keys = streams.k[0, row, head, : t + 1].tolist()
        self.values = streams.v[0, row, head, : t + 1].tolist()
        self.t, self.sinks = t, method.n_sinks
        past = int((tokens - method.n_sinks - 1) * method.recent_ratio)  # recent tokens besides the current one
        self.start, self.count = t - past, tokens - method.n_sinks - 1 - past
        self.candidates = range(self.sinks, self.start)

    def rows(self):
        return [[self.capped(dot(q, k) * SCALE) for k in self.keys] for q in self.queries]

    def capped(self, x):
        return x if self.softcap is None else self.softcap * math.tanh(x / self.softcap)

    def probabilities(self, rows):
        """Probabilities of each query head's logits, with its sink in the denominator."""
        return [softmax(row, sink) for row, sink in zip(rows, self.sink_of, strict=True)]


def oracle(past: Past) -> set[int]:
    full = past.probabilities(past.rows())
    return best([sum(column) for column in zip(*full, strict=True)], past.candidates, past.count)


def sparq(past: Past, r: int) -> set[int]:
    size = [sum(abs(q[d]) for q in past.queries) for d in range(DIM)]
    dims = sorted(range(DIM), key=lambda d: -size[d])[:r]
    score = [0.0] * len(past.keys)
    for q in past.queries:
        scale = math.sqrt(DIM * sum(abs(q[d]) for d in dims) / sum(map(abs, q)))
        for p, k in enumerate(past.keys):
            score[p] += sum(q[d] * k[d] for d in dims) / scale
    return best(score, past.candidates, past.count)


def quest(past: Past, page: int) -> set[int]:
    score = []
    for p in range(len(past.keys)):
        inside = past.keys[p // page * page : p // page * page + page]
        lows, highs = ([f(column) for column in zip(*inside, strict=True)] for f in (min, max))
        bounds = [sum(max(x * lo, x * hi) for x, lo, hi in zip(q, lows, highs, strict=True)) for q in past.queries]
        score.append(max(bounds))
    return best(score, past.candidates, past.count)


def infllm(past: Past, block: int, windows: dict[int, int], attended: dict[int, set[int]]) -> set[int]:
    """windows[i]: the first position in the window of query i; attended[i]: all that query i attended to."""
    received = [[0.0] * len(past.keys) for _ in past.queries]
    for g, queries in enumerate(past.all_queries):
        for i in range(past.t):
            seen = sorted(attended.get(i, range(i + 1)))
            row = softmax([past.capped(dot(queries[i], past.keys[p]) * SCALE) for p in seen], past.sink_of[g])
            for p, weight in zip(seen, row, strict=True):
                if p >= windows[i]:
                    received[g][p] += weight
    score = [math.inf] * len(past.keys)
    blocks = (past.start - 1 - past.sinks) // block
    for j in range(max(0, blocks)):
        inside = range(past.sinks + j * block, past.sinks + (j + 1) * block)
        total = 0.0
        for g, q in enumerate(past.queries):
            total += past.capped(dot(q, past.keys[max(inside, key=lambda p: received[g][p])]) * SCALE)
        for p in inside:
            score[p] = total
    return best(score, past.candidates, past.count)


def near_of(past: Past) -> set[int]:
    return set(range(past.sinks)) | set(range(past.start, past.t + 1))


CHOICES = {
    "oracle": (Oracle(n_sinks=3), oracle),
    "sparq": (SparQ(n_sinks=2, r=2), lambda past: sparq(past, 2)),
    "quest": (Quest(n_sinks=1, page=4), lambda past: quest(past, 4)),
    "quest, no sinks": (Quest(n_sinks=0, page=3, recent_ratio=0.2), lambda past: quest(past, 3)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    method, rule = CHOICES[name]
    streams = Streams.random(5, PROMPT + LONG, dim=DIM)
    kept, _, _ = run(method, streams, 13)
    for step, rows in enumerate(kept):
        for row, heads in enumerate(rows):
            for head, held in enumerate(heads):
                past = Past(streams, row, head, PROMPT + step, method, 13)
                assert set(held) == near_of(past) | rule(past), (step, row, head)


@pytest.mark.parametrize("method", [Oracle(n_sinks=2), SparQ(n_sinks=2, r=DIM), PQCache(n_sinks=2, m=1, b=8)])
def test_alibi_is_part_of_what_is_chosen_by(method):
    """All three are exact here (every component; no more tokens than centroids); steep slopes prefer the near."""
    streams = Streams.random(9, PROMPT + STEPS, dim=DIM, group=1)
    slopes = torch.tensor([0.05, 0.4, 2.0])
    kept, _, _ = run(method, streams, 13, alibi=slopes)
    plain, _, _ = run(method, streams, 13)
    for step, rows in enumerate(kept):
        for row, heads in enumerate(rows):
            for head, held in enumerate(heads):
                past = Past(streams, row, head, PROMPT + step, method, 13)
                x = [v + float(slopes[head]) * (p - past.t) for p, v in enumerate(past.rows()[0])]
                assert set(held) == near_of(past) | best(x, past.candidates, past.count)
    assert kept != plain


GEOMETRY = {"softcap": 1.4, "sinks": torch.linspace(2, -3, HEADS * GROUP)}


@pytest.mark.parametrize(
    "method",
    [
        Oracle(n_sinks=2),
        SparQ(n_sinks=2, r=DIM),
        SparQ(n_sinks=2, r=DIM, combine="softmax_sum"),
        PQCache(n_sinks=2, m=1, b=8),
        Quest(n_sinks=2, page=1),
    ],
    ids=["oracle", "sparq", "sparq softmax", "pqcache", "quest"],
)
def test_softcap_and_sinks_are_part_of_what_is_chosen_by(method):
    """All are exact here; each output is the attention over what was chosen, with the sink in the denominator."""
    streams = Streams.random(9, PROMPT + STEPS, dim=DIM)
    kept, outs, _ = run(method, streams, 13, **GEOMETRY)
    for step, rows in enumerate(kept):
        for row, heads in enumerate(rows):
            for head, held in enumerate(heads):
                past = Past(streams, row, head, PROMPT + step, method, 13, **GEOMETRY)
                x = past.rows()
                if isinstance(method, Oracle):
                    x = past.probabilities(x)
                elif getattr(method, "combine", "max") == "softmax_sum":
                    inside = past.probabilities([[each[p] for p in past.candidates] for each in x])
                    x = [dict(zip(past.candidates, each, strict=True)) for each in inside]
                join = max if isinstance(method, Quest) else sum
                score = {p: join(each[p] for each in x) for p in past.candidates}
                assert set(held) == near_of(past) | best(score, past.candidates, past.count)
                rows_held = past.probabilities([[each[p] for p in held] for each in past.rows()])
                for g, weights in enumerate(rows_held):
                    values = zip(*(past.values[p] for p in held), strict=True)
                    want = [sum(w * v for w, v in zip(weights, column, strict=True)) for column in values]
                    assert outs[step][row, head * GROUP + g, 0].tolist() == pytest.approx(want, abs=1e-6)
    # The largest of a group is the largest behind a softcap too, whatever the sinks.
    assert (kept == run(method, streams, 13)[0]) == isinstance(method, Quest)


@pytest.mark.parametrize(
    "geometry", [pytest.param({}, id="plain", marks=pytest.mark.slow), pytest.param(GEOMETRY, id="softcap and sinks")]
)
def test_infllm(geometry):
    """Rows of the prompt are full rows; later ones go over what was attended to, the chosen blocks included."""
    method, tokens = InfLLM(n_sinks=2, block=3, choice="kv_head"), 13
    streams = Streams.random(6, PROMPT + LONG, dim=DIM)
    kept, _, _ = run(method, streams, tokens, **geometry)
    for row in range(2):
        for head in range(HEADS):
            attended = {PROMPT + step: set(rows[row][head]) for step, rows in enumerate(kept)}
            pasts = [Past(streams, row, head, PROMPT + step, method, tokens, **geometry) for step in range(LONG)]
            local = pasts[0].t - pasts[0].start
            windows = {i: i - local for i in range(PROMPT + LONG)}
            for step, past in enumerate(pasts):
                wanted = near_of(past) | infllm(past, 3, windows, attended)
                assert attended[PROMPT + step] == wanted, (row, head, step)


@pytest.mark.parametrize("geometry", [{}, GEOMETRY], ids=["plain", "softcap and sinks"])
def test_sparq_makes_up_with_the_mean_value(geometry):
    """The mean stands for the attention that goes to tokens which are not attended to, not for the sink's."""
    method, tokens = SparQ(n_sinks=2, r=2, mean_value=True), 13
    streams = Streams.random(7, PROMPT + STEPS, dim=DIM)
    kept, outs, _ = run(method, streams, tokens, **geometry)
    for step, rows in enumerate(kept):
        past = Past(streams, 1, 2, PROMPT + step, method, tokens, **geometry)
        size = [sum(abs(q[d]) for q in past.queries) for d in range(DIM)]
        dims = sorted(range(DIM), key=lambda d: -size[d])[:2]
        mean = [sum(column) / len(past.values) for column in zip(*past.values, strict=True)]
        for g, q in enumerate(past.queries):
            scale = math.sqrt(DIM * sum(abs(q[d]) for d in dims) / sum(map(abs, q)))
            x = [past.capped(sum(q[d] * k[d] for d in dims) / scale) for k in past.keys]
            s = softmax(x, past.sink_of[g])
            held = rows[1][2]
            covered = sum(s[p] for p in held)
            exact = softmax([past.capped(dot(q, past.keys[p]) * SCALE) for p in held])
            for d in range(len(mean)):
                attention = sum(w * past.values[p][d] for w, p in zip(exact, held, strict=True))
                expected = covered * attention + (sum(s) - covered) * mean[d]
                assert outs[step][1, 2 * GROUP + g, 0, d].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("cluster", ["prompt", "outside_window"])
@pytest.mark.parametrize("combine", ["softmax_sum", "raw_sum", "max"])
def test_pqcache(combine, cluster):
    """Scores from the centroids and codes it made; codes are the nearest centroids, for tokens of every origin."""
    method, tokens = PQCache(n_sinks=2, m=2, b=2, combine=combine, cluster=cluster, cache_tokens=0), 13
    streams = Streams.random(8, PROMPT + STEPS, dim=DIM)
    kept, _, state = run(method, streams, tokens)
    centroids, codes = state.kv_index["centroids"], state.kv_index["codes"]
    for row in range(2):
        for head in range(HEADS):
            tables = centroids[row, head].tolist()
            keys = streams.k[0, row, head].tolist()
            for p in range(2, PROMPT + STEPS):
                for j in range(2):
                    part = keys[p][3 * j : 3 * j + 3]
                    far = [sum((x - c) ** 2 for x, c in zip(part, table, strict=True)) for table in tables[j]]
                    assert far[int(codes[row, head, p, j])] == pytest.approx(min(far), abs=1e-5)
            for step, rows in enumerate(kept):
                past = Past(streams, row, head, PROMPT + step, method, tokens)
                score = {}
                each = []
                for q in past.queries:
                    x = {
                        p: sum(
                            dot(q[3 * j : 3 * j + 3], tables[j][int(codes[row, head, p, j])]) * SCALE for j in range(2)
                        )
                        for p in past.candidates
                    }
                    if combine == "softmax_sum":
                        x = dict(zip(x, softmax(list(x.values())), strict=True))
                    each.append(x)
                for p in past.candidates:
                    values = [x[p] for x in each]
                    score[p] = max(values) if combine == "max" else sum(values)
                chosen = set(rows[row][head]) - near_of(past)
                worst = min(score[p] for p in chosen)
                others = [score[p] for p in past.candidates if p not in chosen]
                assert len(chosen) == past.count
                assert worst >= max(others) - 1e-6


def test_tokens_with_the_same_codes_are_chosen_by_age():
    """One centroid: all candidates score the same, so the newest are chosen."""
    method, tokens = PQCache(n_sinks=2, m=1, b=1, max_iter=1, cache_tokens=0), 13
    streams = Streams.random(8, PROMPT + STEPS, dim=DIM)
    streams.k[:] = 1.0  # all keys are the same
    kept, _, _ = run(method, streams, tokens)
    for step, rows in enumerate(kept):
        past = Past(streams, 0, 0, PROMPT + step, method, tokens)
        newest = set(list(past.candidates)[-past.count :])
        assert all(set(head) == near_of(past) | newest for heads in rows for head in heads)


# -- Oracle is the most attention that can be kept at a count ----------------------------------------------------------

RIVALS = st.sampled_from(
    [
        SparQ(n_sinks=2, r=1),
        SparQ(n_sinks=2, r=DIM),
        Quest(n_sinks=2, page=3),
        InfLLM(n_sinks=2, block=3),
        InfLLM(n_sinks=2, block=2, choice="kv_head"),
        PQCache(n_sinks=2, m=3, b=2),
        PQCache(n_sinks=2, m=1, b=1, combine="raw_sum"),
        PQCache(n_sinks=2, m=2, b=8, combine="max"),
    ]
)


@settings(max_examples=40, deadline=None)
@given(rival=RIVALS, seed=st.integers(0, 1000), tokens=st.integers(4, 30), prompt=st.integers(3, PROMPT))
def test_no_method_keeps_more_attention_than_oracle(rival, seed, tokens, prompt):
    streams = Streams.random(seed, prompt + 4, dim=DIM)
    held, _, _ = run(rival, streams, tokens, prompt)
    most, _, _ = run(Oracle(n_sinks=2), streams, tokens, prompt)
    for step in range(4):
        for row in range(2):
            for head in range(HEADS):
                past = Past(streams, row, head, prompt + step, rival, tokens)
                full = [softmax(x) for x in past.rows()]
                mass = [sum(column) for column in zip(*full, strict=True)]
                assert len(held[step][row][head]) == len(most[step][row][head])
                theirs, ours = (sum(mass[p] for p in kept[step][row][head]) for kept in (held, most))
                assert ours >= theirs - 1e-6


@pytest.mark.parametrize(("grouped", "repeated"), [("shared", "shared"), ("query_head", "kv_head")])
@pytest.mark.parametrize("prefill", ["full", "blockwise"])
def test_infllm_with_grouped_heads_is_infllm_with_repeated_ones(grouped, repeated, prefill):
    """Representatives belong to query heads, so repeating keys and values for them changes nothing but memory."""
    streams = Streams.random(11, PROMPT + STEPS, dim=DIM)
    whole = Streams(streams.q, *(x.repeat_interleave(GROUP, dim=2) for x in (streams.k, streams.v)))
    options = {"n_sinks": 2, "block": 3, "chunk": 4, "rounding": "blocks", "prefill": prefill, "cache_tokens": 6}
    _, ours, state = run(InfLLM(choice=grouped, **options), streams, 15)
    _, theirs, _ = run(InfLLM(choice=repeated, **options), whole, 15)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert state.memory.keys.shape[1] == (HEADS if grouped == "shared" else HEADS * GROUP)
