"""The sets and scores of the authors' own code, on the same queries, keys and values, without a model.

Recorded in tests/fixtures/authors_2025.npz (five layers of 97 tokens) and authors_2026.npz (four of 96); what was
called of each repository, and how, is in the .md beside each. What each parameter is called over there:

    R1KV(budget, window_size, kernel_size, mix_lambda)   RKV(form="release", window, kernel, importance=mix_lambda)
    CakeprefillKVCache(cache_size, window_size), config  CAKE(window, gamma, tau1, tau2); its kernel is 5
    LlamaAttention_heavy_hitter, h2o and applyval        VATP(n_sinks=sink_len, recent_ratio=0.5), halves are equal
    TriAttentionConfig(per_layer_perhead_pruning,        TriAttention(max_offset, group=layer_perhead_aggregation,
        normalize_scores, allow_prefill_compression)         protect_recent=0)
    EvictLayer(token_budget, residual_length, n_large)   VaSE(window=residual_length, large=n_large / token_budget)
    EvictLayer(mode attn)                                SnapKV(window, kernel=5, pool="avg", softmax="older")
    TriAttention(per_head_pruning, prefix_length)        TriAttention(pruning="per_head", protect_recent=0), keep=prompt
    EfficientDefensiveKVPress(window_size, kernel_size)  DefensiveKV(window, kernel), heads adaptive, head_floor 0
    CapPress(n_sink, tau, n_future_positions)            CapKV(n_sinks, tau, n_future)

All of them keep their budget beside the coming token: Budget(tokens=..., counts_self=False).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recordings import Recording
from test_peers import HOW
from tiny import Streams, run_core
from torch import Tensor

from kvexp.core import (
    AttentionParams,
    Budget,
    CacheConfig,
    Cadence,
    EvictionContext,
    EvictionLayer,
    Method,
    QueryCalibration,
    RoPE,
    SequenceState,
)
from kvexp.core.eviction import CacheState
from kvexp.hf.triattention_file import read_triattention
from kvexp.methods import (
    CAKE,
    GKV,
    H2O,
    RKV,
    VATP,
    CapKV,
    DefensiveKV,
    EpiKV,
    LagKV,
    QFilters,
    SnapKV,
    TriAttention,
    VaSE,
)
from kvexp.util.errors import ConfigError

SEEN: list[Tensor] = []  # what a method made on its way, [H, T] of the first row, layer after layer
Sets = list[list[set[int]]]  # positions, per layer and kv head


class Recorded(Recording):
    """q [L, H * G, T, D], k and v [L, H, T, D] as float32, where recorded w [L, n, H * G * D]; cases of each method."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        units = dict.fromkeys("qkv", self.config.get("unit", 1 / 4096)) | {"w": 1 / 32}
        self.given = {part: self.tensor(part).float() * unit for part, unit in units.items() if part in self}
        self.layers, self.heads, self.length, self.width = self.given["k"].shape

    def cases(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """Number and settings, in the words of the authors' code, of every case of one method."""
        return list(enumerate(self.config[name]["cases"]))

    def kept(self, where: str) -> Tensor:
        """[L, H, T] bool."""
        return self.mask(where, self.length)

    @property
    def rope(self) -> RoPE:
        return RoPE(self.tensor("triattention/inv_freq"), interleaved=False)

    @torch.inference_mode()
    def run(
        self,
        method: Method,
        slots: int,
        rows: int = 1,
        prompt: int | None = None,
        rope: RoPE | None = None,
        budget: Mapping[str, Any] | None = None,
        given: Mapping[str, Tensor] | None = None,
        **how: Any,
    ) -> list[EvictionLayer]:
        """The layers after all tokens, in `rows` rows that differ in their seeds alone.

        prompt: so many are the prompt, and the only eviction comes when all others have been fed in one forward; given:
        other queries or keys.
        """
        SEEN.clear()
        every = None if prompt is None else self.length - prompt
        cadence = Cadence(at_prefill=prompt is None, every=every)
        config = CacheConfig(method, Budget(tokens=slots, counts_self=False, **(budget or {})), cadence, **how)
        sequence = SequenceState(seeds=list(range(rows)), prompt_columns=prompt)
        sequence.multi_token_steps_allowed = True
        common = CacheState(config, self.layers, sequence)
        params = AttentionParams(self.width**-0.5, rope=rope)
        streams = {**self.given, **(given or {})}
        blocks: Any = [None] * self.layers
        if "w" in streams:  # [L, H, G, n, D]
            blocks = streams["w"].unflatten(-1, (self.heads, -1, self.width)).permute(0, 2, 3, 1, 4)
        states = [EvictionLayer(config, i, common, None, blocks[i]) for i in range(self.layers)]
        for columns in [slice(None)] if prompt is None else [slice(0, prompt), slice(prompt, None)]:
            for state, *inputs in zip(states, *(streams[name] for name in "qkv"), strict=True):
                state.forward(*(x[None, :, columns].expand(rows, -1, -1, -1) for x in inputs), params, None)
        return states


OLDER, NEWER = Recorded("authors_2025"), Recorded("authors_2026")


def kept(states: list[EvictionLayer], length: int) -> Tensor:
    """[L, B, H, T] bool."""
    made = torch.zeros(len(states), len(states[0].kept_positions()), NEWER.heads, length, dtype=torch.bool)
    for layer, state in enumerate(states):
        for row, heads in enumerate(state.kept_positions()):
            for head, positions in enumerate(heads):
                made[layer, row, head, positions] = True
    return made


def noted(cls: type[Any], name: str = "priority") -> type[Any]:
    """The method, but what this function of it returns is noted in SEEN."""
    own = getattr(cls, name)

    def note(self: Method, ctx: EvictionContext) -> Tensor:
        SEEN.append(own(self, ctx))
        return SEEN[-1]

    return type(f"Noted{cls.__name__}", (cls,), {name: note})


# 2025: sets at the end of a prompt, R-KV, CAKE, VATP, TriAttention.


def cases_of(name: str) -> list[tuple[dict[str, Any], Sets]]:
    """Settings and kept positions of every case of one method."""
    masks = [(case, OLDER.kept(f"{name}/{number}/kept").numpy()) for number, case in OLDER.cases(name)]
    return [(case, [[set(np.flatnonzero(head).tolist()) for head in layer] for layer in mask]) for case, mask in masks]


def kept_of(name: str, method: Method, case: dict[str, Any], **how: Any) -> Sets:
    """What kvexp keeps of the prompt under `method`, in a case recorded of the method called `name`."""
    given, group = {}, OLDER.given["q"].shape[1] // OLDER.heads
    if name == "vatp":  # one query head per kv head
        given["q"] = OLDER.given["q"][:, ::group].contiguous()
    if case.get("keys") == "v":
        given["k"] = OLDER.given["v"]
    if name == "triattention":
        shape = (OLDER.layers, OLDER.heads, group, -1)
        # mean [L, H, G, D]: real parts of all pairs, then imaginary ones.
        mean, size = (OLDER.tensor(f"triattention/{part}").view(shape) for part in ("mean", "size"))
        how = {"calibration": QueryCalibration.of(torch.zeros_like(mean), mean, size), "rope": OLDER.rope, **how}
    states = OLDER.run(method, slots(case), given=given, **how)
    return [[set(head) for head in state.kept_positions()[0]] for state in states]


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


@pytest.mark.parametrize("how", HOW, ids=lambda how: how["mode"])
@pytest.mark.parametrize(("name", "number"), [("rkv", 8), ("cake", 26), ("vatp", 5), ("triattention", 9)])
def test_same_sets(name: str, number: int, how: dict[str, Any]) -> None:
    cases = [(case, theirs) for case, theirs in cases_of(name) if compared(case, theirs)]
    assert len(cases) == number
    for case, theirs in cases:
        assert exchanged(kept_of(name, method_of(name, case), case, **how), theirs) == [], case


def test_rkv_differs_only_in_the_first_slot_where_keys_resemble_no_other() -> None:
    """The release takes slot 0 for similar to a key without a similar one, so slot 0 alone counts less there."""
    assert np.min(OLDER.config["rkv"]["rows_without_a_similar_key"]["v"]) >= 9
    found = []
    for case, theirs in cases_of("rkv"):
        if case["keys"] == "v":
            found += exchanged(kept_of("rkv", method_of("rkv", case), case), theirs)
    assert found == [(0, 0, {7}, {0})]


def rkv_on_the_way(layer: int, head: int, ends: list[int], *, by_score: bool) -> list[set[int]]:
    """What one head keeps at each of these numbers of tokens, from R-KV's release as described (24 slots, window 8).

    by_score: it leaves slots in the order of their scores, as the release does; else in that of their positions. A key
    that resembles no other spares none, which is kvexp's departure.
    """
    window, kernel, mix, budget = 8, 7, 0.07, 24
    q = OLDER.given["q"][layer].unflatten(0, (OLDER.heads, -1))[head].double().numpy()  # [G, T, D]
    k = OLDER.given["k"][layer, head].double().numpy()
    slots: list[int] = []
    kept = []
    for end in ends:
        slots += range(max(slots, default=-1) + 1, end)
        x = (q[:, end - window : end] @ k[slots].T / OLDER.width**0.5).max(0)[:, :-window]
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
def test_rkv_differs_from_the_second_eviction_on_where_the_release_leaves_slots_by_score() -> None:
    """Pooling and the newest similar key go by a slot's place: the same sets where slots lie by position."""
    method, ends = RKV(form="release", importance=0.07), [49, 65, 81, 97]
    config = CacheConfig(method, Budget(tokens=24, counts_self=False), Cadence(every=16))
    found: dict[bool, list[int]] = {True: [], False: []}  # by score? -> sets that differ, at each eviction
    ours = []
    for layer in range(OLDER.layers):
        state = EvictionLayer(config, 0, CacheState(config, 1, SequenceState(prompt_columns=ends[0])))
        at = []
        for part in (slice(0, ends[0]), *(slice(t, t + 1) for t in range(ends[0], OLDER.length))):
            states = (each[layer][None, :, part] for each in (OLDER.given[name] for name in "qkv"))
            state.forward(*states, AttentionParams(OLDER.width**-0.5), None)
            if part.stop in ends:
                at.append([set(held) for held in state.kept_positions()[0]])
        ours.append(at)
    for by_score in found:
        for step in range(len(ends)):
            theirs = [
                rkv_on_the_way(layer, head, ends, by_score=by_score)[step]
                for layer, head in np.ndindex(OLDER.layers, OLDER.heads)
            ]
            mine = [head for at in ours for head in at[step]]
            found[by_score].append(sum(a != b for a, b in zip(theirs, mine, strict=True)))
    assert found[False] == [0, 0, 0, 0]
    assert found[True][0] == 0 and min(found[True][1:]) > 0


def test_cake_grants_the_whole_budget_where_the_release_loses_some() -> None:
    """The release loses slots in two ways; kvexp's sets hold all of the release's, and fill the budget.

    What it moves away from layers that have the whole prompt may fill another one above the prompt's length. And its
    cascade may cut a layer a slot below the share that is rounded up for that layer in the end.
    """
    lost = []
    for case, theirs in cases_of("cake"):
        if not compared(case, theirs):
            ours = kept_of("cake", method_of("cake", case), case)
            assert all(not only_theirs for _, _, only_theirs, _ in exchanged(ours, theirs)), case
            for head in range(OLDER.heads):
                assert sum(len(layer[head]) for layer in ours) == slots(case) * OLDER.layers
            lost.append((case["cascading"], slots(case) * OLDER.layers - sum(case["slots"])))
    assert sorted(lost) == [(False, 6), (False, 15), (True, 1), (True, 6), (True, 15)]


def test_cake_shares_out_slots_by_what_layers_look_at() -> None:
    """Else the layers' budgets would have been compared with nothing: they differ, and a layer has its whole prompt."""
    each = [[len(layer[0]) for layer in theirs] for case, theirs in cases_of("cake") if compared(case, theirs)]
    assert min(len(set(sizes)) for sizes in each) >= 3
    assert any(OLDER.length in sizes for sizes in each)


def test_sets_are_spread_over_the_prompt() -> None:
    """Else equal sets would say little: they differ from head to head, and no few positions are in all of them."""
    for name in ("rkv", "cake", "vatp", "triattention"):
        for case, theirs in cases_of(name):
            heads = [head for layer in theirs for head in layer if len(head) < OLDER.length]
            protected = case.get("window_size", case.get("recent", 0)) + case.get("sink_len", 0)
            if min(map(len, heads)) > protected + 2:
                assert len({frozenset(head) for head in heads}) > len(heads) // 2, (name, case)


def priorities(name: str, number: int) -> Tensor:
    """The priority [L, H, T] of a recorded case, in kvexp."""
    case = OLDER.cases(name)[number][1]
    method = method_of(name, case)
    kept_of(name, noted(type(method))(**vars(method)), case, mode="mask")
    return torch.cat(SEEN)


def test_same_scores_of_vatp() -> None:
    """Scores of the slots that the release keeps: it sets others to 0 and sinks to the largest number there is."""
    for number, (case, _) in enumerate(cases_of("vatp")):
        theirs = torch.tensor(OLDER[f"vatp/{number}/score"])
        held = theirs != 0
        assert (theirs[..., : case["sink_len"]] > 1e38).all()
        held[..., : case["sink_len"]] = False
        ours = priorities("vatp", number)
        torch.testing.assert_close(ours[held], theirs[held], rtol=1e-5, atol=0)


def test_same_scores_of_triattention() -> None:
    """Its scores per query head, normalised; angles of up to 65536 are in float32 there."""
    raw = torch.tensor(OLDER["triattention/score"]).double()
    apart = raw - raw.mean(-1, keepdim=True)
    normal = (apart / apart.square().mean(-1, keepdim=True).sqrt()).unflatten(1, (OLDER.heads, 3))
    ours = priorities("triattention", 0)
    torch.testing.assert_close(ours, normal.amax(2).float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "number", "other"),
    [
        ("rkv", 1, RKV(form="release")),
        ("rkv", 1, RKV(form="release", importance=0.07, kernel=5)),
        ("cake", 0, CAKE(window=31)),
        ("cake", 2, CAKE(tau2=0.9)),
        ("vatp", 0, VATP(n_sinks=19)),
        ("vatp", 4, H2O()),
        ("triattention", 1, TriAttention(max_offset=2048, protect_recent=0)),
        ("triattention", 0, TriAttention(group="mean", protect_recent=0)),
    ],
)
def test_a_near_miss_is_seen(name: str, number: int, other: Method) -> None:
    """The comparison is sharp: one parameter off, and sets differ."""
    case, theirs = cases_of(name)[number]
    assert exchanged(kept_of(name, other, case), theirs)


