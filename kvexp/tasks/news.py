"""News: summaries of the articles that come with kvexp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from kvexp.articles import articles, articles_digest
from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.summarization import SummaryTask


@dataclass(frozen=True, kw_only=True)
class News(SummaryTask):
    """Summarize a fictional news article of kvexp.articles, which no model has read: 36 of 450 to 900 words.

    The body is the article without its title, which would be a summary already; the reference its three highlights, one
    a line, as in CNN/DailyMail. Two things are not: the instruction says how long a summary is wanted, and an answer
    has as many tokens as the references, since ROUGE F1 falls with every sentence that the reference does not have.
    """

    name: ClassVar[str] = "news"
    generated: ClassVar[bool] = True

    instruction: str = "Summarize the following news article in three sentences:"
    instruction_after: str = "Summarize the news article above in three sentences."
    max_new_tokens: int = 85

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for article in islice(articles(), self.limit):
            yield f"article {article.id}", {"article": article}

    def example(self, row: dict[str, Any], where: str) -> Example:
        article = row["article"]
        return self.summary_of(article.id, article.text, "\n".join(article.highlights))

    def articles_read(self) -> set[str]:
        return {row["article"].id for _, row in self.rows()}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()}"

    def check_options(self) -> None:
        super().check_options()
        if self.sample != "first":
            raise ConfigError(f"task.sample must be first for news, got {self.sample!r}: its articles have an order")
