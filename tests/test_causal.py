"""Removals as masks against caches built without the token, planted models, plans, measures, and the command."""

from __future__ import annotations

import collections
import copy
import math

import pandas as pd
import pytest
import torch
from planted import PLANTS
from test_diagnose_log import case_of
from tiny import CONFIGS, stock, tiny
from transformers import DynamicCache

from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.case import Case
from kvexp.diagnose.causal.prompt_scores import everything_evicted, prompt_scores
from kvexp.diagnose.causal.removal_effects import ForcedAnswer
from kvexp.diagnose.causal.removal_plan import RemovalPlan, removal_units
from kvexp.diagnose.causal.search_order import ordered_by_effect
from kvexp.diagnose.search import cause
from kvexp.diagnose.undo import UndoneEvictions
from kvexp.diagnose.watching import EvictionRecord, watch
from kvexp.errors import ConfigError
from kvexp.generate import GenerationParams, divergence_from_full
from kvexp.methods import H2O, TOVA, Full, Random, SnapKV, StreamingLLM, Window
from kvexp.models.cache import EvictionCacheLayer
from kvexp.models.removal import Removal, RemovalCache, RemovalLayer

QUESTION = [50, 51]


def forced(case, rows=4):
    return ForcedAnswer(case, 32, rows)


def kl_of(full, other):
    full, other = full.log_softmax(-1), other.log_softmax(-1)
    return float((full.exp() * (full - other)).sum(-1).mean())


class RaggedLayer:
    """A layer whose heads hold lists of tokens of their own length: a token that is removed is not there at all.

    Knows scale, ALiBi and nothing else of kvexp's attention; grows as tokens are fed one by one.
    """

    def __init__(self, keys, values, removed):
        self.seq_len = keys.shape[2]
        self.held = [[at for at in range(self.seq_len) if (head, at) not in removed] for head in range(keys.shape[1])]
        self.keys = [[keys[0, head, at] for at in held] for head, held in enumerate(self.held)]
        self.values = [[values[0, head, at] for at in held] for head, held in enumerate(self.held)]

    def forward(self, query, key, value, params, padding):
        group = query.shape[1] // key.shape[1]
        out = []
        for head, held in enumerate(self.held):
            held.append(self.seq_len)
            self.keys[head].append(key[0, head, 0])
            self.values[head].append(value[0, head, 0])
            keys, values = torch.stack(self.keys[head]), torch.stack(self.values[head])
            for number in range(head * group, (head + 1) * group):
                logits = params.scale * (keys @ query[0, number, 0])
                if params.alibi is not None:
                    logits = logits + params.alibi[number] * (torch.tensor(held) - self.seq_len)
                out.append(logits.softmax(-1) @ values)
        self.seq_len += 1
        return torch.stack(out)[None, :, None]


def really_removed(case, answer, removed):
    """Mean KL of the answer from caches whose heads lack these slots; removed: (layer, head, position) each."""
    logits = []
    for gone in (set(), set(removed)):
        context = case.full().prefill_prompt()
        layers = []
        for layer, state in enumerate(context.cache.layer_states):
            mine = {(head, at) for where, head, at in gone if where == layer}
            held = slice(0, state.slots.length)
            ragged = RaggedLayer(state.slots.keys[:, :, held], state.slots.values[:, :, held], mine)
            layers.append(EvictionCacheLayer(ragged, None, case.model.config))
        cache = copy.copy(context.cache)
        cache.layers, cache.sequence = layers, None
        made = [context.logits]
        with torch.no_grad():
            for number, token in enumerate([*case.question, *answer[:-1]]):
                at = torch.tensor([[len(case.prompt) + number]])
                options = {} if case.model.config.model_type == "mpt" else {"position_ids": at}
                options["attention_mask"] = at.new_ones(1, 0)
                made.append(case.model(torch.tensor([[token]]), past_key_values=cache, **options).logits[:, -1])
        logits.append(torch.cat(made)[-len(answer) :][0 if case.question else 1 :])
    return kl_of(*logits)


