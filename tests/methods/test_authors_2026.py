"""Methods of 2026 against the authors' own code, on the same queries, keys, values and output projections.

Recorded in tests/fixtures/authors_2026.npz from four layers of 96 tokens; what was called of each repository, and how,
is in authors_2026.md beside it. What each parameter is called over there:

    EvictLayer(token_budget, residual_length, n_large)   VaSE(window=residual_length, large=n_large / token_budget)
    EvictLayer(mode attn)                                SnapKV(window, kernel=5, pool="avg", softmax="older")
    TriAttention(per_head_pruning, prefix_length)        TriAttention(pruning="per_head", protect_recent=0), keep=prompt
    EfficientDefensiveKVPress(window_size, kernel_size)  DefensiveKV(window, kernel), heads adaptive, head_floor 0
    CapPress(n_sink, tau, n_future_positions)            CapKV(n_sinks, tau, n_future)

Budgets hold the coming token not: Budget(tokens=..., counts_self=False).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Streams, run_core
from torch import Tensor

from kvexp.core import AttentionParams, Budget, CacheConfig, Cadence, EvictionContext, EvictionLayer, Method, RoPE
from kvexp.core.eviction import CacheState
from kvexp.core.sequence import SequenceState
from kvexp.hf.triattention_file import read_triattention, write_triattention
from kvexp.methods import CapKV, DefensiveKV, QFilters, SnapKV, TriAttention, VaSE
from kvexp.util import ConfigError

FILE = Path(__file__).parents[1] / "fixtures" / "authors_2026.npz"
SEEN: list[Tensor] = []  # what a method made on its way, [H, T] of the first row, layer after layer


class Recorded:
    """authors_2026.npz: q [L, H * G, T, D], k and v [L, H, T, D], w [L, n, H * G * D]."""

    def __init__(self) -> None:
        with np.load(FILE) as file:
            self.arrays: dict[str, Any] = {name: file[name] for name in file.files}
        self.about: dict[str, Any] = json.loads(str(self.arrays["about"]))
        self.q, self.k, self.v, self.w = (
            torch.tensor(self.arrays[name]).float() / (32 if name == "w" else 4096) for name in "qkvw"
        )
        self.layers, self.heads, self.length, self.width = self.k.shape

    def cases(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        return list(enumerate(self.about[name]["cases"]))

    def mask(self, name: str) -> Tensor:
        """[L, H, T] bool."""
        return torch.tensor(np.unpackbits(self.arrays[name], axis=-1, count=self.length)).bool()

    @torch.inference_mode()
    def run(
        self,
        method: Method,
        slots: int,
        rows: int = 1,
        prompt: int | None = None,
        rope: RoPE | None = None,
        budget: Mapping[str, Any] | None = None,
        queries: Tensor | None = None,
        **how: Any,
    ) -> list[EvictionLayer]:
        """The layers after all tokens, in `rows` rows that differ in their seeds alone.

        prompt: so many are the prompt, and the only eviction comes when all others have been fed in one forward.
        """
        SEEN.clear()
        cadence = Cadence(every=None) if prompt is None else Cadence(at_prefill=False, every=self.length - prompt)
        config = CacheConfig(method, Budget(tokens=slots, counts_self=False, **(budget or {})), cadence, **how)
        sequence = SequenceState(seeds=list(range(rows)), prompt_columns=prompt)
        sequence.multi_token_steps_allowed = True
        common = CacheState(config, self.layers, sequence)
        params = AttentionParams(self.width**-0.5, rope=rope)
        blocks = self.w.unflatten(-1, (self.heads, -1, self.width)).permute(0, 2, 3, 1, 4)  # [L, H, G, n, D]
        states = [EvictionLayer(config, i, common, None, blocks[i]) for i in range(self.layers)]
        for part in [slice(None)] if prompt is None else [slice(0, prompt), slice(prompt, None)]:
            for state, *inputs in zip(states, self.q if queries is None else queries, self.k, self.v, strict=True):
                state.forward(*(each[None, :, part].expand(rows, -1, -1, -1) for each in inputs), params, None)
        return states


RECORDED = Recorded()


def kept(states: list[EvictionLayer], length: int) -> Tensor:
    """[L, B, H, T] bool."""
    made = torch.zeros(len(states), len(states[0].kept_positions()), RECORDED.heads, length, dtype=torch.bool)
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


def vase(case: dict[str, Any], cls: type[VaSE] = VaSE) -> VaSE:
    return cls(window=case["residual_length"], large=case["n_large"] / case["token_budget"])


@pytest.mark.parametrize(("number", "case"), RECORDED.cases("vase"))
def test_vase_keeps_the_same_by_range_and_draws_by_the_same_law(number: int, case: dict[str, Any]) -> None:
    if case["mode"] == "attn":
        states = RECORDED.run(SnapKV(window=case["residual_length"], pool="avg", softmax="older"), case["token_budget"])
        assert torch.equal(kept(states, RECORDED.length)[:, 0], RECORDED.mask(f"vase/{number}/kept"))
        return
    rows = 200
    stay = kept(RECORDED.run(vase(case, noted(VaSE, "attention")), case["token_budget"], rows), RECORDED.length)
    assert (stay.sum(-1) == case["token_budget"]).all()
    large = RECORDED.mask(f"vase/{number}/large")
    assert stay.mean(1, dtype=torch.float32)[large].eq(1).all()
    weights = torch.tensor(RECORDED.arrays[f"vase/{number}/weights"]).masked_fill(large, 0.0)
    for layer, made in enumerate(SEEN):
        ours = made[0].float().masked_fill(large[layer], 0.0)
        torch.testing.assert_close(ours, weights[layer], rtol=1e-5, atol=1e-8)
    share = torch.tensor(RECORDED.arrays[f"vase/{number}/share"]).float()
    drawn = (share > 0) & ~large
    apart = (stay.float().mean(1) - share)[drawn]
    error = (share * (1 - share) / rows).sqrt()[drawn].clamp_min(1e-3) + 1e-3  # the recorded shares are float16
    assert (apart.abs() < 5 * error).all() and abs(float((apart / error).mean())) < 0.2
    assert 0.5 < float((apart / error).std()) < 1.3


def triattention_file(folder: Path) -> Path:
    """The file that the authors' `save_head_frequency_stats` wrote of these queries."""
    file = folder / "authors.pt"
    file.write_bytes(RECORDED.arrays["triattention/file"].tobytes())
    return file


