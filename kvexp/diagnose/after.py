"""The options of `diagnose`: what is added to a run once its rows are there.

Rows are made as ever, alone or with shared prefills; then every example is generated once more by itself, watched. So
a diagnosis can change no row, can be asked for later, and knows whether it has seen what the row has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.config.settings import Settings
from kvexp.console import Progress
from kvexp.diagnose.case import Case
from kvexp.diagnose.folders import Row
from kvexp.diagnose.refusals import check, nothing_to_log
from kvexp.diagnose.runs import cases
from kvexp.diagnose.twin import twin
from kvexp.diagnose.watching import Evictions, watch
from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import EVICTIONS, TWIN, Told, has, write_table, write_told
from kvexp.generate import Generation, receipts
from kvexp.models.texts import texts_of
from kvexp.record import Run
from kvexp.terminal import say


@dataclass(frozen=True)
class Log:
    """Every eviction of the first so many examples (null: of all); costs one more generation, alone in its batch."""

    examples: int | None = None

    parts: ClassVar[tuple[str, ...]] = (EVICTIONS,)

    def __post_init__(self) -> None:
        if self.examples is not None and self.examples < 1:
            raise ConfigError(f"examples must be at least 1 or null for all, got {self.examples}")

    def check(self, settings: Settings) -> None:
        """ConfigError, before any model loads, for a run that cannot be diagnosed."""
        check(settings)

    def after(self, settings: Settings, run: Run) -> None:
        """Write what the run's folder lacks; a run that evicts nothing gets a line that says so."""
        title = _title(settings)
        if (why := nothing_to_log(settings)) is not None:
            say(f"{title}: nothing to do, {why}")
            return
        rows = [row for row in run.rows() if not row.get("skipped") and row["index"] < (settings.limit or math.inf)]
        rows = sorted(rows, key=lambda row: row["index"])[: self.examples]
        if not self.lacking(run, rows):
            say(f"{title}: {len(rows)} examples are diagnosed already ({run.path})")
            return
        self.add(settings, run, rows)

    def lacking(self, run: Run, rows: list[Row]) -> list[Row]:
        """Those that have not all parts of this diagnosis."""
        return [row for row in rows if not all(has(run, row["example"], part) for part in self.parts)]

    def add(self, settings: Settings, run: Run, rows: list[Row]) -> None:
        """Write what these rows lack."""
        todo = self.lacking(run, rows)
        title = _title(settings)
        with Progress(title, len(rows), len(rows) - len(todo)) as progress:
            for row, told in self._written(settings, run, todo):
                if not told.same:
                    say(f"{title}: example {row['example']}: {unlike(told)}")
                progress.advance()

    def _written(self, settings: Settings, run: Run, todo: list[Row]) -> Iterator[tuple[Row, Told]]:
        for row, case, _ in cases(settings, todo):
            told, tables = self.diagnosed(case, row)
            for ending, columns in tables.items():
                write_table(run, told.example, ending, columns, told.texts if ending == EVICTIONS else None)
            write_told(run, told)
            yield row, told

    def diagnosed(self, case: Case, row: Row) -> tuple[Told, dict[str, dict[str, Any]]]:
        """One example: what is told of it, and its tables as columns."""
        seen = Evictions()
        made = case.generated(lambda cache: watch(cache, seen))
        evictions = {name: values.numpy() for name, values in seen.table().items()}
        return told_of(case, made, row), {EVICTIONS: evictions}


@dataclass(frozen=True)
class Twin(Log):
    """The log, and what the evictions did to attention; costs three generations more, one of them of the full cache."""

    parts: ClassVar[tuple[str, ...]] = (EVICTIONS, TWIN)

    def diagnosed(self, case: Case, row: Row) -> tuple[Told, dict[str, dict[str, Any]]]:
        told, tables = super().diagnosed(case, row)
        answer = told.ids[told.prompt_tokens + told.question_tokens :]
        losses, agrees = twin(case, answer)
        columns = {name: values.numpy() for name, values in losses.table().items()}
        return replace(told, agrees=agrees), {**tables, TWIN: columns}


def _title(settings: Settings) -> str:
    return f"diagnose {settings.labels['method']} {settings.labels['setting']}".strip()


def told_of(case: Case, made: Generation, row: Row) -> Told:
    ids = [*case.prompt, *case.question, *made.tokens[0]]
    (receipt,) = receipts(made.cache)
    output = case.tokenizer.decode(made.tokens[0], skip_special_tokens=True)
    return Told(
        example=row["example"],
        prompt_tokens=len(case.prompt),
        question_tokens=len(case.question),
        ids=ids,
        texts=texts_of(case.tokenizer, ids),
        heads=[state.slots.keys.shape[1] for state in made.cache.layer_states if state.slots is not None],
        same_output=output == row["output"],
        same_kept=receipt.kept_digest == row["receipt"]["kept_digest"],
    )


def unlike(told: Told) -> str:
    """What to say of an example whose diagnosis saw something else than its row."""
    if told.same_output:
        return "kept other slots than its row"
    return "alone it writes another answer than in the batch of its row, where sums round otherwise"
