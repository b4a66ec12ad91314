"""One run: make sure its baseline exists, then generate, score and record what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from kvexp.record import Run
from kvexp.runner.answers import UNTIMED, Answer, generated
from kvexp.runner.contexts import asked, mixes_rows
from kvexp.runner.fitting import check_room, check_template, fitted, with_ends
from kvexp.runner.forced import forced
from kvexp.runner.lm_eval import ItemAnswer, item_answers, item_prompt
from kvexp.runner.model import check_fits, commit_of, load, tokenizer_of
from kvexp.runner.progress import Progress
from kvexp.runner.prompts import Prompt, continuation, tokenise
from kvexp.runner.rows import check_commit, recordable
from kvexp.runner.settings import Settings
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item, LMEval

SHARED = 8  # questions about one context that are answered from one prefill before their rows are written


AHEAD: set[str] = set()  # runs that this process has filled in before their turn: no news to the reader


def run(settings: Settings) -> Run:
    """Rows for every example of the task (up to `limit`), and for the full-attention baseline; resumes what exists.

    Raises what went wrong, after recording it in the run's folder.
    """
    baseline: Run | None = None
    if settings.is_baseline:
        settings.task.check()  # once for a run and its baseline, which comes first and has the same task
    else:
        check_fits(settings.model, settings.method)
        baseline = run(settings.baseline())
    record = Run.open(
        settings.outputs_dir,
        settings.identity,
        settings.labels,
        environment(),
        baseline=baseline.hash if baseline is not None else None,
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
    def say(seconds: float) -> None:
        if seconds == 0:
            print(f"{record.path} is being worked on by another process; waiting for it", flush=True)

    return say


def _fill(settings: Settings, record: Run) -> bool:
    """Run the examples of the shard that have no row yet; returns whether those of the whole run have theirs now."""
    examples = list(settings.task.examples())
    _fill_shard(settings, record, examples)
    return settings.shard.whole or {example.id for example in examples} <= {row["example"] for row in record.rows()}


def _fill_shard(settings: Settings, record: Run, examples: list[Example]) -> None:
    done = {row["example"] for row in record.rows()}
    mine = [(i, examples[i]) for i in settings.shard.takes(len(examples))]
    todo = [(i, example) for i, example in mine if example.id not in done]
    name = f"{settings.labels['method']} {settings.labels['setting']}".strip()
    ratio = settings.labels.get("kv_ratio")
    title = name if ratio is None else f"{name} kv_ratio={ratio:g}"
    if done and record.hash not in AHEAD:
        print(f"{title}: {len(mine) - len(todo)} of {len(mine)} rows are there already ({record.path})")
    if not todo:
        return
    check_room(settings, todo)  # an impossible configuration is said before weights are made or read
    words = tokenizer_of(settings.model)
    check_template(settings, words)
    todo = fitted(settings, words, todo)
    model, tokenizer = load(settings.model)
    settings = with_ends(settings, model, tokenizer)
    commit = commit_of(model)
    check_commit(record, commit)
    with Progress(title, len(mine), len(mine) - len(todo)) as progress:
        shared = 1 if mixes_rows(settings) else SHARED
        for batch in batches(todo, settings.batch_size, shared):
            for row in _rows(settings, model, tokenizer, batch):
                record.append(recordable(row, commit))
                progress.advance(row)


def batches(todo: list[tuple[int, Example]], size: int, shared: int) -> Iterator[list[tuple[int, Example]]]:
    """Batches of `size` examples, or up to `shared` where more questions about the last one's context follow."""
    batch: list[tuple[int, Example]] = []
    for item in todo:
        same = bool(batch) and bool(item[1].question) and item[1].prompt == batch[-1][1].prompt
        if len(batch) >= (max(size, shared) if same else size):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _rows(settings: Settings, model: Any, tokenizer: Any, batch: list[tuple[int, Example]]) -> list[dict[str, Any]]:
    """One row per example of a batch, in order."""
    prompts = [prompt_of(settings, model, tokenizer, example) for _, example in batch]
    runnable = [(index, prompt) for (index, _), prompt in zip(batch, prompts, strict=True) if prompt.skipped is None]
    made = _generate(settings, model, tokenizer, runnable) if runnable else {}
    each = [(index, prompt) for (index, _), prompt in zip(batch, prompts, strict=True)]
    return [made.get(index) or skipped(settings, index, prompt) for index, prompt in each]


