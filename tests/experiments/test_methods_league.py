"""The league of methods: its pieces cover every method once and fit into memory, its tables say what rows say."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments import methods_league, real_tasks
from experiments.lib import floors, league, real_scale
from experiments.lib.exhibits import declared, params
from experiments.lib.floors import CHANCE, FREQUENT, LEAD, RANDOM, judged, of_examples
from experiments.lib.league import GROUPS, LEFT_OUT, LONGEST, MOST_BYTES, QUESTIONS, RATIOS, pieces
from kvexp.results.read import folders
from kvexp.results.stats import MIN_PAIRS
from kvexp.run.compose import options
from kvexp.run.store import Run
from kvexp.tasks import Example
from kvexp.util.errors import ConfigError


def test_every_method_is_in_the_league_or_left_out_for_a_reason():
    known = options("method")
    taken = {name for group in GROUPS for name in group.methods}
    assert sorted([*taken, *LEFT_OUT]) == sorted(known)


@pytest.mark.parametrize("task", LONGEST)
def test_a_sweep_of_the_league_has_enough_rows_for_an_interval(task):
    config, swept = declared()[f"real/league_{task}"], params(f"real/league_{task}")
    assert swept["model"] == real_scale.MODEL and swept["task"] == task and task in real_scale._files()
    assert tuple(float(ratio) for ratio in swept["kv_ratio"].split(",")) == RATIOS
    assert config["limit"] >= MIN_PAIRS
    if task == "needle":
        assert len(config["task"]["lengths"]) * len(config["task"]["depths"]) == config["limit"]
        assert max(config["task"]["lengths"]) == LONGEST[task]


def test_pieces_cover_everything_once_and_hold_what_memory_has():
    made = pieces(list(LONGEST))
    assert len({piece.name for piece in made}) == len(made)
    fewer = {piece for piece in pieces(list(LONGEST), answers=False) if piece.group.keeps_all}
    assert fewer == {piece for piece in made if piece.group.keeps_all}
    assert len(pieces(["needle"], answers=False)) < len(pieces(["needle"]))
    for task in LONGEST:
        for question in QUESTIONS:
            mine = [piece for piece in made if (piece.task, piece.question) == (task, question)]
            for group in GROUPS:
                parts = [piece.methods for piece in mine if piece.group is group]
                assert [name for part in parts for name in part] == list(group.methods if task in group.tasks else ())
                assert all(len(part) * group.bytes_per_token * LONGEST[task] <= MOST_BYTES for part in parts)
    assert [piece.methods for piece in pieces(["news"], ["knorm"])] == [("knorm",)] * 2


@pytest.mark.parametrize("task", LONGEST)
def test_every_method_is_run_on_every_task(task):
    known = {name for group in GROUPS for name in group.methods}
    assert {name for piece in pieces([task]) for name in piece.methods} == known


def test_methods_run_with_words_of_their_own_have_a_name_of_their_own():
    assert league.how_of("budget.stream_recent=28 budget.heads=duo seed=1 budget.stream_sinks=4") == "duo"
    assert league.how_of("budget.heads=adaptive") == "adaptive"
    assert league.how_of("method.chunk=128") == "chunk128" and league.how_of("method.chunk=1280") == ""
    frame = pd.DataFrame([row("kvzip", 0.1, "chunk128"), row("snapkv", 0.1, "adaptive")])
    assert league.entries(frame) == ["kvzip", "snapkv+adaptive"], "one with another chunk keeps its plain name"


def test_what_cannot_be_asked_for_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(real_scale, "model_is_here", lambda: True)
    for words, why in (
        (["nwes"], "no such task in the league: nwes; there are cnn_dailymail, needle, news, news_qa"),
        (["--methods", "h3o"], "no such method in the league: h3o"),
        (["needle"], "no task is left: give --data FOLDER"),
        (["--record", "--outputs", str(tmp_path)], "has no run with a divergence: run the league first"),
    ):
        assert methods_league.main(words) == 2
        assert why in capsys.readouterr().err


def test_a_sweep_that_fails_is_told_and_the_others_are_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(real_scale, "model_is_here", lambda: True)
    seen = []

    def sweep(experiment, words):
        seen.append((experiment, words))
        if "task.question=choice(in_prompt)" in words:
            raise ConfigError("no")

    monkeypatch.setattr(methods_league, "sweep", sweep)
    assert methods_league.main(["news", "--methods", "knorm", "--limit", "1", "--outputs", str(tmp_path)]) == 1
    assert [experiment for experiment, _ in seen] == ["real/league_news"] * 2
    assert seen[0][1] == [
        f"outputs_dir={tmp_path}/news",
        "limit=1",
        "kv_ratio=0.25,0.75",
        "task.question=choice(after_eviction)",
        "method=choice(knorm)",
    ]
    said = capsys.readouterr()
    assert "1 of 2 sweeps failed: news/in_prompt/old/knorm" in said.err
    assert league.NOT_RECORDED in said.out and "2 sweeps, 0.0 hours\n" in said.out
    monkeypatch.setattr(methods_league, "planned_seconds", lambda experiment, words: 3600.0)
    assert methods_league.main(["news", "--methods", "knorm", "--plan", "--outputs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "news/after_eviction/old/knorm: 60.0 minutes left" in said and "2 sweeps, 2.0 hours left" in said


def row(method, kl, how="", *, ratio=0.5, ahead="", behind="", each=None, **more):
    each = examples(0.9 * kl, 0.2 * kl / 19) if each is None else each
    ends = {"kl_low": kl * 0.9, "kl_high": kl * 1.1}
    made = {"task": "news", "question": "after_eviction", "method": method, "how": how, "kv_ratio": ratio, "n": 20}
    made |= {"kl": kl, **ends, "top1": 0.9, "of_full": math.nan, "slots": 100.0, "kl_each": each}
    return made | {"ahead_of": ahead, "behind": behind} | more


def test_a_cell_is_the_nearest_method_and_how_many_are_not_told_from_it():
    frame = pd.DataFrame(
        [
            row("keydiff", 0.1, ahead="h2o knorm snapkv"),
            row("expected_attention", 0.11, "adaptive"),
            row("snapkv", 0.2, behind="keydiff h2o"),
            row("h2o", 0.15, ahead="snapkv", behind="keydiff"),
            row("knorm", 3.0, behind="keydiff"),
            row("ideal", 0.01),
        ]
    )
    assert "| news, hidden | - | - | keydiff, +1<br>0.100 (0.095..0.106) | - |" in league.leaders(frame)
    assert "| keydiff<br>0.100 (too few) |" in league.leaders(frame.assign(kl_low=np.nan, kl_high=np.nan))
    near = pd.DataFrame([row("keydiff", 0.01, ahead="quest"), row("quest", 0.3), row("pqcache", 0.2)])
    assert "| keydiff<br>**0.010 (0.010..0.010)** |" in league.leaders(near), "near the full cache"
    assert "| news, hidden | - | - | - | - |" in league.leaders(frame[frame["method"].eq("ideal")]), "nobody evicts"


def test_the_interval_of_the_smallest_is_corrected_for_the_choice():
    """One method's interval is under 0.05; as the smallest of 25 it is not: the least of many is often so by chance."""
    kl = np.random.default_rng(0).lognormal(np.log(0.035), 0.5, 20)
    best = row("keydiff", 0.04, each=league._joined({str(place): each for place, each in enumerate(kl)}))
    assert "| keydiff<br>**0.040 (0.027..0.047)** |" in league.leaders(pd.DataFrame([best]))
    others = [row(name, 1.0) for name in [*league.OLD, *league.NEW, "rkv", "vase"] if name != "keydiff"]
    assert len(others) == 25
    assert "| keydiff, +25<br>0.040 (0.023..0.05" in league.leaders(pd.DataFrame([best, *others]))


