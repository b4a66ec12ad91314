"""testbed_qa: several questions about one document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from kvexp.tasks.base import Example
from kvexp.tasks.metrics import exact_match, qa_f1
from kvexp.tasks.questions import SharedContextTask
from kvexp.tasks.testbed.base import Generated
from kvexp.testbed.forms import ask, opening


@dataclass(frozen=True, kw_only=True)
class TestbedQA(SharedContextTask, Generated):
    """Answer `per_document` questions about each document, one example each. Word F1 and exact match, in percent.

    An updated fact is asked for its latest value. Plays LongBench's question answering. Asked with
    question=after_eviction the questions of a document share one evicted context.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_qa"
    metrics: ClassVar[tuple[str, ...]] = ("f1", "exact")

    per_document: int = 4
    max_new_tokens: int = 6

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """`limit` and `size` count questions."""
        each = ({"number": n // self.per_document, "question": n % self.per_document} for n in range(self.size))
        for row in islice(each, self.limit):
            yield f"document {row['number']}, question {row['question']}", row

    def example(self, row: dict[str, Any], where: str) -> Example:
        doc, rng = self.document(row["number"])
        fact = rng.sample(doc.current(), self.per_document)[row["question"]]
        name = f"{self.split}-{row['number']}.{row['question']}"
        return self.ask(name, ("", opening(doc.text), ""), ask(fact), fact.value)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"f1": 100 * qa_f1(output, reference), "exact": 100 * exact_match(output, reference)}

    def check_options(self) -> None:
        super().check_options()
        self.at_least("per_document", 1)
        self.at_least("facts", self.per_document)
