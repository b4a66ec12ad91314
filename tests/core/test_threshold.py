"""A threshold in place of a budget (`budget.threshold`): kept sets, all modes and paths alike, the column, refusals."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from oracles import Past
from test_conf import composed
from test_head_budgets import FAST, METHODS, sampled, value
from test_kept_sets import CONTINUATION, LENGTHS, NEW, PROMPTS, SEEDS, Truth, Witness
from test_step import ROWS, alike, both
from tiny import LAYERS, LETTERS, feed, prompts_of, tiny

from kvexp.core import Budget, CacheConfig, Cadence, Method, Quantization, SlotSelection
from kvexp.core.method import EvictionContext
from kvexp.generate import GenerationParams, generate, pad_left, receipts
from kvexp.hf import EvictionCache
from kvexp.methods import CAKE, H2O, VATP, ExpectedAttention, Ideal, KVzap, KVzip, PyramidKV, SnapKV, StreamingLLM
from kvexp.results.table import ratio_reached
from kvexp.retrieval import Quest
from kvexp.run.settings import settings_of
from kvexp.util import ConfigError

# About half of the slots: attention adds up to the group's five query heads per query, norms of keys lie around 5.
LIMITS = {"key_attention": 3.0, "h2o": 3.0, "tova": 0.6, "knorm": -6.5}
RECENT = 3


class ThresholdWitness(Witness):
    """A `Witness` whose heads keep what reaches the threshold at the end of the prompt, and as many from then on."""

    def __init__(self, name: str, row: int) -> None:
        super().__init__("llama", name, PROMPTS[row], CONTINUATION[row].tolist(), SEEDS[row])
        self.name, self.rooms = name, {}  # type: ignore[var-annotated]

    def decide(self, layer: int, pasts: list[Past]) -> list[list[int]]:
        found = []
        for h, past in enumerate(pasts):
            must = set(past.held[-RECENT:])
            values = {p: value(self.name, past, p) for p in past.held}
            if (layer, h) not in self.rooms:
                stay = must | {p for p, v in values.items() if v >= LIMITS[self.name]}
                self.rooms[layer, h] = len(stay)
            else:
                rest = sorted((p for p in past.held if p not in must), key=lambda p, v=values: (v[p], p))
                stay = must | set(rest[::-1][: self.rooms[layer, h] - len(must)])
            found.append(sorted(stay))
        return found


def truth(name: str, row: int) -> Truth:
    return ThresholdWitness(name, row).run()


def budget(name: str, **changes: Any) -> Budget:
    return Budget(threshold=LIMITS[name], threshold_recent=RECENT, **changes)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "h2o")) for n in LIMITS])
def test_against_the_oracle(name: str) -> None:
    """A padded batch whose prompt comes in chunks, and a row alone in the other modes."""
    prompt, mask = pad_left(PROMPTS, 0, "cpu")
    want = [truth(name, row) for row in range(len(LENGTHS))]
    sizes = {len(head) for one in want for layer in one.kept[0] for head in layer}
    assert len(sizes) > 3 and any(RECENT < size < min(LENGTHS) for size in sizes), "the limit bites"
    for mode, rows in (("overwrite", [0, 1, 2]), ("compact", [1]), ("mask", [1])):
        at = torch.tensor(rows)
        cache = EvictionCache(
            tiny("llama"), METHODS[name], budget(name), mode=mode, max_new_tokens=NEW,  # type: ignore[arg-type]
            prompt_tokens=LENGTHS[rows[0]] if len(rows) == 1 else 17, seeds=[SEEDS[row] for row in rows],
        )  # fmt: skip
        ids, shown = (prompt, mask) if len(rows) > 1 else (torch.tensor([PROMPTS[1]]), None)
        fed = feed(cache, tiny("llama"), ids, CONTINUATION[at], mask=shown, chunk=5)
        for i, row in enumerate(rows):
            for step in range(NEW + 1):
                for layer in range(LAYERS):
                    assert fed.kept[step][layer][i] == want[row].kept[step][layer], (mode, row, step, layer)
                torch.testing.assert_close(fed.logits[step][i], want[row].logits[step], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("method", "rows"), sampled([(FAST[1], "padded"), (FAST[2], "equal")], product(FAST, ROWS)))
def test_the_short_step_is_the_general_one(method: Method, rows: str, monkeypatch: Any) -> None:
    limit = Budget(threshold=1.0, threshold_recent=RECENT)
    short, general, taken = both("llama", method, limit, ROWS[rows], monkeypatch)
    assert taken == 13 * 2
    alike(short, general, peak=False)


@pytest.mark.parametrize(
    "every", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
def test_modes_and_cadences_agree(every: int | None) -> None:
    for method, limit in ((H2O(), 2.0), (SnapKV(window=2, kernel=3), 0.05), (KVzip(n_sinks=1), 0.2)):
        if method.needs.second_pass is not None and every == 3:
            continue
        if isinstance(method, SnapKV) and every == 3:
            continue
        runs = [
            generate(
                tiny("llama"), prompts_of(3, (40, 33)), method, Budget(threshold=limit, threshold_recent=2),
                decoding=GenerationParams(9, eos=None), mode=mode, tokenizer=LETTERS,
                cadence=Cadence(every=every) if method.evicts_while_decoding else Cadence(),
            )
            for mode in ("overwrite", "compact", "mask")
        ]  # fmt: skip
        for layer in range(LAYERS):
            assert len({repr(run.cache.kept_positions(layer)) for run in runs}) == 1
        assert runs[0].tokens == runs[1].tokens == runs[2].tokens


def test_ends_of_the_scale() -> None:
    """Infinity is reached by nothing but what is protected; the least number is reached by all."""
    prompts, decoding = prompts_of(3, (40, 33)), GenerationParams(1, eos=None)
    none = generate(tiny("llama"), prompts, H2O(), Budget(threshold=1e30, threshold_recent=5), decoding=decoding)
    every = generate(tiny("llama"), prompts, H2O(), Budget(threshold=-1e30), decoding=decoding)
    for row, length in enumerate((40, 33)):
        for layer in range(LAYERS):
            assert none.cache.kept_positions(layer)[row] == [list(range(length - 5, length))] * 3
            assert every.cache.kept_positions(layer)[row] == [list(range(length))] * 3
    assert [one.first_eviction_step for one in receipts(none.cache)] == [0, 0]
    assert [one.first_eviction_step for one in receipts(every.cache)] == [None, None]


@pytest.mark.parametrize("threshold", [0.002, 0.02, 0.2])
def test_a_threshold_is_in_the_unit_of_the_score_where_the_priority_is_its_logarithm(threshold: float) -> None:
    """ExpectedAttention ranks by a logarithm without epsilon, and by the score itself with one too small to matter."""

    def kept(epsilon: float) -> list[Any]:
        method, budget = ExpectedAttention(epsilon=epsilon), Budget(threshold=threshold, threshold_recent=2)
        decoding = GenerationParams(1, eos=None)
        run = generate(tiny("llama"), prompts_of(3, (40, 33)), method, budget, decoding=decoding)
        return [run.cache.kept_positions(layer) for layer in range(LAYERS)]

    found = kept(0.0)
    assert found == kept(1e-12)
    sizes = [len(head) for layer in found for row in layer for head in row]
    assert threshold < 0.01 or min(sizes) < 33, "something was evicted"
    assert threshold > 0.1 or max(sizes) > 6, "more is left than sinks and newest tokens"


def test_every_share_reaches_a_threshold_of_zero() -> None:
    assert ExpectedAttention().threshold_as_priority(0.0) == -math.inf
    assert ExpectedAttention(epsilon=0.02).threshold_as_priority(0.1) == H2O().threshold_as_priority(0.1) == 0.1
    assert KVzap().threshold_as_priority(-4.0) == -4.0, "its score is a logarithm as it stands"


def test_the_methods_window_gives_way_to_the_thresholds() -> None:
    """H2O's recent window is half of a budget, and there is none: the newest `threshold_recent` tokens stay."""
    seen = []

    class Watched(H2O):
        def priority(self, ctx: EvictionContext) -> torch.Tensor:
            seen.append(ctx.recent.tolist())
            return super().priority(ctx)

    generate(
        tiny("llama"), prompts_of(3, (40, 33)), Watched(), Budget(threshold=9.0, threshold_recent=35),
        decoding=GenerationParams(1, eos=None),
    )  # fmt: skip
    assert seen == [[35, 33]] * LAYERS


