"""The core against the slow truth: outputs, kept sets and scores after every forward, on random streams."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from reference import Reference, Rule, Step, World
from tiny import Seen, Streams, run_core
from torch import Tensor
from turns import in_turn

from kvexp.core import AttentionParams, Budget, CacheConfig, Cadence, Method, Noise, RoPE
from kvexp.methods import KNorm, Random
from kvexp.util.errors import ConfigError

HEADS, GROUP, DIM, VALUES = 3, 5, 7, 11
LENGTHS, NEW = (17, 13), 19  # row 1 is padded on the left by 4 columns
SEEDS = (23, 29)
SCALE = DIM**-0.5


CASES = {name: (case.method, case.rule) for name, case in cases.CASES.items() if case.rule}
MODES = ("overwrite", "compact", "mask")
ONLY_MASK = ("h2o_mask", "a2sf_full_rows", "ideal")
PAIRS = [(name, mode) for name in CASES for mode in MODES if mode == "mask" or name not in ONLY_MASK]


def num_layers(rule: Rule) -> int:
    return 2 if rule.across_layers else 1


@functools.cache
def streams_of(layers: int) -> Streams:
    return Streams.random(
        41, max(LENGTHS) + NEW, layers=layers, batch=2, heads=HEADS, group=GROUP, dim=DIM, value_dim=VALUES
    )


def noise_of(method: Method, layers: int, row: int, count: int) -> Any:
    """[L][H * G][N][N] for one row: an input of both sides."""
    spec = method.score_spec
    if spec is None or spec.noise is None:
        return None
    places, seeds = torch.arange(count)[None], torch.tensor([SEEDS[row]])
    draws = [spec.noise.draw(seeds, i, HEADS * GROUP, places, places[:, None]) for i in range(layers)]
    return [torch.broadcast_to(d, (1, HEADS * GROUP, count, count))[0].double().tolist() for d in draws]


def births_of(method: Method, rule: Rule, layers: int, row: int, count: int) -> Rule:
    """The random method's scores are an input too."""
    if not isinstance(method, Random):
        return rule
    keys, places = torch.zeros(1, HEADS, count, DIM), torch.arange(count)[None]
    table = [method.initial_score(keys, places, torch.tensor([SEEDS[row]]), i)[0].tolist() for i in range(layers)]
    return replace(rule, initial_score=lambda layer, head, p, _: float(table[layer][head][p]))


def truth(
    method: Method, rule: Rule, world: World, row: int, widths: tuple[int, ...], streams: Streams | None = None
) -> list[list[Step]]:
    """The reference for one row, without its padding. widths: of the padded batch."""
    layers, missing = num_layers(rule), widths[0] - LENGTHS[row]
    streams = streams or streams_of(layers)
    count = sum(widths) - missing
    q, k, v = (t[:, row, :, missing : sum(widths)].double().tolist() for t in (streams.q, streams.k, streams.v))
    world = replace(world, noise=noise_of(method, layers, row, count))
    rule = births_of(method, rule, layers, row, count)
    return Reference(rule, world, q, k, v, (widths[0] - missing, *widths[1:])).steps


def compare(seen: Seen, row: int, want: list[list[Step]], *, out: float, score: float | None) -> None:
    for step, layers in enumerate(want):
        for i, expected in enumerate(layers):
            where = f"row {row}, forward {step}, layer {i}"
            assert seen.kept[step][i][row] == expected.kept, where
            got = seen.out[step][i][row].transpose(0, 1).double()  # [Q, H * G, Dv]
            wanted = torch.tensor(expected.out, dtype=torch.float64)
            torch.testing.assert_close(
                got[-wanted.shape[0] :], wanted, rtol=out, atol=out, msg=lambda m, w=where: f"{w}: {m}"
            )
            if score is not None:
                for h, scores in enumerate(expected.score):
                    assert seen.score[step][i][row][h] == pytest.approx(scores, rel=score, abs=score), where


@functools.cache
def truth_of(name: str, row: int, widths: tuple[int, ...], **world: Any) -> list[list[Step]]:
    method, rule = CASES[name]
    return truth(method, rule, World(scale=SCALE, max_new_tokens=NEW, **world), row, widths)