# 2026: VaSE, TriAttention, DefensiveKV, CapKV.


def vase(case: dict[str, Any], cls: type[VaSE] = VaSE) -> VaSE:
    return cls(window=case["residual_length"], large=case["n_large"] / case["token_budget"])


@pytest.mark.parametrize(("number", "case"), NEWER.cases("vase"))
def test_vase_keeps_the_same_by_range_and_draws_by_the_same_law(number: int, case: dict[str, Any]) -> None:
    if case["mode"] == "attn":
        states = NEWER.run(SnapKV(window=case["residual_length"], pool="avg", softmax="older"), case["token_budget"])
        assert torch.equal(kept(states, NEWER.length)[:, 0], NEWER.kept(f"vase/{number}/kept"))
        return
    rows = 200
    stay = kept(NEWER.run(vase(case, noted(VaSE, "attention")), case["token_budget"], rows), NEWER.length)
    assert (stay.sum(-1) == case["token_budget"]).all()
    large = NEWER.kept(f"vase/{number}/large")
    assert stay.mean(1, dtype=torch.float32)[large].eq(1).all()
    weights = NEWER.tensor(f"vase/{number}/weights").masked_fill(large, 0.0)
    for layer, made in enumerate(SEEN):
        ours = made[0].float().masked_fill(large[layer], 0.0)
        torch.testing.assert_close(ours, weights[layer], rtol=1e-5, atol=1e-8)
    share = NEWER.tensor(f"vase/{number}/share").float()
    drawn = (share > 0) & ~large
    apart = (stay.float().mean(1) - share)[drawn]
    error = (share * (1 - share) / rows).sqrt()[drawn].clamp_min(1e-3) + 1e-3  # the recorded shares are float16
    assert (apart.abs() < 5 * error).all() and abs(float((apart / error).mean())) < 0.2
    assert 0.5 < float((apart / error).std()) < 1.3