def examples(start, step=0.001, count=20):
    """Means of so many examples, as the page keeps them."""
    return league._joined({f"length 1000, depth {place}": start + step * place for place in range(count)})


def test_a_recording_made_in_pieces_keeps_what_is_larger():
    hidden = pd.DataFrame([row("h2o", 0.2), row("knorm", 3.0)])
    seen = pd.DataFrame([row("h2o", 0.1, question="in_prompt")])
    assert list(league.merged(league.recorded().iloc[:0], hidden)["kl"]) == [0.2, 3.0]
    both = league.merged(hidden, seen)
    assert list(both["question"]) == ["after_eviction", "after_eviction", "in_prompt"]
    trial, again = pd.DataFrame([row("h2o", 9.0, n=2)]), hidden.assign(kl=[0.3, 4.0])
    assert league.merged(both, trial).equals(both), "a smaller trial replaces nothing"
    assert list(league.merged(both, again)["kl"]) == [0.3, 4.0, 0.1], "the same once more does"
    more = pd.DataFrame([row("h2o", 0.25, n=40)])
    assert list(league.merged(both, more)["kl"]) == [0.25, 0.1], "a block has one number of examples"


def test_methods_that_are_added_to_a_block_are_compared_with_all_of_it():
    kept = pd.DataFrame([row("h2o", 0.2, each=examples(0.2), of_full=70.0), row("tova", 0.5, each=examples(0.5))])
    again, cake = row("h2o", 0.2, each=examples(0.2)), row("cake", 0.9, each=examples(0.9, 0.002))
    frame = league.merged(kept, pd.DataFrame([cake, again])).set_index("method")
    assert frame.loc["h2o", "ahead_of"] == "cake tova" and frame.loc["cake", "behind"] == "h2o tova"
    assert frame.loc["h2o", "of_full"] == 70, "answers were not written once more"
    level = row("cake", 0.2, each=examples(0.219, -0.001))
    page = league.leaders(league.merged(kept, pd.DataFrame([level])))
    assert "| h2o, +1<br>0.200 (0.205..0.214) |" in page, "tova is told from it, cake is not"