def check(name: str, mode: str, widths: tuple[int, ...], budget: int, dtype: torch.dtype, **world: Any) -> None:
    method, rule = CASES[name]
    streams = streams_of(num_layers(rule))
    streams = Streams(*(t.to(dtype) for t in (streams.q, streams.k, streams.v)))
    streams, mask = streams.padded([widths[0] - n for n in LENGTHS])
    cadence = Cadence(world.get("at_prefill", True), world.get("every", 1))
    limit = None if name == "full" else Budget(tokens=budget, counts_self=world.get("counts_self", True))
    plan = CacheConfig(method, limit, cadence, mode, "original")  # type: ignore[arg-type]
    seen = run_core(plan, streams, widths, mask=mask, max_new_tokens=NEW, seeds=SEEDS, prompt=widths[0])
    score = 1e-5 if rule.attention or isinstance(method, Random) else None
    if isinstance(method, KNorm):
        score = 2e-5  # the core rounds key norms to 16 bits, on purpose
    # Outputs follow the streams' precision; scores are float32 always.
    out = 1e-9 if dtype == torch.float64 else 1e-5
    for row in range(len(LENGTHS)):
        want = truth_of(name, row, widths, budget=budget, **world)
        chooses = rule.decode_evicts and cadence.every is not None
        if not chooses:  # scores mean nothing once nothing is chosen by them
            compare(seen, row, want[:1], out=out, score=score)
        compare(seen, row, want, out=out, score=score if chooses else None)


STEPS = (17,) + (1,) * NEW
SEVERAL = (17, 1, 3, 2, 1, 1, 5, 1, 3, 2)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_every_method_in_every_mode_equals_the_reference(name: str, mode: str) -> None:
    check(name, mode, STEPS, 7, torch.float64)


@pytest.mark.parametrize("name", ["h2o", "keyformer", "a2sf_0.9", "tova", "spatten", "knorm"])
def test_float32_equals_the_reference(name: str) -> None:
    check(name, "overwrite", STEPS, 7, torch.float32)


@pytest.mark.parametrize(
    ("name", "mode"),
    in_turn(["h2o", "h2o_damping", "keyformer", "a2sf_0.9", "streaming_llm", "spatten", "snapkv"], MODES, of=3),
)
def test_k_kept_and_one_more_attended(name: str, mode: str) -> None:
    check(name, mode, STEPS, 7, torch.float64, counts_self=False)


@pytest.mark.parametrize(
    ("name", "world", "mode"),
    in_turn(
        ["h2o", "h2o_damping", "keyformer", "keyformer_shared", "tova", "window"],
        [{"every": 3}, {"at_prefill": False}, {"every": 3, "at_prefill": False}, {"every": None}],
        MODES,
        of=3,
    ),
)
def test_cadence(name: str, world: dict[str, Any], mode: str) -> None:
    check(name, mode, STEPS, 7, torch.float64, **world)


@pytest.mark.parametrize(
    ("name", "every", "mode"),
    in_turn(
        ["h2o", "h2o_damping", "keyformer", "a2sf_0.9", "keyformer_a2sf_shared", "tova", "knorm", "dilated_window"],
        [1, 5],
        MODES,
        of=3,
    ),
)
def test_several_tokens_per_forward(name: str, every: int, mode: str) -> None:
    check(name, mode, SEVERAL, 7, torch.float64, every=every)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("name", ["ideal", "a2sf_full_rows", "h2o_mask"])
def test_several_tokens_per_forward_in_simulations(name: str, every: int) -> None:
    check(name, "mask", SEVERAL, 7, torch.float64, every=every)


@pytest.mark.parametrize("counts_self", [True, False])
@pytest.mark.parametrize("name", ["keyformer_frozen", "h2o_mask", "ideal", "tova_protected", "snapkv_avg"])
def test_variants_with_and_without_the_current_token_in_the_budget(name: str, counts_self: bool) -> None:
    check(name, "mask", STEPS, 7, torch.float64, counts_self=counts_self)


@pytest.mark.parametrize(
    ("name", "budget", "mode"),
    in_turn(
        ["key_attention", "h2o", "h2o_damping", "keyformer", "a2sf", "window", "tova"],
        [1, 2, 3, 15, 23, 29],
        MODES,
        of=3,
    ),
)
def test_budgets_from_one_slot_to_more_than_the_prompt(name: str, budget: int, mode: str) -> None:
    """Budgets of 15 and more exceed the short row's prompt of 13 tokens, 23 and more both."""
    check(name, mode, STEPS, budget, torch.float64)


# -- geometry ----------------------------------------------------------------------------------------------------------


def turn(vector: Any, position: int, frequencies: list[float], interleaved: bool) -> list[float]:
    """RoPE in plain Python over the first 2R dims."""
    out, half = [float(x) for x in vector], len(frequencies)
    for i, f in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        x, y, angle = out[a], out[b], position * f
        out[a], out[b] = x * math.cos(angle) - y * math.sin(angle), y * math.cos(angle) + x * math.sin(angle)
    return out


