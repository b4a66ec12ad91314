"""Tasks that ask about a text: does the model know the question while it reads, or only after the eviction?"""

from __future__ import annotations

from dataclasses import dataclass

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
