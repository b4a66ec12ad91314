"""Removals as masks against caches built without the token, planted models, plans, measures, and the command."""

from __future__ import annotations

import collections
import copy
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from planted import PLANTS
from scipy.stats import spearmanr
from scipy.stats import t as student
from test_eviction_log import case_of
from test_replay import made
from test_sweep_divergence import ONE_BY_ONE
from tiny import CONFIGS, stock, tiny
from transformers import DynamicCache

from experiments.studies.causal import (
    METHODS,
    REMOVALS,
    SCORES,
    ForcedAnswer,
    Removal,
    RemovalCache,
    RemovalLayer,
    RemovalPlan,
    causal_tables,
    company_rows,
    everything_evicted,
    main,
    mass_kept,
    mass_of_top,
    mass_rows,
    mean_with_interval,
    method_settings,
    pair_rows,
    precision_at,
    prompt_scores,
    rank_correlation,
    read_frame,
    read_measured,
    removal_units,
    score_quality,
    score_rows,
    superiority,
    weighted_ranks,
)
from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.case import Case
from kvexp.diagnose.log import EvictionRecord, watch
from kvexp.generate import GenerationParams, divergence_from_full
from kvexp.hf.layers import EvictionCacheLayer
from kvexp.methods import H2O, TOVA, Full, Random, SnapKV, StreamingLLM, Window
from kvexp.run.batches import settings_at
from kvexp.util import ConfigError

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
    monkeypatch.setattr("experiments.studies.causal.first_layer", lambda trial: 0)
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
        with pytest.raises(ConfigError, match=f"{next(iter(bad))} must be"):
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


# `python -m experiments.studies.causal`: from a run to tables and a picture; measures of scores on arrays whose
# answer is known.


WHOSE = {"h2o", "tova", "window", "streaming_llm", "answer_attention", "answer_attention_value", "answer_output_change"}
SMALL = ("--first", "2", "--tokens", "20", "--layers", "8", "--heads", "8", "--new-tokens", "6")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made(tmp_path_factory.mktemp("causal"), *ONE_BY_ONE)


@pytest.mark.slow
def test_the_command_measures_prints_draws_and_goes_on_where_it_was(run, tmp_path, capsys):
    picture, table = tmp_path / "causes.svg", tmp_path / "removals.csv"
    words = [str(run.path), *SMALL, "--methods", "h2o", "tova", "window"]
    scores = tmp_path / "scores.csv"
    assert main([*words, "--draw", str(picture), "--csv", str(table), "--scores", str(scores)]) == 0
    told = capsys.readouterr().out
    for title in (
        "effect of removing tokens",
        "by class of token",
        "by position",
        "where the effect is",
        "wrong answers",
        "differences within an example",
    ):
        assert title in told
    assert "2 examples" in told and "a minute" in told and "answer_output_change" in told
    heads = (Path(__file__).parents[2] / "docs" / "causes.csv").read_text().splitlines()[0]
    first, *rest = scores.read_text().splitlines()
    assert first == heads and len(rest) == len(WHOSE) - 1 and all(line.startswith("testbed_summary,") for line in rest)
    assert picture.read_text().startswith("<?xml") and len(pd.read_csv(table)) > 2 * 36
    names = [name for name in {line["example"] for line in run.rows()} if read_measured(run, name)]
    assert len(names) == 2
    before = {name: read_frame(run, name, REMOVALS) for name in names}
    assert main([*words[:-1], "streaming_llm"]) == 0  # another method of the same removals
    for name in names:
        pd.testing.assert_frame_equal(before[name], read_frame(run, name, REMOVALS))
        assert set(read_frame(run, name, SCORES)["method"]) == WHOSE
    capsys.readouterr()


