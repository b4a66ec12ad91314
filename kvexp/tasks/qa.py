"""Questions about a context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.tasks.articles import articles, articles_digest
from kvexp.tasks.base import Example, FramedQuestions, row_id
from kvexp.tasks.data import text
from kvexp.tasks.metrics import beyond_ascii, contains, qa_f1
from kvexp.util import ConfigError

# Questions of one's own: a local JSON file of texts, each with a list of questions.


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


# What the tasks that ask about kvexp's own English share: the words around a question, and which answers are right.


@dataclass(frozen=True, kw_only=True)
class NewsQuestions(FramedQuestions):
    """Questions with one short answer each, that stands in the context letter for letter.

    A question counts only where the full cache answers it (`only_answered`): the reference stands in the answer word
    for word, both without case, punctuation and articles. What a model cannot do with all of its cache says nothing
    about what it loses with less.
    """

    generated: ClassVar[bool] = True
    only_answered: ClassVar[bool] = True

    def answered(self, output: str, example: Example) -> bool:
        return bool(contains(output, example.reference))

    def check_options(self) -> None:
        super().check_options()
        if self.sample != "first":
            raise ConfigError(
                f"task.sample must be first for {self.name}, got {self.sample!r}: its questions have an order"
            )


# News questions: four about each of the articles that come with kvexp.


@dataclass(frozen=True, kw_only=True)
class NewsQA(NewsQuestions):
    """Answer four questions about each of 36 fictional articles, one to each quarter of its words; an example each.

    With question=after_eviction, the default here, an article is prefilled and evicted once for all of its questions,
    and nobody knows them before. `limit` counts questions.

    Scores in percent: `exact`, whether the reference stands in the answer word for word, as in the task needle; `f1`
    of the words of both (SQuAD's), which a whole sentence as an answer lowers for every method alike.
    """

    name: ClassVar[str] = "news_qa"
    metrics: ClassVar[tuple[str, ...]] = ("exact", "f1")

    question: str = "after_eviction"
    max_new_tokens: int = 32

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        each = ((article, number) for article in articles() for number in range(len(article.questions)))
        for article, number in islice(each, self.limit):
            yield f"article {article.id}, question {number}", {"article": article, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        article, number = row["article"], row["number"]
        asked = article.questions[number]
        made = self.about(f"{article.id} question {number}", article.text, asked.question, asked.answer)
        return replace(made, info={"article": article.id, "question": number, "paragraph": asked.paragraph})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"exact": 100 * contains(output, reference), "f1": 100 * qa_f1(output, reference)}

    def articles_read(self) -> set[str]:
        return {row["article"].id for _, row in self.rows()}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()}"
