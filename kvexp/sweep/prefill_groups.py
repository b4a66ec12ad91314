"""The runs of a sweep that differ in method and budget alone: one prefill per example for all of them.

This fills in rows ahead of the runs themselves, which then find them done. What goes wrong here is left to a run's own
turn, where it is told and recorded as always.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvexp.config.model_spec import hub_commit, load, prepare_for_fork, tokenizer_of
from kvexp.config.settings import Settings
from kvexp.console import Progress
from kvexp.errors import CacheError, ConfigError
from kvexp.evaluate.context_outputs import outputs_from_context_shared, shares_score_across_batch
from kvexp.evaluate.evaluate_run import ids_without_work, waiting_notice
from kvexp.evaluate.example_prompts import (
    MAX_QUESTIONS_PER_CONTEXT,
    answerable,
    check_beforehand,
    pending_batches,
    prompts_of,
)
from kvexp.evaluate.example_prompts import IndexedPrompts as Prompts
from kvexp.evaluate.limits import (
    TIME,
    Items,
    Rows,
    TimeLimit,
    TimeLimitExceeded,
    failure_kind,
    free_memory,
    partition_by_memory,
    restart_process,
)
from kvexp.evaluate.outputs import NO_TIMES, generate_outputs_shared
from kvexp.evaluate.preflight import fit_examples, with_stop_tokens
from kvexp.evaluate.rows import check_commit, environment, failed_row, row_of, skipped_row, validated_row
from kvexp.models.half_precision import one_row_per_forward
from kvexp.record import Run, identity
from kvexp.session import Session
from kvexp.sweep.fork_pool import ForkPool, num_workers
from kvexp.tasks import Example, LMEval
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

Numbered = Sequence[tuple[int, Example]]

# Places for batches in all rounds of the processes, over batches: a process per thread gains about as much.
MIN_UTILISATION = 4 / 3


def can_share(settings: Settings) -> bool:
    """Whether a run can share its prefill with others and still write the rows it would write alone."""
    task, decoding, model = settings.task, settings.decoding, settings.model
    if one_row_per_forward(model.dtype, model.resolved_device()):
        return False
    if isinstance(task, LMEval) or task.only_nll or decoding.num_beams > 1 or decoding.prefill_chunk is not None:
        return False
    if settings.budget is not None and settings.budget.of == "sequence":  # it goes by what each question adds
        return False
    return not shares_score_across_batch(settings) and not settings.method.modifies_prefill


def prefill_groups(wanted: Iterable[Settings]) -> list[list[Settings]]:
    """The runs, with their baselines, that share prefills: several each, in the order they were asked for."""
    alike: dict[str, dict[str, Settings]] = defaultdict(dict)
    for settings in wanted:
        if can_share(settings):
            base = settings if settings.is_baseline else settings.baseline()
            for one in (base, settings):
                alike[group_key(one)].setdefault(str(one.identity), one)
    return [list(group.values()) for group in alike.values() if len(group) > 1]


def group_key(settings: Settings) -> str:
    """Equal for runs that see the same prompts through the same model."""
    same = {key: settings.identity[key] for key in ("model", "task", "data", "generation", "beyond_context")}
    extra = (
        settings.shard,
        settings.limit,
        settings.batch_size,
        settings.seed,
        settings.outputs_dir,
        settings.model.path,
    )
    return repr((sorted(same.items()), extra, getattr(settings.task, "size", None)))


def run_group(members: list[Settings], session: Session, *, wait: bool = True) -> bool:
    """Write the rows that these runs lack, as far as that goes together.

    False where another process works on one of them, and wait is not set: then nothing was done.
    """
    members[0].task.check()
    by_name = {}
    for settings in members:
        baseline = None if settings.is_baseline else identity(settings.baseline().identity)
        known = (settings.outputs_dir, settings.identity, settings.labels, environment())
        run = Run.open(*known, baseline=baseline, command=settings.command)
        by_name[run.hash] = (settings, run)
    with ExitStack() as claims:
        for name in sorted(by_name):  # all processes in one order: none waits for one that waits for it
            run = by_name[name][1]
            part = members[0].shard.name
            try:
                claims.enter_context(run.claim(timeout=None if wait else 0, waiting=waiting_notice(run), part=part))
            except TimeoutError:
                return False
        examples = list(members[0].task.examples())
        _run_missing([GroupRun(*pair, examples) for pair in by_name.values()], examples, session)
    session.filled_ahead.update(by_name)
    return True


class GroupRun:
    """One run of a group: its settings, its folder, and which examples have their row."""

    def __init__(self, settings: Settings, run: Run, examples: Sequence[Example]) -> None:
        self.settings, self.run = settings, run
        self.done = ids_without_work(settings, run, examples)
        self.failed = False  # left to its own turn, which will say what is wrong with it

    def look(self, tokenizer: Tokenizer, examples: Sequence[Example]) -> None:
        """Leave it to its own turn where it cannot be."""
        try:
            check_beforehand(self.settings, tokenizer, examples)
        except ConfigError:
            self.failed = True

    def has_pending(self, batch: Numbered) -> bool:
        return not self.failed and any(example.id not in self.done for _, example in batch)

    def write(self, rows: list[dict[str, Any]], commit: str | None) -> list[dict[str, Any]]:
        """Those that were missing."""
        new = [row for row in rows if row["example"] not in self.done]
        self.run.append(*(validated_row(row, commit) for row in new))
        self.done |= {row["example"] for row in new}
        return new


def _run_missing(members: list[GroupRun], examples: Sequence[Example], session: Session) -> None:
    lead = members[0].settings
    work = pending_batches(
        examples,
        lead.batch_size,
        MAX_QUESTIONS_PER_CONTEXT,
        lambda example: any(m.has_pending([(0, example)]) for m in members),
    )
    todo = [item for batch in work for item in batch]
    if sum(m.has_pending(todo) for m in members) < 2:
        return
    tokenizer = tokenizer_of(lead.model)
    for member in members:
        member.look(tokenizer, examples)
    work = [fit_examples(lead, tokenizer, batch) for batch in work]
    model, tokenizer = load(lead.model)
    commit = hub_commit(model)
    for member in members:
        check_commit(member.run, commit)
        member.settings = with_stop_tokens(member.settings, model, tokenizer)
    size = _processes(members, model, tokenizer, work)
    title = f"{len(members)} runs that share each prompt's prefill" + (f", in {size} processes" if size > 1 else "")
    missing = sum(example.id not in m.done for m in members for _, example in todo)

    def stuck(items: Items) -> None:  # called in another thread: this one has not come back
        more = f", in a library's call on {len(items)} prompts of {len(members)} runs"
        for member in members:
            member.write([failed_row(member.settings, *item, TIME, more) for item in items], commit)
        say(f"{title}: a call did not come back within timeout_s; the command starts anew", file=sys.stderr)
        restart_process()

    def make(batch: Numbered) -> Iterator[dict[str, Any]]:
        lacking = [m for m in members if m.has_pending(batch)]
        for member, rows in _rows(lacking, model, tokenizer, batch, TimeLimit(lead.timeout_s, stuck), size):
            yield from member.write(rows, commit)

    with ForkPool(size, make) as crew, Progress(title, missing, 0, session=session) as progress:
        for _ in crew.imap(work):
            progress.advance()


def _processes(members: list[GroupRun], model: Model, tokenizer: Tokenizer, work: Sequence[Numbered]) -> int:
    """How many processes to share the batches among: one for every thread, or one that has all threads.

    One where processes would wait for work or for memory, and where time is limited, which is that of a process alone.
    """
    settings, several = [member.settings for member in members], num_workers(model)
    rounds = -(-len(work) // several)
    if several < 2 or rounds * several > MIN_UTILISATION * len(work) or settings[0].timeout_s is not None:
        return 1
    prepare_for_fork(model)
    _, runnable = answerable(settings[0], model, tokenizer, prompts_of(settings[0], model, tokenizer, work[0]))
    return several if len(partition_by_memory(settings, model, runnable, several)) == 1 else 1


def _rows(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Numbered, time_limit: TimeLimit, processes: int
) -> Iterable[tuple[GroupRun, list[dict[str, Any]]]]:
    """Rows of a batch, for every member that is not left to its own turn."""
    if not members:
        return
    prompts = prompts_of(members[0].settings, model, tokenizer, batch)
    held: dict[GroupRun, Prompts] = {}
    # A budget may be too small for some of the prompts: only runs that skip the same ones go on together.
    alike: dict[tuple[int, ...], tuple[list[GroupRun], Prompts]] = {}
    for member in members:
        held[member], runnable = answerable(member.settings, model, tokenizer, prompts)
        alike.setdefault(tuple(index for index, _ in runnable), ([], runnable))[0].append(member)
    for together, runnable in alike.values():
        for member, made in _shared(together, model, tokenizer, runnable, time_limit, processes):
            yield (
                member,
                [made.get(index) or skipped_row(member.settings, index, prompt) for index, prompt in held[member]],
            )


def _shared(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Prompts, time_limit: TimeLimit, processes: int
) -> Iterable[tuple[GroupRun, Rows]]:
    """The answers of members to the same prompts, as many members at a time as memory allows."""
    if not batch:
        yield from ((member, {}) for member in members)
        return
    for part in partition_by_memory([member.settings for member in members], model, batch, processes):
        yield from _answers([members[place] for place in part], model, tokenizer, batch, time_limit)


def _answers(
    members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Items, time_limit: TimeLimit, halved: int = 0
) -> Iterable[tuple[GroupRun, Rows]]:
    """Each member with its rows; half as many at a time where memory or time is short; none where one would fail."""
    made: list[Rows] | None = None
    try:
        with time_limit.of(batch, len(members)):
            made = _made(members, model, tokenizer, batch, halved)
    except (Exception, TimeLimitExceeded) as error:
        known = isinstance(error, ConfigError | CacheError | MemoryError | RuntimeError | TimeLimitExceeded)
        if len(members) == 1 and not known:
            raise
        if len(members) == 1 and failure_kind(error) is None:
            members[0].failed = True
    if made is not None:
        yield from zip(members, made, strict=True)
        return
    free_memory()  # outside of the handler, where the traceback no longer holds what the failed attempt had allocated
    if len(members) > 1:  # one alone is left to its own turn
        half = len(members) // 2
        yield from _answers(members[:half], model, tokenizer, batch, time_limit, halved + 1)
        yield from _answers(members[half:], model, tokenizer, batch, time_limit, halved + 1)


def _made(members: list[GroupRun], model: Model, tokenizer: Tokenizer, batch: Items, halved: int) -> list[Rows]:
    """Index -> row, for each member."""
    each = _together([m.settings for m in members], model, tokenizer, batch)
    return [
        {
            i: {**row_of(member.settings, model, tokenizer, i, prompt, answers[i]), "halved": halved}
            for i, prompt in batch
        }
        for member, answers in zip(members, each, strict=True)
    ]


def _together(members: list[Settings], model: Model, tokenizer: Tokenizer, batch: Items) -> list[dict[int, Any]]:
    """Index -> answer, for each member."""
    straight = [(i, prompt) for i, prompt in batch if not prompt.question and not prompt.choices]
    others = [(i, prompt) for i, prompt in batch if prompt.question or prompt.choices]
    made: list[dict[int, Any]] = [{} for _ in members]
    if straight:
        for mine, more in zip(made, generate_outputs_shared(members, model, tokenizer, straight), strict=True):
            mine |= more
    if others:
        for mine, more in zip(made, outputs_from_context_shared(members, model, tokenizer, others), strict=True):
            mine |= more
    # A step taken in company says nothing about the time of one taken alone.
    return [{i: dataclasses.replace(answer, seconds=NO_TIMES.copy()) for i, answer in mine.items()} for mine in made]
