"""testbed_summary: report the marked facts of a document in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.tasks.base import Example
from kvexp.tasks.questions import IN_PROMPT, QuestionTask
from kvexp.tasks.testbed.base import Generated
from kvexp.testbed.forms import SUMMARY, opening, summary
from kvexp.testbed.words import ORDINALS


@dataclass(frozen=True, kw_only=True)
class TestbedSummary(QuestionTask, Generated):
    """Summarize: state every fact that a number marks ("first city alice north ford !"), in order.

    ROUGE F1 in percent, of the facts without their numbers. Plays CNN/DailyMail and, with task.tokens=512 or more,
    GovReport: what must be said is strewn over the whole text. The instruction is the last word: " summary :".
    """

    __test__ = False  # no test of pytest's
    name: ClassVar[str] = "testbed_summary"
    later_options: ClassVar[tuple[str, ...]] = ("question",)

    max_new_tokens: int = 48

    def example(self, row: dict[str, Any], where: str) -> Example:
        doc, _ = self.document(row["number"])
        name = f"{self.split}-{row['number']}"
        context, asked = opening(doc.text), SUMMARY
        if self.question == IN_PROMPT:  # all of it is body: what truncate=middle shortens
            context, asked = context + asked, ""
        return self.ask(name, ("", context, ""), asked, summary(doc.marked))

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """ROUGE F1 with stemmer in percent, one fact per line for rougeLsum."""
        from kvexp.tasks.rouge import rouge

        return rouge(_facts(output), _facts(reference))

    def check_options(self) -> None:
        super().check_options()
        self.at_least("marked", 1)


def _facts(summary: str) -> str:
    """One fact per line, without its number: counting is no merit."""
    words = [word for word in summary.split() if word not in ORDINALS]
    return " ".join(words).replace(" ! ", "\n")
