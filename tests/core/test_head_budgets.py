"""Budgets of kv heads (`Budget.heads`, `Budget.threshold`), every way in one grid: kept sets against oracles, modes,
steps, batches, beams, bytes, and what is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import oracles
import pytest
import torch
from commands import composed
from oracles import Past, Row
from test_kept_sets import CONTINUATION, LENGTHS, NEW, PROMPTS, SEEDS, Truth, Witness
from test_step import ROWS, alike, both
from test_together import same
from tiny import LAYERS, LETTERS, Fed, feed, prompts_of, tiny

from kvexp.core import AttentionParams, Budget, CacheConfig, Cadence, HeadScores, Method, Quantization, SlotSelection
from kvexp.core import decode_stack as cross_layer
from kvexp.core.budget_shares import retrieval_heads, slots_by_head, union_priority
from kvexp.core.decode import RaggedProducts
from kvexp.core.method import EvictionContext
from kvexp.core.slots import RaggedSlots
from kvexp.generate import (
    Generation,
    GenerationParams,
    decode,
    generate,
    generate_from_context,
    pad_left,
    prefill,
    prefill_together,
    receipts,
)
from kvexp.hf import EvictionCache
from kvexp.methods import (
    A2SF,
    CAKE,
    CAOTE,
    CUR,
    H2O,
    TOVA,
    VATP,
    ExpectedAttention,
    H2ODamping,
    Ideal,
    KeyAttention,
    KeyDiff,
    Keyformer,
    KNorm,
    KVzap,
    KVzip,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    Window,
)
from kvexp.results.table import ratio_reached
from kvexp.retrieval import Oracle, Quest
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError

KV_HEADS = 3
SCORES = HeadScores.of(torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.7]]))
SINKS, RECENT, SLOTS = 2, 3, 14  # of streaming heads; RECENT also of a threshold


def duo(slots: int | None = None, **changes: Any) -> Budget:
    size: dict[str, Any] = {"kv_ratio": 0.7} if slots is None else {"tokens": slots}
    return Budget(**size, heads="duo", **{"stream_sinks": SINKS, "stream_recent": RECENT, **changes})


SHARES = ("union", "adaptive", "global")  # ways in which heads share what they were given
WAYS: dict[str, Budget] = {how: Budget(kv_ratio=0.5, heads=how) for how in SHARES}  # type: ignore[arg-type]
WAYS |= {"duo": duo(), "threshold": Budget(threshold=1.0, threshold_recent=RECENT)}
PLANS: dict[str, dict[str, Any]] = {"duo": {"head_scores": SCORES}}
MODES = ("overwrite", "compact", "mask")
METHODS: dict[str, Method] = {
    "key_attention": KeyAttention(),
    "h2o": H2O(),
    "tova": TOVA(),
    "knorm": KNorm(),
    "cur": CUR(n_sinks=1, block=4),
}
# About half of the slots: attention adds up to the group's five query heads per query, norms of keys lie around 5.
LIMITS = {"key_attention": 3.0, "h2o": 3.0, "tova": 0.6, "knorm": -6.5}


def sampled(quick: Sequence[Any], every: Iterable[Any]) -> list[Any]:
    """All cases; those that are not among the quick ones are slow."""
    soon = {repr(case) for case in quick}
    return [pytest.param(*case, marks=[] if repr(case) in soon else [pytest.mark.slow]) for case in every]


def run(
    how: str,
    method: Method,
    lengths: Sequence[int] = (40, 33),
    *,
    new: int = 9,
    budget: Budget | None = None,
    **given: Any,
) -> Generation:
    """Generate from random prompts of these lengths under one of WAYS, or a budget of its kind."""
    decoding = GenerationParams(new, eos=None, num_beams=given.pop("num_beams", 1))
    options = {"tokenizer": LETTERS, **PLANS.get(how, {}), **given}
    return generate(tiny("llama"), prompts_of(3, lengths), method, budget or WAYS[how], decoding=decoding, **options)


def kept(made: Generation) -> list[list[list[list[int]]]]:
    """[layer][row][head] positions."""
    return [made.cache.kept_positions(layer) for layer in range(LAYERS)]


def in_all_modes(how: str, method: Method, lengths: Sequence[int] = (40, 33), **given: Any) -> Generation:
    """`run` in every mode, which keep the same and say the same."""
    made = [run(how, method, lengths, mode=mode, **given) for mode in MODES]
    for other in made[1:]:
        assert kept(other) == kept(made[0]) and other.tokens == made[0].tokens
    return made[0]


def value(name: str, past: Past, p: int) -> float:
    """What a method ranks position p by, as its oracle does."""
    if name == "tova":  # one score for all heads of a layer
        return sum(rows[-1].get(p, 0.0) for rows in past.heads)
    if name == "cur":
        return oracles.leverages(past)[p]
    return -past.norms[p] if name == "knorm" else oracles.total(past.rows, p)


class HeadWitness(Witness):
    """A `Witness` whose heads share out their budget at the end of the prompt; from then on each has its own."""

    def __init__(self, name: str, how: str, floor: float, row: int) -> None:
        super().__init__("llama", name, PROMPTS[row], CONTINUATION[row].tolist(), SEEDS[row])
        self.name, self.how, self.floor, self.end = name, how, floor, len(PROMPTS[row])
        self.rooms: dict[tuple[int, int], int] = {}  # of each layer and head, once they are shared out
        self.waiting: list[Past] = []

    def decide(self, layer: int, pasts: list[Past]) -> list[list[int]]:
        if self.name == "cur" and pasts[0].newest >= self.end:  # it chooses once
            return [list(past.held) for past in pasts]
        values: list[Row] = [{p: value(self.name, past, p) for p in past.held} for past in pasts]
        if self.how == "union":
            stay = oracles.union_of_heads(values, self.must(pasts[0]), self.budget - 1)
            return [sorted(stay) for _ in pasts]
        if (layer, 0) in self.rooms:
            return [
                sorted(oracles.top_of(row, self.must(past), self.rooms[layer, h]))
                for h, (row, past) in enumerate(zip(values, pasts, strict=True))
            ]
        self.waiting += pasts
        if self.how == "global" and layer < LAYERS - 1:
            return [list(past.held) for past in pasts]  # for now
        values = [{p: value(self.name, past, p) for p in past.held} for past in self.waiting]
        stays = oracles.shared_out(values, [self.must(past) for past in self.waiting], self.budget - 1, self.floor)
        first = layer + 1 - len(self.waiting) // self.kv_heads
        for i, stay in enumerate(stays):
            place = first + i // self.kv_heads, i % self.kv_heads
            self.rooms[place] = len(stay)
            if place[0] < layer:
                self.keep(*place, sorted(stay), self.waiting[0].newest)
        self.waiting = []
        return [sorted(stay) for stay in stays[-self.kv_heads :]]

    def must(self, past: Past) -> set[int]:
        """H2O's recent window, less the token to come; CUR's sink."""
        if self.name == "cur":
            return {0}
        return set(past.held[-(self.budget // 2 - 1) :]) if self.name == "h2o" else set()


FLOORS = {"adaptive": 0.2}


class DuoWitness(Witness):
    """A `Witness` whose retrieval heads keep everything and whose other heads keep first and newest tokens."""

    def decide(self, layer: int, pasts: list[Past]) -> list[list[int]]:
        size, streams = LAYERS * KV_HEADS, SINKS + RECENT
        room = size if self.prompt <= SLOTS else (SLOTS - streams) * size // (self.prompt - streams)
        ranked = sorted((-float(SCORES.scores[i, j]), i, j) for i in range(LAYERS) for j in range(KV_HEADS))
        full = {(i, j) for _, i, j in ranked[:room]}
        return [
            list(past.held)
            if (layer, h) in full
            else sorted({p for p in past.held if p < SINKS} | set(past.held[-(RECENT - 1) :]))
            for h, past in enumerate(pasts)
        ]


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


def witness(how: str, name: str, row: int, floor: float) -> Witness:
    if how == "duo":
        return DuoWitness("llama", "key_attention", PROMPTS[row], CONTINUATION[row].tolist(), SEEDS[row])
    return ThresholdWitness(name, row) if how == "threshold" else HeadWitness(name, how, floor, row)


@functools.cache
def truth(name: str, how: str, row: int, floor: float) -> Truth:
    return witness(how, name, row, floor).run()


def evict_batch(name: str, how: str, rows: Sequence[int], floor: float | None = None, **options: Any) -> Fed:
    prompt, mask = pad_left([PROMPTS[row] for row in rows], 0, "cpu")
    budget = {
        "duo": duo(SLOTS), "threshold": Budget(threshold=LIMITS.get(name, 0.0), threshold_recent=RECENT),
    }.get(how) or Budget(kv_ratio=0.5, heads=how, head_floor=floor)  # type: ignore[arg-type] # fmt: skip
    cache = EvictionCache(
        tiny("llama"), METHODS[name], budget, max_new_tokens=NEW + (how == "duo"),
        seeds=[SEEDS[row] for row in rows], prompt_tokens=prompt.shape[1], **PLANS.get(how, {}), **options,
    )  # fmt: skip
    return feed(cache, tiny("llama"), prompt, CONTINUATION[list(rows)], mask=mask, chunk=5)


def agree(fed: Fed, name: str, how: str, rows: Sequence[int], floor: float | None = None) -> None:
    for i, row in enumerate(rows):
        want = truth(name, how, row, FLOORS.get(how, 0.0) if floor is None else floor)
        for step in range(NEW + 1):
            for layer in range(LAYERS):
                assert fed.kept[step][layer][i] == want.kept[step][layer], f"row {row}, step {step}, layer {layer}"
            torch.testing.assert_close(fed.logits[step][i], want.logits[step], rtol=1e-4, atol=1e-4)


CASES = [*product(SHARES, METHODS), *product(["duo"], ["h2o", "knorm"]), *product(["threshold"], LIMITS)]


@pytest.mark.parametrize(
    ("how", "name"),
    sampled(
        [
            *(("union", "h2o"), ("adaptive", "key_attention"), ("global", "knorm"), *((how, "cur") for how in SHARES)),
            *(("duo", "h2o"), ("duo", "knorm"), ("threshold", "h2o")),
        ],
        CASES,
    ),
)
def test_against_the_oracle(how: str, name: str) -> None:
    """The fast step, in a padded batch whose prompt comes in chunks; every mode of dropping in a row alone."""
    agree(evict_batch(name, how, [0, 2, 1]), name, how, [0, 2, 1])
    for mode in ("compact", "mask"):
        agree(evict_batch(name, how, [1], mode=mode), name, how, [1])


@pytest.mark.parametrize(
    ("how", "floor"), sampled([("adaptive", 0.5), ("global", 0.5)], product(SHARES[1:], (0.0, 0.5, 1.0)))
)
def test_floors_against_the_oracle(how: str, floor: float) -> None:
    agree(evict_batch("key_attention", how, [1], floor), "key_attention", how, [1], floor)


def test_the_ways_differ() -> None:
    """No two ways keep the same, so that agreeing means something, and heads hold different numbers of slots."""
    for name in ("key_attention", "knorm"):  # TOVA scores all heads of a layer alike
        found = {how: truth(name, how, 0, FLOORS.get(how, 0.0)).kept for how in WAYS}
        assert len({repr(one) for one in found.values()}) == len(WAYS), name
        for how in SHARES[1:]:
            sizes = [[len(head) for head in layer] for layer in found[how][-1]]
            assert sum(map(sum, sizes)) == LAYERS * KV_HEADS * (LENGTHS[0] // 2 - 1)
            assert any(a != b for heads in sizes for a, b in pairwise(heads)), (name, how)
        by_layer = [sum(len(head) for head in layer) for layer in found["global"][0]]
        assert by_layer[0] != by_layer[1], "layers share too"
        assert len({len(head) for layer in found["threshold"][0] for head in layer}) > 2, "the limit bites"


# -- all ways to compute the same -------------------------------------------------------------------------------------

FAST = [KeyAttention(), H2O(), Keyformer(), A2SF(alpha=0.3), TOVA(), VATP(n_sinks=1), KeyDiff(), Window()]
SLOW = [SnapKV(window=2, kernel=3), CAOTE(), H2ODamping(), KNorm(), StreamingLLM(n_sinks=2), KVzip(n_sinks=1)]


@pytest.mark.parametrize(
    ("how", "method", "rows"),
    sampled(
        [
            *(("union", FAST[1], "padded"), ("union", FAST[2], "equal")),
            *(("adaptive", FAST[0], "padded"), ("adaptive", FAST[2], "padded"), ("adaptive", FAST[5], "equal")),
            *(("global", FAST[0], "equal"), ("global", FAST[7], "padded")),
            *(("duo", FAST[1], "padded"), ("duo", FAST[7], "equal")),
            *(("threshold", FAST[1], "padded"), ("threshold", FAST[2], "equal")),
        ],
        product(WAYS, FAST, ROWS),
    ),
)
def test_the_short_step_is_the_general_one(how: str, method: Method, rows: str, monkeypatch: Any) -> None:
    short, general, taken = both("llama", method, WAYS[how], ROWS[rows], monkeypatch, plan=PLANS.get(how))
    assert taken == 13 * 2
    alike(short, general, peak=False)


def test_bookkeeping_of_layers_of_other_width_is_each_layers_own(monkeypatch: Any) -> None:
    """Buffers merged, and widened to the widest; one layer's heads fill all its columns. Scores: see ORDERED_GROUP."""
    monkeypatch.setattr(cross_layer, "NEAR_WIDENING", cross_layer.MAX_WIDENING)
    runs, prompts, decoding = [], prompts_of(5, (40, 18, 33))[2:], GenerationParams(12, eos=None)
    for widening in (cross_layer.MAX_WIDENING, 0.0):
        monkeypatch.setattr(cross_layer, "MAX_WIDENING", widening)
        runs.append(generate(tiny("llama"), prompts, H2O(), WAYS["adaptive"], decoding=decoding, keep_logits=True))
    merged, apart = (run.cache.layer_states for run in runs)
    assert merged[0].cross_layer_buffers.merged and not apart[0].cross_layer_buffers.merged
    widths = [state.require_slots().positions.shape[2] for state in apart]
    assert len(set(widths)) == LAYERS and any(state.backend.no_padding_slots for state in apart)
    assert {state.require_slots().positions.shape[2] for state in merged} == {max(widths)}
    assert not any(state.backend.no_padding_slots for state in merged)
    assert torch.equal(torch.stack(runs[0].logits), torch.stack(runs[1].logits))
    for one, other, width in zip(merged, apart, widths, strict=True):
        assert torch.equal(one.require_slots().positions[..., :width], other.require_slots().positions)
        torch.testing.assert_close(one.require_slots().score[..., :width], other.require_slots().score)