def test_marks_are_those_of_paired_examples():
    frame = pd.DataFrame(
        [
            row("keydiff", 0.2, each=examples(0.2)),
            row("snapkv", 0.3, each=examples(0.3)),
            row("h2o", 0.3, each=examples(0.319, -0.001)),
            row("snapkv", 0.1, ratio=0.25, each=examples(0.1)),
        ]
    )
    marks = league.marked(frame).set_index(["method", "kv_ratio"])
    assert marks.loc[("keydiff", 0.5), "ahead_of"] == "h2o snapkv" and marks.loc[("snapkv", 0.5), "behind"] == "keydiff"
    assert marks.loc[("snapkv", 0.25), "ahead_of"] == ""


def test_a_run_that_was_interrupted_is_no_entry():
    frame = pd.DataFrame([row("h2o", 0.1), row("knorm", 0.2, n=4), row("tova", 0.3, question="in_prompt", n=4)])
    assert list(league.finished(frame)["method"]) == ["h2o", "tova"]


# Floors: what an answer that read nothing gets, and when a task tells methods apart at all.


TEXT = "One red fox ran. Two green birds sang. Three blue fish swam. Four grey wolves slept. Five black cats hid."


class Words:
    """Scores the share of the reference's words that an answer holds."""

    def score(self, output, reference, example):
        words = reference.split()
        return {"recall": 100 * sum(word in output.split() for word in words) / len(words)}


def test_short_references_are_set_beside_one_random_sentence():
    examples = [Example(f"e{i}", TEXT, reference) for i, reference in enumerate(("red", "red", "red", "cats"))]
    found = of_examples(Words(), examples, "recall")
    assert set(found) == {RANDOM, FREQUENT}, "no Lead-3: it reads where a short answer stands"
    assert 0 < found[RANDOM]["e0"] < 100, "one of five sentences has the word"
    assert found[RANDOM] == of_examples(Words(), examples, "recall")[RANDOM], "the same draws again"
    assert found[FREQUENT] == {"e0": 100.0, "e1": 100.0, "e2": 100.0, "e3": 0.0}, "the most frequent of the others"


