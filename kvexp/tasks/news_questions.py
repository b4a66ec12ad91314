"""What the tasks that ask about kvexp's own English share: the words around a question, and which answers are right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.metrics import contains
from kvexp.tasks.questions import QuestionTask


@dataclass(frozen=True, kw_only=True)
class NewsQuestions(QuestionTask):
    """Questions with one short answer each, that stands in the context letter for letter.

    `before`: in front of the context. `after`: behind it, with {question}. `answer_prefix` stands behind it all and
    begins the answer of a base model; a chat model, whose answer begins with its turn, does not get it.

    A question counts only where the full cache answers it (`only_answered`): the reference stands in the answer word
    for word, both without case, punctuation and articles. What a model cannot do with all of its cache says nothing
    about what it loses with less.
    """

    generated: ClassVar[bool] = True
    only_answered: ClassVar[bool] = True

    before: str = ""
    after: str = "\n\n{question}"
    answer_prefix: str = ""

    def for_model(self, *, chat: bool) -> NewsQuestions:
        return replace(self, answer_prefix="") if chat else self

    def about(self, name: str, context: str, question: str, answer: str) -> Example:
        """The example that asks `question` about `context`."""
        after = self.after.replace("{question}", question) + self.answer_prefix
        return self.ask(name, (self.before, context, ""), after, answer)

    def answered(self, output: str, example: Example) -> bool:
        return bool(contains(output, example.reference))

    def check_options(self) -> None:
        super().check_options()
        if self.after.count("{question}") != 1:
            raise ConfigError(f"task.after must hold {{question}} once, got {self.after!r}")
        if self.sample != "first":
            raise ConfigError(
                f"task.sample must be first for {self.name}, got {self.sample!r}: its questions have an order"
            )
