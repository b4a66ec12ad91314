"""Examples with a question or choices, tasks whose rows are made: what every runner may rely on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from kvexp.errors import ConfigError
from kvexp.tasks import Example, QuestionTask

ROWS = [{"text": "A cat sat.", "asked": f"\nWho sat {n}?", "answer": "cat"} for n in (1, 2, 1)]


@dataclass(frozen=True, kw_only=True)
class Pairs(QuestionTask):
    """Rows made here: a text, a question, two answers to choose from."""

    name: ClassVar[str] = "pairs"
    metrics: ClassVar[tuple[str, ...]] = ("acc",)
    generated: ClassVar[bool] = True

    data: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, row in enumerate(ROWS[: self.limit], start=1):
            yield f"made row {number}", row

    def fingerprint(self) -> str:
        return "made:pairs"

    def example(self, row: dict[str, Any], where: str) -> Example:
        if not row["answer"]:
            raise ConfigError(f"{where} has no answer")
        return self.ask("same", ("Read: ", row["text"], "\n"), row["asked"], "cat", choices=(" cat", " dog"))


def test_a_question_is_in_the_prompt_or_after_it_with_the_same_characters() -> None:
    within, after = next(Pairs().examples()), next(Pairs(question="after_eviction").examples())
    assert within.prompt_parts == ("Read: ", "A cat sat.", "\n\nWho sat 1?")
    assert within.question == ""
    assert after.prompt_parts == ("Read: ", "A cat sat.", "\n")
    assert after.question == "\nWho sat 1?"
    assert within.prompt == after.prompt + after.question
    assert within.choices == after.choices == (" cat", " dog")


def test_examples_keep_question_and_choices_under_their_new_names() -> None:
    made = list(Pairs(question="after_eviction").examples())
    assert [example.id for example in made] == ["same", "same#2", "same#3"]
    assert [example.question for example in made] == [row["asked"] for row in ROWS]
    assert all(example.choices == (" cat", " dog") for example in made)


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"task\.question must be one of in_prompt, after_eviction, got 'later'"):
        Pairs(question="later").check()


def test_every_row_that_is_made_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    Pairs().check()
    monkeypatch.setitem(ROWS[2], "answer", "")
    with pytest.raises(ConfigError, match="made row 3 has no answer"):
        Pairs().check()
    Pairs(limit=2).check()
    monkeypatch.setattr(Pairs, "rows", lambda self: iter(()))
    with pytest.raises(ConfigError, match=r"task\.name=pairs: found no rows"):
        Pairs().check()


def test_invariants_of_an_example() -> None:
    example = Example("a", "context", "r", question=" why?", choices=(" x", " y"))
    assert example.prompt_parts == ("", "context", "")
    assert replace(example, id="b").choices == (" x", " y")
    with pytest.raises(ValueError, match="example a: the question is white space"):
        Example("a", "context", "r", question="\n")
    with pytest.raises(ValueError, match="example a: choice 1 is empty"):
        Example("a", "context", "r", choices=(" x", ""))
    with pytest.raises(ValueError, match="has choices and a continuation"):
        Example("a", "context", "r", " went on", choices=(" x", " y"))


def test_a_task_that_scores_no_choices_says_so() -> None:
    with pytest.raises(NotImplementedError):
        Pairs().score_choices([-1.0, -2.0], [1, 1], Example("a", "p", "r", choices=(" x", " y")))
