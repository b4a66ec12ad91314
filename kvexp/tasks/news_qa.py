"""News questions: four about each of the articles that come with kvexp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.articles import articles, articles_digest
from kvexp.tasks.base import Example
from kvexp.tasks.metrics import contains, qa_f1
from kvexp.tasks.news_questions import NewsQuestions


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
