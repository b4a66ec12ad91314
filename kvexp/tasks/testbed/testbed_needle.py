"""testbed_needle: find a code at some depth of a text of some length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, product
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example
from kvexp.tasks.metrics import exact_match, word_recall
from kvexp.tasks.questions import QuestionTask
from kvexp.tasks.testbed.base import MOST_TOKENS, Generated
from kvexp.testbed.document import LONGEST
from kvexp.testbed.forms import ask, opening
from kvexp.testbed.needle_document import needle_document


@dataclass(frozen=True, kw_only=True)
class TestbedNeedle(QuestionTask, Generated):
    """Say the three digits of somebody's code: a grid of `lengths` (tokens) and `depths` (percent), round and round.

    `facts` others are strewn about as distractors. Exact match and word recall, in percent; rows carry length and
    depth, and the depth in characters (`depth_measured`). Plays needle in a haystack.
    """

    __test__ = False
    name: ClassVar[str] = "testbed_needle"
    metrics: ClassVar[tuple[str, ...]] = ("exact", "word_recall")

    lengths: tuple[int, ...] = (128, 256, 384)
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    facts: int = 5
    marked: int = 0
    updated: int = 0
    max_new_tokens: int = 6

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """`size` and `limit` count examples: cell after cell of the grid, then the grid again with other texts."""
        cells = ((again, cell) for again in count() for cell in product(self.lengths, self.depths))
        for again, (length, depth) in islice(cells, self.size if self.limit is None else min(self.size, self.limit)):
            row = {"length": length, "depth": depth, "repeat": again}
            yield f"cell {row}", row

    def example(self, row: dict[str, Any], where: str) -> Example:
        name = f"{self.split}-{row['length']}-{row['depth']}-{row['repeat']}"
        rng = self.random(name)
        doc, fact = needle_document(rng, self.split, row["length"], row["depth"] / 100, self.facts)
        before, _, behind = doc.text.partition(fact.sentence())
        measured = round(100 * len(before) / len(before + behind), 2)
        made = self.ask(name, ("", opening(doc.text), ""), ask(fact), fact.value)
        return replace(made, info={**row, "depth_measured": measured})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"exact": 100 * exact_match(output, reference), "word_recall": 100 * word_recall(output, reference)}

    def check_options(self) -> None:
        for option in ("tokens", "marked", "updated"):
            if getattr(self, option) != getattr(type(self), option):
                raise ConfigError(f"task.{option} has no meaning for {self.name}: set task.lengths instead")
        super().check_options()
        least = LONGEST * (self.facts + 1)
        if not self.lengths or min(self.lengths) < least:
            raise ConfigError(
                f"task.lengths must be numbers of tokens, at least {least} to hold the needle and task.facts="
                f"{self.facts} others, got {list(self.lengths)}"
            )
        if max(self.lengths) > MOST_TOKENS:
            raise ConfigError(f"task.lengths must be at most {MOST_TOKENS} tokens, got {max(self.lengths)}")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(f"task.depths must be percent, between 0 and 100, got {list(self.depths)}")
