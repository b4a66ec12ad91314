"""One run of a group that shares prefills: which examples lack a row, and which texts it has still to be forced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvexp.config.divergence_options import refusal
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import ids_without_work
from kvexp.evaluate.example_prompts import check_beforehand
from kvexp.evaluate.rows import validated_row
from kvexp.record import Run, divergence_lines
from kvexp.record.divergence_lines import REFERENCE, Line
from kvexp.tasks import Example

if TYPE_CHECKING:
    from kvexp.models.types import Tokenizer

Numbered = Sequence[tuple[int, Example]]


class GroupRun:
    """A run's settings, its folder, and what of its work is done: rows by example, texts by (example, kind of text).

    within: the examples that may be forced a text; None: all. failed: left to its own turn, which will say what is
    wrong with it; error: what was wrong. skipped: why an example was left out, each reason once.
    """

    def __init__(
        self, settings: Settings, run: Run, examples: Sequence[Example], within: Collection[str] | None = None
    ) -> None:
        self.settings, self.run = settings, run
        self.failed, self.error, self.skipped = False, "", dict[str, None]()
        answered = not settings.divergence.only
        self.done = ids_without_work(settings, run, examples) if answered else {example.id for example in examples}
        self.texts = settings.divergence.texts if refusal(settings) is None else ()
        self.forced = self._without_text(examples, within) if self.texts else set()

    def _without_text(self, examples: Sequence[Example], within: Collection[str] | None) -> set[tuple[str, str]]:
        """(example, kind of text) that is measured, or will not be: of other shards, skipped, without a reference."""
        mine = {examples[place].id for place in self.settings.shard.takes(len(examples))}
        mine -= {row["example"] for row in self.run.rows() if row.get("skipped")}
        if within is not None:
            mine &= set(within)
        left = {(e.id, text) for e in examples for text in self.texts if e.id not in mine or not _has(e, text)}
        return left | set(divergence_lines.read(self.run))

    def look(self, tokenizer: Tokenizer, examples: Sequence[Example]) -> None:
        """Leave it to its own turn where it cannot be."""
        try:
            check_beforehand(self.settings, tokenizer, examples)
        except ConfigError as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Leave it to its own turn."""
        self.failed, self.error = True, f"{type(error).__name__}: {error}".rstrip(": ")

    def lacks_row(self, example: str) -> bool:
        """Whether it is to answer this example."""
        return example not in self.done

    def lacks_text(self, example: str, text: str) -> bool:
        """Whether it is to be forced this text."""
        return text in self.texts and (example, text) not in self.forced

    def answers(self, batch: Numbered) -> bool:
        """Whether it lacks a row of the batch."""
        return not self.failed and any(self.lacks_row(example.id) for _, example in batch)

    def to_force(self, names: Iterable[str]) -> list[str]:
        """The kinds of text that it lacks for any of these examples."""
        each = list(names)
        return [text for text in self.texts if not self.failed and any(self.lacks_text(name, text) for name in each)]

    def has_pending(self, batch: Numbered) -> bool:
        """Whether it lacks anything of the batch."""
        return self.answers(batch) or bool(self.to_force(example.id for _, example in batch))

    def missing(self, batch: Numbered) -> int:
        """Rows and texts that it lacks."""
        rows = sum(self.lacks_row(example.id) for _, example in batch)
        return rows + sum(self.lacks_text(example.id, text) for _, example in batch for text in self.texts)

    def write(self, rows: list[dict[str, Any]], commit: str | None) -> list[Any]:
        """Those that were missing. An example that is skipped has no text to be forced either."""
        new = [row for row in rows if self.lacks_row(row["example"])]
        self.run.append(*(validated_row(row, commit) for row in new))
        self.done |= {row["example"] for row in new}
        self.skipped |= {row["skipped"]: None for row in rows if row["skipped"]}
        self.forced |= {(row["example"], text) for row in rows if row["skipped"] for text in self.texts}
        return new

    def write_lines(self, lines: list[Line]) -> list[Any]:
        """Those that were missing."""
        new = [line for line in lines if self.lacks_text(line["example"], line["text"])]
        if new:
            divergence_lines.append(self.run, new)
        self.forced |= {(line["example"], line["text"]) for line in new}
        return new


def _has(example: Example, text: str) -> bool:
    return text != REFERENCE or bool(example.reference.strip())
