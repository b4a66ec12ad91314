"""Which eviction changed the answer: planted causes are found, what undoing means is exact, searches find the least."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import CROWD, ID, PLANTS, POPULAR, Head, build, lay
from test_eviction_log import case_of, held, job, run_job, run_of, watched
from test_planted import BUDGET, TABLE, learned_of
from tiny import CONFIGS

from kvexp.core import CacheConfig
from kvexp.core.backends import held_slots
from kvexp.diagnose.case import Case
from kvexp.diagnose.replay import (
    NOTHING_UNDONE,
    Cause,
    Replay,
    UndoneEvictions,
    cause,
    interval,
    phrase_of,
    saved,
    smallest,
    span_text,
    text_of_places,
)
from kvexp.diagnose.show import main
from kvexp.generate import GenerationParams, decode
from kvexp.hf import calibrate_queries
from kvexp.methods import A2SF, H2O, TOVA, Keyformer, StreamingLLM, Window
from kvexp.run.evictions import require_example_log

# -- planted causes ----------------------------------------------------------------------------------------------------


def planted(method, name, layout):
    """What the search finds, the plant, and the log; None where the method keeps what it needs."""
    plant = PLANTS[name][0](layout)
    chosen = TABLE[method].method
    plan = {"positions": "original"} if layout == "gpt2" else {}
    if chosen.needs.calibration:
        plan["calibration"] = calibrate_queries(plant.model, [plant.prompt])
    if chosen.needs.surrogate:
        plan["surrogate"] = learned_of(plant)
    one = GenerationParams(max_new_tokens=1, eos=None)
    case = Case(plant.model, plant.prompt, plant.steps, CacheConfig(chosen, BUDGET, **plan), one)
    made, log = watched(case)
    assert made.tokens[0] != [plant.answer]
    replay = Replay(case, 16)
    assert replay.answers([NOTHING_UNDONE]) == made.tokens
    return cause(replay, lambda tokens: tokens == [plant.answer]), plant, log


def lost(methods, layouts):
    """Every case in which tests/cases.py says that the method loses the answer, of methods that can be replayed."""
    for method in (name for name in methods if not hasattr(TABLE[name].method, "rewrites")):
        marks = TABLE[method].planted.replace(" ", "")
        for mark, (name, (_, known)) in zip(marks, PLANTS.items(), strict=True):
            yield from ((method, name, layout) for layout in known[:layouts] if mark == "-")


FEW = ["window", "h2o", "keyformer", "streaming_llm_4"]


QUICK = list(lost(FEW, 1))
CASES = [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in lost(TABLE, 3) if one not in QUICK)]


@pytest.mark.parametrize(("method", "name", "layout"), CASES)
def test_the_planted_cause_is_found(method, name, layout):
    found, plant, log = planted(method, name, layout)
    heads = 1 + int(log["head"].max())
    assert found.undone is not None and found.whole
    assert found.undone.places == ((plant.layer, plant.head % heads),)
    assert len(found.undone.positions) == 1 and set(found.undone.positions) <= set(plant.vital)
    mine = (log["position"] == found.undone.positions[0]) & (log["layer"] == plant.layer)
    (step,) = log["step"][mine & (log["head"] == plant.head % heads)].tolist()
    assert (found.undone.first, found.undone.last) == (step, step)


@pytest.mark.parametrize("layout", ["llama", "gpt2", "mpt"])
def test_two_layers_lost_are_two_layers_found(layout):
    """Layer 0 looks for one word and layer 1 for another; each votes "no" without it, and two votes decide."""
    heads = [
        Head(attends=POPULAR | {("?", word): 14.0}, says={word: "yes", "*": "no"}, norms={word: 2.0, "<s>": 0.5})
        for word in ("N", "A")
    ]
    prompt = lay(CROWD | {16: "N", 40: "A"})
    one = GenerationParams(max_new_tokens=1, eos=None)
    case = Case(build(layout, *heads), prompt, [ID["?"]], CacheConfig(Window(), BUDGET, positions="original"), one)
    made, log = watched(case)
    assert (made.tokens, case.full().generate_again().tokens) == ([[ID["no"]]], [[ID["yes"]]])
    found = cause(Replay(case, 16), lambda tokens: tokens == [ID["yes"]])
    last = int(log["head"].max())
    assert found.undone == UndoneEvictions((16, 40), ((0, last), (1, last)), 0, 0)
    assert found.spans == [[16], [40]]


# -- what undoing means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("method", [H2O(), A2SF(alpha=0.5), TOVA(), Keyformer()], ids=lambda method: method.name)
def test_nothing_undone_is_the_run_and_everything_is_full_attention(family, method):
    positions = "original" if family in ("gpt2", "opt") else method.positions
    case = case_of(family, method, question=[50, 51], positions=positions)
    made, _ = watched(case)
    replay = Replay(case, 2)
    first, last = replay.answers([NOTHING_UNDONE, replay.everything])
    assert [first] == made.tokens
    assert [last] == case.full().generate_again().tokens
    assert first != last, "else the comparison shows nothing"


def test_renumbered_survivors_come_back_to_their_places():
    case = case_of("llama", StreamingLLM(), positions="renumbered")
    replay = Replay(case)
    assert replay.answers([replay.everything]) == case.full().generate_again().tokens


def visible(replay, trial, layer):
    """Positions each head of a layer sees at the end of this trial."""
    context = replay.fork([trial])
    decode(replay.case.model, [context], replay.case.decoding, [0], None, start=0.0)
    state = context.cache.layer_states[layer]
    return state.kept_positions()[0], held_slots(state.require_slots())[0].sum(-1).tolist()


@pytest.mark.parametrize(("first", "last", "came"), [(0, 9, [3, 4, 25]), (0, 0, [3, 4]), (6, 9, [25]), (7, 9, [])])
def test_undone_evictions_are_seen_besides_the_budget_and_no_others(first, last, came):
    """window scores by position, so what comes back changes no other choice: the sets are known exactly."""
    case = case_of("llama", Window())  # 31 of prompt, 11 stay: 0-19 go at step 0, then 20, 21, ... 25 at step 6
    case = dataclasses.replace(case, decoding=GenerationParams(max_new_tokens=7, eos=None))
    _, log = watched(case)
    step = int(log["step"][(log["position"] == 25) & (log["layer"] == 1)][0])
    assert step == 6
    trial = UndoneEvictions((3, 4, 25, 36), ((1, 2), (0, 1)), first, last)
    replay = Replay(case)
    recent = list(range(26, 37))
    assert held(log, 1, 2, 37, 6) == recent
    seen, held_now = visible(replay, trial, 1)
    assert seen == [recent, recent, [*came, *recent]] and held_now == [11, 11, 11]
    assert visible(replay, trial, 0)[0] == [recent, [*came, *recent], recent]


def test_rows_of_one_batch_are_trials_of_their_own():
    case = case_of("mpt", TOVA())
    replay = Replay(case, 8)
    whole = replay.everything
    trials = [
        NOTHING_UNDONE,
        whole,
        dataclasses.replace(whole, last=0),
        dataclasses.replace(whole, positions=(1, 2, 3)),
    ]
    assert replay.answers(trials) == [replay.answers([trial])[0] for trial in trials]
    assert replay.trials == 8


# -- searching ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
@settings(max_examples=60, deadline=None)
def test_what_is_needed_is_what_is_found(given):
    count, needed = given
    items = list(range(count))

    def works(candidates):
        return [needed <= set(candidate) for candidate in candidates]

    span = interval(items, works, 7)
    assert span == items[min(needed) : max(needed) + 1]
    assert smallest(span, works) == sorted(needed)


def test_one_cause_costs_a_logarithm():
    asked = []

    def works(candidates):
        asked.extend(candidates)
        return [4711 in candidate for candidate in candidates]

    assert smallest(interval(list(range(8192)), works, 1), works) == [4711]
    assert len(asked) <= 2 * 14


def test_no_single_one_can_be_left_out_even_where_more_is_not_always_better():
    def works(candidates):  # 5 spoils what 2 and 9 do together, unless 7 is there
        return [{2, 9} <= set(c) and (5 not in c or 7 in c) for c in candidates]

    found = smallest(list(range(12)), works)
    assert works([found])[0] and not any(works([[x for x in found if x != y] for y in found]))


# -- words -------------------------------------------------------------------------------------------------------------


def test_words_for_what_was_found():
    heads = [2, 2, 2, 2]
    assert text_of_places([(1, 0), (1, 1), (2, 0), (2, 1)], heads) == "layers 1-2"
    assert text_of_places([(0, 0), (0, 1), (3, 1)], heads) == "layer 0, layer 3 head 1"
    undone = UndoneEvictions((4, 6, 9), ((1, 0), (1, 1)), 0, 3)
    assert Cause(undone, 1, True).spans == [[4, 6, 9]]
    assert Cause(dataclasses.replace(undone, positions=(4, 8)), 1, True).spans == [[4], [8]]
    assert phrase_of(undone, ["a b"], heads) == "losing 'a b' in layer 1 at steps 0-3 flipped the answer"


def test_from_rows_to_a_reason(tmp_path, command, capsys):
    words = ("model=testbed_learned", "task=testbed_needle", "method=h2o", "task.max_new_tokens=6")
    run_job(job(tmp_path, "diagnose=log", *words, limit=3))
    run = run_of(tmp_path)
    assert main(["explain", str(run.path)]) == 0
    told = capsys.readouterr().out
    row = next(row for row in run.rows() if row["metrics"]["exact"] == 0)
    found = saved(run, row["example"], "output")
    assert found.phrase in told and found.back == found.full != found.answer == row["output"]
    needle = require_example_log(run, row["example"])
    for span, text in zip(found.cause.spans, found.spans, strict=True):
        assert span_text(needle.texts, span) == text
    assert main(["replay", str(run.path), str(row["index"])]) == 0
    assert found.phrase in capsys.readouterr().out.replace("\n", " ")
    assert main(["replay", str(run.path.parent / run.baseline), "0"]) == 2
    assert main(["replay", str(run.path), str(row["index"]), "--until", "score", "--again"]) == 0
    assert saved(run, row["example"], "score").cause.trials > 0
    assert main(["replay", str(run.path), str(row["index"]), "--again", "--trials", "3"]) == 0
    assert "the trials ran out" in " ".join(capsys.readouterr().out.split())
    assert main(["replay", str(run.path), str(row["index"])]) == 0
    assert saved(run, row["example"], "output") == found, "an unfinished search is taken up when more is allowed"