def triattention_file(folder: Path) -> Path:
    """The file that the authors' `save_head_frequency_stats` wrote of these queries."""
    file = folder / "authors.pt"
    file.write_bytes(NEWER["triattention/file"].tobytes())
    return file


@pytest.mark.parametrize(("number", "case"), NEWER.cases("triattention"))
def test_triattention_keeps_the_same_in_all_its_modes(tmp_path: Path, number: int, case: dict[str, Any]) -> None:
    mode = {"per_layer_perhead": "per_layer_head"}.get(case["mode"], case["mode"])
    prompt = case["prefix_length"] or None
    states = NEWER.run(
        TriAttention(pruning=mode, protect_recent=0), case["budget"], 2, prompt,
        NEWER.rope,
        calibration=read_triattention(triattention_file(tmp_path), NEWER.heads),
        keep=None if prompt is None else "prompt",
    )  # fmt: skip
    stay = kept(states, NEWER.length)
    assert torch.equal(stay[:, 0], NEWER.kept(f"triattention/{number}/kept")) and torch.equal(stay[:, 0], stay[:, 1])
    if mode != "per_layer_head":
        assert all(torch.equal(stay[0], layer) for layer in stay)
    if mode == "union":
        assert torch.equal(stay[:, :, 0], stay[:, :, 1])


