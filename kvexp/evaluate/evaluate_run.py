"""One run: make sure its baseline exists, then generate, score and record what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvexp.config.environment import environment
from kvexp.config.model_spec import check_fits, commit_of, load, tokenizer_of
from kvexp.config.settings import Settings
from kvexp.evaluate.batches import SHARED, Batch, due
from kvexp.evaluate.context_outputs import asked, mixes_rows
from kvexp.evaluate.example_prompts import answerable, check_beforehand, prompts_of
from kvexp.evaluate.lm_eval_items import ItemAnswer, item_answers
from kvexp.evaluate.nan_report import layer_named
from kvexp.evaluate.oom_retry import TIME, Items, Patience, in_halves
from kvexp.evaluate.outputs import UNTIMED, Answer, generated
from kvexp.evaluate.preflight import fitted, with_ends
from kvexp.evaluate.progress import Progress
from kvexp.evaluate.rows import check_commit, check_threads, recordable
from kvexp.evaluate.teacher_forcing import forced
from kvexp.evaluate.timeout import start_anew
from kvexp.evaluate.tokenized_examples import TokenizedExample
from kvexp.evaluate.warm_up import warm_up
from kvexp.record import Run, identity
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item, LMEval
from kvexp.terminal import say

Numbered = list[tuple[int, TokenizedExample]]

AHEAD: set[str] = set()  # runs that this process has filled in before their turn: no news to the reader


def run(settings: Settings) -> Run:
    """Rows for every example of the task (up to `limit`), and for the full-attention baseline; resumes what exists.

    Raises what went wrong, after recording it in the run's folder.
    """
    settings.task.check()
    _check(settings)
    return _recorded(settings)


def _check(settings: Settings) -> None:
    """An impossible run is told before weights are made or read, its baseline's too. One that has rows is possible."""
    check_fits(settings.model, settings.method)
    # os.path: a folder that may not be looked into is told of by opening the run.
    if not os.path.exists(settings.outputs_dir / identity(settings.identity) / "examples.jsonl"):
        check_beforehand(settings, tokenizer_of(settings.model), list(settings.task.examples()))


def _recorded(settings: Settings) -> Run:
    baseline = None if settings.is_baseline else _recorded(settings.baseline())
    record = Run.open(
        settings.outputs_dir,
        settings.identity,
        settings.labels,
        environment(),
        baseline=baseline.hash if baseline is not None else None,
        command=settings.command,
    )
    with record.claim(waiting=waiting(record), part=settings.shard.name):
        try:
            complete = _fill(settings, record)
        except Exception as error:  # an interruption is no failure: the rows so far stay and the next run goes on
            with contextlib.suppress(OSError):  # a full disk: what went wrong is raised, recorded or not
                record.fail(error)
            raise
        if complete:  # else other shards have rows to add, or a failure to be read
            record.clear_failure()
            record.finish(len(record.rows()))
    return record


def waiting(record: Run) -> Any:
    told: list[float] = []

    def print_waiting(seconds: float) -> None:
        if seconds > 1 and not told:  # less is a process that looks who is at it
            told.append(seconds)
            say(f"{record.path} is being worked on by another process; waiting for it", flush=True)

    return print_waiting


def _fill(settings: Settings, record: Run) -> bool:
    """Run the examples of the shard that have no row yet; returns whether those of the whole run have theirs now."""
    examples = list(settings.task.examples())
    _fill_shard(settings, record, examples)
    return settings.shard.whole or {example.id for example in examples} <= {row["example"] for row in record.rows()}


def _fill_shard(settings: Settings, record: Run, examples: list[Example]) -> None:
    done = settled(settings, record, examples)
    shared = 1 if mixes_rows(settings) else SHARED
    work = due(examples, settings.batch_size, shared, lambda example: example.id not in done)
    total, missing = len(settings.shard.takes(len(examples))), sum(example.id not in done for example in examples)
    name = f"{settings.labels['method']} {settings.labels['setting']}".strip()
    ratio = settings.labels.get("kv_ratio")
    title = name if ratio is None else f"{name} kv_ratio={ratio:g}"
    if done and record.hash not in AHEAD:
        say(f"{title}: {total - missing} of {total} rows are there already ({record.path})")
    if not work:
        return
    check_threads(record, settings.model, environment()["threads"])
    tokenizer = tokenizer_of(settings.model)
    work = [fitted(settings, tokenizer, batch) for batch in work]
    model, tokenizer = load(settings.model)
    settings = with_ends(settings, model, tokenizer)
    commit = commit_of(model)
    check_commit(record, commit)

    def write(row: dict[str, Any]) -> None:
        if row["example"] not in done:
            record.append(recordable(row, commit))
            progress.advance()

    def stuck(items: Items) -> None:  # called in another thread: this one has not come back
        for index, prompt in items:
            write(lost(settings, index, prompt, TIME, f", in a library's call on {len(items)} prompts"))
        say(f"{title}: a call did not come back within timeout_s; the command starts anew", file=sys.stderr)
        start_anew()

    patience = Patience(settings.timeout_s, stuck)
    prompts = (prompts_of(settings, model, tokenizer, batch) for batch in work)
    runnable = (some for each in prompts if (some := answerable(settings, model, tokenizer, each)[1]))
    warm_up(settings, model, tokenizer, next(runnable, []), patience)
    with Progress(title, total, total - missing) as progress:
        for batch in work:
            make = functools.partial(_rows, settings, model, tokenizer, batch, patience)
            for row in layer_named(model, batch, make):
                write(row)


