"""Kept sets against `oracles`, whose attention rows come from stock Hugging Face models with masks put in by hand.

The stock model sees the whole sequence at every step; layer by layer and head by head, a mask hides what the oracle
has evicted. So its rows, its hidden states and its logits are those of a model whose cache was really cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import oracles
import pytest
import torch
from cases import CASES, Case
from oracles import Past, Repeat, Row
from tiny import CONFIGS, LAYERS, Fed, distinct, feed, stock, tiny
from torch import Tensor
from transformers import DynamicCache
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from turns import in_turn

import kvexp.methods
from kvexp.core import Budget, ChoosesSlots, Noise, QueryCalibration, Surrogate
from kvexp.core.budget_shares import LayerBudgets
from kvexp.generate import pad_left
from kvexp.hf import EvictionCache, calibrate_queries
from kvexp.methods import CAKE, D2O, CaM, Compactor, EpiKV, Ideal, Keyformer, KVzap, KVzip, PyramidKV, Random, VaSE
from kvexp.methods.compactor import sketch_matrix

METHODS = {name: case for name, case in CASES.items() if case.oracle}
FAMILIES = ("llama", "gptj", "mpt", "gpt2")
LENGTHS, NEW = (17, 13, 11), 7
RATIO = (1, 2)  # kv_ratio 1/2: budgets 8, 6 and 5
SEEDS = (3, 5, 7)


@dataclass(frozen=True)
class Truth:
    """kept[step][layer][head] and logits[step] [V]; step 0 is the end of the prompt."""

    kept: list[list[list[list[int]]]]
    logits: list[Tensor]


@functools.cache
def surrogate(family: str) -> Surrogate:
    """Linear maps from what a layer gets to the scores of its kv heads, drawn."""
    dice, config = torch.Generator().manual_seed(13), stock(family).config
    shape = (LAYERS, CONFIGS[family].get("num_key_value_heads", 3), config.hidden_size)
    return Surrogate.of(torch.randn(*shape, generator=dice), torch.randn(*shape[:2], generator=dice))


@contextmanager
def masks_by_hand(
    model: Any,
    visible: Tensor,
    seen: list[Tensor],
    queries: list[Tensor],
    norms: list[Tensor] | None = None,
    inputs: list[Tensor] | None = None,
) -> Iterator[None]:
    """visible [L, query heads, N, N] bool replaces every mask; attention probabilities [heads, N, N] go to `seen`.

    The queries before RoPE [heads, N, D] go to `queries`, the norms [N] of what each layer gets to `norms`, what
    it gets [N, width] to `inputs`.
    """
    attentions = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    assert len(attentions) == visible.shape[0]
    hooks = []
    for i, module in enumerate(attentions):

        def before(module: Any, args: Any, kwargs: Any, mask: Tensor = visible[i]) -> Any:
            assert "attention_mask" in kwargs
            states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            queries.append(queries_of(module, visible.shape[1], states))
            if inputs is not None:
                inputs.append(states[0].double())
            if norms is not None:
                norms.append(states[0].double().norm(dim=-1))
            as_bool = model.config.model_type == "mpt"
            hidden = ~mask[None] if as_bool else torch.zeros(mask.shape)[None].masked_fill(~mask[None], -1e30)
            return args, kwargs | {"attention_mask": hidden}

        def after(_: Any, __: Any, output: Any) -> None:
            seen.append(output[1][0].double())

        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def queries_of(attention: Any, heads: int, hidden: Tensor) -> Tensor:
    """The queries [heads, N, D] that an attention module makes of its input [1, N, width], before RoPE."""
    joint = getattr(attention, "c_attn", None) or getattr(attention, "Wqkv", None)
    queries = attention.q_proj(hidden) if joint is None else joint(hidden).chunk(3, dim=-1)[0]
    return queries[0].unflatten(-1, (heads, -1)).transpose(0, 1).double()


def rope_pairs(family: str) -> list[tuple[int, int, float]]:
    """The pairs of dimensions that a family's RoPE turns, and by how much a position: base 10000."""
    if family == "llama":
        return [(f, f + 7, 10000 ** (-f / 7)) for f in range(7)]
    return [(2 * f, 2 * f + 1, 10000 ** (-f / 3)) for f in range(3)] if family == "gptj" else []


