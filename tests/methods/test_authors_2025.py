"""The sets kept at the end of a prompt against the authors' own code, on the same queries, keys and values.

Recorded in tests/fixtures/authors_2025.npz from five layers of 97 tokens; what was called of each repository, and how,
is in authors_2025.md beside it. What each parameter is called over there:

    R1KV(budget, window_size, kernel_size, mix_lambda)   RKV(form="release", window, kernel, importance=mix_lambda)
    CakeprefillKVCache(cache_size, window_size), config  CAKE(window, gamma, tau1, tau2); its kernel is 5
    LlamaAttention_heavy_hitter, h2o and applyval        VATP(n_sinks=sink_len, recent_ratio=0.5), halves are equal
    TriAttentionConfig(per_layer_perhead_pruning,        TriAttention(max_offset, group=layer_perhead_aggregation,
        normalize_scores, allow_prefill_compression)         protect_recent=0)

All of them keep their budget beside the coming token: Budget(tokens=..., counts_self=False).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_peers import HOW
from torch import Tensor

from kvexp.core import (
    AttentionParams,
    Budget,
    CacheConfig,
    Cadence,
    EvictionLayer,
    Method,
    QueryCalibration,
    RoPE,
    SequenceState,
)
from kvexp.core.eviction import CacheState
from kvexp.methods import CAKE, H2O, RKV, VATP, SnapKV, TriAttention

FILE = Path(__file__).parents[1] / "fixtures" / "authors_2025.npz"
Sets = list[list[set[int]]]  # positions, per layer and kv head


class Recorded:
    """authors_2025.npz: q [L, H * G, T, D], k and v [L, H, T, D]; settings, sets and scores of every recorded case."""

    def __init__(self) -> None:
        with np.load(FILE) as file:
            self.arrays: dict[str, Any] = {name: file[name] for name in file.files}
        self.about: dict[str, Any] = json.loads(str(self.arrays["about"]))
        self.q, self.k, self.v = (torch.tensor(self.arrays[name]).float() * self.about["unit"] for name in "qkv")
        self.layers, self.heads, self.length, self.width = self.k.shape
        self.group = self.q.shape[1] // self.heads

    def cases(self, name: str) -> list[tuple[dict[str, Any], Sets]]:
        """Settings, in the words of the authors' code, and kept positions of every case of one method."""
        found = []
        for number, case in enumerate(self.about[name]["cases"]):
            mask = np.unpackbits(self.arrays[f"{name}/{number}/kept"], axis=-1, count=self.length)
            found.append((case, [[set(np.flatnonzero(head).tolist()) for head in layer] for layer in mask]))
        return found

    @torch.inference_mode()
    def kept(self, name: str, method: Method, case: dict[str, Any], **how: Any) -> Sets:
        """What kvexp keeps of the prompt under `method`, in a case recorded of the method called `name`."""
        query = self.q[:, :: self.group].contiguous() if name == "vatp" else self.q  # one query head per kv head
        keys = self.v if case.get("keys") == "v" else self.k
        rope = None
        if name == "triattention":
            rope = RoPE(torch.tensor(self.arrays["triattention/inv_freq"]), interleaved=False)
            how = {"calibration": self.calibration(), **how}
        config = CacheConfig(method, Budget(tokens=slots(case), counts_self=False), Cadence(every=None), **how)
        common = CacheState(config, self.layers, SequenceState())
        states = [EvictionLayer(config, i, common) for i in range(self.layers)]
        params = AttentionParams(self.width**-0.5, rope=rope)
        for state, *inputs in zip(states, query, keys, self.v, strict=True):
            state.forward(*(each[None] for each in inputs), params, None)
        return [[set(head) for head in state.kept_positions()[0]] for state in states]

    def calibration(self) -> QueryCalibration:
        """What TriAttention's code was given; mean [L, H, G, D]: real parts of all pairs, then imaginary ones."""
        shape = (self.layers, self.heads, self.group, -1)
        mean, size = (torch.tensor(self.arrays[f"triattention/{part}"]).view(shape) for part in ("mean", "size"))
        return QueryCalibration.of(torch.zeros_like(mean), mean, size)


