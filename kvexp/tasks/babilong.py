"""BABILong (Kuratov et al., arXiv:2406.10149): facts of bAbI (Weston et al., arXiv:1502.05698) hidden in books, and a
question that needs one or several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.tasks.base import CountedTask, Example, Positive, QuestionTask, Rules, Truncation, kinds_of, row_id
from kvexp.tasks.data import text
from kvexp.util.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """A kind of question. labels: all answers that there are; the others: the parts of the official prompt."""

    labels: Sequence[str]
    instruction: str
    examples: str
    after: str


# The prompts of babilong/prompts.py in github.com/booydar/babilong (Apache-2.0) at commit 7a6efee, to the letter.
KINDS = kinds_of("babilong", Kind)


def is_right(output: str, target: str, question: str, labels: Sequence[str]) -> bool:
    """Whether the target is the only label in the answer's first sentence that the question does not name.

    babilong/metrics.py, to the letter. It looks for labels anywhere, also inside of words: "one" stands in "none", so
    that no answer is right where the target of a qa7 is none.
    """
    said = output.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    lowered = question.lower()
    named = {label for label in map(str.lower, labels) if label in said and label not in lowered}
    return named == {target.lower()}


@dataclass(frozen=True, kw_only=True)
class BABILong(CountedTask, QuestionTask):
    """Questions of BABILong (arXiv:2406.10149) from `data_files`, in the columns of RMT-team/babilong: input, question,
    target. `subset`: qa1, qa2 or qa3 (where is somebody, something, and where was it before), qa6 (yes or no), qa7 (how
    many things).

    The official prompt, to the letter, and behind it "Answer:" for a base model (`answer_prefix`; a chat model's answer
    begins with its turn); `accuracy` by the official rule (`is_right`). counted=answered counts rows that the full
    cache answers.
    """

    name: ClassVar[str] = "babilong"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    rules: ClassVar[Rules] = (
        (lambda c: c.subset not in KINDS, f"task.subset must be one of {', '.join(KINDS)}, got {{c.subset!r}}"),
    )

    subset: str = "qa1"
    answer_prefix: str = "\nAnswer:"
    max_new_tokens: Positive = 20
    truncate: Truncation = "skip"

    def label(self, choice: str) -> str:
        return f"{choice}/{self.subset}"

    def example(self, row: dict[str, Any], where: str) -> Example:
        given, question, target = (text(row, name, where, "data_files") for name in ("input", "question", "target"))
        labels = KINDS[self.subset].labels
        if target.lower() not in labels:
            raise ConfigError(
                f"{where}: the target {target!r} is no answer of {self.subset}, which has {', '.join(labels)}: "
                "set task.subset to the file's task"
            )
        return self.about(row_id(row, "id", given, question), given, question, target)

    def about(self, name: str, context: str, question: str, answer: str) -> Example:
        """The example in the official form."""
        kind = KINDS[self.subset]
        before = f"{kind.instruction}\n\n{kind.examples}\n\n{kind.after}\n\n<context>\n"
        after = f"\n</context>\n\nQuestion: {question}{self.answer_prefix}"
        example = self.ask(name, (before, context.strip(), ""), after, answer)
        return replace(example, info={"question": question})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        right = is_right(output, example.reference, example.info["question"], KINDS[self.subset].labels)
        return {"accuracy": 100.0 * right}