@pytest.mark.parametrize(
    ("how", "family"),
    sampled(
        [("adaptive", "gptj"), ("union", "mpt"), ("global", "mistral"), ("adaptive", "gpt2")],
        product(SHARES, ("gptj", "gpt2", "mpt", "mistral")),
    ),
)
def test_on_other_families(how: str, family: str, monkeypatch: Any) -> None:
    changes = {"sliding_window": 11} if family == "mistral" else {}
    short, general, taken = both(family, H2O(), WAYS[how], ROWS["padded"], monkeypatch, **changes)
    assert taken > 0
    alike(short, general, peak=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_products_of_packed_heads_are_those_of_each_head_alone(dtype: torch.dtype) -> None:
    """Two calls: what lies in the buffers of the first is not seen by the second."""
    dice = torch.Generator().manual_seed(0)
    widths = [[5, 12, 8], [12, 1, 7]]
    states = [torch.randn(2, 3, 12, 16, generator=dice).to(dtype) for _ in range(2)]
    places = torch.arange(12).expand(2, 3, 12)
    slots = RaggedSlots(*states, places, torch.zeros(2, 3, 12))
    slots.pack(places, torch.ones(2, 3, 12, dtype=torch.bool), 0, widths)
    products, newest = RaggedProducts(slots), torch.full((2, 1, 1), 12)
    for _ in range(2):
        query = torch.randn(2, 3, 2, 1, 16, generator=dice).to(dtype)
        x = products.logits(query, newest, AttentionParams(0.25))
        probabilities = products.softmax(x)
        out = products.output()
        assert x.dtype == probabilities.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert out.dtype == dtype and out.shape == (2, 3, 2, 1, 16)
        for row, head in product(range(2), range(3)):
            width = widths[row][head]
            keys, values = (one[row, head, :width] for one in states)
            alone = torch.mm(query[row, head, :, 0], keys.t()).to(x.dtype) * 0.25
            seen = torch.softmax(alone, dim=-1)
            torch.testing.assert_close(x[row, head, :, 0, :width], alone)
            assert (x[row, head, :, 0, width:] == -torch.inf).all()
            torch.testing.assert_close(probabilities[row, head, :, 0, :width], seen)
            assert not probabilities[row, head, :, 0, width:].any()
            torch.testing.assert_close(out[row, head, :, 0], seen.to(dtype) @ values)


@pytest.mark.parametrize(
    ("how", "method"),
    sampled(
        [
            *(("union", SLOW[1]), ("adaptive", SLOW[0]), ("adaptive", SLOW[2]), ("global", SLOW[1])),
            *((how, SLOW[5]) for how in SHARES),
            *(("duo", SLOW[0]), ("duo", FAST[1]), ("threshold", SLOW[0]), ("threshold", SLOW[5])),
        ],
        product(WAYS, [*FAST, *SLOW]),
    ),
)
def test_modes_agree(how: str, method: Method) -> None:
    """A threshold is in the unit of the method's priority: of SnapKV and KVzip, shares of attention."""
    limit = {"snapkv": 0.05, "kvzip": 0.2}.get(method.name, 1.0)
    budget = Budget(threshold=limit, threshold_recent=2) if how == "threshold" else None
    made = in_all_modes(how, method, budget=budget)
    if method.name == "kvzip":
        sizes = {len(head) for layer in kept(made) for head in layer[0]}
        assert (len(sizes) == 1) == (how == "union")


@pytest.mark.parametrize(("how", "every"), sampled([("adaptive", 3)], product(WAYS, (3, None))))
def test_other_cadences(how: str, every: int | None) -> None:
    """Free slots per head, or tokens that are appended behind heads of different widths, for longer than the room."""
    in_all_modes(how, H2O(), new=70 if every is None else 12, cadence=Cadence(every=every))


@pytest.mark.parametrize(
    ("how", "layers"), sampled([("adaptive", "cake")], product(("adaptive", "union"), ("cake", "pyramid")))
)
def test_with_budgets_of_layers(how: str, layers: Any) -> None:
    """A layer's heads share what the layer was given."""
    budget, lengths = Budget(kv_ratio=0.7, heads=how, layers=layers), (60, 47)  # type: ignore[arg-type]
    shared = in_all_modes(how, KeyAttention(), lengths, budget=budget)
    plain = run(how, KeyAttention(), lengths, budget=Budget(kv_ratio=0.7, layers=layers))
    for one, uniform in zip(kept(shared), kept(plain), strict=True):
        assert [sum(map(len, row)) for row in one] == [sum(map(len, row)) for row in uniform]


@pytest.mark.parametrize("how", WAYS)
def test_rows_do_not_know_their_neighbours(how: str) -> None:
    """To the bit: tokens, kept positions and logits of a row are those it has alone."""
    prompts, decoding = prompts_of(5, (40, 18, 33)), GenerationParams(12, eos=None)
    options: dict[str, Any] = {"decoding": decoding, "keep_logits": True, **PLANS.get(how, {})}
    together = generate(tiny("llama"), prompts, H2O(), WAYS[how], **options)
    for row, prompt in enumerate(prompts):
        alone = generate(tiny("llama"), [prompt], H2O(), WAYS[how], **options)
        assert together.tokens[row] == alone.tokens[0]
        assert [layer[row] for layer in kept(together)] == [layer[0] for layer in kept(alone)]


@pytest.mark.parametrize("how", SHARES)
def test_a_prompt_within_its_budget_loses_nothing(how: str) -> None:
    """Beside a longer one: its heads have the uniform number, and evict once they hold more."""
    prompts, decoding = prompts_of(5, (40, 12)), GenerationParams(14, eos=None)
    budget = Budget(tokens=20, heads=how)  # type: ignore[arg-type]
    both_rows = generate(tiny("llama"), prompts, H2O(), budget, decoding=decoding)
    alone = generate(tiny("llama"), prompts[1:], H2O(), budget, decoding=decoding)
    plain = generate(tiny("llama"), prompts[1:], H2O(), Budget(tokens=20), decoding=decoding)
    assert both_rows.tokens[1] == alone.tokens[0]
    for layer in range(LAYERS):
        held = both_rows.cache.kept_positions(layer)
        assert held[1] == alone.cache.kept_positions(layer)[0] and {len(head) for head in held[1]} == {19}
        assert how == "union" or held[1] == plain.cache.kept_positions(layer)[0]


@pytest.mark.parametrize("how", WAYS)
def test_beams_forks_and_questions(how: str) -> None:
    """Rows that are reordered, copied and fed several tokens at once are those of mode mask."""
    model, prompts, decoding, made = tiny("llama"), prompts_of(3, (40, 33)), GenerationParams(8, eos=None), []
    for mode in MODES:
        searched = run(how, H2O(), num_beams=3, mode=mode)
        context = prefill(model, prompts, H2O(), WAYS[how], max_new_tokens=20, mode=mode, **PLANS.get(how, {}))
        asked = generate_from_context(
            model, context.fork([1, 0, 1]), [[3, 5, 7], [2, 4, 6], [8, 9, 1]], decoding=decoding
        )
        again = generate_from_context(model, context, [[3, 5], [2, 4]], decoding=decoding)
        made.append((searched.tokens, asked.tokens, again.tokens))
    assert made[0] == made[1] == made[2]


def test_shared_prefill_is_each_by_itself() -> None:
    """Caches of all ways decode together with plain ones: each has what it has alone."""
    model, prompts = tiny("llama"), prompts_of(3, (40, 33))
    budgets = [Budget(kv_ratio=0.5), *(WAYS[how] for how in SHARES), Budget(kv_ratio=0.3, heads="adaptive")]
    configs = [CacheConfig(method, budget) for method in (H2O(), KNorm()) for budget in budgets]
    contexts = prefill_together(model, prompts, configs, max_new_tokens=9)
    decoding = GenerationParams(9, eos=None)
    together = decode(model, contexts, decoding, [0, 0], None, start=0.0)
    for config, one in zip(configs, together, strict=True):
        same(generate(model, prompts, config, decoding=decoding), one)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overwrite", "compact"])
@pytest.mark.parametrize("how", ["adaptive", "global", "duo"])
def test_resident_bytes_are_the_sum_of_the_budgets(how: str, mode: str) -> None:
    """By the ledger, and by the storages that hold keys and values: no padding, and nothing of the prompt is left."""
    lengths, new, slot = (40, 33, 40), 6, 2 * 14 * 4  # bytes of keys and values of a head in float32
    made = run(how, H2O(), lengths, new=new, mode=mode)
    heads = len(lengths) * KV_HEADS * LAYERS
    if how == "duo":  # retrieval heads have the prompt and all tokens to come
        full = [int(retrieval_heads(duo(), math.floor(0.7 * n), n, new, SCORES).sum()) for n in lengths]
        each = [count * (n + new) + (6 - count) * (SINKS + RECENT) for n, count in zip(lengths, full, strict=True)]
        wanted = sum(each)
    else:
        wanted = sum(n // 2 * KV_HEADS * LAYERS for n in lengths)
        assert wanted - heads == sum(len(head) for layer in kept(made) for row in layer for head in row)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for state in made.cache.layer_states
        for tensor in every_tensor(state.require_slots())
        if tensor.shape[-1] == 14
    }
    tracker = made.cache.memory_tracker
    assert sum(storages.values()) == tracker.bytes
    if mode == "compact":  # 64 free slots in each head for tokens to come
        assert tracker.bytes <= (wanted + heads * 64) * slot
        return
    assert tracker.bytes == wanted * slot
    uniform = run(how, H2O(), lengths, new=new, budget=Budget(kv_ratio=0.5))
    assert how == "duo" or tracker.bytes <= uniform.cache.memory_tracker.bytes


def every_tensor(item: Any) -> list[torch.Tensor]:
    """All tensors that an object holds, however deep."""
    if isinstance(item, torch.Tensor):
        return [item]
    parts = (
        item.values()
        if isinstance(item, dict)
        else item
        if isinstance(item, list | tuple)
        else vars(item).values()
        if hasattr(item, "__dict__")
        else ()
    )
    return [tensor for part in parts for tensor in every_tensor(part)]


# -- sharing out ------------------------------------------------------------------------------------------------------


def test_slots_by_head_against_the_draft() -> None:
    """Random priorities with many ties, dead slots, protected ones, rows of different budgets."""
    dice = torch.Generator().manual_seed(5)
    for trial in range(60):
        b, h, s = 3, 4, 23
        priority = torch.randint(0, 9, (b, h, s), generator=dice).float()
        positions = torch.stack([torch.randperm(s, generator=dice) for _ in range(b * h)]).view(b, h, s)
        live = torch.randint(12, s, (b,), generator=dice)
        positions = torch.where(positions < live[:, None, None], positions, -1)
        protected = (positions >= 0) & ((positions < trial % 3) | (positions >= live[:, None, None] - trial % 4))
        keep = [int(n) for n in torch.randint(5, 11, (b,), generator=dice)]
        floor = (0.0, 0.2, 0.35, 1.0)[trial % 4]
        got = slots_by_head(priority, positions, protected, keep, floor).tolist()
        for row in range(b):
            values = [
                {int(p): float(v) for p, v in zip(*pair, strict=True) if p >= 0}
                for pair in zip(positions[row], priority[row], strict=True)
            ]
            must = [set(p[m].tolist()) for p, m in zip(positions[row], protected[row], strict=True)]
            want = oracles.shared_out(values, must, keep[row], floor)
            assert got[row] == [len(stay) for stay in want], (trial, row)


def test_the_dossiers_example() -> None:
    """Two heads of five slots, three each, floor 0.34: kvpress gives 5 + 1, the authors' release 4 + 2."""
    priority = torch.tensor([[[0.5, 0.4, 0.3, 0.2, 0.1], [0.09, 0.08, 0.07, 0.06, 0.05]]])
    positions = torch.arange(5).expand(1, 2, 5)
    assert slots_by_head(priority, positions, torch.zeros(1, 2, 5, dtype=torch.bool), [3], 0.34).tolist() == [[5, 1]]


def test_a_slot_that_one_head_ranks_last_is_last_for_all() -> None:
    priority = torch.tensor([[[1.0, -torch.inf, 2.0], [3.0, 9.0, torch.inf]]])
    assert union_priority(priority).tolist() == [[[2.0, -torch.inf, torch.inf]] * 2]


def test_union_averages_what_a_logarithm_is_of() -> None:
    share = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0)) ** 6
    assert torch.allclose(union_priority(share.log(), logarithmic=True).exp(), union_priority(share))
    hidden = torch.tensor([[[0.0, -torch.inf, -1.0], [-3.0, 9.0, torch.inf]]])
    found = union_priority(hidden, logarithmic=True)
    assert found[0, 0].tolist() == found[0, 1].tolist()
    assert found[0, 0, 1] == -torch.inf and found[0, 0, 2] == torch.inf
    assert found[0, 0, 0].item() == pytest.approx(math.log((1 + math.exp(-3)) / 2))


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_union_of_a_method_that_ranks_by_a_logarithm(ratio: float) -> None:
    """ExpectedAttention ranks by a logarithm without epsilon, and by the score itself with one too small to matter."""
    runs = [
        generate(
            tiny("llama"), prompts_of(3, (40, 33)), ExpectedAttention(epsilon=epsilon),
            Budget(kv_ratio=ratio, heads="union"), decoding=GenerationParams(1, eos=None),
        )
        for epsilon in (0.0, 1e-12)
    ]  # fmt: skip
    for layer in range(LAYERS):
        assert runs[0].cache.kept_positions(layer) == runs[1].cache.kept_positions(layer)