CALIBRATION = distinct(23, 3, 19).tolist()  # what a calibration pass reads


@functools.cache
def calibration_queries(family: str) -> list[list[list[tuple[int, list[float]]]]]:
    """[L][query heads]: position and query before RoPE, of all that a stock model makes of `CALIBRATION`."""
    model, heads = stock(family), CONFIGS[family].get("num_attention_heads", 3)
    rows: list[list[list[tuple[int, list[float]]]]] = [[[] for _ in range(heads)] for _ in range(LAYERS)]
    for ids in CALIBRATION:
        visible = torch.ones(LAYERS, heads, len(ids), len(ids)).tril().bool()
        queries: list[Tensor] = []
        with torch.inference_mode(), masks_by_hand(model, visible, [], queries):
            model(torch.tensor([ids]))
        for layer, head in product(range(LAYERS), range(heads)):
            rows[layer][head] += enumerate(queries[layer][head].tolist())
    return rows


@functools.cache
def main_directions(family: str) -> list[list[list[float]]]:
    """[L][query heads][D]: of these queries, turned by hand."""
    pairs = rope_pairs(family)
    turned = [
        [[oracles.rotated(query, place, pairs) for place, query in head] for head in layer]
        for layer in calibration_queries(family)
    ]
    return [[oracles.main_direction(vectors) for vectors in layer] for layer in turned]


@functools.cache
def mean_queries(family: str) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """[L][query heads][D], [L][query heads][n]: the mean of these queries, and the mean length of each pair."""
    heads = [[[query for _, query in head] for head in layer] for layer in calibration_queries(family)]
    means = [[[sum(column) / len(rows) for column in zip(*rows, strict=True)] for rows in layer] for layer in heads]
    sizes = [
        [[sum(math.hypot(q[a], q[b]) for q in rows) / len(rows) for a, b, _ in rope_pairs(family)] for rows in layer]
        for layer in heads
    ]
    return means, sizes