def test_triattentions_scores_are_the_authors(tmp_path: Path) -> None:
    rope = NEWER.rope
    calibration = read_triattention(triattention_file(tmp_path), NEWER.heads)
    # The nearer half of the offsets: an angle of thousands of radians has three digits in float32, there as here.
    NEWER.run(noted(TriAttention)(max_offset=64), 40, rope=rope, calibration=calibration)
    score = NEWER.tensor("triattention/score").unflatten(1, (NEWER.heads, -1))
    apart = score - score.mean(-1, keepdim=True)
    normalised = apart / apart.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(torch.cat(SEEN), normalised.amax(2), rtol=1e-5, atol=1e-5)


def test_the_authors_file_is_read(tmp_path: Path) -> None:
    given = triattention_file(tmp_path)
    made = read_triattention(given, NEWER.heads)
    queries = NEWER.given["q"].unflatten(1, (NEWER.heads, -1))
    torch.testing.assert_close(made.mean, queries.mean(-2), rtol=1e-5, atol=1e-6)
    sizes = torch.stack(queries.unflatten(-1, (2, -1)).unbind(-2)).norm(dim=0).mean(-2)
    torch.testing.assert_close(made.size, sizes, rtol=1e-5, atol=1e-6)
    pairs = made.mean.flatten(1, 2).unflatten(-1, (2, -1))
    flat = {"E_q": torch.complex(*pairs.unbind(-2)), "E_q_norm": made.size.flatten(1, 2), "omega": torch.ones(8)}
    torch.save(flat, tmp_path / "flat.pt")
    assert read_triattention(tmp_path / "flat.pt", NEWER.heads).digest == made.digest


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    given = torch.load(triattention_file(tmp_path), weights_only=True)

    def refused(words: str, heads: int = NEWER.heads, **changes: Any) -> None:
        torch.save(given | changes, tmp_path / "wrong.pt")
        with pytest.raises(ConfigError, match=words):
            read_triattention(tmp_path / "wrong.pt", heads)

    lacking = {name: stats for name, stats in given["stats"].items() if name != "layer02_head01"}
    refused("it lacks 'layer02_head01'", stats=lacking)
    refused("has rope_style=interleaved", metadata=given["metadata"] | {"rope_style": "interleaved"})
    refused("6 query heads in a layer, which 4 kv heads cannot share", heads=4)
    (tmp_path / "text.pt").write_text("no tensor")
    with pytest.raises(ConfigError, match=r"text\.pt is no file of TriAttention"):
        read_triattention(tmp_path / "text.pt", 2)
    with pytest.raises(ConfigError, match="there is no file"):
        read_triattention(tmp_path / "none.pt", 2)


