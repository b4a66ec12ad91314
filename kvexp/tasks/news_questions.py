"""What the tasks that ask about kvexp's own English share: the words around a question, and which answers are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.framed_questions import FramedQuestions
from kvexp.tasks.metrics import contains


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
