"""BABILong (Kuratov et al., arXiv:2406.10149): facts of bAbI (Weston et al., arXiv:1502.05698) hidden in books, and a
question that needs one or several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.tasks.base import CountedTask, Example, Positive, QuestionTask, Rules, Truncation, row_id
from kvexp.tasks.data import text
from kvexp.util.errors import ConfigError

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
NUMBERS = ("none", "one", "three", "two")

_POSITIONS = (
    "I will give you context with the facts about positions of different persons hidden in some random text and a "
    "question. You need to answer the question based only on the information from the facts. If a person was in "
    "different locations, use the latest location to answer the question."
)
_CARRIED = (
    "I give you context with the facts about locations and actions of different persons hidden in some random text and "
    "a question.{gap}You need to answer the question based only on the information from the facts.\nIf a person got an "
    "item in the first location and travelled to the second location the item is also in the second location. If a "
    "person dropped an item in the first location and moved to the second location the item remains in the first "
    "location."
)
_OBJECTS = (
    "I will give you context with the facts about people and objects they carry, hidden in some random text and a "
    "question. You need to answer the question based only on the information from the facts."
)
_PEOPLE = (
    "I will give you context with the facts about people and their locations hidden in some random text and a "
    "question. You need to answer the question based only on the information from the facts. If a person was in "
    "different locations, use the latest location the person was in to answer the question."
)


@dataclass(frozen=True)
class Kind:
    """A kind of question. labels: all answers that there are; the others: the parts of the official prompt."""

    labels: tuple[str, ...]
    instruction: str
    examples: str
    after: str


def _lessons(*lessons: str, between: str = "\n", end: str = "") -> str:
    return between.join(f"<example>\n{lesson}\n</example>" for lesson in lessons) + end


# The prompts of babilong/prompts.py in github.com/booydar/babilong (Apache-2.0) at commit 7a6efee, to the letter.
KINDS = {
    "qa1": Kind(
        ROOMS,
        _POSITIONS,
        _lessons(
            "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. "
            "Where is Charlie?\nAnswer: The most recent location of Charlie is balcony.",
            "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to balcony. "
            "Where is Alan?\nAnswer: The most recent location of Alan is shop.",
            between="\n\n",
        ),
        "Always return your answer in the following format: The most recent location of ’person’ is ’location’. "  # noqa: RUF001
        "Do not write anything else after that.",
    ),
    "qa2": Kind(
        ROOMS,
        _CARRIED.format(gap=""),
        _lessons(
            "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. Where is the bottle?\n"
            "Answer: The bottle is in the balcony.",
            "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. Where is the screw driver?\n"
            "Answer: The screw driver is in the kitchen.",
        ),
        "Always return your answer in the following format: The ’item’ is in ’location’. "  # noqa: RUF001
        "Do not write anything else after that.",
    ),
    "qa3": Kind(
        ROOMS,
        _CARRIED.format(gap=" "),
        _lessons(
            "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel journeyed "
            "to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen. Where was the apple before "
            "the kitchen?\nAnswer: Before the kitchen the apple was in the bathroom.",
            "John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra took "
            "the football. Sandra travelled to the garden. Sandra journeyed to the bedroom. Where was the football "
            "before the bedroom?\nAnswer: Before the bedroom the football was in the garden.",
        ),
        "Always return your answer in the following format: Before the $location_1$ the $item$ was in the "
        "$location_2$. Do not write anything else after that.",
    ),
    "qa6": Kind(
        ("no", "yes"),
        _PEOPLE,
        _lessons(
            "John travelled to the hallway. John travelled to the garden. Is John in the garden?\nAnswer: yes",
            "Mary went to the office. Daniel journeyed to the hallway. Mary went to the bedroom. Sandra went to the "
            "garden. Is Mary in the office?\nAnswer: no",
            end="\n",
        ),
        "Your answer should contain only one word - $yes$ or $no$. Do not write anything else after that. "
        "Do not explain your answer.",
    ),
    "qa7": Kind(
        NUMBERS,
        _OBJECTS,
        _lessons(
            "Daniel went to the bedroom. Daniel got the apple there. How many objects is Daniel carrying?\nAnswer: one",
            "Mary grabbed the apple there. Mary gave the apple to John. How many objects is Mary carrying?\n"
            "Answer: none",
            "Sandra travelled to the hallway. Sandra picked up the milk there. Sandra took the apple there. Mary "
            "travelled to the garden. How many objects is Sandra carrying?\nAnswer: two",
            end="\n",
        ),
        "Your answer should contain only one word - $none$ or $number_of_objects$. Do not write anything else after "
        "that. Do not explain your answer.",
    ),
}


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
