"""One run: make sure its baseline exists, then generate, score and record what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError
from kvexp.record import Run
from kvexp.runner.model import load
from kvexp.runner.progress import Progress
from kvexp.runner.prompts import Prompt, continuation, tokenise
from kvexp.runner.settings import Settings
from kvexp.tasks import Example


def run(settings: Settings) -> Run:
    """Rows for every example of the task (up to `limit`), and for the full-attention baseline; resumes what exists.

    Raises what went wrong, after recording it in the run's folder.
    """
    baseline: Run | None = None
    if settings.is_baseline:
        settings.task.check()  # once for a run and its baseline, which comes first and has the same task
    else:
        baseline = run(settings.baseline())
    record = Run.open(
        settings.outputs_dir,
        settings.identity,
        settings.labels,
        _environment(),
        baseline=baseline.hash if baseline is not None else None,
    )
    with record.claim(waiting=_waiting(record)):
        try:
            _fill(settings, record)
        except Exception as error:  # an interruption is no failure: the rows so far stay and the next run goes on
            record.fail(error)
            raise
        record.clear_failure()
        record.finish(len(record.rows()))
    return record


def _waiting(record: Run) -> Any:
    def say(seconds: float) -> None:
        if seconds == 0:
            print(f"{record.path} is being worked on by another process; waiting for it", flush=True)

    return say


def _fill(settings: Settings, record: Run) -> None:
    """Run the examples that have no row yet."""
    done = {row["example"] for row in record.rows()}
    examples = list(settings.task.examples())
    todo = [(i, example) for i, example in enumerate(examples) if example.id not in done]
    name = f"{settings.labels['method']} {settings.labels['setting']}".strip()
    ratio = settings.labels.get("kv_ratio")
    title = name if ratio is None else f"{name} kv_ratio={ratio:g}"
    if done:
        print(f"{title}: {len(examples) - len(todo)} of {len(examples)} rows are there already ({record.path})")
    if not todo:
        return
    model, tokenizer = load(settings.model)
    if settings.model.chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model.chat=true, but this tokenizer has no chat template: set model.chat=false")
    with Progress(title, len(examples), len(examples) - len(todo)) as progress:
        for batch in _batches(todo, settings.batch_size):
            for row in _rows(settings, model, tokenizer, batch):
                record.append(row)
                progress.advance(row)


def _batches(todo: list[tuple[int, Example]], size: int) -> Iterator[list[tuple[int, Example]]]:
    for start in range(0, len(todo), size):
        yield todo[start : start + size]


def _rows(settings: Settings, model: Any, tokenizer: Any, batch: list[tuple[int, Example]]) -> list[dict[str, Any]]:
    """One row per example of a batch, in order."""
    from kvexp.models.families import longest

    decoding = settings.decoding
    room = longest(model.config) - decoding.max_new_tokens + 1
    if settings.beyond_context:
        room = 1 << 40
    prompts = [tokenise(example, settings.task, tokenizer, room, chat=settings.model.chat) for _, example in batch]
    runnable = [(index, prompt) for (index, _), prompt in zip(batch, prompts, strict=True) if prompt.skipped is None]
    made = _generate(settings, model, tokenizer, runnable) if runnable else {}
    return [made.get(index) or _skipped(index, prompt) for (index, _), prompt in zip(batch, prompts, strict=True)]


def _generate(
    settings: Settings, model: Any, tokenizer: Any, batch: list[tuple[int, Prompt]]
) -> dict[int, dict[str, Any]]:
    from kvexp.generate import continuation_logprobs, generate, receipts
    from kvexp.models.families import longest

    ids = [prompt.ids for _, prompt in batch]
    seeds = [settings.seed + index for index, _ in batch]
    result = generate(
        model,
        ids,
        settings.method,
        settings.budget,
        decoding=settings.decoding,
        tokenizer=tokenizer,
        seeds=seeds,
        **settings.plan(),
    )
    logprobs: list[list[float]] | None = None
    if settings.task.needs_nll:
        chat = settings.model.chat
        continuations = [continuation(prompt, tokenizer, chat=chat) for _, prompt in batch]
        # One by one: a tau schedule goes by the length of the row's own continuation, not by its neighbours'.
        logprobs = []
        for prompt_ids, words, seed in zip(ids, continuations, seeds, strict=True):
            words = words if settings.beyond_context else words[: longest(model.config) - len(prompt_ids) + 1]
            logprobs += continuation_logprobs(
                model, [prompt_ids], [words], settings.method, settings.budget, seeds=[seed], **settings.plan()
            )
    seconds = {key[: -len("_s")]: _number(value) for key, value in dataclasses.asdict(result.timing).items()}
    rows = {}
    for place, (index, prompt) in enumerate(batch):
        tokens = result.tokens[place]
        output = tokenizer.decode(tokens, skip_special_tokens=True)
        metrics = settings.task.score(output, prompt.example.reference, prompt.example)
        if logprobs is not None:
            metrics = {**metrics, "nll": -sum(logprobs[place]) / len(logprobs[place])}
        rows[index] = {
            **_head(index, prompt),
            "metrics": metrics,
            "new_tokens": len(tokens),
            "seconds": seconds,
            "receipt": dataclasses.asdict(receipts(result.cache)[place]),
            "output": output,
            "reference": prompt.example.reference,
        }
    return rows


def _head(index: int, prompt: Prompt) -> dict[str, Any]:
    return {
        "example": prompt.example.id,
        "index": index,
        "prompt_tokens": len(prompt.ids) or prompt.tokens,
        "prompt_cut": prompt.cut,
        "skipped": prompt.skipped,
    }


def _skipped(index: int, prompt: Prompt) -> dict[str, Any]:
    empty = {"metrics": {}, "new_tokens": 0, "seconds": {"ttft": None, "tt2t": None, "tpot": None}, "receipt": None}
    return {**_head(index, prompt), **empty, "output": "", "reference": prompt.example.reference}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _environment() -> dict[str, Any]:
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