def turned(t: Tensor, missing: list[int], frequencies: list[float], interleaved: bool) -> Tensor:
    """t [L, B, *, N, D] at its original positions."""
    out = t.clone()
    for row, less in enumerate(missing):
        for column in range(less, t.shape[3]):
            for i in range(t.shape[0]):
                for h in range(t.shape[2]):
                    vector = turn(t[i, row, h, column].tolist(), column - less, frequencies, interleaved)
                    out[i, row, h, column] = torch.tensor(vector, dtype=t.dtype)
    return out


@pytest.mark.parametrize(
    ("name", "interleaved", "widths", "mode"),
    in_turn(["streaming_llm", "h2o", "keyformer"], [False, True], [STEPS, SEVERAL], MODES, of=3),
)
def test_renumbered_rope(name: str, interleaved: bool, widths: tuple[int, ...], mode: str) -> None:
    (method, rule), frequencies = CASES[name], [1.0, 0.3, 0.05]
    plain = streams_of(1)
    missing = [max(LENGTHS) - n for n in LENGTHS]
    streams = Streams(*(turned(t, missing, frequencies, interleaved) for t in (plain.q, plain.k)), plain.v)
    params = AttentionParams(SCALE, rope=RoPE(torch.tensor(frequencies), interleaved))
    plan = CacheConfig(method, Budget(tokens=7), Cadence(), mode, "renumbered")  # type: ignore[arg-type]
    streams, mask = streams.padded(missing)
    seen = run_core(plan, streams, widths, params=params, mask=mask, max_new_tokens=NEW, seeds=SEEDS)
    world = World(
        SCALE, 7, max_new_tokens=NEW, renumbered=True, rotate=lambda x, p: turn(x, p, frequencies, interleaved)
    )
    for row in range(2):
        compare(
            seen, row, truth(method, rule, world, row, widths, plain), out=1e-5, score=1e-5 if rule.attention else None
        )


@pytest.mark.parametrize(
    ("name", "place", "widths", "mode"),
    in_turn(["streaming_llm", "h2o", "keyformer_shared"], ["original", "renumbered"], [STEPS, SEVERAL], MODES, of=3),
)
def test_alibi(name: str, place: str, widths: tuple[int, ...], mode: str) -> None:
    method, rule = CASES[name]
    slopes = [0.5 / (1 + i) for i in range(HEADS * GROUP)]
    plan = CacheConfig(method, Budget(tokens=7), Cadence(), mode, place)  # type: ignore[arg-type]
    streams, mask = streams_of(num_layers(rule)).padded([0, 4])
    params = AttentionParams(SCALE, alibi=torch.tensor(slopes))
    seen = run_core(plan, streams, widths, params=params, mask=mask, max_new_tokens=NEW, seeds=SEEDS)
    world = World(SCALE, 7, max_new_tokens=NEW, alibi=torch.tensor(slopes).tolist(), renumbered=place == "renumbered")
    for row in range(2):
        compare(seen, row, truth(method, rule, world, row, widths), out=1e-6, score=1e-5 if rule.attention else None)


@pytest.mark.parametrize(
    ("name", "budget", "widths", "mode"),
    in_turn(["key_attention", "keyformer", "window", "streaming_llm"], [7, 13], [STEPS, SEVERAL], MODES, of=3),
)
def test_sliding_window(name: str, budget: int, widths: tuple[int, ...], mode: str) -> None:
    """A slot that the model itself cannot see any more goes before any other that is not protected."""
    method, rule = CASES[name]
    streams, mask = streams_of(1).padded([0, 4])
    plan = CacheConfig(method, Budget(tokens=budget), Cadence(), mode, "original")  # type: ignore[arg-type]
    params = AttentionParams(SCALE, sliding_window=11)
    seen = run_core(plan, streams, widths, params=params, mask=mask, max_new_tokens=NEW, seeds=SEEDS)
    world = World(SCALE, budget, max_new_tokens=NEW, sliding_window=11)
    for row in range(2):
        compare(seen, row, truth(method, rule, world, row, widths), out=1e-5, score=1e-5 if rule.attention else None)


SINKS = tuple(0.9 - 0.4 * i for i in range(HEADS * GROUP))  # from heads that look at tokens to heads that hardly do
LOOKING = ["h2o", "snapkv", "a2sf_0.9", "tova", "spatten", "a2sf_full_rows", "ideal"]
TEMPERED = [("keyformer", STEPS, "overwrite"), ("keyformer_a2sf", SEVERAL, "compact"), ("keyformer", SEVERAL, "mask")]


