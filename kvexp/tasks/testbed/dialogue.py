"""testbed_dialogue: two speakers tell each other facts; the last turn recalls some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.tasks.base import Example
from kvexp.tasks.questions import AFTER_EVICTION, QuestionTask
from kvexp.tasks.testbed.base import Generated
from kvexp.testbed.forms import dialogue, last_request


@dataclass(frozen=True, kw_only=True)
class TestbedDialogue(QuestionTask, Generated):
    """Reply to the last turn of a conversation, which asks to recall `per_recall` facts said earlier. ROUGE in percent.

    `recalls`: how often a speaker asks so, the last turn included; earlier replies stand in the prompt. It is a most:
    in a short conversation two requests may fall into one turn, which then makes one of them. Plays SODA. With
    question=after_eviction all but that last request is prefilled and evicted.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_dialogue"
    later_options: ClassVar[tuple[str, ...]] = ("question",)

    marked: int = 0
    recalls: int = 2
    per_recall: int = 3
    max_new_tokens: int = 32

    def example(self, row: dict[str, Any], where: str) -> Example:
        shape = self.shape
        pieces = dialogue(self.random(row["number"]), self.split, shape, self.recalls, self.per_recall)
        reference = pieces[-1].strip().removesuffix(" ;")
        said, request = "".join(pieces[:-1]), ""
        if self.question == AFTER_EVICTION:  # else all of it is body: what truncate=middle shortens
            said, request = last_request(said)
        return self.ask(f"{self.split}-{row['number']}", ("", said, ""), request, reference)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """ROUGE F1 with stemmer in percent, one fact per line for rougeLsum."""
        from kvexp.tasks.rouge import rouge

        return rouge(output.replace(" . ", "\n"), reference.replace(" . ", "\n"))

    def check_options(self) -> None:
        super().check_options()
        self.at_least("facts", 1)
        for option in ("recalls", "per_recall"):
            self.at_least(option, 1)
            self.at_most(option, 4)