def slow(*names):
    """The names as parameters of slow tests: each has a quicker one beside it."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", ["llama", "mpt", *slow(*(name for name in CONFIGS if name not in ("llama", "mpt")))])
@pytest.mark.parametrize("question", [(), QUESTION], ids=["in the prompt", "after"])
def test_a_masked_forward_is_a_cache_without_the_token(family, question):
    case = case_of(family, Window(), question=question)
    measured = forced(case)
    heads = measured.heads
    trials = [
        [Removal((7,))],
        [Removal((0, 1, 2, 3))],
        [Removal((12,), ((1, 0),))],
        [Removal((5,), ((0, heads[0] - 1),)), Removal((30,), ((1, 0), (1, 1)))],
    ]
    effects = []
    for trial, effect in zip(trials, measured.effects(trials), strict=True):
        gone = [
            (layer, head, at)
            for one in trial
            for layer, count in enumerate(heads)
            for head in range(count)
            if one.places is None or (layer, head) in one.places
            for at in one.positions
        ]
        assert effect.kl == pytest.approx(really_removed(case, measured.answer, gone), rel=1e-3, abs=2e-6)
        assert effect.kl_max >= effect.kl - 1e-7
        effects.append(effect.kl)
    assert max(effects[:2]) > 1e-3 and max(effects[2:]) > 1e-6  # else nothing was removed


@pytest.mark.parametrize("family", ["llama", *slow("gpt2", "gptj", "opt")])
def test_a_masked_forward_is_hugging_faces_cache_without_the_token(family):
    case = case_of(family, Window())
    measured = forced(case)
    model, prompt, answer = stock(family), torch.tensor([case.prompt]), measured.answer
    logits = []
    for gone in ((), (9, 10)):
        cache = DynamicCache()
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True)
            left = [at for at in range(len(case.prompt)) if at not in gone]
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, left], layer.values[:, :, left]
            made = []
            for number, token in enumerate(answer[:-1]):
                at = torch.tensor([[len(case.prompt) + number]])
                made.append(model(torch.tensor([[token]]), past_key_values=cache, position_ids=at).logits[:, -1])
        logits.append(torch.cat(made))
    (effect,) = measured.effects([[Removal((9, 10))]])
    assert effect.kl == pytest.approx(kl_of(*logits), rel=1e-3, abs=2e-6)
    flips = int((logits[0].argmax(-1) != logits[1].argmax(-1)).sum())
    assert effect.flips == flips


def test_nothing_removed_is_no_effect_in_any_row_and_a_forward_leaves_the_cache_as_it_was():
    measured = forced(case_of("llama", Window()))
    trials = [[], [Removal((4,))], [], [Removal((4,))], [Removal((4,), ((0, 1),))], []]
    found = list(measured.effects(trials))
    assert [found[row].kl for row in (0, 2, 5)] == pytest.approx([0, 0, 0], abs=1e-6)
    assert found[1].kl == pytest.approx(found[3].kl, rel=1e-4) and found[1].kl > 10 * abs(found[0].kl)
    assert found[4].kl != pytest.approx(found[1].kl, rel=0.1)
    assert [list(measured.effects(trials[:2]))[1].kl, found[0].flips] == pytest.approx([found[1].kl, 0], rel=1e-4)


@pytest.mark.parametrize(
    "family", ["llama", "mpt", "gpt2", *slow(*(n for n in CONFIGS if n not in ("llama", "mpt", "gpt2")))]
)
def test_a_forward_that_begins_above_the_first_layers_has_the_effects_of_a_whole_one(family, monkeypatch):
    measured = forced(case_of(family, Window(), question=QUESTION), rows=2)
    above = [[Removal((at,), ((1, 0),))] for at in (5, 12)]
    mixed = [*above, [Removal((5,))], [], [Removal((5,), ((1, 0),)), Removal((6,), ((0, 0),))]]
    found = list(measured.effects(mixed))
    assert found[2].kl > 1e-5 and found[0].kl > 0
    computed, state = [], measured.cache.states[0]
    with monkeypatch.context() as patch:
        patch.setattr(state, "forward", lambda *some: computed.append(1) or RemovalLayer.forward(state, *some))
        again = [each.kl for each in measured.effects(above)]
        assert again == pytest.approx([each.kl for each in found[:2]], rel=1e-4, abs=2e-6) and not computed
        assert len(list(measured.effects(mixed[2:3]))) == 1 and computed == [1]
    monkeypatch.setattr("kvexp.diagnose.causal.removal_effects.first_layer", lambda trial: 0)
    for each, whole in zip(found, measured.effects(mixed), strict=True):
        assert each.kl == pytest.approx(whole.kl, rel=1e-4, abs=2e-6) and each.flips == whole.flips
        assert each.logprob == pytest.approx(whole.logprob, abs=1e-5)
    assert "forward" not in vars(measured.layers.blocks[0])


def test_what_a_cache_of_removals_cannot_start_from_is_said():
    case = case_of("llama", H2O())
    with pytest.raises(ConfigError, match="full cache of one prompt"):
        RemovalCache(case.model, case.prefill_prompt().cache)
    one = Case(case.model, case.prompt, [], case.cache, GenerationParams(max_new_tokens=1, eos=None))
    with pytest.raises(ConfigError, match="one token is predicted by the prompt"):
        forced(one)


def test_a_sliding_window_is_seen_by_removals():
    case = case_of("llama", Window())
    windowed = Case(tiny("mistral", sliding_window=9), case.prompt, [], case.cache, case.decoding)
    near, far = forced(windowed).effects([[Removal((29,))], [Removal((3,))]])
    assert near.kl > 1e-4 and far.kl == pytest.approx(0, abs=1e-6)


# -- planted models: the cause is known --------------------------------------------------------------------------------


def planted_case(name, layout, method=None):
    make, _ = PLANTS[name]
    plant = make(layout)
    cache = CacheConfig(method or Full(), None if method is None else Budget(tokens=24))
    decoding = GenerationParams(max_new_tokens=1, eos=None)
    return plant, Case(plant.model, plant.prompt, plant.steps, cache, decoding)


@pytest.mark.parametrize(
    ("name", "layout"), [("needle", "llama"), ("unseen", "mpt"), ("recency", "gpt2"), ("seen_below", "llama")]
)
def test_the_token_that_causes_the_answer_has_by_far_the_largest_effect(name, layout):
    plant, case = planted_case(name, layout)
    measured = forced(case, rows=16)
    assert measured.answer == [plant.answer]
    found = list(measured.effects([[Removal((at,))] for at in range(len(case.prompt))]))
    order = sorted(range(len(found)), key=lambda at: -found[at].kl)
    assert order[0] in plant.vital and found[order[0]].flips == 1
    assert found[order[0]].kl > 20 * found[order[1]].kl


def test_the_layer_and_head_of_the_cause_are_found():
    plant, case = planted_case("seen_below", "llama")
    measured, (at,) = forced(case), plant.vital
    head = plant.head % measured.heads[0]
    places = [(layer, number) for layer in range(2) for number in range(measured.heads[layer])]
    found = dict(zip(places, measured.effects([[Removal((at,), (place,))] for place in places]), strict=True))
    assert found.pop((plant.layer, head)).flips == 1
    assert max(effect.kl for effect in found.values()) < 1e-6


def test_a_cause_that_stands_five_times_is_none_of_the_five_alone():
    plant, case = planted_case("induction", "gpt2")
    alone, together = forced(case).effects([[Removal(plant.vital[:1])], [Removal(plant.vital)]])
    assert alone.flips == 0 and together.flips == 1 and together.kl > 100 * alone.kl


# -- scores of methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [(), QUESTION], ids=["in the prompt", "after"])
def test_the_scores_are_those_of_each_method_alone(question):
    case = case_of("llama", H2O(), question=question)
    methods = {
        "h2o": case.cache,
        "tova": CacheConfig(TOVA(), Budget(kv_ratio=0.4)),
        "random": CacheConfig(Random(), Budget(kv_ratio=0.4)),
        "streaming_llm": CacheConfig(StreamingLLM(), Budget(tokens=9)),
        "roomy": CacheConfig(H2O(), Budget(tokens=60)),
    }
    found = prompt_scores(case, methods)
    assert list(found) == list(methods)
    for name, config in methods.items():
        seen = EvictionRecord()
        case.prefill_prompt(lambda cache, seen=seen: watch(cache, seen), config)
        table = seen.table()
        gone = set(zip(*(table[key].tolist() for key in ("layer", "head", "position")), strict=True))
        kept = found[name].kept
        assert gone == {tuple(place) for place in (~kept).nonzero().tolist()}
        places = zip(*(table[key].tolist() for key in ("layer", "head", "position")), strict=True)
        for place, value in zip(places, table["score"].tolist(), strict=True):
            assert float(found[name].priority[place]) == pytest.approx(value, rel=1e-5)
        assert not bool((found[name].protected & ~kept).any())
    assert bool(found["roomy"].kept.all()) and len(found["tova"].kept[0, 0]) == len(case.prompt)


def test_the_answers_own_attention_is_hugging_faces():
    case = case_of("llama", Window())
    measured = forced(case)
    ids = torch.tensor([[*case.prompt, *measured.answer[:-1]]])
    with torch.no_grad():
        whole = stock("llama")(ids, output_attentions=True)
    scores, tokens = measured.answer_scores(), len(case.prompt)
    for layer, weights in enumerate(whole.attentions):
        mine = weights[0, :, tokens:, :tokens].sum(1)
        mine = mine.unflatten(0, (measured.heads[layer], -1)).sum(1)
        torch.testing.assert_close(scores["answer_attention"][layer], mine, rtol=1e-4, atol=1e-5)


# -- plans -------------------------------------------------------------------------------------------------------------

CLASSES = ["first"] * 4 + ["other"] * 150 + ["digits"] * 3 + ["names"] * 30 + ["last"] * 8


def test_a_plan_stands_for_every_token_once():
    units = removal_units(RemovalPlan(tokens=60, span=8, layers=40, heads=30), CLASSES, [3, 3, 3, 3], seed=5)
    by_kind = collections.defaultdict(list)
    for unit in units:
        by_kind[unit.kind].append(unit)
    total = {kind: sum(unit.weight * len(unit.positions) for unit in mine) for kind, mine in by_kind.items()}
    count = len(CLASSES)
    assert total == pytest.approx({"token": count, "span": count, "layer": 4 * count, "head": 12 * count})
    chosen = [unit.positions[0] for unit in by_kind["token"]]
    assert len(set(chosen)) == len(chosen) and abs(len(chosen) - 60) <= 6
    assert {0, 1, 2, 3, *range(154, 157), *range(187, 195)} <= set(chosen)
    for name in set(CLASSES):
        weight = sum(unit.weight for unit in by_kind["token"] if CLASSES[unit.positions[0]] == name)
        assert weight == pytest.approx(CLASSES.count(name))
    assert collections.Counter(unit.layer for unit in by_kind["layer"]) == {0: 10, 1: 10, 2: 10, 3: 10}
    assert [at for unit in by_kind["span"] for at in unit.positions] == list(range(count))
    again = removal_units(RemovalPlan(tokens=60, span=8, layers=40, heads=30), CLASSES, [3, 3, 3, 3], seed=5)
    assert units == again != removal_units(RemovalPlan(tokens=60, layers=40, heads=30), CLASSES, [3, 3, 3, 3], seed=6)


def test_a_plan_without_removals_of_a_kind_has_none_and_bad_numbers_are_said():
    units = removal_units(RemovalPlan(tokens=None, spans=0, layers=0, heads=0), CLASSES, [1, 1], seed=1)
    assert [unit.positions for unit in units] == [(at,) for at in range(len(CLASSES))]
    assert {unit.weight for unit in units} == {1.0} and math.isclose(sum(unit.weight for unit in units), len(CLASSES))
    for bad in ({"tokens": -1}, {"span": 0}, {"heads": -2}):
        with pytest.raises(ConfigError, match=f"--{next(iter(bad))} must be"):
            RemovalPlan(**bad)


def test_all_that_a_method_evicts_removed_at_once_is_its_divergence():
    """A method that evicts at the prompt's end alone is a removal of what it does not keep."""
    case = case_of("llama", SnapKV(window=4), tokens=12)
    measured = forced(case)
    (scores,) = prompt_scores(case, {"snapkv": case.cache}).values()
    gone = everything_evicted(scores)
    (effect,) = measured.effects([gone])
    full, variant = (one.prefill_prompt() for one in (measured.case, case))
    ((line,),) = divergence_from_full(case.model, full, [variant], [measured.answer])
    assert effect.kl == pytest.approx(sum(line.kl[1:]) / len(line.kl[1:]), rel=1e-3) and effect.kl > 1e-3
    assert effect.flips == sum(not same for same in line.same_top1[1:])