def test_one_set_for_all_layers_goes_through_decoding_in_every_mode(tmp_path: Path) -> None:
    """Steps of one and of several tokens, rows of other seeds, padding: what is kept stays the same in all layers."""
    calibration = read_triattention(triattention_file(tmp_path), NEWER.heads)
    rope = NEWER.rope
    streams = Streams(*(each[:, None].expand(-1, 2, -1, -1, -1) for each in (NEWER.given[name] for name in "qkv")))
    seen = []
    for mode in ("overwrite", "compact", "mask"):
        config = CacheConfig(
            TriAttention(pruning="per_head"),
            Budget(tokens=24),
            mode=mode,
            calibration=calibration,  # type: ignore[arg-type]
        )
        mask = torch.ones(2, NEWER.length, dtype=torch.int64)
        mask[1, :7] = 0
        params = AttentionParams(NEWER.width**-0.5, rope=rope)
        seen.append(run_core(config, streams, [60] + [1] * 12, params=params, mask=mask[:, :72]).kept)
    assert seen[0] == seen[1] == seen[2]
    for step in seen[0]:
        assert all(layer == step[0] for layer in step) and {len(head) for row in step[0] for head in row} == {23}


def test_budgets_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    calibration = read_triattention(triattention_file(tmp_path), NEWER.heads)
    for budget in (
        Budget(kv_ratio=0.5, layers="pyramid"),
        Budget(tokens=9, layers="cake"),
        Budget(tokens=9, heads="adaptive"),
    ):
        with pytest.raises(ConfigError, match="keeps the same positions in all layers"):
            CacheConfig(TriAttention(pruning="union"), budget, calibration=calibration)
    with pytest.raises(ConfigError, match="qfilters needs directions of the model's queries"):
        CacheConfig(QFilters(), Budget(tokens=9), calibration=calibration)


