"""Tasks that ask about a text: does the model know the question while it reads, or only after the eviction?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, Task

IN_PROMPT, AFTER_EVICTION = "in_prompt", "after_eviction"
QUESTIONS = (IN_PROMPT, AFTER_EVICTION)


@dataclass(frozen=True, kw_only=True)
class QuestionTask(Task):
    """A task whose examples are a context and a question about it, or an instruction what to do with it.

    question=in_prompt: both are prefilled, so the last query rows that a method scores by are the question's, and
    eviction knows what will be asked (the setting of LongBench and of most papers). question=after_eviction: the
    context is prefilled and evicted, then the question is fed token by token, as a question asked of a cache that is
    kept. The characters, context then question, are the same in both.
    """

    question: str = IN_PROMPT

    def ask(
        self,
        name: str,
        context: tuple[str, str, str],
        question: str,
        reference: str,
        *,
        continuation: str = "",
        choices: tuple[str, ...] = (),
    ) -> Example:
        """The example that asks `question` about `context` = (prefix, body, suffix); only the body may be shortened.

        question: everything behind the context up to where the answer starts. It begins with the white space that
        parts it from the context, else its first token may not be the one it is inside the whole text.
        """
        prefix, body, suffix = context
        if self.question == IN_PROMPT:
            suffix, question = suffix + question, ""
        return Example(
            name,
            prefix + body + suffix,
            reference,
            continuation,
            prefix,
            body,
            suffix,
            question=question,
            choices=choices,
        )

    def check_options(self) -> None:
        super().check_options()
        self.choice("question", QUESTIONS)


@dataclass(frozen=True, kw_only=True)
class SharedContextTask(QuestionTask):
    """A task that may have several questions about one context.

    shared_context (questions=all on the command line): every context is prefilled and evicted once and each of its
    questions is asked of a copy of that cache. The examples of a context then stand together, in the order of its
    first question, each with all `questions` of its context: a context too long is cut so that the longest of them
    fits, and is the same text for all, whatever `limit` leaves out.
    """

    later_options: ClassVar[tuple[str, ...]] = ("shared_context",)

    shared_context: bool = False

    def examples(self) -> Iterator[Example]:
        if not self.shared_context:
            yield from super().examples()
            return
        before = self._pinned_stamps()
        whole = replace(self, limit=None) if self.sample == "first" else self
        contexts: dict[tuple[str, str], list[Example]] = {}
        for example in Task.examples(whole):
            key = ("asked", example.prompt) if example.question else ("skipped", example.id)
            contexts.setdefault(key, []).append(example)
        self._check_unchanged(before)
        each = (
            replace(example, questions=tuple(other.question for other in asked), number=number)
            for asked in contexts.values()
            for number, example in enumerate(asked)
        )
        yield from islice(each, self.limit)

    def check_options(self) -> None:
        super().check_options()
        if self.shared_context and self.question != AFTER_EVICTION:
            raise ConfigError(
                "questions=all asks all questions of a context that was evicted once, so that none of them can be in "
                f"the prompt, got task.question={self.question}: set task.question=after_eviction, or questions=each"
            )


def with_shared_context(task: Task, name: str) -> Task:
    """The task as questions=all asks it; ConfigError where it has one question per context. name: as it was chosen."""
    if not isinstance(task, SharedContextTask):
        raise ConfigError(
            f"questions=all is for tasks with several questions per context, and task={name} has one: take news_qa, "
            "news_needle, needle_multi, longbench, govreport_sections, testbed_qa, or context_qa for a file of your "
            "own; or set questions=each"
        )
    return replace(task, shared_context=True)
