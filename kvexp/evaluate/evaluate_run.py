"""One run: make sure its baseline exists, then generate, score and record what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvexp.config.group_checks import batch_cache
from kvexp.config.model_spec import check_cache_fits_model, hub_commit, load, tokenizer_of
from kvexp.config.settings import Settings
from kvexp.console import Progress
from kvexp.core import CacheConfig
from kvexp.errors import CacheError, ConfigError, NotFinite
from kvexp.evaluate.context_outputs import outputs_from_context, shares_score_across_batch
from kvexp.evaluate.conversations import conversation_outputs
from kvexp.evaluate.example_prompts import (
    MAX_QUESTIONS_PER_CONTEXT,
    Batch,
    answerable,
    check_beforehand,
    pending_batches,
    prompts_of,
)
from kvexp.evaluate.limits import (
    TIME,
    Items,
    TimeLimit,
    TimeLimitExceeded,
    free_memory,
    restart_process,
    retry_in_halves,
)
from kvexp.evaluate.lm_eval_items import item_answers
from kvexp.evaluate.outputs import generate_outputs
from kvexp.evaluate.preflight import fit_examples, with_stop_tokens
from kvexp.evaluate.rows import (
    check_commit,
    check_prompts,
    check_threads,
    environment,
    failed_row,
    row_of,
    skipped_row,
    validated_row,
)
from kvexp.methods import Full
from kvexp.record import Run, identity
from kvexp.session import Session
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item, LMEval
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer


PROMPT, NEW = 128, 3  # tokens: enough for every kind of call
Made = TypeVar("Made")


def evaluate_run(settings: Settings, session: Session | None = None) -> Run:
    """Rows for every example of the task (up to `limit`), and for the full-attention baseline; resumes what exists.

    session: of the command, whose counts it adds to. Raises what went wrong, after recording it in the run's folder.
    """
    settings.task.check()
    _check(settings)
    return _recorded(settings, session or Session())


def _check(settings: Settings) -> None:
    """An impossible run is told before weights are made or read, its baseline's too. One that has rows is possible."""
    check_cache_fits_model(settings.model, settings.cache)
    # os.path: a folder that may not be looked into is told of by opening the run.
    if not os.path.exists(settings.outputs_dir / identity(settings.identity) / "examples.jsonl"):
        check_beforehand(settings, tokenizer_of(settings.model), list(settings.task.examples()))


def _recorded(settings: Settings, session: Session) -> Run:
    baseline = None if settings.is_baseline else _recorded(settings.baseline(), session)
    record = Run.open(
        settings.outputs_dir,
        settings.identity,
        settings.labels,
        environment(),
        baseline=baseline.hash if baseline is not None else None,
        command=settings.command,
    )
    with record.claim(waiting=waiting_notice(record), part=settings.shard.name):
        try:
            complete = _run_missing(settings, record, session)
        except Exception as error:  # an interruption is no failure: the rows so far stay and the next run goes on
            with contextlib.suppress(OSError):  # a full disk: what went wrong is raised, recorded or not
                record.fail(error)
            raise
        if complete:  # else other shards have rows to add, or a failure to be read
            record.clear_failure()
            record.finish(len(record.rows()))
    return record


def waiting_notice(record: Run) -> Any:
    told: list[float] = []

    def print_waiting(seconds: float) -> None:
        if seconds > 1 and not told:  # less is a process that looks who is at it
            told.append(seconds)
            say(f"{record.path} is being worked on by another process; waiting for it", flush=True)

    return print_waiting


def _run_missing(settings: Settings, record: Run, session: Session) -> bool:
    """Run the examples of the shard that have no row yet; returns whether those of the whole run have theirs now."""
    examples = list(settings.task.examples())
    _run_shard(settings, record, examples, session)
    return settings.shard.whole or {example.id for example in examples} <= {row["example"] for row in record.rows()}


def _run_shard(settings: Settings, record: Run, examples: list[Example], session: Session) -> None:
    done = ids_without_work(settings, record, examples)
    shared = 1 if shares_score_across_batch(settings) else MAX_QUESTIONS_PER_CONTEXT
    work = pending_batches(examples, settings.batch_size, shared, lambda example: example.id not in done)
    total, missing = len(settings.shard.takes(len(examples))), sum(example.id not in done for example in examples)
    name = f"{settings.labels['method']} {settings.labels['setting']}".strip()
    ratio = settings.labels.get("kv_ratio")
    title = name if ratio is None else f"{name} kv_ratio={ratio:g}"
    if done and record.hash not in session.filled_ahead:
        say(f"{title}: {total - missing} of {total} rows are there already ({record.path})")
    if not work:
        return
    check_threads(record, settings.model, environment()["threads"])
    tokenizer = tokenizer_of(settings.model)
    check_prompts(settings, record, tokenizer, examples)
    work = [fit_examples(settings, tokenizer, batch) for batch in work]
    model, tokenizer = load(settings.model)
    settings = with_stop_tokens(settings, model, tokenizer)
    commit = hub_commit(model)
    check_commit(record, commit)

    def write(row: dict[str, Any]) -> None:
        if row["example"] not in done:
            record.append(validated_row(row, commit))
            progress.advance()

    def stuck(items: Items) -> None:  # called in another thread: this one has not come back
        for index, prompt in items:
            write(failed_row(settings, index, prompt, TIME, f", in a library's call on {len(items)} prompts"))
        say(f"{title}: a call did not come back within timeout_s; the command starts anew", file=sys.stderr)
        restart_process()

    time_limit = TimeLimit(settings.timeout_s, stuck)
    prompts = (prompts_of(settings, model, tokenizer, batch) for batch in work)
    runnable = (some for each in prompts if (some := answerable(settings, model, tokenizer, each)[1]))
    warm_up(settings, model, tokenizer, next(runnable, []), time_limit)
    with Progress(title, total, total - missing, session=session) as progress:
        for batch in work:
            make = functools.partial(_rows, settings, model, tokenizer, batch, time_limit)
            for row in with_nan_location(model, batch, make):
                write(row)
    free_memory()