def settled(settings: Settings, record: Run, examples: Sequence[Example]) -> set[str]:
    """Examples that need no work here: those of other shards, and failed ones, unless they are to be tried again."""
    mine = settings.shard.takes(len(examples))
    others = {example.id for place, example in enumerate(examples) if place not in mine}
    return others | {row["example"] for row in record.rows() if not (settings.retry and row.get("failed"))}


def _rows(settings: Settings, model: Any, tokenizer: Any, batch: Batch, patience: Patience) -> list[dict[str, Any]]:
    """One row per example of a batch, in order."""
    prompts = prompts_of(settings, model, tokenizer, batch)
    prompts, runnable = answerable(settings, model, tokenizer, prompts)
    make = functools.partial(_generate, settings, model, tokenizer)
    failed = functools.partial(lost, settings)
    made = in_halves(runnable, make, failed, patience) if runnable else {}
    return [made.get(index) or skipped(settings, index, prompt) for index, prompt in prompts]


def _generate(settings: Settings, model: Any, tokenizer: Any, batch: Items) -> dict[int, dict[str, Any]]:
    """Index -> row."""
    if settings.task.only_nll:
        return {index: row_of(settings, model, tokenizer, index, prompt, None) for index, prompt in batch}
    if isinstance(settings.task, LMEval):
        answers = item_answers(settings, model, tokenizer, batch)
        return {index: row_of(settings, model, tokenizer, index, prompt, answers[index]) for index, prompt in batch}
    straight = [(i, prompt) for i, prompt in batch if not prompt.question and not prompt.choices]
    others = [(i, prompt) for i, prompt in batch if prompt.question or prompt.choices]
    made = generated(settings, model, tokenizer, straight) if straight else {}
    made |= asked(settings, model, tokenizer, others) if others else {}
    return {index: row_of(settings, model, tokenizer, index, prompt, made[index]) for index, prompt in batch}


def row_of(
    settings: Settings, model: Any, tokenizer: Any, index: int, prompt: TokenizedExample, answer: Answer | None
) -> dict[str, Any]:
    """answer: None where the task wants log-probabilities alone."""
    example, metrics = prompt.example, {}
    head = _head(settings, index, prompt)
    if isinstance(answer, ItemAnswer):
        assert isinstance(settings.task, LMEval) and isinstance(example, Item)
        metrics = settings.task.score_item(example, answer.results)
    elif answer is not None and example.choices:
        metrics = settings.task.score_choices(answer.logprobs, answer.counts, example)
    elif answer is not None:
        metrics = settings.task.score(answer.output, example.reference, example)
        if settings.task.only_answered:
            head["answered"] = settings.task.answered(answer.output, example)
    if settings.task.needs_nll:
        logprobs, fed = forced(settings, model, tokenizer, prompt)
        of_nll, info = settings.task.score_nll(logprobs, example)
        metrics, answer = {**metrics, **of_nll}, answer or fed
        head["info"] |= {**info, "nll_tokens": len(logprobs)}
    assert answer is not None
    row = {
        **head,
        "metrics": metrics,
        "new_tokens": answer.new_tokens,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seconds": answer.seconds,
        "receipt": answer.receipt,
        "output": answer.output,
        "reference": example.reference,
    }
    if answer.logprobs:
        row["choices"] = {"logprobs": answer.logprobs, "tokens": answer.counts}
    return row


def _head(settings: Settings, index: int, prompt: TokenizedExample) -> dict[str, Any]:
    return {
        "example": prompt.example.id,
        "index": index,
        "prompt_digest": prompt.digest,
        "prompt_tokens": len(prompt.ids) or prompt.tokens,
        "question_tokens": len(prompt.question),
        "prompt_cut": prompt.cut,
        "chat_template": settings.model.chat and settings.task.wrapped,
        "skipped": prompt.skipped,
        "failed": None,
        "halved": 0,
        "info": dict(prompt.example.info),
    } | ({"trust_remote_code": True} if settings.model.trust_remote_code else {})


def skipped(settings: Settings, index: int, prompt: TokenizedExample) -> dict[str, Any]:
    empty: dict[str, Any] = {"metrics": {}, "new_tokens": 0, "finish_reason": None, "stop_reason": None}
    empty |= {"seconds": dict(UNTIMED), "receipt": None}
    return {**_head(settings, index, prompt), **empty, "output": "", "reference": prompt.example.reference}


def lost(settings: Settings, index: int, prompt: TokenizedExample, why: str, more: str = "") -> dict[str, Any]:
    """The row of an example that was tried and failed (attempts.MEMORY or TIME): skipped, and for this reason."""
    words = f"no answer within timeout_s={settings.timeout_s:g}{more}" if why == TIME else "out of memory, alone"
    row = skipped(settings, index, dataclasses.replace(prompt, skipped=f"{words}; retry=true tries again"))
    return {**row, "failed": why}
