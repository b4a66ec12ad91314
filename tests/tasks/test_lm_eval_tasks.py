"""lm-eval's tasks as examples: its own prompts, choices and metrics over local rows, and what a user can get wrong."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvexp.tasks import lm_eval as definition
from kvexp.tasks.lm_eval import SEVEN, LMEval, Request, protocol_of
from kvexp.util.errors import ConfigError

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")

ROWS = Path(__file__).resolve().parents[1] / "fixtures" / "lm_eval"


def of(name, **options):
    return LMEval(tasks=(name,), data_dir=str(ROWS), **options)


def requests(task):
    return [[(r.context, r.question, r.continuation) for r in item.requests] for item in task.examples()]


# -- reading -----------------------------------------------------------------------------------------------------------


def test_runs_that_ask_the_same_read_it_once_and_a_changed_file_again(tmp_path, monkeypatch):
    """A sweep asks each task for every method and budget; the items are lm-eval's, drawn with the same seed."""
    folder = tmp_path / "rows"
    shutil.copytree(ROWS, folder)
    loads, load = [], definition.load
    monkeypatch.setattr(definition, "load", lambda name, **how: loads.append(how) or load(name, **how))

    def asked(**options):
        return list(LMEval(tasks=("copa",), data_dir=str(folder), num_fewshot=1, **options).examples())

    first = asked(limit=2)
    assert asked(limit=2) == first and asked()[:2] == first and len(loads) == 1
    assert asked(limit=2, fewshot_seed=5)[0].number == 0 and len(loads) == 2
    file = folder / "super_glue_copa.validation.jsonl"
    file.write_text(file.read_text("utf-8").replace("glass", "jar"), "utf-8")
    assert "jar" in asked(limit=2)[0].requests[0].context and len(loads) == 3


# -- prompts -----------------------------------------------------------------------------------------------------------

RIGHT = {  # the right answer in words, item by item
    "piqa": ["twist the lid", "switch on a lamp", "put on gloves", "use a broom"],
    "winogrande": ["Tom thanked Sam since Sam", "The cup broke on the stone as the cup", "Eva lent Ida a pen, for Ida"],
    "openbookqa": ["iron", "light of the sun", "gills"],
    "copa": [" it broke.", " a cat came by.", " she went to bed."],
    "mathqa": ["12", "4.5", "5"],
    "arc_easy": ["a bat", "water", "high"],
    "arc_challenge": ["a bat", "water", "high"],
}


@pytest.mark.parametrize("name", SEVEN)
def test_items(name):
    items = list(of(name).examples())
    assert all(not r.question for item in items for r in item.requests)
    assert [item.reference for item in items] == RIGHT[name]
    assert [item.id for item in items] == [f"{name}/{i}" for i in range(len(RIGHT[name]))]
    assert [item.number for item in items] == list(range(len(items)))


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("name", SEVEN)
def test_requests_are_those_lm_eval_builds_itself(name, shots, monkeypatch):
    task = of(name, num_fewshot=shots)
    theirs = definition.load(name, data_dir=str(ROWS), shots=shots)
    monkeypatch.setattr("lm_eval.api.task.tqdm", lambda rows, **_: rows)
    theirs.build_all_requests(limit=None, rank=0, world_size=1)
    expected = [(i.doc_id, i.idx, i.args) for i in theirs.instances]
    made = [
        (item.number, n, (r.context, r.continuation)) for item in task.examples() for n, r in enumerate(item.requests)
    ]
    assert made == expected


def test_examples_are_the_same_in_every_pass_and_for_any_limit():
    task = of("piqa", num_fewshot=2)
    whole = requests(task)
    assert requests(task) == whole
    assert requests(of("piqa", num_fewshot=2, limit=2)) == whole[:2]
    assert requests(of("piqa", num_fewshot=2, fewshot_seed=5)) != whole
    assert [[(r.context, r.question, r.continuation) for r in i.requests] for i in task.everything()] == whole


def test_an_item_is_no_example_of_itself():
    """lm-eval sees to that only in a test split: drawn from the evaluated validation split it gives answers away."""

    def asked(**options):
        items = of("piqa", num_fewshot=3, fewshot_split="validation", **options).examples()
        goals = ("open a jar", "light a room", "warm the hands", "sweep a floor")
        return [item.requests[0].context.count(f"Question: {goal}\n") for item, goal in zip(items, goals, strict=True)]

    assert asked() == [1] * 4 and 2 in asked(fewshot_excludes_item=False)


