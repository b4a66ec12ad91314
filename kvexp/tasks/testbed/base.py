"""What the testbed's tasks share: documents of the synthetic language, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Task
from kvexp.testbed import LANGUAGE
from kvexp.testbed.document import LONGEST, SPLITS, Document, DocumentShape, document

MOST_TOKENS = 1_000_000  # of a document: more takes hours to write, and no model of the testbed reads as many


@dataclass(frozen=True, kw_only=True)
class Generated(Task):
    """Rows made by `kvexp.testbed`; row i depends on split, seed, i and the shape of the documents alone.

    `tokens`: length of a document; `facts` stated in it, of which `marked` by a number (the summary's) and `updated`
    stated anew later with another value; `size`: rows, of which `limit` takes the first. `split`: train, validation
    and test share no fact, so nothing asked here was ever seen in training. The models were trained on documents of up
    to 560 tokens and 20 facts: longer and fuller ones may be asked for, and are then a test of that too.
    """

    generated: ClassVar[bool] = True

    size: int = 60
    split: str = "test"
    tokens: int = 288
    facts: int = 14
    marked: int = 6
    updated: int = 2
    truncate: str = "skip"

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number in range(self.size if self.limit is None else min(self.size, self.limit)):
            yield f"row {number}", {"number": number}

    def random(self, number: int | str) -> Random:
        """The generator that makes document `number`, or the one of this name."""
        return Random(f"{self.split} {self.seed} {number}")

    def document(self, number: int) -> tuple[Document, Random]:
        """Document `number`, and its generator as the document leaves it."""
        made, state = _seeded(f"{self.split} {self.seed} {number}", self.split, self.shape)
        rng = Random()
        rng.setstate(state)
        return made, rng

    @property
    def shape(self) -> DocumentShape:
        return DocumentShape(self.tokens, self.facts, self.marked, self.updated)

    def fingerprint(self) -> str:
        return f"testbed language {LANGUAGE}, split {self.split}"

    def check_options(self) -> None:
        super().check_options()
        self.choice("split", SPLITS)
        if self.sample != "first":
            raise ConfigError(f"task.sample must be first for {self.name}, got {self.sample!r}: its rows are random")
        for option in ("hub_id", "hub_config", "revision", "data_files"):
            if getattr(self, option):
                raise ConfigError(f"task.{option} has no meaning for {self.name}, which makes its own rows")
        for option in ("size", "tokens"):
            self.at_least(option, 1)
        if self.tokens > MOST_TOKENS:
            raise ConfigError(f"task.tokens must be at most {MOST_TOKENS}, got {self.tokens}")
        for option in ("facts", "marked", "updated"):
            self.at_least(option, 0)
        if not self.marked + self.updated <= self.facts <= MOST_FACTS:
            raise ConfigError(
                f"task.facts={self.facts} must be at least task.marked={self.marked} + task.updated={self.updated} "
                f"and at most {MOST_FACTS}"
            )
        self.at_most("marked", MOST_MARKED)
        least = LONGEST * (self.facts + self.updated)
        if self.tokens < least:
            raise ConfigError(
                f"task.tokens must be at least {least} to hold task.facts={self.facts} and task.updated={self.updated} "
                f"later statements, got {self.tokens}; raise it or lower those"
            )

    def at_least(self, option: str, least: int) -> None:
        if getattr(self, option) < least:
            raise ConfigError(f"task.{option} must be at least {least}, got {getattr(self, option)}")

    def at_most(self, option: str, trained: int) -> None:
        """Refuse a form of prompt that no model of the testbed was trained on."""
        if getattr(self, option) > trained:
            raise ConfigError(
                f"task.{option} must be at most {trained}, as the models were trained, got {getattr(self, option)}"
            )


@lru_cache(maxsize=512)  # a sweep reads the same rows for every run; states are large
def _seeded(words: str, split: str, shape: DocumentShape) -> tuple[Document, tuple[Any, ...]]:
    rng = Random(words)
    return document(rng, split, shape), rng.getstate()


MOST_MARKED = 10  # the words "eleventh" and "twelfth" were never trained
MOST_FACTS = 40  # (name, attribute) pairs of a split are many more, but not without end
