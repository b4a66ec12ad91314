"""Floors: what an answer that read nothing gets, and when a task tells methods apart at all."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import real_tasks
from experiments.lib import floors
from experiments.lib.floors import CHANCE, FREQUENT, LEAD, RANDOM, judged, of_examples
from kvexp.record import Run
from kvexp.results.read import folders
from kvexp.tasks import Example

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