@pytest.mark.parametrize(("number", "case"), RECORDED.cases("triattention"))
def test_triattention_keeps_the_same_in_all_its_modes(tmp_path: Path, number: int, case: dict[str, Any]) -> None:
    mode = {"per_layer_perhead": "per_layer_head"}.get(case["mode"], case["mode"])
    prompt = case["prefix_length"] or None
    states = RECORDED.run(
        TriAttention(pruning=mode, protect_recent=0), case["budget"], 2, prompt,
        RoPE(torch.tensor(RECORDED.arrays["triattention/inv_freq"]), interleaved=False),
        calibration=read_triattention(triattention_file(tmp_path), RECORDED.heads),
        keep=None if prompt is None else "prompt",
    )  # fmt: skip
    stay = kept(states, RECORDED.length)
    assert torch.equal(stay[:, 0], RECORDED.mask(f"triattention/{number}/kept")) and torch.equal(stay[:, 0], stay[:, 1])
    if mode != "per_layer_head":
        assert all(torch.equal(stay[0], layer) for layer in stay)
    if mode == "union":
        assert torch.equal(stay[:, :, 0], stay[:, :, 1])


def test_triattentions_scores_are_the_authors(tmp_path: Path) -> None:
    rope = RoPE(torch.tensor(RECORDED.arrays["triattention/inv_freq"]), interleaved=False)
    calibration = read_triattention(triattention_file(tmp_path), RECORDED.heads)
    # The nearer half of the offsets: an angle of thousands of radians has three digits in float32, there as here.
    RECORDED.run(noted(TriAttention)(max_offset=64), 40, rope=rope, calibration=calibration)
    score = torch.tensor(RECORDED.arrays["triattention/score"]).unflatten(1, (RECORDED.heads, -1))
    apart = score - score.mean(-1, keepdim=True)
    normalised = apart / apart.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(torch.cat(SEEN), normalised.amax(2), rtol=1e-5, atol=1e-5)