def test_its_identity_and_label() -> None:
    settings = settings_of(*composed("budget=threshold", "budget.threshold=0.02"))
    plain = settings_of(*composed("budget=ratio", "kv_ratio=0.5"))
    assert settings.identity["budget"]["threshold"] == 0.02 and settings.identity["budget"]["threshold_recent"] == 128
    assert "threshold" not in plain.identity["budget"]
    assert settings.labels["kv_ratio"] is settings.labels["tokens"] is None


def test_the_ratio_reached_is_printed_where_there_is_a_threshold() -> None:
    base = {"verdict99": "baseline", "kv_ratio": None, "tokens": None, "kv_ratio_reached": 1.0}
    free = base | {"verdict99": "undecided", "kv_ratio_reached": 0.25}
    fixed, counted = free | {"kv_ratio": 0.5}, free | {"tokens": 128}
    assert [column.cell(free) for column in ratio_reached([base, fixed, free])] == ["0.250"]
    assert ratio_reached([base, fixed, counted]) == []


def of(method: Method, *given: Any, **settings: Any) -> CacheConfig:
    return CacheConfig(method, Budget(threshold=1.0), *given, **settings)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Budget(kv_ratio=0.5, threshold=1.0), "exactly one of kv_ratio, tokens and threshold"),
        (lambda: Budget(threshold=float("nan")), "threshold must be a finite number, got nan"),
        (lambda: Budget(threshold=1.0, threshold_recent=0), "threshold_recent must be a whole number of at least 1"),
        (lambda: Budget(kv_ratio=0.5, threshold_recent=4), r"threshold_recent has no effect without budget\.threshold"),
        (lambda: Budget(threshold=1.0, heads="adaptive"), r"leave budget\.heads at uniform"),
        (lambda: Budget(threshold=1.0, pyramid=0.5), r"budget\.pyramid at 0"),
        (lambda: Budget(threshold=1.0, layers="cake"), r"budget\.layers at null \(or uniform\)"),
        (
            lambda: of(Ideal(), mode="mask"),
            r"ideal drops nothing, so budget\.threshold=1 has no head's slots .* kv_ratio",
        ),
        (lambda: of(Quest()), r"quest drops nothing, so budget\.threshold=1 has"),
        (
            lambda: of(H2O(), Cadence(at_prefill=False)),
            r"threshold=1 shares out slots .* set cache\.evict_at_prefill=true",
        ),
        (
            lambda: of(H2O(), quantization=Quantization(4, 4)),
            r"budget\.threshold=1 packs heads .* give kv_ratio or tokens in its place \(budget=ratio, budget=tokens\)",
        ),
        (
            lambda: of(PyramidKV()),
            r"pyramidkv shares .* budget\.threshold=1 says .* give kv_ratio .*, or set budget\.layers=uniform",
        ),
        (
            lambda: of(H2O(), bounded_chunk=8),
            r"budget\.threshold=1 shares slots out among heads when a prompt has ended",
        ),
        (lambda: of(H2O(), keep="span"), r"budget\.threshold=1 gives heads different numbers"),
        (
            lambda: of(H2O(), select=SlotSelection(by="chunk")),
            r"by which budget\.threshold=1 shares out slots: give kv_ratio .*, or leave the group select alone",
        ),
        (lambda: Budget(), "exactly one of kv_ratio and tokens, .*, or a number as threshold"),
    ],
)
def test_refusals(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


def test_a_method_leaves_its_own_layers_out_where_it_is_told_to() -> None:
    CacheConfig(PyramidKV(), Budget(threshold=1.0, layers="uniform"))
    CacheConfig(CAKE(), Budget(kv_ratio=0.5, heads="global", layers="uniform"))
    typed = settings_of(*composed("budget=threshold", "budget.threshold=0.01", "method=cake", "budget.layers=uniform"))
    assert typed.cache.budget == Budget(threshold=0.01, layers="uniform")


@pytest.mark.parametrize("method", [VATP(n_sinks=4), StreamingLLM(n_sinks=4)], ids=lambda method: method.name)
@pytest.mark.parametrize("length", [8, 10, 11, 13, 14, 15])
def test_sinks_stay_where_they_and_the_newest_tokens_are_more_than_the_prompt(method: Method, length: int) -> None:
    """Up to 14 tokens the whole prompt stays; from then on as many slots, and with them the sinks, in every mode."""
    for mode in ("overwrite", "compact", "mask"):
        run = generate(
            tiny("llama"), prompts_of(3, (length,)), method, Budget(threshold=1e30, threshold_recent=10),
            decoding=GenerationParams(6, eos=None), mode=mode, tokenizer=LETTERS,  # type: ignore[arg-type]
        )  # fmt: skip
        newest = length + 5  # five tokens are fed
        want = [*range(4), *range(newest - min(length, 14) + 4, newest)]
        for layer in range(LAYERS):
            assert run.cache.kept_positions(layer)[0] == [want] * len(run.cache.kept_positions(layer)[0]), mode
