"""Questions of one's own: a local JSON file of texts, each with a list of questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, row_id
from kvexp.tasks.data import text
from kvexp.tasks.framed_questions import FramedQuestions
from kvexp.tasks.metrics import beyond_ascii, contains, qa_f1


@dataclass(frozen=True, kw_only=True)
class ContextQA(FramedQuestions):
    """Answer questions about texts of `data_files`; rows {"context", "questions": [{"question", "answers"}, ...]} and
    perhaps an id. `answers`: a text, or a list of texts that are all right. An example per question, `limit` counts
    questions.

    Scores in percent, the best over the answers: `f1` of the words of both (SQuAD's), `exact`, whether an answer stands
    in the model's word for word. Of a question that has letters beyond ASCII, in itself or an answer, the words are
    those of any script (`kvexp.tasks.metrics.words_of`), and the row's info says so (`words`: unicode). All questions
    count, also those that the full cache does not answer.
    """

    name: ClassVar[str] = "context_qa"
    metrics: ClassVar[tuple[str, ...]] = ("f1", "exact")

    question: str = "after_eviction"
    context_field: str = "context"
    questions_field: str = "questions"
    id_field: str = "id"
    max_new_tokens: int = 64

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.data_files is None and not self.hub_id:
            raise ConfigError(
                'task.data_files=FILE: name a .json or .jsonl file of rows {"context", "questions": [{"question", '
                '"answers"}, ...]}, got none'
            )
        yield from islice(self._asked(), self.limit)

    def _asked(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for where, row in self.source.choose(None, "first", self.seed):
            for number, asked in enumerate(entries(row, self.questions_field, where)):
                yield f"question {number} of {where}", {"row": row, "asked": asked, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        context = text(row["row"], self.context_field, where, "context_field")
        asked, answers = text(row["asked"], "question", where, "questions_field"), answers_of(row["asked"], where)
        name = f"{row_id(row['row'], self.id_field, context)} question {row['number']}"
        made = self.about(name, context, asked, answers[0])
        words = {"words": "unicode"} if beyond_ascii("".join((asked, *answers))) else {}
        return replace(made, info={"answers": answers, "question": row["number"], **words})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        answers = example.info["answers"]
        unicode = "words" in example.info
        best = max(qa_f1(output, answer, unicode) for answer in answers)
        return {"f1": 100 * best, "exact": 100 * max(contains(output, answer, unicode) for answer in answers)}

    def check_options(self) -> None:
        super().check_options()
        if self.sample != "first":
            raise ConfigError(
                f"task.sample must be first for context_qa, got {self.sample!r}: its questions have an order"
            )


def entries(row: Mapping[str, Any], field: str, where: str) -> list[Mapping[str, Any]]:
    """The questions of a row: a list of objects, at least one."""
    found = row.get(field)
    if not isinstance(found, list | tuple) or not found or not all(isinstance(each, Mapping) for each in found):
        shown = f"got {found!r:.80}" if field in row else f"it has: {', '.join(row)}"
        raise ConfigError(
            f'{where}: field {field!r} must be a list of objects {{"question", "answers"}}, {shown}; correct the row, '
            "or name the field that holds them with task.questions_field"
        )
    return list(found)


def answers_of(asked: Mapping[str, Any], where: str) -> list[str]:
    """The right answers to a question: field `answers` or `answer`, a text or a list of texts, none of them empty."""
    found = asked.get("answers", asked.get("answer"))
    each = [found] if isinstance(found, str) else found
    if not isinstance(each, list | tuple) or not each or not all(isinstance(one, str) and one.strip() for one in each):
        shown = f"got {found!r:.80}" if found is not None else f"it has: {', '.join(asked)}"
        raise ConfigError(f"{where}: field 'answers' must be a text or a list of texts, none of them empty, {shown}")
    return list(each)