# -- the question after the eviction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEVEN)
def test_a_question_after_the_eviction_has_the_same_characters(name):
    inside = list(of(name, num_fewshot=1).examples())
    after = list(of(name, num_fewshot=1, question="after_eviction").examples())
    for one, other in zip(inside, after, strict=True):
        for whole, parted in zip(one.requests, other.requests, strict=True):
            assert parted.context + parted.question == whole.context
            assert parted.question.startswith("\n\n")
            assert not parted.context[-1].isspace()
        assert len({r.context for r in other.requests}) == 1, "the examples are one context for all choices"
    first = next(of(name).examples()).requests
    assert [r.question for r in after[0].requests] == [f"\n\n{r.context}" for r in first]


def test_winogrande_has_a_question_per_choice():
    item = next(of("winogrande", num_fewshot=1, question="after_eviction").examples())
    assert [r.question for r in item.requests] == ["\n\nTom thanked Sam since Tom", "\n\nTom thanked Sam since Sam"]
    assert item.requests[0].continuation == item.requests[1].continuation == " had cooked."


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """ " twist the lid" has 13 characters without its space, " bury the jar in sand" 20: -10/13 > -16/20 > -14/13."""
    task = of("piqa")
    item = next(task.examples())
    for logprobs, acc, norm in (((-10.0, -16.0), 100, 100), ((-14.0, -16.0), 100, 0), ((-17.0, -16.0), 0, 0)):
        assert task.score_item(item, [(p, False) for p in logprobs]) == {"acc": acc, "acc_norm": norm}
    task = of("winogrande")
    item = next(task.examples())
    assert task.score_item(item, [(-2.0, False), (-1.0, False)]) == {"acc": 100}
    assert task.score_item(item, [(-1.0, False), (-2.0, False)]) == {"acc": 0}
    task = of("mathqa")
    item = next(task.examples())
    assert task.score_item(item, [(p, False) for p in (-5.0, -4.0, -1.0, -3.0, -2.0)]) == {"acc": 100, "acc_norm": 100}


def test_an_item_scored_twice_is_scored_anew():
    task = of("piqa")
    item = next(task.examples())
    assert task.score_item(item, [(-1.0, False), (-9.0, False)])["acc"] == 100
    assert task.score_item(item, [(-9.0, False), (-1.0, False)])["acc"] == 0


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROWS.parents[2])  # the task files name their rows from there


def test_whole_texts(in_root):
    """Nats per word and per byte; bits per byte are the latter once more."""
    task = LMEval(tasks=(str(ROWS / "own_texts.yaml"),))
    task.check()
    item = next(task.examples())
    assert (item.kind, item.requests) == ("loglikelihood_rolling", (Request(item.reference),))
    text = "A river runs to the sea. The sea is salt, the river is not."
    assert item.reference == text
    made = task.score_item(item, [-118.0])
    assert made["word_nll"] == pytest.approx(118 / len(text.split()))
    assert made["byte_nll"] == pytest.approx(118 / len(text))
    assert set(made) == {"word_nll", "byte_nll"}, "names of which the results know that less is better"


def test_answers_that_are_generated(in_root):
    task = LMEval(tasks=(str(ROWS / "own_answers.yaml"),), num_fewshot=1)
    task.check()
    item = next(task.examples())
    assert item.kind == "generate_until"
    assert item.generation["max_gen_toks"] == 7
    assert item.generation["until"] == ["\n\n", "."]
    assert item.prompt.endswith("the river is not. Say one:")
    assert "Say one: one" not in item.prompt, "the item is no example of itself"
    assert task.score_item(item, ["one"]) == {"exact_match": 100}
    assert task.score_item(item, ["two"]) == {"exact_match": 0}
    after = next(dataclasses.replace(task, question="after_eviction").examples())
    assert after.prompt + after.question == item.prompt
    assert after.question == "\n\nA river runs to the sea. The sea is salt, the river is not. Say one:"


