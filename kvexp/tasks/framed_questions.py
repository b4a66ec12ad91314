"""What tasks share that ask questions about a text: the words around the text and the question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.questions import SharedContextTask

Own = TypeVar("Own", bound="FramedQuestions")


@dataclass(frozen=True, kw_only=True)
class FramedQuestions(SharedContextTask):
    """Questions about a context, in words that are options.

    `before`: in front of the context. `after`: behind it, with {question}. `answer_prefix` stands behind it all and
    begins the answer of a base model; a chat model, whose answer begins with its turn, does not get it.
    """

    before: str = ""
    after: str = "\n\n{question}"
    answer_prefix: str = ""

    def for_model(self: Own, *, chat: bool) -> Own:
        return replace(self, answer_prefix="") if chat else self

    def about(self, name: str, context: str, question: str, answer: str) -> Example:
        """The example that asks `question` about `context`."""
        after = self.after.replace("{question}", question) + self.answer_prefix
        return self.ask(name, (self.before, context, ""), after, answer)

    def check_options(self) -> None:
        super().check_options()
        if self.after.count("{question}") != 1:
            raise ConfigError(f"task.after must hold {{question}} once, got {self.after!r}")