@pytest.mark.parametrize(("number", "case"), NEWER.cases("defensivekv"))
def test_defensivekv_has_the_same_scores_and_sets(number: int, case: dict[str, Any]) -> None:
    window, slots = case["window_size"], round(NEWER.length * (1 - case["compression_ratio"]))
    method = noted(DefensiveKV)(window=window, kernel=case["kernel_size"])
    score = NEWER.tensor(f"defensivekv/{number}/score")
    NEWER.run(method, slots)
    torch.testing.assert_close(torch.cat(SEEN)[..., :-window], score[..., :-window], rtol=2e-5, atol=1e-7)
    config = {"heads": "adaptive", "head_floor": 0.0}
    stay = kept(NEWER.run(method, slots, budget=config), NEWER.length)[:, 0]
    for layer, each in enumerate(score):  # the best of the layer, whatever the head
        best = each.flatten().sort(descending=True).values
        assert int(stay[layer].sum()) == slots * NEWER.heads
        assert (each[stay[layer]] >= best[slots * NEWER.heads - 1] * (1 - 1e-5)).all()


@pytest.mark.parametrize(("number", "case"), NEWER.cases("defensivekv"))
def test_the_clamp_alone_is_snapkvs_option(number: int, case: dict[str, Any]) -> None:
    window = case["window_size"]
    NEWER.run(noted(SnapKV)(window=window, kernel=case["kernel_size"], aggregate="defensive"), window + 4)
    clamped = NEWER.tensor(f"defensivekv/{number}/clamp")
    torch.testing.assert_close(torch.cat(SEEN)[..., :-window], clamped, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("number", "case"), NEWER.cases("capkv"))
def test_capkv_has_the_same_scores(number: int, case: dict[str, Any]) -> None:
    """The drawn queries are those before RoPE: the layer is fed them turned."""
    rope = NEWER.rope
    places = torch.arange(NEWER.length)
    turned = torch.stack([rope.rotate_by(each[None], places[None, None])[0] for each in NEWER.given["q"]])
    sinks = case["n_sink"]
    method = noted(CapKV)(n_sinks=sinks, tau=case["tau"], n_future=case["n_future_positions"])
    NEWER.run(method, 40, rope=rope, given={"q": turned})
    score = NEWER.tensor(f"capkv/{number}/score")
    torch.testing.assert_close(torch.cat(SEEN)[..., sinks:], score[..., sinks:], rtol=1e-4, atol=1e-6)


# Decoding: G-KV and causal LagKV, evictions on the way; EpiKV, an eviction at every token.

DECODING = Recording("authors_decoding")