def test_the_likelihood_of_one_answer(in_root):
    task = LMEval(tasks=(str(ROWS / "own_words.yaml"),))
    item = next(task.examples())
    assert [r.continuation for r in item.requests] == [" one"]
    assert task.score_item(item, [(-2.5, True)]) == {"nll": 2.5, "acc": 100}
    assert task.score_item(item, [(-2.5, False)]) == {"nll": 2.5, "acc": 0}


# -- names, files, presets ---------------------------------------------------------------------------------------------


def test_parts():
    task = LMEval(tasks=("piqa", "arc_easy", "piqa"), data_dir=str(ROWS))
    assert [part.tasks for part in task.parts()] == [("piqa",), ("arc_easy",)]
    assert [part.label("lm_eval") for part in task.parts()] == ["piqa", "arc_easy"]
    assert task.label("lm_eval") == "lm_eval"


def test_the_fingerprint_goes_by_the_rows_and_the_definition(tmp_path, in_root):
    for path in ROWS.glob("piqa.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    same = LMEval(tasks=("piqa",), data_dir=str(tmp_path)).fingerprint()
    assert same == of("piqa").fingerprint()
    assert same != of("copa").fingerprint()
    with (tmp_path / "piqa.train.jsonl").open("a") as file:
        file.write('{"goal": "x", "sol1": "y", "sol2": "z", "label": 0}\n')
    assert LMEval(tasks=("piqa",), data_dir=str(tmp_path)).fingerprint() != same
    own = tmp_path / "own_words.yaml"
    own.write_text((ROWS / "own_words.yaml").read_text())
    before = LMEval(tasks=(str(own),)).fingerprint()
    own.write_text(own.read_text().replace("{{ask}}", "{{ask}}!"))
    assert LMEval(tasks=(str(own),)).fingerprint() != before


def test_what_datasets_writes_beside_its_data_is_no_data(tmp_path):
    for path in ROWS.glob("piqa.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "piqa.validation.dataset_info.json").write_text("{}")
    assert len(list(LMEval(tasks=("piqa",), data_dir=str(tmp_path)).examples())) == 4


def test_papers():
    a2sf, h2o = protocol_of("a2sf"), protocol_of("h2o")
    assert (a2sf.mode, a2sf.add_bos, a2sf.fewshot_split, a2sf.fewshot_excludes_item) == (
        *("row_mask", False, "validation", False),
    )
    assert (a2sf.budget_length, a2sf.padded_batch, a2sf.score_dtype, a2sf.whole_text) == ("padded", 2, "float16", False)
    assert (h2o.mode, h2o.add_bos, h2o.whole_text, h2o.per_token, h2o.budget_length) == (
        *("row_mask", False, True, True, "own"),
    )
    assert h2o == protocol_of("keyformer") == protocol_of("row_mask", add_bos=False, whole_text=True, per_token=True)
    assert protocol_of("a2sf", add_bos=True, padded_batch=16).add_bos is True
    assert of("piqa", protocol="a2sf", score_dtype="float32").measured.score_dtype == "float32"


# -- bad input ---------------------------------------------------------------------------------------------------------


def checked(**options):
    LMEval(**({"data_dir": str(ROWS)} | options)).check()


@pytest.mark.slow
def test_an_unknown_task_is_met_with_its_neighbours():
    """Slow: to know that a name is nobody's, all of lm-eval's definitions are read."""
    with pytest.raises(ConfigError, match=r"lm-eval has no task 'pika'; did you mean .*piqa"):
        checked(tasks=("pika",))
    with pytest.raises(ConfigError, match="holds no data of hellaswag"):
        checked(tasks=("hellaswag",))
    assert len(LMEval(tasks=("ai2_arc",), data_dir=str(ROWS)).parts()) == 2, "a tag stands for its tasks"


def test_a_split_that_is_not_there(tmp_path):
    rows = (ROWS / "arc_easy.validation.jsonl").read_bytes()
    (tmp_path / "arc_easy.validation.jsonl").write_bytes(rows)
    task = LMEval(tasks=("arc_easy",), data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"arc_easy is evaluated on its split test, task.data_dir holds validation"):
        task.check()
    (tmp_path / "arc_easy.test.jsonl").write_bytes(rows)
    task.check()
    with pytest.raises(ConfigError, match=r"draws its examples from its split train.*task.fewshot_split=test"):
        dataclasses.replace(task, num_fewshot=1).check()
    (tmp_path / "arc_easy.test.2.jsonl").write_bytes(rows)
    with pytest.raises(ConfigError, match="both hold the split test of arc_easy"):
        task.check()
    (tmp_path / "arc_easy.test.2.jsonl").rename(tmp_path / "mathqa.jsonl")
    with pytest.raises(ConfigError, match=r"holds no data of mathqa: expected mathqa.SPLIT.jsonl .*math_qa"):
        LMEval(tasks=("mathqa",), data_dir=str(tmp_path)).check()


def test_rows_of_another_schema(tmp_path):
    (tmp_path / "piqa.validation.jsonl").write_text(json.dumps({"goal": "x", "sol1": "y"}) + "\n")
    with pytest.raises(ConfigError, match=r"cannot use these files .*columns of baber/piqa on the hub"):
        LMEval(tasks=("piqa",), data_dir=str(tmp_path)).check()
    good = (ROWS / "piqa.validation.jsonl").read_text()
    (tmp_path / "piqa.validation.jsonl").write_text(
        good + json.dumps({"goal": None, "sol1": "y", "sol2": "z", "label": 0})
    )
    with pytest.raises(ConfigError, match=r"row 5 of the data of lm-eval's task piqa has no 'goal'"):
        LMEval(tasks=("piqa",), data_dir=str(tmp_path)).check()
    (tmp_path / "winogrande.validation.jsonl").write_text(
        json.dumps({"sentence": "Ann saw _.", "option1": "a", "option2": "b", "answer": "1"})
        + "\n"
        + json.dumps({"sentence": "Ann saw it.", "option1": "a", "option2": "b", "answer": "1"})
    )
    with pytest.raises(
        ConfigError, match=r"row 2 of the data of lm-eval's task winogrande cannot be asked \(ValueError"
    ):
        LMEval(tasks=("winogrande",), data_dir=str(tmp_path)).check()


def test_a_hub_that_does_not_answer(monkeypatch):
    """HF_HUB_OFFLINE=1 in tests: only the cache is read, and nothing is in it."""
    with pytest.raises(
        ConfigError, match=r"cannot load the data of lm-eval's task copa \(aps/super_glue on the hub\).*data_dir"
    ):
        LMEval(tasks=("copa",)).check()
    monkeypatch.setattr(definition, "forbidden", lambda: False)
    monkeypatch.setattr(definition, "unreachable", lambda: "no route")
    with pytest.raises(ConfigError, match=r"on the hub\): no route. Make the hub reachable, or .*copa.SPLIT.jsonl"):
        LMEval(tasks=("copa",)).check()


def test_metrics_of_a_corpus_alone(in_root, tmp_path):
    path = tmp_path / "own_corpus.yaml"
    path.write_text((ROWS / "own_words.yaml").read_text().split("metric_list")[0] + "metric_list:\n  - metric: bleu\n")
    with pytest.raises(ConfigError, match=r"all metrics of lm-eval's task .* are of the whole corpus"):
        LMEval(tasks=(str(path),)).check()


def test_without_lm_eval(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install kvexp\[eval\]"):
        of("piqa").check()


def test_a_grader_that_draws_does_so_by_the_item_alone():
    def process_results(doc, results):
        return {"drawn": random.random()}

    task = SimpleNamespace(process_results=process_results, apply_filters=lambda: None, higher_is_better=dict)

    def graded(doc: dict[str, str]) -> float:
        instance = SimpleNamespace(doc=doc, resps=[], filtered_resps={})
        task.apply_filters = lambda: instance.filtered_resps.update(none="Yes.")
        (value,) = definition.outcome(task, SimpleNamespace(instances=[instance]), ["Yes."])[0].values()
        return value

    first = graded({"prompt": "One."})
    state = random.getstate()
    assert graded({"prompt": "Two."}) != first == graded({"prompt": "One."})
    assert random.getstate() == state
    assert LMEval(tasks=("ifeval",)).corrected() == ("letter_draws",)
    assert LMEval(tasks=("piqa",)).corrected() == ()