class Witness:
    """Steps one unpadded row through a stock model, deciding with an oracle what each head may still see."""

    def __init__(self, family: str, name: str, prompt: Sequence[int], new: Sequence[int], seed: int) -> None:
        self.model, self.case, self.pairs = stock(family), CASES[name], rope_pairs(family)
        self.method = self.case.method
        self.family = family
        self.ids, self.prompt, self.seed, self.new = [*prompt, *new], len(prompt), seed, len(new)
        calibrated = self.method.needs.calibration
        self.directions = main_directions(family) if calibrated else []
        self.query_means, self.pair_sizes = mean_queries(family) if calibrated else ([], [])
        self.budget = len(prompt) * RATIO[0] // RATIO[1]
        self.critical = self.case.select.values == "critical" or self.method.needs.output_projection
        self.budgets = [self.budget] * LAYERS  # by layer, as soon as the prompt was read
        count = len(self.ids)
        self.kv_heads = CONFIGS[family].get("num_key_value_heads", 3)
        heads = CONFIGS[family].get("num_attention_heads", 3)
        self.group = heads // self.kv_heads
        # ALiBi's row over two positions: minus the slope, and 0.
        biases = build_mpt_alibi_tensor(heads, 2) if family == "mpt" else torch.zeros(heads, 1, 2)
        self.slopes = [-float(bias[0, 0]) for bias in biases]
        self.visible = torch.ones(count, count).tril().bool().expand(LAYERS, heads, count, count).clone()
        self.held: list[list[list[int]]] = [[[] for _ in range(self.kv_heads)] for _ in range(LAYERS)]
        self.rows: list[list[list[Row]]] = [[[] for _ in range(self.kv_heads)] for _ in range(LAYERS)]
        self.evictions: list[list[list[int]]] = [[[] for _ in range(self.kv_heads)] for _ in range(LAYERS)]

    @torch.inference_mode()
    def run(self) -> Truth:
        kept, logits = [], []
        repeats = self.repeats() if isinstance(self.method, KVzip) else [[[] for _ in range(self.kv_heads)]] * LAYERS
        for end in range(self.prompt, len(self.ids) + 1):
            probabilities: list[Tensor] = []
            self.queries: list[Tensor] = []
            self.inputs: list[Tensor] = []
            cache = DynamicCache()
            seen = (probabilities, self.queries, None, self.inputs)
            with masks_by_hand(self.model, self.visible[:, :, :end, :end], *seen):
                ids = torch.tensor([self.ids[:end]])
                logits.append(self.model(ids, past_key_values=cache, use_cache=True).logits[0, -1])
            fresh = range(0 if end == self.prompt else end - 1, end)
            if end == self.prompt:
                self.budgets = self.layer_budgets(probabilities)
            for layer in range(LAYERS):
                stored = cache.layers[layer]
                self.layer(layer, fresh, probabilities[layer], stored.keys[0], stored.values[0], repeats[layer])
            kept.append([[list(head) for head in heads] for heads in self.held])
        return Truth(kept, logits)

    def layer_budgets(self, probabilities: list[Tensor]) -> list[int]:
        """Slots of every layer; probabilities [L] of [heads, N, N]: of the whole prompt."""
        if isinstance(self.method, PyramidKV):
            return oracles.pyramid_budgets(self.budget, self.prompt, self.method.window, LAYERS, self.method.beta)
        if isinstance(self.method, CAKE):
            each = [oracles.cake_preference(self.last_rows(rows), self.prompt) for rows in probabilities]
            return oracles.cake_budgets(self.budget, self.prompt, self.method.window, each)
        return self.budgets

    def last_rows(self, probabilities: Tensor, heads: slice = slice(None)) -> list[list[Row]]:
        """What the prompt's last three queries look at, in each query head; probabilities [heads, N, N]."""
        rows = probabilities[heads, self.prompt - 3 : self.prompt].tolist()
        return [[dict(enumerate(row)) for row in head] for head in rows]

    def repeats(self) -> list[list[list[Repeat]]]:
        """By layer and kv head: what is seen of the prompt behind its first token, fed again by fives.

        Each time behind the prompt alone, and behind the five tokens before it.
        """
        found: list[list[list[Repeat]]] = [[[] for _ in range(self.kv_heads)] for _ in range(LAYERS)]
        prompt = self.ids[: self.prompt]
        for start in range(1, self.prompt, 5):
            ids = [*prompt, *(prompt[start - 5 : start] if start > 1 else []), *prompt[start : start + 5]]
            seen: list[Tensor] = []
            norms: list[Tensor] = []
            causal = torch.ones(len(ids), len(ids)).tril().bool().expand(*self.visible.shape[:2], -1, -1)
            with masks_by_hand(self.model, causal, seen, [], norms):
                self.model(torch.tensor([ids]))
            fed, chunk = slice(self.prompt, None), range(start, min(start + 5, self.prompt))
            for layer, h in product(range(LAYERS), range(self.kv_heads)):
                heads = seen[layer][h * self.group : (h + 1) * self.group, fed].tolist()
                rows = [[dict(enumerate(row)) for row in head] for head in heads]
                found[layer][h].append(Repeat(chunk, rows, norms[layer][fed].tolist()))
        return found

    def layer(
        self, layer: int, fresh: range, probabilities: Tensor, keys: Tensor, values: Tensor, repeats: list[list[Repeat]]
    ) -> None:
        noise = self.noise(layer, fresh)
        for h in range(self.kv_heads):
            self.held[layer][h] += fresh
            self.rows[layer][h] += [self.row(layer, h, q, probabilities, noise) for q in fresh]
        pasts = [self.past(layer, h, probabilities, keys[h], values[h], repeats[h]) for h in range(self.kv_heads)]
        for past in pasts:
            past.layer = pasts
        for h, stay in enumerate(self.decide(layer, pasts)):
            self.keep(layer, h, stay, fresh[-1])

    def decide(self, layer: int, pasts: list[Past]) -> list[list[int]]:
        """What every head of a layer keeps, ascending."""
        oracle = self.case.oracle
        assert oracle is not None
        return [sorted(oracle(past)) if len(past.held) > past.room else list(past.held) for past in pasts]

    def keep(self, layer: int, h: int, stay: list[int], newest: int) -> None:
        """From the position behind the newest on, a head sees nothing but what stays."""
        if len(stay) < len(self.held[layer][h]):
            self.evictions[layer][h].append(newest)
        gone = [p for p in range(newest + 1) if p not in stay]
        self.visible[layer, h * self.group : (h + 1) * self.group, newest + 1 :, gone] = False
        self.held[layer][h] = stay

    def past(
        self, layer: int, h: int, probabilities: Tensor, keys: Tensor, values: Tensor, repeats: list[Repeat]
    ) -> Past:
        """What one kv head has seen; keys, values [N, D]: its own."""
        return Past(
            self.rows[layer][h], self.held[layer][h], self.budgets[layer] - 1, self.budgets[layer], self.prompt,
            heads=self.rows[layer], model=self.rows, head=h,
            norms=dict(enumerate(keys.norm(dim=-1).tolist())), noise=self.births(layer, h),
            evictions=self.evictions[layer][h], keys=dict(enumerate(keys.double().tolist())),
            values=dict(enumerate(values.double().tolist())),
            newest_rows=self.newest_rows(layer, h, probabilities), pairs=self.pairs,
            slopes=self.slopes[h * self.group : (h + 1) * self.group],
            output_norms=self.output_norms(layer, h, values.double()),
            output_sizes=self.output_norms(layer, h, values.double(), order=1) if self.critical else [],
            directions=self.of_heads(self.directions, layer, h),
            query_means=self.of_heads(self.query_means, layer, h),
            pair_sizes=self.of_heads(self.pair_sizes, layer, h),
            queries=self.queries[layer][h * self.group : (h + 1) * self.group].tolist(),
            repeats=repeats,
            head_rows=self.last_rows(probabilities, slice(h * self.group, (h + 1) * self.group)),
            sketch=self.sketch(layer, h, keys.shape[-1]), predicted=self.predicted(layer, h),
        )  # fmt: skip

    def of_heads(self, each: list[list[list[float]]], layer: int, h: int) -> list[list[float]]:
        """What belongs to a kv head's query heads; nothing where nothing was calibrated."""
        return each[layer][h * self.group : (h + 1) * self.group] if each else []

    def row(self, layer: int, h: int, q: int, probabilities: Tensor, noise: Tensor | None) -> Row:
        """One row, summed over the query heads of a kv head, as the method's score sees it."""
        result: Row = {}
        spec = self.method.score_spec
        for i in range(h * self.group, (h + 1) * self.group):
            row = {p: float(probabilities[i, q, p]) for p in self.held[layer][h] if p <= q}
            if noise is not None and isinstance(self.method, Keyformer):
                step = max(0, q - self.prompt + 1)
                adjust = {p: float(noise[i, q, p]) for p in row}
                row = oracles.tempered(row, adjust, 1.0 + step * (2.0 - 1.0) / self.new)
            for p, a in row.items():
                result[p] = result.get(p, 0.0) + a
        assert spec is None or abs(sum(result.values()) - self.group) < 1e-4
        return result

    def newest_rows(self, layer: int, h: int, probabilities: Tensor) -> list[Row]:
        """The newest query's attention to what the kv head holds, in each of its query heads."""
        heads = range(h * self.group, (h + 1) * self.group)
        return [{p: float(probabilities[i, -1, p]) for p in self.held[layer][h]} for i in heads]

    def output_norms(self, layer: int, h: int, values: Tensor, order: int = 2) -> list[Row]:
        """The norm of values [N, D] behind the output projection, in each query head of the kv head."""
        attention = [m for m in self.model.modules() if type(m).__name__.endswith("Attention")][layer]
        name = next(name for name in ("o_proj", "out_proj", "c_proj") if hasattr(attention, name))
        weight = getattr(attention, name).weight.double()
        weight = weight.T if name == "c_proj" else weight  # [width, heads * D]
        blocks = weight.split(values.shape[1], dim=1)[h * self.group : (h + 1) * self.group]
        return [dict(enumerate((values @ block.T).norm(p=order, dim=-1).tolist())) for block in blocks]

    def noise(self, layer: int, fresh: range) -> Tensor | None:
        if not isinstance(self.method, Keyformer):
            return None
        at = torch.arange(fresh[-1] + 1)[None]
        return Noise().draw(torch.tensor([self.seed]), layer, self.kv_heads * self.group, at, at[:, None])[0]

    def sketch(self, layer: int, h: int, width: int) -> list[list[float]]:
        """Compactor's draws, [D][sketch]."""
        if not isinstance(self.method, Compactor):
            return []
        made = sketch_matrix(torch.tensor([self.seed]), layer, self.kv_heads, width, self.method.sketch)
        return made[0, h].double().tolist()

    def predicted(self, layer: int, h: int) -> Row:
        """What the drawn surrogate says of every token, by what the layer gets at it."""
        if not isinstance(self.method, KVzap):
            return {}
        made = surrogate(self.family)
        scores = self.inputs[layer] @ made.weight[layer, h].double() + made.bias[layer, h].double()
        return dict(enumerate(scores.tolist()))

    def births(self, layer: int, h: int) -> Row:
        if not isinstance(self.method, Random | VaSE):
            return {}
        at = torch.arange(len(self.ids))[None, None]
        fixed = isinstance(self.method, Random) and not self.method.redraw
        eviction = None if fixed else torch.tensor([max(self.held[layer][h])])
        drawn = self.method.draws(at, torch.tensor([self.seed]), layer, self.kv_heads, eviction)
        return dict(enumerate(drawn[0, h].tolist()))


