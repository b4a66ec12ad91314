"""testbed_choice: which of several values is the right one, by log-likelihood."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.questions import QuestionTask
from kvexp.tasks.testbed.base import Generated
from kvexp.testbed.document import Document, Fact, document, draw_value
from kvexp.testbed.forms import answer, ask, opening
from kvexp.testbed.words import ATTRIBUTES

# A value of one word is judged by the prefill alone, before anything is evicted.
SEVERAL_WORDS = tuple(attribute for attribute, parts in ATTRIBUTES.items() if len(parts) > 1)


@dataclass(frozen=True, kw_only=True)
class TestbedChoice(QuestionTask, Generated):
    """Choose among `options` values of two or three words by log-likelihood, after `num_fewshot` answered questions.

    One wrong option begins with the right one's first word (in 11 of 12 questions, in 99 of 100 about codes), others
    are values that the text gives to somebody else, as far as it has such.
    Accuracy, in percent: `acc` by the summed log-probability (as lm-eval's). Plays lm-eval's multiple choice.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_choice"
    metrics: ClassVar[tuple[str, ...]] = ("acc",)

    options: int = 4
    num_fewshot: int = 0

    def example(self, row: dict[str, Any], where: str) -> Example:
        rng = self.random(row["number"])
        doc, fact = self._with_long_value(rng)
        others = [other for other in doc.current() if other.key != fact.key]
        shots = "".join(ask(shot) + answer(shot) for shot in rng.sample(others, self.num_fewshot))
        values = [fact.value, *self._wrong(rng, fact, others)]
        rng.shuffle(values)
        name = f"{self.split}-{row['number']}"
        context = ("", opening(doc.text) + shots, "")
        return self.ask(name, context, ask(fact), fact.value, choices=tuple(f" {value}" for value in values))

    def _with_long_value(self, rng: Random) -> tuple[Document, Fact]:
        while True:
            doc = document(rng, self.split, self.shape)
            long = [fact for fact in doc.current() if fact.attribute in SEVERAL_WORDS]
            if long:
                return doc, rng.choice(long)

    def _wrong(self, rng: Random, fact: Fact, others: list[Fact]) -> list[str]:
        """Values to tell from the fact's, all different."""
        first = fact.value.split()[0]
        near = [value for value in (draw_value(rng, fact.attribute) for _ in range(200)) if value.split()[0] == first]
        elsewhere = [other.value for other in others if other.attribute == fact.attribute]
        rng.shuffle(elsewhere)
        candidates = [*near[:1], *elsewhere, *(draw_value(rng, fact.attribute) for _ in range(50))]
        return [value for value in dict.fromkeys(candidates) if value != fact.value][: self.options - 1]

    def score_choices(self, logprobs: list[float], tokens: list[int], example: Example) -> dict[str, float]:
        best = max(range(len(logprobs)), key=logprobs.__getitem__)
        return {"acc": 100.0 * (example.choices[best].strip() == example.reference)}

    def check_options(self) -> None:
        super().check_options()
        if not 2 <= self.options <= 4:
            raise ConfigError(f"task.options must be between 2 and 4, got {self.options}")
        self.at_least("num_fewshot", 0)
        self.at_most("num_fewshot", 15)
        if self.num_fewshot >= self.facts:
            raise ConfigError(
                f"task.num_fewshot={self.num_fewshot} needs as many other facts: task.facts={self.facts} states one "
                "to ask about and too few to show; lower one or raise the other"
            )