def test_the_authors_file_is_read_and_written(tmp_path: Path) -> None:
    given = triattention_file(tmp_path)
    made = read_triattention(given, RECORDED.heads)
    queries = RECORDED.q.unflatten(1, (RECORDED.heads, -1))
    torch.testing.assert_close(made.mean, queries.mean(-2), rtol=1e-5, atol=1e-6)
    sizes = torch.stack(queries.unflatten(-1, (2, -1)).unbind(-2)).norm(dim=0).mean(-2)
    torch.testing.assert_close(made.size, sizes, rtol=1e-5, atol=1e-6)
    write_triattention(tmp_path / "ours.pt", made)
    theirs, ours = (torch.load(file, weights_only=True) for file in (given, tmp_path / "ours.pt"))
    assert ours["metadata"]["sampled_heads"] == [list(each) for each in theirs["metadata"]["sampled_heads"]]
    assert ours["metadata"]["head_dim"] == theirs["metadata"]["head_dim"]
    assert ours["stats"].keys() == theirs["stats"].keys()
    for head, stats in theirs["stats"].items():
        assert ours["stats"][head].keys() == stats.keys()
        assert all(torch.equal(ours["stats"][head][name], stats[name]) for name in stats)
    pairs = made.mean.flatten(1, 2).unflatten(-1, (2, -1))
    flat = {"E_q": torch.complex(*pairs.unbind(-2)), "E_q_norm": made.size.flatten(1, 2), "omega": torch.ones(8)}
    torch.save(flat, tmp_path / "flat.pt")
    assert read_triattention(tmp_path / "flat.pt", RECORDED.heads).digest == made.digest


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    given = torch.load(triattention_file(tmp_path), weights_only=True)

    def refused(words: str, heads: int = RECORDED.heads, **changes: Any) -> None:
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
    calibration = read_triattention(triattention_file(tmp_path), RECORDED.heads)
    rope = RoPE(torch.tensor(RECORDED.arrays["triattention/inv_freq"]), interleaved=False)
    streams = Streams(*(each[:, None].expand(-1, 2, -1, -1, -1) for each in (RECORDED.q, RECORDED.k, RECORDED.v)))
    seen = []
    for mode in ("overwrite", "compact", "mask"):
        config = CacheConfig(
            TriAttention(pruning="per_head"),
            Budget(tokens=24),
            mode=mode,
            calibration=calibration,  # type: ignore[arg-type]
        )
        mask = torch.ones(2, RECORDED.length, dtype=torch.int64)
        mask[1, :7] = 0
        params = AttentionParams(RECORDED.width**-0.5, rope=rope)
        seen.append(run_core(config, streams, [60] + [1] * 12, params=params, mask=mask[:, :72]).kept)
    assert seen[0] == seen[1] == seen[2]
    for step in seen[0]:
        assert all(layer == step[0] for layer in step) and {len(head) for row in step[0] for head in row} == {23}


def test_budgets_that_differ_between_layers_are_refused(tmp_path: Path) -> None:
    calibration = read_triattention(triattention_file(tmp_path), RECORDED.heads)
    for budget in (
        Budget(kv_ratio=0.5, layers="pyramid"),
        Budget(tokens=9, layers="cake"),
        Budget(tokens=9, heads="adaptive"),
    ):
        with pytest.raises(ConfigError, match="keeps the same positions in all layers"):
            CacheConfig(TriAttention(pruning="union"), budget, calibration=calibration)
    with pytest.raises(ConfigError, match="qfilters needs directions of the model's queries"):
        CacheConfig(QFilters(), Budget(tokens=9), calibration=calibration)


@pytest.mark.parametrize(("number", "case"), RECORDED.cases("defensivekv"))
def test_defensivekv_has_the_same_scores_and_sets(number: int, case: dict[str, Any]) -> None:
    window, slots = case["window_size"], round(RECORDED.length * (1 - case["compression_ratio"]))
    method = noted(DefensiveKV)(window=window, kernel=case["kernel_size"])
    score = torch.tensor(RECORDED.arrays[f"defensivekv/{number}/score"])
    RECORDED.run(method, slots)
    torch.testing.assert_close(torch.cat(SEEN)[..., :-window], score[..., :-window], rtol=2e-5, atol=1e-7)
    config = {"heads": "adaptive", "head_floor": 0.0}
    stay = kept(RECORDED.run(method, slots, budget=config), RECORDED.length)[:, 0]
    for layer, each in enumerate(score):  # the best of the layer, whatever the head
        best = each.flatten().sort(descending=True).values
        assert int(stay[layer].sum()) == slots * RECORDED.heads
        assert (each[stay[layer]] >= best[slots * RECORDED.heads - 1] * (1 - 1e-5)).all()


@pytest.mark.parametrize(("number", "case"), RECORDED.cases("defensivekv"))
def test_the_clamp_alone_is_snapkvs_option(number: int, case: dict[str, Any]) -> None:
    window = case["window_size"]
    RECORDED.run(noted(SnapKV)(window=window, kernel=case["kernel_size"], aggregate="defensive"), window + 4)
    clamped = torch.tensor(RECORDED.arrays[f"defensivekv/{number}/clamp"])
    torch.testing.assert_close(torch.cat(SEEN)[..., :-window], clamped, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(("number", "case"), RECORDED.cases("capkv"))
def test_capkv_has_the_same_scores(number: int, case: dict[str, Any]) -> None:
    """The drawn queries are those before RoPE: the layer is fed them turned."""
    rope = RoPE(torch.tensor(RECORDED.arrays["triattention/inv_freq"]), interleaved=False)
    places = torch.arange(RECORDED.length)
    turned = torch.stack([rope.rotate_by(each[None], places[None, None])[0] for each in RECORDED.q])
    sinks = case["n_sink"]
    method = noted(CapKV)(n_sinks=sinks, tau=case["tau"], n_future=case["n_future_positions"])
    RECORDED.run(method, 40, rope=rope, queries=turned)
    score = torch.tensor(RECORDED.arrays[f"capkv/{number}/score"])
    torch.testing.assert_close(torch.cat(SEEN)[..., sinks:], score[..., sinks:], rtol=1e-4, atol=1e-6)