# -- refused ----------------------------------------------------------------------------------------------------------


def of(how: str, method: Method, *given: Any, **options: Any) -> CacheConfig:
    return CacheConfig(method, WAYS[how], *given, **PLANS.get(how, {}), **options)


BITS = {"quantization": Quantization(8, 8, group=2)}
AT_STEPS = Cadence(at_prefill=False)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Budget(kv_ratio=0.5, heads="pairs"), "heads must be one of uniform"),  # type: ignore[arg-type]
        (lambda: Budget(kv_ratio=0.5, head_floor=0.1), r"head_floor .* budget\.heads=uniform"),
        (lambda: Budget(kv_ratio=0.5, heads="adaptive", head_floor=1.5), "head_floor must be in"),
        (lambda: Budget(kv_ratio=0.5, stream_sinks=3), r"budget\.stream_sinks .* budget\.heads=uniform"),
        (lambda: duo(stream_recent=0), "stream_recent must be at least 1"),
        (lambda: duo(stream_sinks=-1), "stream_sinks must be at least 0"),
        (lambda: Budget(kv_ratio=0.5, threshold=1.0), "exactly one of kv_ratio, tokens and threshold"),
        (lambda: Budget(threshold=float("nan")), "threshold must be a finite number"),
        (lambda: Budget(threshold=1.0, threshold_recent=0), "threshold_recent must be at least 1"),
        (lambda: Budget(kv_ratio=0.5, threshold_recent=4), r"threshold_recent .* without budget\.threshold"),
        (lambda: Budget(threshold=1.0, heads="adaptive"), r"leave budget\.heads at uniform"),
        (lambda: Budget(threshold=1.0, layers="cake"), r"budget\.layers at null"),
        (lambda: Budget(), "exactly one of kv_ratio, tokens and threshold"),
        (lambda: CacheConfig(H2O(), duo()), r"head_scores=kvexp\.hf\.calibrate_heads"),
        (lambda: HeadScores.of(torch.ones(3)), r"finite float32 numbers \[L, H\]"),
        (lambda: of("adaptive", Ideal(), mode="mask"), r"ideal drops nothing.*budget\.heads=uniform"),
        (lambda: of("union", Oracle()), r"oracle drops nothing.*budget\.heads=uniform"),
        (lambda: of("threshold", Ideal(), mode="mask"), r"ideal drops nothing.*budget\.threshold=1 .* kv_ratio"),
        (lambda: of("threshold", Quest()), r"quest drops nothing, so budget\.threshold=1 has"),
        (lambda: of("global", H2O(), AT_STEPS), r"evict_at_prefill=true, or set budget\.heads=uniform"),
        (lambda: of("threshold", H2O(), AT_STEPS), r"threshold=1 .* set cache\.evict_at_prefill=true"),
        (lambda: of("adaptive", H2O(), **BITS), r"set cache\.bits=16, or set budget\.heads=uniform"),
        (lambda: of("threshold", H2O(), **BITS), r"budget\.threshold=1 .* give kv_ratio or tokens in its place"),
        (lambda: of("threshold", PyramidKV()), r"budget\.threshold=1 .* or set budget\.layers=uniform"),
        (lambda: of("threshold", H2O(), bounded_chunk=8), r"budget\.threshold=1 shares slots out among heads"),
        (lambda: of("threshold", H2O(), keep="span"), r"budget\.threshold=1 gives heads different numbers"),
        (
            lambda: of("threshold", H2O(), select=SlotSelection(by="chunk")),
            r"budget\.threshold=1 .* leave the group select alone",
        ),
    ],
)
def test_refusals(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


# -- a threshold in place of a budget (`budget.threshold`): kept sets, all modes and paths alike, the column, refusal


def test_ends_of_the_scale() -> None:
    """Only protected slots reach infinity; everything reaches the least number, and nothing is lost."""
    prompts, decoding = prompts_of(3, (40, 33)), GenerationParams(1, eos=None)
    none = generate(tiny("llama"), prompts, H2O(), Budget(threshold=1e30, threshold_recent=5), decoding=decoding)
    every = generate(tiny("llama"), prompts, H2O(), Budget(threshold=-1e30), decoding=decoding)
    for row, length in enumerate((40, 33)):
        for layer in range(LAYERS):
            assert none.cache.kept_positions(layer)[row] == [list(range(length - 5, length))] * 3
            assert every.cache.kept_positions(layer)[row] == [list(range(length))] * 3
    assert [one.first_eviction_step for one in receipts(none.cache)] == [0, 0]
    assert [one.first_eviction_step for one in receipts(every.cache)] == [None, None]


@dataclass(frozen=True)
class Parity(Method):
    def priority(self, ctx: EvictionContext) -> torch.Tensor:
        return (ctx.positions % 2).float()


def test_a_slot_that_just_reaches_the_threshold_stays() -> None:
    budget, decoding = Budget(threshold=1.0, threshold_recent=1), GenerationParams(1, eos=None)
    run = generate(tiny("llama"), prompts_of(3, (20,)), Parity(), budget, decoding=decoding)
    assert run.cache.kept_positions(0)[0] == [[*range(1, 20, 2)]] * 3


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