def check_logits(name: str, widths: tuple[int, ...], mode: str, world: World, **config: Any) -> None:
    """As `check`, over queries three times as long, so that a softcap and sinks have a say."""
    (method, rule), plain = CASES[name], streams_of(num_layers(CASES[name][1]))
    plain = Streams(3 * plain.q.double(), plain.k.double(), plain.v.double())
    streams, mask = plain.padded([0, 4])
    mode = "mask" if name in ONLY_MASK else mode
    plan = CacheConfig(method, None if name == "full" else Budget(tokens=7), mode=mode, **config)  # type: ignore[arg-type]
    sinks = None if world.sinks is None else torch.tensor(world.sinks, dtype=torch.float64)
    params = AttentionParams(SCALE, softcap=world.softcap, sinks=sinks)
    seen = run_core(plan, streams, widths, params=params, mask=mask, max_new_tokens=NEW, seeds=SEEDS)
    for row in range(2):
        want, score = truth(method, rule, world, row, widths, plain), 1e-5 if rule.attention else None
        compare(seen, row, want[:1], out=1e-9, score=score)
        compare(seen, row, want, out=1e-9, score=score if rule.decode_evicts else None)


@pytest.mark.parametrize(
    ("name", "widths", "mode"), [*in_turn(["full", "window", *LOOKING], [STEPS, SEVERAL], MODES, of=3), *TEMPERED]
)
def test_softcap(name: str, widths: tuple[int, ...], mode: str) -> None:
    check_logits(name, widths, mode, World(SCALE, 7, max_new_tokens=NEW, softcap=0.8))


@pytest.mark.parametrize(
    ("name", "widths", "mode"), in_turn(["full", "window", *LOOKING], [STEPS, SEVERAL], MODES, of=3)
)
def test_sinks(name: str, widths: tuple[int, ...], mode: str) -> None:
    check_logits(name, widths, mode, World(SCALE, 7, max_new_tokens=NEW, sinks=SINKS))


@pytest.mark.parametrize(("name", "widths", "mode"), [*in_turn(LOOKING, [STEPS, SEVERAL], MODES, of=3), *TEMPERED])
def test_sinks_left_out_of_the_score(name: str, widths: tuple[int, ...], mode: str) -> None:
    world = World(SCALE, 7, max_new_tokens=NEW, sinks=SINKS, sinks_count=False, softcap=2.0)
    check_logits(name, widths, mode, world, score_sink="renormalised")


def test_a_temperature_is_refused_where_heads_have_sinks() -> None:
    for name in ("keyformer", "keyformer_a2sf"):
        with pytest.raises(ConfigError, match=r"temperature or noise .* score.sink=renormalised"):
            check_logits(name, STEPS, "overwrite", World(SCALE, 7, max_new_tokens=NEW, sinks=SINKS))


# -- the reference itself ----------------------------------------------------------------------------------------------


def test_the_reference_on_three_tokens_by_hand() -> None:
    """Keys of one dim: 0, ln 2, 0; queries 1: probabilities 1 | 1/3 2/3 | 1/4 1/2 1/4; budget 3 keeps 2."""
    k = [[[[0.0], [math.log(2)], [0.0], [0.0]]]]
    q = [[[[1.0], [1.0], [1.0], [1.0]]]]
    v = [[[[1.0], [2.0], [4.0], [8.0]]]]
    prefill, step = Reference(Rule(attention=True), World(1.0, 3), q, k, v, (3, 1)).steps
    assert [x[0][0] for x in prefill[0].out] == pytest.approx([1.0, 1 / 3 + 4 / 3, 1 / 4 + 1 + 1])
    assert prefill[0].kept == [[0, 1]]  # sums: 19/12, 14/12, 3/12
    assert prefill[0].score[0] == pytest.approx({0: 19 / 12, 1: 14 / 12})
    assert step[0].out[0][0] == pytest.approx([1 / 4 + 1 + 2])  # tokens 0, 1 and 3 are left: 1/4 1/2 1/4
    assert step[0].kept == [[0, 1]]
    assert step[0].score[0] == pytest.approx({0: 22 / 12, 1: 20 / 12})


def test_noise_is_drawn_per_query_and_key() -> None:
    draw = Noise().draw(torch.tensor([3]), 0, 15, torch.arange(5)[None], torch.arange(7)[None, None])
    assert draw.shape == (1, 15, 5, 7)
    assert draw.flatten().unique().numel() == 15 * 5 * 7