def slots(case: dict[str, Any]) -> int:
    """The budget of a recorded case."""
    return case["heavy"] + case["recent"] if "heavy" in case else case.get("budget", case.get("cache_size"))


def method_of(name: str, case: dict[str, Any]) -> Method:
    """kvexp's method with the settings of a recorded case."""
    if name == "rkv":
        window, kernel = case["window_size"], case["kernel_size"]
        return RKV(form="release", window=window, kernel=kernel, importance=case["mix_lambda"])
    if name == "cake":
        return CAKE(window=case["window_size"], gamma=case["gamma"], tau1=case["tau1"], tau2=case["tau2"])
    if name == "vatp":
        assert case["heavy"] == case["recent"]
        return VATP(n_sinks=case["sink_len"])
    far, group = case["offset_max_length"], case["layer_perhead_aggregation"]
    return TriAttention(max_offset=far, group=group, protect_recent=0)


def exchanged(ours: Sets, theirs: Sets) -> list[tuple[int, int, set[int], set[int]]]:
    """Heads whose sets differ: layer, head, what only the authors' code keeps, what only kvexp keeps."""
    return [
        (layer, head, want - got, got - want)
        for layer, (row, other) in enumerate(zip(ours, theirs, strict=True))
        for head, (got, want) in enumerate(zip(row, other, strict=True))
        if got != want
    ]


def compared(case: dict[str, Any], theirs: Sets) -> bool:
    """Whether the sets of a case must be equal: no documented departure touches them.

    R-KV with values for keys: many keys resemble no other. CAKE: the release granted less than its budget.
    """
    granted = sum(len(layer[0]) for layer in theirs)
    return case.get("keys") != "v" and granted == slots(case) * len(theirs)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


@pytest.mark.parametrize("how", HOW, ids=lambda how: how["mode"])
@pytest.mark.parametrize(("name", "number"), [("rkv", 8), ("cake", 26), ("vatp", 5), ("triattention", 9)])
def test_same_sets(recorded: Recorded, name: str, number: int, how: dict[str, Any]) -> None:
    cases = [(case, theirs) for case, theirs in recorded.cases(name) if compared(case, theirs)]
    assert len(cases) == number
    for case, theirs in cases:
        assert exchanged(recorded.kept(name, method_of(name, case), case, **how), theirs) == [], case


def test_rkv_differs_only_in_the_first_slot_where_keys_resemble_no_other(recorded: Recorded) -> None:
    """The release takes slot 0 for similar to a key without a similar one, so slot 0 alone counts less there."""
    assert np.min(recorded.about["rkv"]["rows_without_a_similar_key"]["v"]) >= 9
    found = []
    for case, theirs in recorded.cases("rkv"):
        if case["keys"] == "v":
            found += exchanged(recorded.kept("rkv", method_of("rkv", case), case), theirs)
    assert found == [(0, 0, {7}, {0})]