SEQUENCES = distinct(11, len(LENGTHS), max(LENGTHS) + NEW)
PROMPTS = [SEQUENCES[row, NEW : NEW + n].tolist() for row, n in enumerate(LENGTHS)]
CONTINUATION = SEQUENCES[:, :NEW]


@functools.cache
def truth(family: str, name: str, row: int) -> Truth:
    return Witness(family, name, PROMPTS[row], CONTINUATION[row].tolist(), SEEDS[row]).run()


@functools.cache
def calibration(family: str) -> QueryCalibration:
    return calibrate_queries(tiny(family), CALIBRATION)


def cache_of(family: str, name: str, rows: Sequence[int], **options: Any) -> EvictionCache:
    method = CASES[name].method
    place = {"positions": "original", "select": CASES[name].select} | options
    if method.needs.calibration:
        place["calibration"] = calibration(family)
    if method.needs.surrogate:
        place["surrogate"] = surrogate(family)
    budget = Budget(kv_ratio=RATIO[0] / RATIO[1]) if method.evicts else None
    seeds = [SEEDS[row] for row in rows]
    return EvictionCache(tiny(family), method, budget, max_new_tokens=NEW, seeds=seeds, **place)  # type: ignore[arg-type]


def agree(fed: Fed, family: str, name: str, rows: Sequence[int]) -> None:
    for i, row in enumerate(rows):
        want = truth(family, name, row)
        for step in range(NEW + 1):
            for layer in range(LAYERS):
                assert fed.kept[step][layer][i] == want.kept[step][layer], f"row {row}, step {step}, layer {layer}"
            torch.testing.assert_close(fed.logits[step][i], want.logits[step], rtol=1e-4, atol=1e-4)