def prompt_of(settings: Settings, model: Any, tokenizer: Any, example: Example) -> Prompt:
    """The example's tokens, which leave room for its answer: what is generated, the longest choice, a continuation."""
    from kvexp.models.families import longest

    if isinstance(example, Item):
        return item_prompt(settings, model, tokenizer, example)
    holds = 1 << 40 if settings.beyond_context else longest(model.config)
    alone = [len(tokenizer(words, add_special_tokens=False).input_ids) for words in example.choices]
    room = holds - max(alone, default=settings.decoding.max_new_tokens) + 1
    prompt = tokenise(example, settings.task, tokenizer, room, chat=settings.model.chat)
    given = example.choices or ((example.continuation,) if settings.task.needs_nll else ())
    if prompt.skipped or not given:
        return prompt
    after = [continuation(prompt, tokenizer, chat=settings.model.chat, words=words) for words in given]
    if prompt.size + max(map(len, after)) > holds + 1:  # a choice may have more tokens where it stands than alone
        why = "too long" if example.choices else "too long with its continuation"
        return Prompt(example, "", [], skipped=why, tokens=prompt.tokens)
    return dataclasses.replace(prompt, choices=after) if example.choices else prompt


def _generate(
    settings: Settings, model: Any, tokenizer: Any, batch: list[tuple[int, Prompt]]
) -> dict[int, dict[str, Any]]:
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
    settings: Settings, model: Any, tokenizer: Any, index: int, prompt: Prompt, answer: Answer | None
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
    if settings.task.needs_nll:
        logprobs, fed = forced(settings, model, tokenizer, index, prompt)
        of_nll, info = settings.task.score_nll(logprobs, example)
        metrics, answer = {**metrics, **of_nll}, answer or fed
        head["info"] |= {**info, "nll_tokens": len(logprobs)}
    assert answer is not None
    row = {
        **head,
        "metrics": metrics,
        "new_tokens": answer.new_tokens,
        "seconds": answer.seconds,
        "receipt": answer.receipt,
        "output": answer.output,
        "reference": example.reference,
    }
    if answer.logprobs:
        row["choices"] = {"logprobs": answer.logprobs, "tokens": answer.counts}
    return row


def _head(settings: Settings, index: int, prompt: Prompt) -> dict[str, Any]:
    return {
        "example": prompt.example.id,
        "index": index,
        "prompt_tokens": len(prompt.ids) or prompt.tokens,
        "question_tokens": len(prompt.question),
        "prompt_cut": prompt.cut,
        "chat_template": settings.model.chat and settings.task.wrapped,
        "skipped": prompt.skipped,
        "info": dict(prompt.example.info),
    } | ({"trust_remote_code": True} if settings.model.trust_remote_code else {})


def skipped(settings: Settings, index: int, prompt: Prompt) -> dict[str, Any]:
    empty = {"metrics": {}, "new_tokens": 0, "seconds": dict(UNTIMED), "receipt": None}
    return {**_head(settings, index, prompt), **empty, "output": "", "reference": prompt.example.reference}


@functools.cache  # asked for by every run of a sweep, and git is a process
def environment() -> dict[str, Any]:
    """Where and with what a run was made: versions, device, commit."""
    import torch

    import kvexp

    where = Path(__file__).resolve().parents[2]
    commit = None
    with contextlib.suppress(OSError):  # no git, or not in a checkout
        if (where / ".git").exists():
            line = ["git", "describe", "--always", "--dirty"]
            commit = subprocess.run(line, cwd=where, capture_output=True, text=True).stdout.strip() or None
    return {
        "kvexp": kvexp.__version__,
        "numerics": kvexp.NUMERICS,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
    }