def ids_without_work(settings: Settings, record: Run, examples: Sequence[Example]) -> set[str]:
    """Examples that need no work here: those of other shards, and failed ones, unless they are to be tried again."""
    mine = settings.shard.takes(len(examples))
    others = {example.id for place, example in enumerate(examples) if place not in mine}
    return others | {row["example"] for row in record.rows() if not (settings.retry and row.get("failed"))}


def _rows(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Batch, time_limit: TimeLimit
) -> list[dict[str, Any]]:
    """One row per example of a batch, in order."""
    prompts = prompts_of(settings, model, tokenizer, batch)
    prompts, runnable = answerable(settings, model, tokenizer, prompts)
    make = functools.partial(_generate, settings, model, tokenizer)
    failed = functools.partial(failed_row, settings)
    made = retry_in_halves(runnable, make, failed, time_limit) if runnable else {}
    return [made.get(index) or skipped_row(settings, index, prompt) for index, prompt in prompts]


def _generate(settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items) -> dict[int, dict[str, Any]]:
    """Index -> row."""
    if settings.task.only_nll:
        return {index: row_of(settings, model, tokenizer, index, prompt, None) for index, prompt in batch}
    if isinstance(settings.task, LMEval):
        answers = item_answers(settings, model, tokenizer, batch)
        return {index: row_of(settings, model, tokenizer, index, prompt, answers[index]) for index, prompt in batch}
    if settings.task.has_turns:
        answers_of_turns = conversation_outputs(settings, model, tokenizer, batch)
        return {i: row_of(settings, model, tokenizer, i, prompt, answers_of_turns[i]) for i, prompt in batch}
    straight = [(i, prompt) for i, prompt in batch if not prompt.question_ids and not prompt.choices]
    others = [(i, prompt) for i, prompt in batch if prompt.question_ids or prompt.choices]
    made = generate_outputs(settings, model, tokenizer, straight) if straight else {}
    made |= outputs_from_context(settings, model, tokenizer, others) if others else {}
    return {index: row_of(settings, model, tokenizer, index, prompt, made[index]) for index, prompt in batch}


def warm_up(settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items, time_limit: TimeLimit) -> None:
    """A short generation before the first that is timed: the beginnings of a batch's prompts under the run's method.

    What a process does once (reading weights in, laying them out, compiling kernels) is no part of any method's time;
    full, which runs first, would pay for all others.

    Under full attention where the budget of so short a prompt does not hold what the method protects. What else goes
    wrong will go wrong again with the batch itself, which tells.
    """
    prompts = [prompt.ids[:PROMPT] for _, prompt in batch if timed(prompt.example)]
    if not prompts:
        return
    failed = True
    with contextlib.suppress(CacheError, MemoryError, RuntimeError, TimeLimitExceeded), time_limit.of(batch):
        try:
            _generate_few(settings, model, tokenizer, prompts)
        except ConfigError:
            beyond = settings.cache.beyond_context
            full = dataclasses.replace(settings, cache=CacheConfig(Full(), beyond_context=beyond))
            with contextlib.suppress(ConfigError):
                _generate_few(full, model, tokenizer, prompts)
        failed = False
    if failed:  # outside of the handler, where the traceback no longer holds what the attempt had allocated
        free_memory()


def timed(example: Any) -> bool:
    """Whether the answer's row holds times; choices, but lm-eval's, are judged from forks of one prefill."""
    return isinstance(example, Item) or not example.choices


def _generate_few(settings: Settings, model: Model, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    from kvexp.generate import generate

    decoding = dataclasses.replace(settings.decoding, max_new_tokens=NEW, min_new_tokens=0, eos=None)
    cache = batch_cache(settings, [len(ids) for ids in prompts])
    mask = [[1] * len(ids) for ids in prompts]
    generate(model, prompts, cache, attention_mask=mask, decoding=decoding, tokenizer=tokenizer)


def with_nan_location(model: Model, batch: Batch, make: Callable[[], Made]) -> Made:
    """make(), whose NotFinite also says the layer and the examples."""
    try:
        return make()
    except NotFinite as error:
        names = ", ".join(example.id for _, example in batch)
        raise NotFinite(f"{error} ({_where(model, make)}; examples {names}){_advice(model)}") from error


def _where(model: Model, make: Callable[[], Any]) -> str:
    from kvexp.models.nan_locator import first_not_finite

    with first_not_finite(model) as found:
        try:
            make()
        except NotFinite:
            pass
        else:
            return "but not when the same batch was run again: is this machine's memory sound?"
    if not found:
        return "in no module's output, so in an attention score or in the cache"
    number = re.search(r"\.(\d+)(?:\.|$)", found[0])
    return f"first in layer {number[1]}, module {found[0]}" if number else f"first in module {found[0]}"


def _advice(model: Model) -> str:
    name = str(model.dtype).removeprefix("torch.")
    return "; float16 ends at 65504: try model.dtype=bfloat16 or float32" if name == "float16" else ""