def rkv_on_the_way(recorded: Recorded, layer: int, head: int, ends: list[int], *, by_score: bool) -> list[set[int]]:
    """What one head keeps at each of these numbers of tokens, from R-KV's release as described (24 slots, window 8).

    by_score: it leaves slots in the order of their scores, as the release does; else in that of their positions. A key
    that resembles no other spares none, which is kvexp's departure.
    """
    window, kernel, mix, budget = 8, 7, 0.07, 24
    q = recorded.q[layer].unflatten(0, (recorded.heads, -1))[head].double().numpy()  # [G, T, D]
    k = recorded.k[layer, head].double().numpy()
    slots: list[int] = []
    kept = []
    for end in ends:
        slots += range(max(slots, default=-1) + 1, end)
        x = (q[:, end - window : end] @ k[slots].T / recorded.width**0.5).max(0)[:, :-window]
        shares = np.exp(x - x.max(-1, keepdims=True))
        looked_at = (shares / shares.sum(-1, keepdims=True)).mean(0)
        reach = range(-(kernel // 2), kernel // 2 + 1)
        pooled = np.array([max(looked_at[i + j] for j in reach if 0 <= i + j < len(x[0])) for i in range(len(x[0]))])
        units = k[slots] / np.linalg.norm(k[slots], axis=-1, keepdims=True)
        cosine = units @ units.T
        np.fill_diagonal(cosine, 0)
        for row in cosine:
            similar = np.flatnonzero(row > 0.5)
            row[similar[-1:]] = 0
        alike = np.exp(cosine.mean(0))
        score = mix * pooled - (1 - mix) * (alike / alike.sum())[:-window]
        chosen = [slots[i] for i in np.argsort(-score, kind="stable")[: budget - window]]
        slots = (chosen if by_score else sorted(chosen)) + slots[-window:]
        kept.append(set(slots))
    return kept


@torch.inference_mode()
def test_rkv_differs_from_the_second_eviction_on_where_the_release_leaves_slots_by_score(recorded: Recorded) -> None:
    """Pooling and the newest similar key go by a slot's place: the same sets where slots lie by position."""
    method, ends = RKV(form="release", importance=0.07), [49, 65, 81, 97]
    config = CacheConfig(method, Budget(tokens=24, counts_self=False), Cadence(every=16))
    found: dict[bool, list[int]] = {True: [], False: []}  # by score? -> sets that differ, at each eviction
    ours = []
    for layer in range(recorded.layers):
        state = EvictionLayer(config, 0, CacheState(config, 1, SequenceState(prompt_columns=ends[0])))
        at = []
        for part in (slice(0, ends[0]), *(slice(t, t + 1) for t in range(ends[0], recorded.length))):
            states = (each[layer][None, :, part] for each in (recorded.q, recorded.k, recorded.v))
            state.forward(*states, AttentionParams(recorded.width**-0.5), None)
            if part.stop in ends:
                at.append([set(held) for held in state.kept_positions()[0]])
        ours.append(at)
    for by_score in found:
        for step in range(len(ends)):
            theirs = [
                rkv_on_the_way(recorded, layer, head, ends, by_score=by_score)[step]
                for layer, head in np.ndindex(recorded.layers, recorded.heads)
            ]
            mine = [head for at in ours for head in at[step]]
            found[by_score].append(sum(a != b for a, b in zip(theirs, mine, strict=True)))
    assert found[False] == [0, 0, 0, 0]
    assert found[True][0] == 0 and min(found[True][1:]) > 0


def test_cake_grants_the_whole_budget_where_the_release_loses_some(recorded: Recorded) -> None:
    """The release loses slots in two ways; kvexp's sets hold all of the release's, and fill the budget.

    What it moves away from layers that have the whole prompt may fill another one above the prompt's length. And its
    cascade may cut a layer a slot below the share that is rounded up for that layer in the end.
    """
    lost = []
    for case, theirs in recorded.cases("cake"):
        if not compared(case, theirs):
            ours = recorded.kept("cake", method_of("cake", case), case)
            assert all(not only_theirs for _, _, only_theirs, _ in exchanged(ours, theirs)), case
            for head in range(recorded.heads):
                assert sum(len(layer[head]) for layer in ours) == slots(case) * recorded.layers
            lost.append((case["cascading"], slots(case) * recorded.layers - sum(case["slots"])))
    assert sorted(lost) == [(False, 6), (False, 15), (True, 1), (True, 6), (True, 15)]


def test_cake_shares_out_slots_by_what_layers_look_at(recorded: Recorded) -> None:
    """Else the layers' budgets would have been compared with nothing: they differ, and a layer has its whole prompt."""
    each = [[len(layer[0]) for layer in theirs] for case, theirs in recorded.cases("cake") if compared(case, theirs)]
    assert min(len(set(sizes)) for sizes in each) >= 3
    assert any(recorded.length in sizes for sizes in each)


def test_sets_are_spread_over_the_prompt(recorded: Recorded) -> None:
    """Else equal sets would say little: they differ from head to head, and no few positions are in all of them."""
    for name in ("rkv", "cake", "vatp", "triattention"):
        for case, theirs in recorded.cases(name):
            heads = [head for layer in theirs for head in layer if len(head) < recorded.length]
            protected = case.get("window_size", case.get("recent", 0)) + case.get("sink_len", 0)
            if min(map(len, heads)) > protected + 2:
                assert len({frozenset(head) for head in heads}) > len(heads) // 2, (name, case)


def priorities(recorded: Recorded, name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The priority [L, H, T] of a recorded case, in kvexp."""
    case, _ = recorded.cases(name)[number]
    method, seen = method_of(name, case), []
    real = type(method).priority

    def priority(self: Method, ctx: Any) -> Tensor:
        seen.append(real(self, ctx)[0])
        return seen[-1][None]

    monkeypatch.setattr(type(method), "priority", priority)
    recorded.kept(name, method, case, mode="mask")
    return torch.stack(seen)


def test_same_scores_of_vatp(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the slots that the release keeps: it sets others to 0 and sinks to the largest number there is."""
    for number, (case, _) in enumerate(recorded.cases("vatp")):
        theirs = torch.tensor(recorded.arrays[f"vatp/{number}/score"])
        held = theirs != 0
        assert (theirs[..., : case["sink_len"]] > 1e38).all()
        held[..., : case["sink_len"]] = False
        with monkeypatch.context() as patch:
            ours = priorities(recorded, "vatp", number, patch)
        torch.testing.assert_close(ours[held], theirs[held], rtol=1e-5, atol=0)


def test_same_scores_of_triattention(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores per query head, normalised; angles of up to 65536 are in float32 there."""
    raw = torch.tensor(recorded.arrays["triattention/score"]).double()
    apart = raw - raw.mean(-1, keepdim=True)
    normal = (apart / apart.square().mean(-1, keepdim=True).sqrt()).unflatten(1, (recorded.heads, recorded.group))
    ours = priorities(recorded, "triattention", 0, monkeypatch)
    torch.testing.assert_close(ours, normal.amax(2).float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "number", "other"),
    [
        ("rkv", 1, RKV(importance=0.07)),
        ("rkv", 1, RKV(form="release")),
        ("rkv", 1, RKV(form="release", importance=0.07, window=9)),
        ("rkv", 1, RKV(form="release", importance=0.07, kernel=5)),
        ("rkv", 1, RKV(form="release", importance=0.07, similar=0.6)),
        ("rkv", 1, SnapKV(window=8, kernel=7)),
        ("cake", 0, CAKE(window=31)),
        ("cake", 0, CAKE(gamma=100)),
        ("cake", 0, CAKE(kernel=3)),
        ("cake", 2, CAKE(tau2=0.9)),
        ("cake", 2, CAKE(tau1=1.2)),
        ("vatp", 0, VATP(n_sinks=19)),
        ("vatp", 2, VATP(n_sinks=7, recent_ratio=0.52)),
        ("vatp", 4, H2O()),
        ("triattention", 1, TriAttention(max_offset=2048, protect_recent=0)),
        ("triattention", 0, TriAttention(protect_recent=2)),
        ("triattention", 0, TriAttention(group="mean", protect_recent=0)),
    ],
)
def test_a_near_miss_is_seen(recorded: Recorded, name: str, number: int, other: Method) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    case, theirs = recorded.cases(name)[number]
    assert exchanged(recorded.kept(name, other, case), theirs)
