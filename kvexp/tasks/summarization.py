"""What the summarization tasks share: an instruction around a document, one reference, ROUGE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, RougeTask, row_id
from kvexp.tasks.data import text
from kvexp.tasks.questions import AFTER_EVICTION, QuestionTask

# name -> the text around {instruction}, or {instruction_after}, and {input}; task.template may also be such a text.
TEMPLATES = {
    # Stanford Alpaca's, which MLPerf's GPT-J and Keyformer's summarization scripts use
    "alpaca": (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
    # HELM's for XSum, which H2O's summarization script uses (with task.stop='###')
    "helm": "###\nArticle: {input}\n\nSummarize the above article in 1 sentence.\n",
    "plain": "{instruction}\n\n{input}\n\n",
    # The same two with the document first, so that an instruction may come once it was evicted: no paper's words.
    "alpaca_last": (
        "Below is an input that provides context, followed by an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Input:\n{input}\n\n### Instruction:\n{instruction_after}\n\n### Response:"
    ),
    "plain_last": "{input}\n\n{instruction_after}\n\n",
}


@dataclass(frozen=True, kw_only=True)
class SummaryTask(QuestionTask, RougeTask):
    """Summarize a document, wherever it comes from: prefix = instruction, body = document, suffix = where the summary
    starts.

    `template` is a name in TEMPLATES or a text with {input} once (and {instruction} or {instruction_after} at most
    once); None: alpaca for a base model, plain for a chat model, with question=after_eviction alpaca_last and
    plain_last. `instruction_after`: the instruction in the words of one that follows the document.

    question=in_prompt: instruction and document are prefilled, in the template's order. question=after_eviction: the
    document is prefilled and evicted, then the instruction and all else that stands behind it is fed token by token;
    the template must not have the instruction in front. With template=alpaca_last or plain_last the text is the same
    in both.

    `stop`: an answer is scored up to the first occurrence of this text. `join_lines`: newlines of answer and reference
    become spaces before sentences are split for rougeLsum, as in the Keyformer release; false keeps a newline as a
    sentence's end.
    """

    later_options: ClassVar[tuple[str, ...]] = ("question", "instruction_after")

    instruction: str = ""
    instruction_after: str = "Summarize the text above."
    template: str | None = None
    stop: str | None = None
    join_lines: bool = False

    @property
    def _around(self) -> str:
        template = self.template or self._default_template(chat=False)
        return TEMPLATES.get(template, template)

    def _default_template(self, *, chat: bool) -> str:
        return ("plain" if chat else "alpaca") + ("_last" if self.question == AFTER_EVICTION else "")

    def for_model(self, *, chat: bool) -> SummaryTask:
        return replace(self, template=self.template or self._default_template(chat=chat))

    def around(self) -> tuple[str, str]:
        """What stands in front of every document and behind it."""
        before, _, after = self._around.partition("{input}")
        return self._instructed(before), self._instructed(after)

    def _instructed(self, words: str) -> str:
        """These words of the template, which hold one of the two instructions at most."""
        name = "instruction_after" if "{instruction_after}" in words else "instruction"
        return words.replace(f"{{{name}}}", str(getattr(self, name)))

    def summary_of(self, name: str, body: str, reference: str) -> Example:
        """The example that asks for a summary of `body`."""
        prefix, suffix = self.around()
        return self.ask(name, (prefix, body, ""), suffix, reference)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        if self.stop is not None:
            output = output.partition(self.stop)[0]
        return self.rouge(output, reference, self.join_lines)

    def check_options(self) -> None:
        super().check_options()
        around = self._around
        given = around.count("{instruction}") + around.count("{instruction_after}")
        if around.count("{input}") != 1 or given > 1:
            raise ConfigError(
                f"task.template must be null, one of {', '.join(TEMPLATES)} or a text with {{input}} once and "
                f"{{instruction}} or {{instruction_after}} at most once, got {self.template!r}"
            )
        if self.question == AFTER_EVICTION:
            self._check_hidden(*around.split("{input}"))
        if self.stop == "":
            raise ConfigError("task.stop must be null or a text that is not empty, got ''")

    def _check_hidden(self, before: str, after: str) -> None:
        """ConfigError where an instruction that is to come after the eviction stands in front of the document."""
        if "{instruction" in before or not after.strip():
            raise ConfigError(
                f"task.question=after_eviction needs a task.template with the instruction behind {{input}}, and "
                f"{self.template} has it {'in front' if '{instruction' in before else 'nowhere'}: set it to null, "
                "alpaca_last, plain_last or a text with {input} and {instruction} behind it"
            )


@dataclass(frozen=True, kw_only=True)
class Summarization(SummaryTask):
    """Summarize the documents of a data set: rows with a document (`input_field`), a summary (`reference_field`) and
    perhaps an id (`id_field`).
    """

    input_field: str = ""
    reference_field: str = ""
    id_field: str = "id"

    def example(self, row: dict[str, Any], where: str) -> Example:
        body = text(row, self.input_field, where, "input_field", empty=True)
        reference = text(row, self.reference_field, where, "reference_field")
        return self.summary_of(row_id(row, self.id_field, body, reference), body, reference)
