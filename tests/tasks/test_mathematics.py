"""Mathematics: answers graded by hand, prompts to the letter, several answers to an item, mistakes refused in time."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from commands import composed

from kvexp.run.batches import evaluate_run
from kvexp.run.settings import settings_of
from kvexp.run.store import Run
from kvexp.tasks import GSM8K, Mathematics, mathematics
from kvexp.tasks.base import with_samples
from kvexp.tasks.mathematics import (
    CLASSES,
    as_integer,
    ends_in_loop,
    grade,
    last_box,
    normalised,
    same_value,
    without_thinking,
)
from kvexp.util.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"
GRADED = [json.loads(line) for line in (FIXTURES / "graded_mathematics.jsonl").read_text("utf-8").splitlines()]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def exam(tmp_path: Path) -> str:
    rows = [{"id": n, "problem": f"What is {n} + {n}?", "answer": f"{2 * n:03d}", "year": "2024"} for n in range(1, 6)]
    return write(tmp_path / "exam.jsonl", *rows)


# ---- the grader


@pytest.mark.parametrize("case", GRADED, ids=lambda case: f"{case['reference'][:20]} {case['output'][-40:]}")
def test_an_answer_is_graded_as_by_hand(case):
    found, _ = grade(case["output"], case["reference"], case["answer"], case["cut"])
    assert found == case["graded"]


def test_enough_answers_of_every_class_were_graded_by_hand():
    counts = Counter(case["graded"] for case in GRADED)
    assert set(counts) == set(CLASSES)
    assert counts["right"] >= 90
    assert counts["wrong"] >= 40
    assert len({json.dumps(case) for case in GRADED}) == len(GRADED)


def test_the_last_box_is_the_balanced_one():
    assert last_box(r"\boxed{1} and \boxed{\frac{a}{\{b\}}}") == r"\frac{a}{\{b\}}"
    assert last_box(r"\boxed{1 and \boxed{2}") == "2"
    assert last_box(r"\boxed{ } \boxed{$$} \boxed{{}}") is None
    assert last_box(r"\fbox{ 7 }") == "7"
    assert last_box(r"so \boxed 7.") == last_box(r"so \boxed7.") == "7"
    assert last_box(r"\boxedness{7}") is None


@pytest.mark.parametrize("end", [r"\boxed{", r"\boxed{4", r"\boxed{\frac{1}{2}", r"\fbox{", r"\boxed", r"\box"])
@pytest.mark.parametrize("answer", ["integer", "expression", "number"])
def test_a_chain_cut_inside_its_last_box_has_no_answer(end, answer):
    text = rf"\boxed{{4}}. Wait: {end}"
    assert last_box(text) is None
    assert grade(text, "4", answer, True) == ("truncated", None)
    assert grade(text, "4", answer, False) == ("no box", None)
    task = Mathematics(answer=answer)
    assert set(task.score(text, "4", None).values()) == {0.0}
    assert grade(r"\boxed{4}. Wait: \boxed{}", "4", answer, True)[0] == "right"


# (box, reference, official, by value), the last by hand
BY_VALUE = {
    "expression": [
        (r"2\le x\le 3", "[2,3]", False, True),
        ("2\u2264x\u22643", "[2,3]", False, True),
        (r"2<x<3", "[2,3]", False, False),
        (r"x\ge 2", r"[2,\infty)", False, True),
        ("3 1/2", r"\frac72", False, True),
        ("\u22123 1/2", r"-\frac72", False, True),
        (r"3\tfrac{1}{2}", r"\frac72", True, True),
        ("31/2", r"\frac72", False, False),
        (r"10\%", "0.1", False, True),
        ("0.1", r"10\%", False, True),
        ("10", r"10\%", True, True),
        ("10", "0.1", False, False),
        ("4210", "4210_5", True, False),
        ("4210_{5}", "4210_5", True, True),
        ("4210_{6}", "4210_5", False, False),
        ("4 2", "42", True, False),
        (r"4\ 2", "42", True, False),
        ("32, 349", "32349", True, False),
        ("10 000", "10000", True, True),
        (r"32{,}349", r"32,\!349", True, True),
        ("42,", "42", False, True),
        (".4", "0.4", True, True),
        ("\u221a2", r"\sqrt2", False, True),
        ("1, 2", "2,1", True, True),
        ("(1,2)", "(2,1)", False, False),
        ("0", "a+3z=0", False, False),
        ("2x+3", "y=2x+3", True, True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True, True),
        (r"\text{Evelyn}", "Evelyn", True, True),
        (r"x<0 \text{ or } x>1", r"(-\infty,0)\cup(1,\infty)", False, True),
        (r"x\le 0 \text{ or } x>1", r"(-\infty,0)\cup(1,\infty)", False, False),
        ("10 percent", "0.1", False, True),
        ("1.5e-3", "0.0015", False, True),
        (r"-1.5\times10^{-3}", "-0.0015", True, True),
        ("2pi", r"2\pi", False, True),
        ("x\u207b\u2074", "x^{-4}", False, True),
        (r"\varnothing", r"\emptyset", False, True),
        (r"5\text{ million}", "5", True, False),
        (r"\{1,2\}", "(1,2)", True, False),
        (r"\{2,1\}", r"\{1,2\}", True, True),
    ],
    "integer": [
        ("4 2", "42", True, False),
        ("42,", "42", False, True),
        ("m+n=42", "42", True, True),
        ("042.0", "42", True, True),
        (r"4\,2", "42", True, False),
        ("4,2", "42", False, False),
        (r"42 \text{ units}", "42", False, True),
        ("42 apples", "42", False, True),
        ("{42}", "42", False, True),
        ("42 million", "42", False, False),
        ("\u221242", "42", False, False),
    ],
    "number": [
        ("\u22125", "-5", True, True),
        ("\u20135", "-5", True, True),
        ("5", "-5", False, False),
        ("\u22125", "5", False, False),
        ("4 2", "42", True, False),
        ("3 1/2", "3.5", False, True),
        ("18 dollars", "18", True, True),
        ("1,450", "1450", True, True),
        ("1e3", "1000", False, True),
        (r"1\times10^3", "1000", False, True),
        ("1\uff0c000", "1000", True, True),
        ("5 million", "5", True, False),
    ],
}


@pytest.mark.parametrize(("answer", "case"), [(answer, case) for answer, cases in BY_VALUE.items() for case in cases])
def test_a_box_is_read_by_the_official_rule_and_as_a_careful_person_does(answer, case):
    box, reference, official, by_value = case
    scores = Mathematics(answer=answer).score(rf"\boxed{{{box}}}", reference, None)
    assert scores == {"accuracy": 100.0 * official, "accuracy_by_value": 100.0 * by_value}


def test_both_readings_differ_on_graded_answers_only_where_a_person_would_say_so():
    """Answers graded by hand by the official rules: a base is part of a numeral, and 33/1 is a whole number."""
    differ = set()
    for case in GRADED:
        graded, box = grade(case["output"], case["reference"], case["answer"], case["cut"])
        if box is not None and same_value(box, case["reference"], case["answer"]) != (graded == "right"):
            differ.add((box, case["reference"]))
    assert differ == {("4210", "4210_{5}"), ("33/1", "33"), (r"\frac{33}{1}", "33")}


def test_thinking_is_what_ends_last_or_never_ends():
    assert without_thinking("a</think>b</think>c") == "c"
    assert without_thinking("a<think>b") == "a"
    assert without_thinking("a <|think|> b") == "a "
    assert without_thinking("I think so") == "I think so"
    assert without_thinking("a◁/think▷b") == "b"


def test_a_loop_is_one_that_goes_on_to_the_end():
    assert ends_in_loop("then " + "we add one and go on " * 4)
    assert ends_in_loop("then " + "we add one and go on " * 4 + "we ad")
    assert not ends_in_loop("we add one and go on " * 4 + "until nothing of it is left to add")
    assert ends_in_loop("x = 0." + "142857" * 9)
    assert not ends_in_loop("")


def test_normal_forms_by_hand():
    assert normalised(r"\left( \dfrac12,\ \sqrt3 \right)") == r"(\frac{1}{2},\sqrt{3})"
    assert normalised(r"1,234{,}567") == "1234567"
    assert normalised("(1,234)") == "(1,234)"  # a pair, as far as anybody can tell
    assert normalised(r"12\text{ cm}^2") == "12"
    assert [as_integer(each) for each in ("007", "-7", "7.5", "n=7", "7,8", "")] == [7, -7, None, 7, None, None]


def test_a_comparison_without_end_is_given_up_and_leaves_an_alarm_as_it_was(monkeypatch):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 60, 0.5)
        monkeypatch.setattr(mathematics, "SECONDS", 0.05)
        monkeypatch.setattr("math_verify.verify", lambda *_, **__: time.sleep(30))
        start = time.monotonic()
        assert not mathematics.same_expression("x+1", "1+x")
        assert time.monotonic() - start < 20
        left, again = signal.getitimer(signal.ITIMER_REAL)
        assert 30 < left <= 60
        assert again == 0.5
        assert not rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- prompts


def test_the_prompt_is_one_turn(exam):
    task = Mathematics(data_files=exam, answer="integer", year=2024)
    first, *_ = task.examples()
    asked = "What is 1 + 1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert first.prompt == asked + "\n\nSolution:"
    assert next(iter(task.for_model(chat=True).examples())).prompt == asked
    assert (first.id, first.reference, first.info) == ("1", "2", {"year": 2024})
    assert task.score(r"\boxed{2}", "2", first) == {"accuracy": 100.0, "accuracy_by_value": 100.0}
    assert task.of_answer(r"\boxed{3}", "2", "length") == {"graded": "wrong", "boxed": "3"}
    assert task.of_answer("3", "2", "length") == {"graded": "truncated"}
    assert task.of_answer("3", "2", "stop") == {"graded": "no box"}


@pytest.mark.parametrize(
    ("option", "row", "reference"),
    [
        ("aime24", {"id": 60, "problem": "P", "solution": "S", "answer": "204", "url": "u", "year": "2024"}, "204"),
        ("aime24", {"ID": "2024-II-4", "Problem": "P", "Solution": "S", "Answer": 33}, "33"),
        ("aime25", {"problem": "P", "answer": "070", "id": "0"}, "70"),
        ("aime26", {"problem_idx": 1, "answer": 277, "problem": "P"}, "277"),
        ("math500", {"problem": "P", "solution": "S", "answer": r"\frac{1}{2}", "unique_id": "test/a/1.json"}, None),
        ("gsm8k", {"question": "P", "answer": "Two and two.\n#### 1,450"}, "1450"),
    ],
)
def test_rows_of_each_hub_schema(tmp_path, option, row, reference):
    config, choices = composed(f"task={option}", f"task.data_files={write(tmp_path / 'rows.jsonl', row)}")
    (example,) = settings_of(config, choices).task.examples()
    assert example.prompt.startswith("P\n\nPlease reason")
    assert example.reference == (reference or row["answer"])


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"answer": "2"}, {}, "row 1 of .* has no field 'problem'.*task.problem_field"),
        ({"problem": "P"}, {}, "field 'answer' must be a text or a number"),
        ({"problem": "P", "answer": ""}, {}, "must be a text or a number"),
        ({"problem": "P", "answer": True}, {}, "must be a text or a number"),
        ({"problem": "P", "answer": "1000"}, {"answer": "integer"}, "whole number from 0 to 999 .* got '1000'"),
        ({"problem": "P", "answer": "1/2"}, {"answer": "integer"}, "whole number from 0 to 999"),
        ({"problem": "P", "answer": "no number"}, {"answer": "number"}, "no single number behind ####"),
        ({"problem": "P", "answer": "2"}, {"template": "Solve it."}, "task.template must hold {problem} once"),
        ({"problem": "P", "answer": "2"}, {"truncate": "middle"}, "another problem"),
    ],
)
def test_a_bad_row_or_option_is_refused(tmp_path, row, options, words):
    with pytest.raises(ConfigError, match=words):
        Mathematics(data_files=write(tmp_path / "rows.jsonl", row), **options).check()


def test_expressions_are_not_compared_without_math_verify(monkeypatch, exam):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"math-verify .*pip install kvexp\[benchmarks\]"):
        Mathematics(data_files=exam).check()
    Mathematics(data_files=exam, answer="integer").check()


# ---- several answers to an item


def test_samples_of_an_item_stand_together_and_say_so(exam):
    task = with_samples(Mathematics(data_files=exam, answer="integer", limit=6), "aime24", 3)
    made = list(task.examples())
    assert [each.id for each in made] == [f"{item} sample {n}" for item in (1, 2) for n in (1, 2, 3)]
    assert [(each.info["item"], each.info["sample"]) for each in made[2:4]] == [("1", 3), ("2", 1)]
    assert len({each.prompt for each in made}) == 2
    assert len(list(replace(task, limit=None).examples())) == 15


def test_one_sample_is_the_task_as_it_was(exam):
    plain = Mathematics(data_files=exam, answer="integer")
    assert with_samples(plain, "aime24", 1) == plain
    assert "samples" in GSM8K(data_files=str(FIXTURES / "gsm8k.jsonl")).not_identifying()
    assert "samples" not in GSM8K(data_files=str(FIXTURES / "gsm8k.jsonl"), samples=2).not_identifying()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("task=aime24", "samples=4"), "4 times the same greedy answer: add generation=sampling"),
        (("task=aime24", "samples=0"), "samples must be at least 1"),
        (("task=news_qa", "samples=2"), "task=news_qa asks each once: take aime24"),
        (("task=aime24", "samples=4", "generation=sampling", "limit=10"), "limit=10 counts answers, and samples=4"),
        (("task=aime24", "+task.samples=4"), "task.samples is set by samples=N"),
    ],
)
def test_samples_that_make_no_sense_are_refused(exam, words, error):
    config, choices = composed(*words, f"+task.data_files={exam}" if "news" in words[0] else f"task.data_files={exam}")
    config["task"].pop("data_files") if "news" in words[0] else None
    with pytest.raises(ConfigError, match=error):
        settings_of(config, choices).task.check()


def test_a_method_and_the_full_cache_draw_the_same(tmp_path, exam):
    """Every sample of a method whose budget holds everything is the full cache's, and samples differ."""
    words = ("model=tiny", "task=aime24", f"task.data_files={exam}", "samples=3", "limit=6", "generation=sampling")
    words += ("generation.temperature=1.5", "generation.top_p=1.0", "task.max_new_tokens=8", "method=h2o")
    config, choices = composed(*words, "budget=tokens", "budget.tokens=600", f"outputs_dir={tmp_path / 'out'}")
    run = evaluate_run(settings_of(config, choices))
    rows, full = run.rows(), Run.load(run.path.parent / str(run.baseline)).rows()
    assert [row["output_tokens"] for row in rows] == [row["output_tokens"] for row in full]
    assert len({tuple(row["output_tokens"]) for row in rows[:3]}) > 1
    assert [row["info"]["item"] for row in rows] == ["1"] * 3 + ["2"] * 3
    assert {row["info"]["graded"] for row in rows} <= {"no box", "truncated", "looping"}
