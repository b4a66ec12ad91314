"""What the summarization tasks share: an instruction around a document, one reference, ROUGE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, Task, row_id
from kvexp.tasks.data import text

# name -> the text around {instruction} and {input}; task.template may also be such a text.
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
}


@dataclass(frozen=True, kw_only=True)
class SummaryTask(Task):
    """Summarize a document, wherever it comes from: prefix = instruction, body = document, suffix = where the summary
    starts.

    `template` is a name in TEMPLATES or a text with {input} once (and {instruction} at most once); None: alpaca for a
    base model, plain for a chat model. `stop`: an answer is scored up to the first occurrence of this text.
    `join_lines`: newlines of answer and reference become spaces before sentences are split for rougeLsum, as in the
    Keyformer release; false keeps a newline as a sentence's end.
    """

    instruction: str = ""
    template: str | None = None
    stop: str | None = None
    join_lines: bool = False

    @property
    def _around(self) -> str:
        template = self.template or "alpaca"
        return TEMPLATES.get(template, template)

    def for_model(self, *, chat: bool) -> SummaryTask:
        return replace(self, template=self.template or ("plain" if chat else "alpaca"))

    def around(self) -> tuple[str, str]:
        """(prefix, suffix) of every prompt."""
        before, _, after = self._around.partition("{input}")
        return before.replace("{instruction}", self.instruction), after.replace("{instruction}", self.instruction)

    def summary_of(self, name: str, body: str, reference: str) -> Example:
        """The example that asks for a summary of `body`."""
        prefix, suffix = self.around()
        return Example(name, prefix + body + suffix, reference, "", prefix, body, suffix)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """ROUGE F1 with stemmer in percent, one sentence per line in both texts for rougeLsum."""
        from kvexp.tasks.rouge import lines, rouge

        if self.stop is not None:
            output = output.partition(self.stop)[0]
        return rouge(lines(output, self.join_lines), lines(reference, self.join_lines))

    def check_options(self) -> None:
        super().check_options()
        if self._around.count("{input}") != 1 or self._around.count("{instruction}") > 1:
            raise ConfigError(
                f"task.template must be null, one of {', '.join(TEMPLATES)} or a text with {{input}} once and "
                f"{{instruction}} at most once, got {self.template!r}"
            )
        if self.stop == "":
            raise ConfigError("task.stop must be null or a text that is not empty, got ''")


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
