"""The option `diagnose`: what is added to a run once its rows are there, and what stands against it.

Rows are made as without a diagnosis, alone or with shared prefills; then every example is generated once more by
itself, watched. So a diagnosis can change no row, can be asked for later, and knows whether it saw what the row says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from kvexp.core import EvictionLayer
from kvexp.diagnose.case import Case, cases, short_title
from kvexp.diagnose.log import EvictionRecord, watch
from kvexp.generate import Generation, receipts
from kvexp.hf.cache import texts_of
from kvexp.retrieval.layer import RetrievalLayer
from kvexp.run.batches import Row, settings_at, waiting_notice
from kvexp.run.evictions import ExampleLog, has_log, write_evictions, write_example_log
from kvexp.run.model_spec import moving_rope
from kvexp.run.settings import Settings
from kvexp.run.store import Run, run_name
from kvexp.tasks import LMEval, Task
from kvexp.util.errors import ConfigError, Rule, refuse
from kvexp.util.fields import AtLeast, check_fields
from kvexp.util.output import say
from kvexp.util.progress import Progress

ELSE = "or diagnose=none"
WITH_ENGINE: Rule[Settings] = (
    lambda s: s.engine is not None,
    "engine={c.engine.name} does not show what its cache holds: diagnose its twin, the same run without engine and "
    f"with model.weights=float16, {ELSE}",
)
REFUSED: tuple[Rule[Settings], ...] = (
    WITH_ENGINE,
    (
        lambda s: s.decoding.num_beams > 1,
        f"diagnose follows one path of tokens, generation.num_beams follows several: set generation=greedy, {ELSE}",
    ),
    (
        lambda s: s.decoding.sample,
        f"with generation.sample=true chance changes answers as evictions do: set generation=greedy, {ELSE}",
    ),
    (
        lambda s: s.cache.bounded_chunk is not None,
        f"diagnose logs evictions from the prompt's end on, prefill=bounded evicts before: set prefill=whole, {ELSE}",
    ),
    (
        lambda s: isinstance(s.task, LMEval) or s.task.only_nll or type(s.task).score_choices is not Task.score_choices,
        "diagnose needs answers that are generated, task={c.task.name} compares probabilities of given texts: "
        "set diagnose=none",
    ),
)


def check_diagnosable(settings: Settings) -> None:
    """ConfigError for runs whose answers are not one greedy path of tokens."""
    refuse(settings, REFUSED)
    if (moving := moving_rope(settings.model)) is not None:
        raise ConfigError(f"diagnose feeds answers in one forward, and {moving.why}: take another model, {ELSE}")


def nothing_to_log(settings: Settings) -> str | None:
    """The reason why a run has no evictions to log; None where it has some."""
    method = settings.method
    if not method.evicts:
        return f"{method.name} evicts nothing"
    if settings.cache.drops_nothing:
        return f"{method.name} keeps everything and chooses anew for every token: there is no eviction"
    return None


@dataclass(frozen=True)
class Log:
    """Logs every eviction of the first `examples` examples (None: of all).

    Costs one more generation per example, alone in its batch.
    """

    examples: Annotated[int, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, settings: Settings) -> None:
        """ConfigError, before any model loads, for a run that cannot be diagnosed."""
        check_diagnosable(settings)

    def run_after(self, settings: Settings, run: Run) -> None:
        """Write what the run's folder lacks; for a run that evicts nothing, print a line that says so."""
        title = _title(settings)
        if (why := nothing_to_log(settings)) is not None:
            say(f"{title}: nothing to do, {why}")
            return
        rows = [row for row in run.rows() if not row.get("skipped") and row["index"] < (settings.limit or math.inf)]
        rows = sorted(rows, key=lambda row: row["index"])[: self.examples]
        if not self.rows_without(run, rows):
            say(f"{title}: {len(rows)} examples are diagnosed already ({run.path})")
            return
        self.write(settings, run, rows)

    def rows_without(self, run: Run, rows: list[Row]) -> list[Row]:
        """The rows whose log is not in the run's folder."""
        return [row for row in rows if not has_log(run, row["example"])]

    def write(self, settings: Settings, run: Run, rows: list[Row]) -> None:
        """Diagnose the rows that are not diagnosed yet, and write that into the run's folder."""
        todo = self.rows_without(run, rows)
        title = _title(settings)
        with Progress(title, len(rows), len(rows) - len(todo)) as progress:
            for row, case, _ in cases(settings, todo):
                seen = EvictionRecord()
                log = example_log(case, case.generate_again(partial(watch, into=seen)), row)
                write_evictions(run, log, seen.table())
                write_example_log(run, log)
                if not log.same_output:
                    why = "alone it writes another answer than in the batch of its row, where sums round otherwise"
                    say(f"{title}: example {row['example']}: {why}")
                elif not log.same:
                    say(f"{title}: example {row['example']}: kept other slots than its row")
                progress.advance()


def _title(settings: Settings) -> str:
    """ "diagnose" and the run's name, for messages."""
    return f"diagnose {run_name(settings.labels)}"


def example_log(case: Case, generation: Generation, row: Row) -> ExampleLog:
    """The log of one example from its `generation`, compared with its row."""
    ids = [*case.prompt, *case.question, *generation.tokens[0]]
    (receipt,) = receipts(generation.cache)
    output = case.tokenizer.decode(generation.tokens[0], skip_special_tokens=True)
    return ExampleLog(
        example=row["example"],
        prompt_tokens=len(case.prompt),
        question_tokens=len(case.question),
        ids=ids,
        texts=texts_of(case.tokenizer, ids),
        heads=[_kv_heads(state) for state in generation.cache.layer_states],
        same_output=output == row["output"],
        same_kept=receipt.kept_digest == row["receipt"]["kept_digest"],
    )


def _kv_heads(state: EvictionLayer | RetrievalLayer) -> int:
    """Heads of one layer that hold, or select, for themselves."""
    if isinstance(state, EvictionLayer):
        return state.require_slots().positions.shape[1]
    assert state.memory is not None
    return state.memory.keys.shape[1]


def ensure_diagnosed(run: Run, rows: list[Row]) -> None:
    """Make the log of the rows that have none; ConfigError where the run can have none."""
    kind = Log()
    if not kind.rows_without(run, rows):
        return
    settings = settings_at(run)
    kind.check(settings)
    if (why := nothing_to_log(settings)) is not None:
        raise ConfigError(f"{short_title(run)} has no log to look at: {why}")
    with run.claim(waiting=waiting_notice(run)):
        kind.write(settings, run, rows)