def test_the_tables_hold_what_the_files_say(run, capsys):
    assert main([str(run.path), *SMALL, "--methods", "h2o", "window", "random"]) == 0
    capsys.readouterr()
    examples = [read_measured(run, row["example"]) for row in run.rows()]
    tables = causal_tables(run, [each for each in examples if each is not None])
    rows = {row["method"]: row for row in score_rows(tables)}
    kept = {name: rows[name]["kept"] for name in ("h2o", "window", "random")}
    assert all(0.25 < value < 0.42 for value in kept.values())  # a sample's estimate of the budget, 0.3
    assert math.isnan(rows["answer_attention"]["mass"]) and not math.isnan(rows["answer_attention"]["rho"])
    assert sum(row["weight"] for row in mass_rows(tables)) == pytest.approx(2)  # once by class, once by position
    assert sum(row["mass"] for row in mass_rows(tables)) == pytest.approx(2)
    lines = read_frame(run, examples[0].example, METHODS)
    h2o = lines[(lines["method"] == "h2o") & (lines["layer"] < 0)].iloc[0]
    assert h2o["kl"] > 0 and 0 <= h2o["gone"] < 1 and h2o["judged"] == examples[0].judged


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "h3o"], "no method 'h3o'; one of a2sf"),
        (["--methods", "full"], "no method 'full'"),
        (["--methods", "pqcache"], "pqcache keeps everything and chooses anew for every token"),
        (["--tokens", "some"], "--tokens must be a whole number or all"),
        (["--span", "0"], "span must be at least 1"),
        (["--first", "0"], "first must be at least 1"),
        (["--example", "nobody"], "no example of the run named 'nobody'"),
        (["--draw", "causes.gif"], "must end in .png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_loads(run, words, told, capsys, monkeypatch):
    monkeypatch.setattr("kvexp.diagnose.case.load", lambda *_: pytest.fail("a model was loaded"))
    assert main([str(run.path), *words]) == 2
    assert told in capsys.readouterr().err


def test_all_methods_are_those_with_a_score_and_the_others_are_named(run, capsys):
    found = method_settings(settings_at(run), ["all"])
    told = capsys.readouterr().out
    assert {"h2o", "tova", "snapkv", "random", "window", "streaming_llm"} <= set(found)
    assert not {"full", "ideal", "quest", "pqcache"} & set(found)
    assert (
        "without pqcache: pqcache keeps everything and chooses anew for every token" in told
        and "without full" not in told
    )
    assert found["tova"].cache.budget == found["h2o"].cache.budget
    with pytest.raises(ConfigError, match="one of a2sf"):
        method_settings(settings_at(run), ["nothing"])


# -- measures ---------------------------------------------------------------------------------------------------------


def test_equal_weights_give_spearmans_correlation():
    draws = np.random.default_rng(1)
    one, other = draws.normal(size=50), draws.integers(0, 6, 50).astype(float)
    weights = np.full(50, 3.0)
    assert rank_correlation(one, other, weights) == pytest.approx(spearmanr(one, other).statistic)
    assert rank_correlation(one, one**3, weights) == pytest.approx(1)
    assert math.isnan(rank_correlation(one, np.ones(50), weights)) and math.isnan(
        rank_correlation(one[:1], one[:1], weights[:1])
    )


def test_a_weight_is_so_many_tokens():
    values, weights = np.array([3.0, 1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0, 1.0])
    each = np.repeat(values, weights.astype(int))
    ranks = {value: np.mean([i + 0.5 for i, other in enumerate(sorted(each)) if other == value]) for value in values}
    assert weighted_ranks(values, weights) == pytest.approx([ranks[value] for value in values])
    other = np.array([1.0, 5.0, 2.0, 9.0])
    whole = rank_correlation(each, np.repeat(other, weights.astype(int)), np.ones(7))
    assert rank_correlation(values, other, weights) == pytest.approx(whole)


def test_mass_and_precision_of_a_choice():
    effect, weights = np.array([8.0, 1.0, 1.0, 0.0]), np.ones(4)
    best, worst = np.array([1.0, 0, 0, 0]), np.array([0, 0, 0, 1.0])
    assert mass_kept(effect, best, weights) == pytest.approx(0.8) and mass_kept(effect, worst, weights) == 0
    assert precision_at(effect, best, weights, 0.25) == 1 and precision_at(effect, worst, weights, 0.25) == 0
    assert precision_at(effect, np.full(4, 0.25), weights, 0.25) == pytest.approx(0.25)
    assert precision_at(effect, best, np.array([2.0, 1, 1, 1]), 0.6) == pytest.approx(2 / 3)
    assert math.isnan(mass_kept(np.zeros(4), best, weights))
    assert mass_of_top(effect, weights, 0.25) == pytest.approx(0.8) and mass_of_top(effect, weights, 1) == 1
    assert mass_of_top(effect[::-1], np.array([1.0, 1, 1, 2]), 0.2) == pytest.approx(8 / 18)  # half of the first


@pytest.mark.slow
def test_the_sampling_error_is_that_of_other_samples():
    """Draw many samples of one population: the spread of the estimates is what one sample says it is."""
    draws = np.random.default_rng(7)
    effect = draws.lognormal(sigma=1.5, size=2000)
    score = np.log(effect) + draws.normal(size=2000)
    kept = (score > np.quantile(score, 0.5)).astype(float)
    found = []
    for seed in range(40):
        picked = draws.choice(2000, 100, replace=False)
        found.append(score_quality(effect[picked], score[picked], kept[picked], np.full(100, 20.0), seed))
    for name in ("rho", "mass"):
        real = np.std([getattr(each, name) for each in found], ddof=1)
        said = np.mean([getattr(each, f"{name}_error") for each in found])
        assert 0.7 < said / real < 1.4, (name, said, real)
    truth = spearmanr(effect, score).statistic
    assert np.mean([each.rho for each in found]) == pytest.approx(truth, abs=0.03)


def test_superiority_is_the_share_of_pairs_won():
    some, others = np.array([1.0, 3.0]), np.array([0.0, 1.0, 2.0])
    assert superiority(some, others) == pytest.approx((1 + 0.5 + 3) / 6) and math.isnan(superiority(some, others[:0]))


def test_few_examples_have_students_interval_and_fewer_have_none():
    values = np.random.default_rng(3).normal(size=12)
    mean, low, high = mean_with_interval(np.append(values, np.nan))
    wanted = student.interval(0.95, 11, values.mean(), values.std(ddof=1) / math.sqrt(12))
    assert mean == pytest.approx(values.mean()) and (low, high) == pytest.approx(wanted)
    assert mean_with_interval(values[:4])[0] == pytest.approx(values[:4].mean())
    assert math.isnan(mean_with_interval(values[:4])[1]) and math.isnan(mean_with_interval(values[:0])[0])


def test_differences_are_taken_within_an_example():
    """A score that is 0.2 behind in every example is so exactly, however much the examples differ."""
    draws, rows = np.random.default_rng(5), []
    for example, base in enumerate(draws.uniform(0.3, 0.9, 6)):
        named = {"example": str(example), "precision": 0.6, "top": 0.6, "kept": 0.5}
        rows.append(named | {"method": "answer_attention", "rho": base, "mass": math.nan, "precision": math.nan})
        rows.append(named | {"method": "h2o", "rho": base - 0.2, "mass": 0.5 + 0.1 * (example % 2)})
    first, last = pair_rows(pd.DataFrame(rows))
    assert (first["method"], last["method"]) == ("answer_attention", "h2o") and first["behind"] == 0
    assert [last[key] for key in ("behind", "behind_low", "behind_high")] == pytest.approx([0.2] * 3)
    assert last["precision"] == pytest.approx(0.1) and last["mass_low"] < last["mass"] == pytest.approx(0.05)
    assert math.isnan(first["mass"]) and math.isnan(first["mass_low"])


def test_what_goes_with_a_divergence_is_asked_across_the_methods_of_one_example():
    """KL rises with the effect evicted and falls with the tokens gone; the level of an example says nothing."""
    names = ["a", "b", "c", "d", "e", "f"]
    quality, joint = [], []
    for example, level in (("x", 1.0), ("y", 50.0)):
        for place, name in enumerate(names):
            quality.append({"example": example, "method": name, "rho": 0.5, "mass": 0.9 - 0.1 * place})
            joint.append({"example": example, "method": name, "kl": level + place, "gone": -place, "gone_mass": 0.1})
    found = {row["what"]: row for row in company_rows(pd.DataFrame(quality), pd.DataFrame(joint))}
    assert found["evicted"]["rho"] == pytest.approx(1) and found["gone"]["rho"] == pytest.approx(-1)
    assert found["evicted"]["n"] == 2 and math.isnan(found["rho"]["rho"])  # the same for all: nothing to go by
    assert company_rows(pd.DataFrame(quality[:4]), pd.DataFrame(joint[:4])) == []