# -- the order of a search --------------------------------------------------------------------------------------------


class KnownCause:
    """A replay that is right as soon as all of `needed` are undone; counts its trials as `Replay` does."""

    size = 8

    def __init__(self, needed, tokens):
        self.needed, self.trials = set(needed), 0
        self.everything = UndoneEvictions(tuple(range(tokens)), ((0, 0), (1, 0)), 0, 9)

    def answers(self, trials):
        self.trials += len(trials)
        return [[int(self.needed <= set(trial.positions) and (1, 0) in trial.places)] for trial in trials]


@pytest.mark.parametrize("needed", [(7,), (3, 480), (20, 21, 300, 650), tuple(range(0, 700, 50))])
def test_a_search_in_the_order_of_effects_finds_the_same_in_fewer_trials(needed):
    order = [*needed, *(at for at in range(700) if at not in needed)]
    plain, ordered = (
        cause(KnownCause(needed, 700), lambda answer: answer == [1], 2000, each) for each in (None, order)
    )
    assert ordered.whole and ordered.undone.positions == needed and ordered.undone.places == ((1, 0),)
    assert ordered.trials < plain.trials and set(needed) <= set(plain.undone.positions)
    wrong = cause(KnownCause(needed, 700), lambda answer: answer == [1], 2000, order[::-1])
    assert set(needed) <= set(wrong.undone.positions)  # a bad order costs trials and finds no wrong cause


def test_positions_are_ordered_by_their_own_effect_or_their_spans():
    rows = [("span", 0, 4, 0.4), ("span", 4, 4, 2.0), ("token", 2, 1, 3.0), ("token", 5, 1, 0.0), ("head", 1, 1, 9.0)]
    removals = pd.DataFrame(rows, columns=["kind", "position", "length", "kl"])
    assert ordered_by_effect(removals, range(10)) == [2, 4, 6, 7, 0, 1, 3, 5, 8, 9]