def evict_batch(family: str, name: str, rows: Sequence[int], *, chunk: int | None = None, **options: Any) -> Fed:
    prompt, mask = pad_left([PROMPTS[row] for row in rows], 0, "cpu")
    cache = cache_of(family, name, rows, prompt_tokens=prompt.shape[1], **options)
    return feed(cache, tiny(family), prompt, CONTINUATION[list(rows)], mask=mask, chunk=chunk)


def shares_layers(case: Case) -> bool:
    """Whether layers have budgets of their own."""
    return type(case.method.layer_budgets) is not LayerBudgets


def each_case(*always: str) -> Iterator[Any]:
    """Every method in every family: `always` and one more, in turn, in every run of the tests, the others slow.

    What only wraps a method, or knows no family, is quick in llama alone.
    """
    wraps = [name for name, case in METHODS.items() if shares_layers(case) or not case.select.plain] + ["kvzap"]
    others = [family for family in FAMILIES if family not in always]
    for family, (number, name) in product(FAMILIES, enumerate(METHODS)):
        quick = (family == "llama") if name in wraps else family in (*always, others[number % len(others)])
        yield pytest.param(family, name, marks=[] if quick else pytest.mark.slow, id=f"{family}-{name}")


@pytest.mark.parametrize(("family", "name"), list(each_case("llama")))
def test_one_row(family: str, name: str) -> None:
    agree(evict_batch(family, name, [1]), family, name, [1])