def test_long_references_are_set_beside_three():
    reference = "One red fox ran and two green birds sang and three blue fish swam away"
    other = "Four black dogs slept and five grey cats ate and six white mice hid in the corn"
    examples = [Example(f"e{i}", TEXT, text) for i, text in enumerate((reference, reference, reference, other))]
    found = of_examples(Words(), examples, "recall")
    assert found[LEAD]["e0"] > found[RANDOM]["e0"] > 0 and found[FREQUENT]["e0"] == 100


def test_the_one_reference_of_all_examples_is_no_floor():
    found = of_examples(Words(), [Example("e0", TEXT, "red"), Example("e1", TEXT, "red")], "recall")
    assert set(found) == {RANDOM}, "a needle at two places: who gives it has read it"


def scores(mean, seed, n=30):
    return {f"e{i}": float(value) for i, value in enumerate(mean + np.random.default_rng(seed).standard_normal(n))}


def test_a_task_is_void_where_the_full_cache_is_not_above_the_best_floor():
    low, high = {RANDOM: scores(10, 0), FREQUENT: scores(5, 1), LEAD: scores(99, 2)}, scores(20, 3)
    made = judged("rouge1", high, low)
    assert not made.void and made.low > 8 and "above it" in str(made) and "Lead-3 98.9" in str(made), (
        "Lead-3 is no floor"
    )
    same = judged("rouge1", scores(10, 4), low)
    assert same.void and "VOID" in str(same) and same.low < 0
    few = judged("rouge1", {"e0": 50.0}, {CHANCE: {"e0": 25.0}})
    assert few.void, "one example shows nothing"
    assert not judged("x", scores(1, 5), {}).void, "without a floor nothing is void"


def test_choices_have_chance_for_each_benchmark(tmp_path):
    run = Run.open(tmp_path, {"method": "full"}, {"model": "m", "task": "lm_eval", "method": "full"})
    for i in range(8):
        name, count = ("piqa", 2) if i % 2 else ("arc_easy", 4)
        row = {"example": f"{name}/{i}", "index": i, "metrics": {"acc": 100.0}, "skipped": None, "seconds": {}}
        run.append(row | {"choices": {"logprobs": [-1.0] * count, "tokens": [1] * count}})
    found = floors.floors_of(folders(tmp_path)[0])
    assert {name: each.means for name, each in found.items()} == {"piqa": {CHANCE: 50.0}, "arc_easy": {CHANCE: 25.0}}
    assert not any(each.void for each in found.values())


@pytest.mark.parametrize("void", [False, True])
def test_methods_are_not_run_on_a_void_task(tmp_path, monkeypatch, capsys, void):
    asked = []
    monkeypatch.setattr(real_tasks, "commands_of", lambda *_: [SimpleNamespace(experiment="x", rows="r", overrides=())])
    monkeypatch.setattr(real_tasks, "sweep", lambda name, words: asked.append(words) or ["h"])
    monkeypatch.setattr(real_tasks, "folders", lambda _: [SimpleNamespace(run=SimpleNamespace(hash="h"))])
    of_run = {"": judged("acc", scores(50 if void else 90, 1), {CHANCE: scores(50, 1)})}
    monkeypatch.setattr(real_tasks, "floors_of", lambda _: of_run)
    real_tasks.run_task("xsum", None, tmp_path)
    assert len(asked) == (1 if void else 2) and asked[0][:2] == real_tasks.FULL
    assert ("VOID" in capsys.readouterr().out) == void
    real_tasks.run_task("xsum", None, tmp_path, void=True)
    assert asked[-1][0].startswith("outputs_dir"), "asked for all the same"
    before = len(asked)
    real_tasks.run_task("xsum", None, tmp_path, methods=False)
    assert len(asked) == before + 1
