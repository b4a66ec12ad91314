"""Which method keeps which planted slot: the theory as a table, checked on answers and on the kept sets themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import CASES
from planted import ID, PLANTS, WORDS, Plant, T, induction, lay, sink
from torch import Tensor

import kvexp.methods
from kvexp.core import Budget, EvictionContext, Method, Simulated, Surrogate
from kvexp.core.budget_shares import LayerBudgets
from kvexp.generate import generate
from kvexp.generate.inputs import GenerationParams
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.generate.prefill import forward_last
from kvexp.hf import EvictionCache, calibrate_queries, train_surrogate
from kvexp.methods import (
    H2O,
    TOVA,
    CaM,
    EpiKV,
    Full,
    KeyAttention,
    Keyformer,
    KNorm,
    KVzipPlus,
    OpenVINO,
    Random,
    SnapKV,
    SpAtten,
    StreamingLLM,
    VaSE,
    Window,
)

BUDGET = Budget(tokens=12)  # of 96; eleven stay when the question comes, the twelfth is the question

TABLE = {name: case for name, case in CASES.items() if case.planted}


def ask(plant: Plant, method: Method, budget: Budget | None, batch: int = 1) -> tuple[Tensor, list[set[int]]]:
    """Logits [batch, V] of the answer, and what the vital head held when the question came; row i has noise seed i."""
    learned = plant.model.config.model_type == "gpt2"
    cache = EvictionCache(
        plant.model,
        method,
        budget if method.evicts else None,
        mode="auto",
        positions="original" if learned else None,  # streaming_llm cannot renumber learned positions
        max_new_tokens=len(plant.steps),
        seeds=list(range(batch)),
        calibration=calibrate_queries(plant.model, [plant.prompt]) if method.needs.calibration else None,
        surrogate=learned_of(plant) if method.needs.surrogate else None,
    )
    ids = torch.tensor([plant.prompt]).expand(batch, -1)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        logits = forward_last(plant.model, ids, mask, cache)
        for step in plant.steps:
            held = [set(row[plant.head]) for row in cache.kept_positions(plant.layer)]
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            logits = forward_last(plant.model, torch.full((batch, 1), step), mask, cache)
    return logits, held


def learned_of(plant: Plant) -> Surrogate:
    """What KVzip+ sees of the prompt itself, learned three times over: a word of one prompt would be half believed."""
    method = KVzipPlus(n_sinks=1, chunk=40, instruct=False)
    return train_surrogate(plant.model, method, [plant.prompt] * 3, [], None).surrogate


def margin(logits: Tensor, answer: int) -> float:
    """By how much the answer leads over the best other word (negative: it does not)."""
    others = logits.clone()
    others[answer] = -torch.inf
    return float(logits[answer] - others.max())


@dataclass(frozen=True)
class Selection(Method):
    """Keeps (or gives up) these positions first: the controls that show which slots matter."""

    these: tuple[int, ...] = ()
    keep: bool = True

    def priority(self, ctx: EvictionContext) -> Tensor:
        chosen = torch.isin(ctx.positions, torch.tensor(self.these))
        return (chosen == self.keep).float()


EVERY = [(name, layout) for name, (_, layouts) in PLANTS.items() for layout in layouts]


def each_in_one_layout():
    """Every method with every plant; one layout of each pair in every run of the tests, in turn, the others slow."""
    for number, method in enumerate(TABLE):
        for place, (name, (_, layouts)) in enumerate(PLANTS.items()):
            for turn, layout in enumerate(layouts):
                quick = turn == (number + place) % len(layouts)
                yield pytest.param(method, name, layout, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_the_vital_slots_decide_and_no_other(name: str, layout: str) -> None:
    plant = PLANTS[name][0](layout)
    before = len(plant.prompt) + len(plant.steps) - 1
    few = Budget(tokens=len(plant.vital), counts_self=False)
    most = Budget(tokens=before - len(plant.vital), counts_self=False)
    right, held = ask(plant, Full(), None)
    assert margin(right[0], plant.answer) > 0.25
    assert held[0] == set(range(before))
    alone, held = ask(plant, Selection(plant.vital), few)
    assert held[0] == set(plant.vital)
    assert margin(alone[0], plant.answer) > 0.25
    without, held = ask(plant, Selection(plant.vital, keep=False), most)
    assert held[0] == set(range(before)) - set(plant.vital)
    assert margin(without[0], plant.answer) < -0.25


@pytest.mark.parametrize(("method", "name", "layout"), list(each_in_one_layout()))
def test_each_method_keeps_what_its_score_says(method: str, name: str, layout: str) -> None:
    plant = PLANTS[name][0](layout)
    mark = TABLE[method].planted.replace(" ", "")[list(PLANTS).index(name)]
    passes = mark in "+" + {"llama": "g", "gpt2": "l"}.get(layout, "")
    logits, held = ask(plant, TABLE[method].method, BUDGET)
    assert (WORDS[int(logits[0].argmax())] == WORDS[plant.answer]) == passes
    is_mask = isinstance(TABLE[method].method, Simulated) and TABLE[method].method.simulation_only
    if not is_mask:  # a simulation holds everything
        assert bool(held[0] & set(plant.vital)) == passes
        decoded = len(plant.steps) - 1
        once = not TABLE[method].method.evicts_while_decoding
        if type(TABLE[method].method.layer_budgets) is LayerBudgets:  # else layers share the slots of two plants
            assert len(held[0]) == (len(plant.prompt) + decoded if method == "full" else 11 + once * decoded)


@pytest.mark.parametrize("name", ["sink", "needle", "recency"])
def test_random_keeps_a_slot_as_often_as_chance_says(name: str) -> None:
    """11 of 96 slots by lot: 256 seeds keep one given slot 29 times, standard deviation 5.1."""
    plant = PLANTS[name][0]("llama")
    logits, held = ask(plant, Random(), BUDGET, batch=256)
    right = logits.argmax(-1) == plant.answer
    assert right.tolist() == [bool(row & set(plant.vital)) for row in held]
    assert abs(int(right.sum()) - 256 * 11 / 96) < 4 * 5.1


def test_fresh_noise_averages_out_and_one_draw_per_key_does_not() -> None:
    """Two mentions make 2, the crowd 6 each with fresh noise, but one draw for all rows can ruin five of the crowd."""
    plant = PLANTS["just_now"][0]("llama")
    fresh, per_key = (ask(plant, Keyformer(fresh=fresh), BUDGET, batch=64)[1] for fresh in (True, False))
    assert sum(16 in row for row in fresh) == 0
    assert 16 < sum(16 in row for row in per_key) < 56


@pytest.mark.parametrize(("method", "newest"), [("h2o", 5), ("h2o_damping_0.9", 1), ("keyformer", 2), ("snapkv_4", 4)])
def test_recent_windows_are_exactly_as_wide_as_said(method: str, newest: int) -> None:
    """Half, 20 % and 30 % of 12 slots, less the question itself; snapkv's last four prompt tokens, its observers, all
    stay. The crowd wins every other slot.
    """
    plant = PLANTS["recency"][0]("llama")
    _, held = ask(plant, TABLE[method].method, BUDGET)
    assert {p for p in held[0] if p > 13} == set(range(T - newest, T))


def test_constant_noise_keeps_what_no_noise_keeps() -> None:
    for name, layout in EVERY:
        plant = PLANTS[name][0](layout)
        constant, none = (ask(plant, Keyformer(noise=noise), BUDGET) for noise in ("constant", "none"))
        assert constant[1] == none[1]


def test_each_kv_head_keeps_its_own() -> None:
    """Only the last query head of the last group looks at the needle: h2o keeps it there, spatten in all heads."""
    plant = PLANTS["needle"][0]("llama")
    held = {}
    for method in (H2O(), SpAtten()):
        cache = EvictionCache(plant.model, method, BUDGET)
        ids = torch.tensor([plant.prompt])
        with torch.inference_mode():
            forward_last(plant.model, ids, torch.ones_like(ids), cache)
        held[method.name] = [16 in head for head in cache.kept_positions(0)[0]]
    assert held == {"h2o": [False, True], "spatten": [True, True]}


@pytest.mark.parametrize(
    ("method", "said"), [(Full(), "B C D"), (H2O(), "B C D"), (Keyformer(), "B C D"), (Window(), "B . .")]
)
def test_generate_copies_a_phrase_as_far_as_its_slots_survive(method: Method, said: str) -> None:
    """The first word comes from the prefill, which is never evicted; C and D must be read from what is left."""
    plant = induction("gpt2")
    budget = None if method == Full() else BUDGET
    out = generate(
        plant.model, [plant.prompt + plant.steps], method, budget, decoding=GenerationParams(max_new_tokens=3)
    )
    assert " ".join(WORDS[token] for token in out.tokens[0]) == said


def test_the_sink_is_the_first_real_token_of_a_padded_row() -> None:
    model = sink("llama").model
    prompts = [lay({}), lay({}, length=T - 23)]
    for method, better in ((StreamingLLM(), True), (Window(), False)):
        yes, no = (
            continuation_logprobs(model, prompts, [[ID["?"], ID[word]]] * 2, method, BUDGET) for word in ("yes", "no")
        )
        assert [a[1] > b[1] for a, b in zip(yes, no, strict=True)] == [better, better]


@pytest.mark.parametrize(
    ("pad", "method"),
    [("N", m) for m in (Full(), Window(), H2O(), Keyformer(), TOVA(), SnapKV(window=4), KNorm())]
    + [("m", m) for m in (H2O(), KeyAttention(), Keyformer(noise="none"), SpAtten())],
)
def test_padding_is_neither_seen_nor_heard(pad: str, method: Method) -> None:
    """Pads that are needles: whoever sees one says yes, and knorm would keep nothing else (it has the shortest key).

    Pads that mention the needle: if their rows counted, 23 mentions would make the unseen needle a heavy hitter.
    """
    plant = PLANTS["unseen"][0]("llama")
    prompts = [lay({}, length=T + 23), lay({}) if pad == "N" else plant.prompt]
    plant.model.config.pad_token_id = ID[pad]
    budget = BUDGET if method.evicts else None
    yes, no = (
        continuation_logprobs(plant.model, prompts, [[ID["?"], ID[word]]] * 2, method, budget) for word in ("yes", "no")
    )
    plant.model.config.pad_token_id = None
    assert all(a[1] < b[1] - 0.4 for a, b in zip(yes, no, strict=True))


def test_the_table_is_complete() -> None:
    assert all(len(case.planted.replace(" ", "")) == len(PLANTS) for case in TABLE.values())
    # OpenVINO drops nothing before the question has been read, EpiKV nothing of a prompt; VaSE keeps most by lot; CaM
    # keeps h2o's slots and drowns what they say in values merged into it.
    covered = {type(case.method) for case in TABLE.values()} | {Random, OpenVINO, EpiKV, VaSE, CaM}
    assert covered == {getattr(kvexp.methods, name) for name in kvexp.methods.__all__}