@pytest.mark.parametrize(("family", "name"), list(each_case()))
def test_padded_batch_in_chunks(family: str, name: str) -> None:
    """Chunks of 5 columns: the short row's first chunk is mostly padding."""
    agree(evict_batch(family, name, [0, 2, 1], chunk=5), family, name, [0, 2, 1])


@pytest.mark.parametrize(
    ("name", "mode"),
    in_turn([n for n, case in METHODS.items() if not isinstance(case.method, ChoosesSlots)], ["compact", "mask"], of=2),
)
def test_other_modes(name: str, mode: str) -> None:
    agree(evict_batch("llama", name, [2, 0], mode=mode, chunk=7), "llama", name, [2, 0])


def test_the_budget_bites() -> None:
    """No two attention methods keep the same, so that agreeing means something."""
    names = ("window", "key_attention", "h2o", "keyformer", "a2sf", "tova", "knorm", "random", "spatten")
    names += ("keydiff", "caote", "rkv", "rkv_release", "vatp")
    for family in FAMILIES:
        kept = [repr(truth(family, name, 0).kept) for name in names]
        assert len(set(kept)) == len(kept), family


# -- how peers go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_slot_order_is_scrambled_but_keys_values_and_scores_stay_with_their_position(mode: str) -> None:
    """Every slot's key and value are those of a full cache at the position the slot claims."""
    everything = evict_batch("llama", "full", [0, 1]).cache.layer_states[0].slots
    assert everything is not None
    scrambled = False
    for name in ("h2o", "keyformer", "a2sf", "knorm", "window"):
        cut = evict_batch("llama", name, [0, 1], mode=mode).cache.layer_states[0].slots
        assert cut is not None
        for b, h in product(range(2), range(3)):
            where = {int(p): s for s, p in enumerate(everything.positions[b, h, : everything.length]) if p >= 0}
            at = cut.positions[b, h, : cut.length].tolist()
            scrambled |= [p for p in at if p >= 0] != sorted(p for p in at if p >= 0)
            for s, p in enumerate(at):
                if p >= 0:  # layer 0: keys depend on nothing that was evicted
                    torch.testing.assert_close(cut.keys[b, h, s], everything.keys[b, h, where[p]])
                    torch.testing.assert_close(cut.values[b, h, s], everything.values[b, h, where[p]])
    assert scrambled == (mode == "overwrite")  # else this test shows nothing


def test_chunks_never_evict_before_the_last_one() -> None:
    """Everything is there until the prompt has ended: the first chunk alone exceeds the budget."""
    prompt = torch.tensor([PROMPTS[0]])
    cache = cache_of("llama", "h2o", [0], prompt_tokens=17)
    model = tiny("llama")
    with torch.inference_mode():
        for end, start in ((11, 0), (16, 11)):
            model(prompt[:, start:end], past_key_values=cache, use_cache=True)
            assert cache.kept_positions(0)[0][0] == list(range(end))
        model(prompt[:, 16:], past_key_values=cache, use_cache=True)
    assert [len(h) for h in cache.kept_positions(0)[0]] == [7, 7, 7]


def test_every_method_has_an_oracle() -> None:
    """Others are looked at elsewhere: Ideal by query, mergers (test_rewriting.py), EpiKV (test_authors.py)."""
    covered = {type(case.method) for case in METHODS.values()}
    assert covered | {Ideal, D2O, CaM, EpiKV} == {getattr(kvexp.methods, name) for name in kvexp.methods.__all__}
