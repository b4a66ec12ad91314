"""The runs of a sweep that differ in method and budget alone: one prefill per example for all of them.

This fills in rows ahead of the runs themselves, which then find them done. What goes wrong here is left to a run's own
turn, where it is told and recorded as always.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvexp.config.model_spec import hub_commit, load, prepare_for_fork, rows_alone, tokenizer_of
from kvexp.config.settings import Settings
from kvexp.console import Progress
from kvexp.evaluate.context_outputs import shares_score_across_batch
from kvexp.evaluate.evaluate_run import waiting_notice
from kvexp.evaluate.example_prompts import (
    MAX_QUESTIONS_PER_CONTEXT,
    answerable,
    pending_batches,
    prompts_of,
)
from kvexp.evaluate.limits import (
    EXIT_HUNG,
    TIME,
    WRITE_EVERY_S,
    Items,
    Pace,
    TimeLimit,
    free_memory,
    partition_by_memory,
    restart_process,
)
from kvexp.evaluate.preflight import fit_examples, with_stop_tokens
from kvexp.evaluate.rows import check_commit, check_prompts, environment, failed_row
from kvexp.models.half_precision import FULL, one_row_per_forward
from kvexp.record import Run, identity
from kvexp.session import Session
from kvexp.sweep.fork_pool import ForkPool, num_workers
from kvexp.sweep.group_batch import held_beside, rows_and_lines_of_batches
from kvexp.sweep.group_run import GroupRun, Numbered
from kvexp.tasks import Example, LMEval
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

# Places for batches in all rounds of the processes, over batches: a process per thread gains about as much.
MIN_UTILISATION = 4 / 3
# Rows of a decode step, above which reading the weights once for more of them gains little (docs/decisions/speed.md).
MAX_DECODE_ROWS = 64


def can_share(settings: Settings) -> bool:
    """Whether a run can share its prefill with others and still write the rows it would write alone."""
    task, decoding, model = settings.task, settings.decoding, settings.model
    if one_row_per_forward(model.dtype, model.resolved_device()):
        return False
    if isinstance(task, LMEval) or task.only_nll or decoding.num_beams > 1 or decoding.prefill_chunk is not None:
        return False
    if task.has_turns:  # each conversation goes its own way
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
    """Write the rows and divergences that these runs lack, as far as that goes together.

    False where another process works on one of them, and wait is not set: then nothing was done.
    """
    members[0].task.check()
    with ExitStack() as claims:
        pairs = opened(members)
        try:
            claim_all(pairs, claims, timeout=None if wait else 0)
        except TimeoutError:
            return False
        examples = list(members[0].task.examples())
        run_missing([GroupRun(*pair, examples) for pair in pairs], examples, session)
    session.filled_ahead.update(run.hash for _, run in pairs)
    return True


def opened(members: Sequence[Settings]) -> list[tuple[Settings, Run]]:
    """The runs with their folders, each once."""
    by_name = {}
    for settings in members:
        baseline = None if settings.is_baseline else identity(settings.baseline().identity)
        known = (settings.outputs_dir, settings.identity, settings.labels, environment())
        run = Run.open(*known, baseline=baseline, command=settings.command)
        by_name[run.hash] = (settings, run)
    return list(by_name.values())


def claim_all(pairs: Sequence[tuple[Settings, Run]], claims: ExitStack, timeout: float | None) -> None:
    """Hold these runs until `claims` ends; TimeoutError where another process does."""
    for settings, run in sorted(pairs, key=lambda pair: pair[1].hash):  # in one order: nobody waits for a waiting one
        claims.enter_context(run.claim(timeout=timeout, waiting=waiting_notice(run), part=settings.shard.name))


def run_missing(members: list[GroupRun], examples: Sequence[Example], session: Session, least: int = 2) -> None:
    """Do what claimed runs lack, where at least so many of them lack anything."""
    lead = members[0].settings
    shared = 1 if shares_score_across_batch(lead) else MAX_QUESTIONS_PER_CONTEXT
    work = pending_batches(
        examples, lead.batch_size, shared, lambda example: any(m.has_pending([(0, example)]) for m in members)
    )
    todo = [item for batch in work for item in batch]
    if sum(m.has_pending(todo) for m in members) < least:
        return
    tokenizer = tokenizer_of(lead.model)
    digests: dict[str, dict[str, Any]] = {}
    for member in members:
        member.look(tokenizer, examples)
        check_prompts(member.settings, member.run, tokenizer, examples, digests)
    work = [fit_examples(lead, tokenizer, batch) for batch in work]
    model, tokenizer = load(lead.model)
    commit = hub_commit(model)
    for member in members:
        check_commit(member.run, commit)
        member.settings = with_stop_tokens(member.settings, model, tokenizer)
    size = _processes(members, model, tokenizer, work)
    title = _title(members, todo) + (f", in {size} processes" if size > 1 else "")
    missing = sum(m.missing(todo) for m in members)
    answers = any(m.answers(todo) for m in members)

    def stuck(items: Items) -> None:  # called in another thread: this one has not come back
        if not answers:  # beginning anew would come to the same call
            say(f"{title}: a call did not come back within timeout_s; the same command goes on", file=sys.stderr)
            os._exit(EXIT_HUNG)
        more = f", in a library's call on {len(items)} prompts of {len(members)} runs"
        for member in members:
            member.write([failed_row(member.settings, *item, TIME, more) for item in items], commit)
        say(f"{title}: a call did not come back within timeout_s; the command starts anew", file=sys.stderr)
        restart_process()

    # In half precision a row's numbers go by what it is decoded together with, which the clock must not decide.
    pace = Pace(WRITE_EVERY_S if lead.model.dtype == FULL and lead.timeout_s is None else None)

    def make(some: Sequence[Numbered]) -> Iterator[bool]:  # whether it is a row, or else a text, that was written
        pairs = [([m for m in members if m.has_pending(batch)], batch) for batch in some]
        each, limit = [pair for pair in pairs if pair[0]], TimeLimit(lead.timeout_s, stuck)
        for member, rows, lines in rows_and_lines_of_batches(each, model, tokenizer, limit, size, pace):
            yield from (True for _ in member.write(rows, commit))
            yield from (False for _ in member.write_lines(lines))

    forces = any(m.to_force(example.id for _, example in todo) for m in members)
    what = "texts" if not answers else "rows and texts" if forces else "examples"
    with ForkPool(size, make) as crew, Progress(title, missing, 0, what) as progress:
        for is_row in crew.imap(decode_groups(work, members, size)):
            progress.advance()
            session.rows_written += is_row
            session.texts_measured += not is_row
    free_memory()


def decode_groups(work: Sequence[Numbered], members: Sequence[GroupRun], processes: int) -> list[list[Numbered]]:
    """The batches in groups whose answers are decoded in the same steps: as even as they go, enough for all processes.

    A group of several has at most MAX_DECODE_ROWS rows. Each batch by itself where the time per batch is limited, and
    where prompts would change each other.
    """
    lead = members[0].settings
    most = (
        1
        if lead.timeout_s is not None or rows_alone(lead.model)
        else max(1, MAX_DECODE_ROWS // (len(members) * lead.batch_size))
    )
    count = min(len(work), processes * -(-len(work) // (processes * most)))
    ends = [len(work) * (place + 1) // count for place in range(count)]
    return [list(work[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _title(members: Sequence[GroupRun], todo: Numbered) -> str:
    forced = sum(bool(m.to_force(example.id for _, example in todo)) for m in members)
    if not forced or any(m.answers(todo) for m in members):
        evicting = sum(not member.settings.is_baseline for member in members)
        full = " and the full cache" if evicting < len(members) else ""
        return f"{evicting} run{'s' * (evicting != 1)}{full} that share each prompt's prefill"
    labels = members[0].settings.labels
    return f"divergence of {forced} run{'s' * (forced != 1)}, {labels['model']}, {labels['task']}"


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
    held = held_beside(members, work[0])
    return several if len(partition_by_memory(settings, model, runnable, several, **held)) == 1 else 1