@torch.inference_mode()
def on_the_way(method: Method, tokens: int) -> tuple[list[Tensor], list[list[EvictionLayer]]]:
    """[ends][L, H, T] bool: what the layers hold after every 16 tokens behind a prompt of 48; and the layers."""
    config = CacheConfig(
        method, Budget(tokens=tokens, counts_self=False), Cadence(at_prefill=False, every=DECODING.config["every"]),
        keep="prompt" if method.name == "lagkv" else None,
    )  # fmt: skip
    prompt, every = DECODING.config["prompt"], DECODING.config["every"]
    commons = [CacheState(config, 1, SequenceState(prompt_columns=prompt)) for _ in range(OLDER.layers)]
    states, masks = [EvictionLayer(config, 0, common) for common in commons], []
    parts = [slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, OLDER.length - 1))]
    for part in parts:
        for layer, state in enumerate(states):
            inputs = (OLDER.given[name][layer][None, :, part] for name in "qkv")
            state.forward(*inputs, AttentionParams(OLDER.width**-0.5), None)
        if part.stop > prompt and (part.stop - prompt) % every == 0:
            masks.append(kept(states, OLDER.length)[:, 0])
    return masks, states


def gkv_of(case: dict[str, Any]) -> GKV:
    importance = case["mix_lambda"] if case["suppressing_redundancy"] else 1.0
    return GKV(window=case["window_size"], memory=case["alpha"], importance=importance)


@pytest.mark.parametrize(("number", "case"), list(enumerate(DECODING.config["gkv"]["cases"])))
def test_gkv_keeps_the_same_and_remembers_the_same(number: int, case: dict[str, Any]) -> None:
    masks, states = on_the_way(gkv_of(case), case["budget"])
    theirs = DECODING.mask(f"gkv/{number}/kept", OLDER.length)
    assert torch.equal(torch.stack(masks), theirs)
    for layer, state in enumerate(states):
        slots, score = state.require_slots(), DECODING.tensor(f"gkv/{number}/score")[-1, layer]
        held = slots.positions[0, :, : slots.length]
        ours = slots.score[0, :, : slots.length].masked_fill(held < 0, 0.0)
        want = score.gather(-1, held.clamp_min(0)).masked_fill(held < 0, 0.0)
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-7)
        assert (want > 0).sum() == 2 * (case["budget"] - case["window_size"])


@pytest.mark.parametrize(("number", "case"), list(enumerate(DECODING.config["lagkv"]["cases"])))
def test_causal_lagkv_keeps_the_same_in_each_head(number: int, case: dict[str, Any]) -> None:
    method = LagKV(against="previous", n_sinks=0, lag=case["chunk_size"], protect_recent=case["keep_recent_k"])
    masks, _ = on_the_way(method, case["cache_size"])
    assert torch.equal(torch.stack(masks), DECODING.mask(f"lagkv/{number}/kept", OLDER.length))


@torch.inference_mode()
@pytest.mark.parametrize(("number", "case"), list(enumerate(DECODING.config["epikv"]["cases"])))
def test_epikv_keeps_the_same_at_every_token(number: int, case: dict[str, Any]) -> None:
    """In both layers and all heads; the states that two layers get are given, keys are of no account."""
    prompt, states = DECODING.config["prompt_epikv"], DECODING.tensor("epikv/states") / 64
    method = EpiKV(window=case["window"], rises=0.0, falls=0.5, protect_recent=case["keep_recent_k"])
    config = CacheConfig(method, Budget(tokens=case["cache_size"], counts_self=False), keep="prompt")
    common = CacheState(config, 2, SequenceState(prompt_columns=prompt))
    layers, count = [EvictionLayer(config, layer, common) for layer in range(2)], states.shape[1] - 1
    theirs = DECODING.mask(f"epikv/{number}/kept", prompt + count)
    for token in range(count + 1):
        new = prompt if token == 0 else 1
        for layer, state in zip(layers, states[:, token], strict=True):
            layer.take_input(state.new_zeros(1, new, 1), state.expand(1, new, -1))
            layer.forward(*(torch.ones(1, 2, new, 4) for _ in "qkv"), AttentionParams(0.5), None)
        if token:  # the last layer's step evicts from all
            want = torch.nonzero(theirs[token - 1])[:, 0].tolist()
            assert all(head == want for layer in layers for head in layer.kept_positions()[0]), token
