"""The rows of a run: made of answers, of what was skipped or failed, checked; and what all rows of a run share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp.hf.load import one_row_per_forward
from kvexp.run.answers import NO_TIMES, ItemAnswer, ModelOutput, continuation_logprobs
from kvexp.run.limits import TIME
from kvexp.run.model_spec import ModelSpec, load
from kvexp.run.prompts import ItemPrompt, Prompts, TokenizedExample, turn_ids
from kvexp.run.settings import Settings
from kvexp.run.store import Run, sent_otherwise
from kvexp.tasks.lm_eval import Item, LMEval
from kvexp.util import ConfigError

if TYPE_CHECKING:
    from kvexp.hf.load import Model, Tokenizer


SAMPLE = 16  # rows whose prompts are made again before a run goes on


def validated_row(row: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """The row as it is written; one with a metric that is no number counts as skipped, with that as its reason.

    The other examples go on. The table counts it, says why, and gives no verdict to a run that lost examples its
    baseline has.
    """
    metrics = row["metrics"]
    wrong = [f"metric {name} is {value}" for name, value in metrics.items() if not _finite(value)]
    chances = (row.get("choices") or {}).get("logprobs", [])
    wrong += [f"log-probability of choice {i} is {value}" for i, value in enumerate(chances) if not _finite(value)]
    made: dict[str, Any] = {**_writable(row), "revision": commit}
    if wrong:
        made["metrics"] = {name: value for name, value in metrics.items() if _finite(value)}
        made["skipped"] = ", ".join(wrong)
    return made


def check_commit(record: Run, commit: str | None) -> None:
    """Rows of two commits of a model are two runs: ConfigError if this run was begun with another one."""
    before = {row["revision"] for row in record.rows() if row.get("revision")} - {commit}
    if before:
        raise ConfigError(
            f"{record.path} has rows of commit {before.pop()} of the model, the hub's revision is {commit} now: set "
            "model.revision to the commit you want, or remove that folder and its baseline's"
        )


def check_prompts(settings: Settings, record: Run, prompts: Prompts) -> None:
    """ConfigError where rows of this run, or of its baseline, were made with other prompts than it would send now.

    SAMPLE rows of each are looked at, from the first to the last; the results look at all of them.
    """
    baseline = record.path.parent / str(record.baseline)
    for run in [record] + ([Run.load(baseline)] if (baseline / "config.json").exists() else []):
        rows = {row["example"]: row for row in run.rows() if row.get("prompt_digest") is not None}
        there = [index for index, example in enumerate(prompts.examples) if example.id in rows]
        if there and isinstance(settings.task, LMEval):  # whose items ask for the model itself
            prompts.use(*load(settings.model))
        for place in range(min(SAMPLE, len(there))):
            prompt = prompts[there[place * len(there) // min(SAMPLE, len(there))]]
            now = {"prompt_digest": prompt.digest, **continuation_digest(settings, prompts.tokenizer, prompt)}
            if why := sent_otherwise(rows[prompt.example.id], now):
                raise ConfigError(
                    f"{run.path} has rows of other prompts than this run would send: example {prompt.example.id} has "
                    f"{why} now. Chat template, tokenizer or a library has changed: remove that folder, or choose "
                    "another outputs_dir"
                )


def check_threads(record: Run, model: ModelSpec, threads: int) -> None:
    """Half-precision products on a CPU are summed by the number of threads: one run has one number of them."""
    before = record.env.get("threads", threads)
    if one_row_per_forward(model.dtype, model.resolved_device()) and record.rows() and before != threads:
        raise ConfigError(
            f"{record.path} has rows made with {before} threads, and in {model.dtype} on a CPU {threads} would make "
            f"others: set OMP_NUM_THREADS={before}, or remove that folder"
        )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _writable(value: Any) -> Any:
    """What JSON cannot say becomes null, wherever it stands."""
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def row_of(
    settings: Settings,
    model: Model,
    tokenizer: Tokenizer,
    index: int,
    prompt: TokenizedExample,
    answer: ModelOutput,
) -> dict[str, Any]:
    """The row of an answer; where the task wants log-probabilities alone, of its continuation."""
    example, metrics = prompt.example, {}
    head = _row_header(settings, index, prompt)
    parted, scored = None, answer.output
    if answer.tokens and settings.thinking is not None:
        parted = settings.thinking.part(answer.tokens, tokenizer)
        scored = answer.results[0] if isinstance(answer, ItemAnswer) else parted.text
    if isinstance(answer, ItemAnswer):
        assert isinstance(settings.task, LMEval) and isinstance(example, Item)
        metrics = settings.task.score_item(example, answer.results)
    elif example.choices:
        metrics = settings.task.score_choices(answer.logprobs, answer.counts, example)
    elif not settings.task.only_nll:
        metrics = settings.task.score(scored, example.reference, example)
        head["info"] |= settings.task.of_answer(scored, example.reference)
        if settings.task.only_answered:
            head["answered"] = settings.task.answered(scored, example)
    if settings.task.needs_nll:
        logprobs, fed = continuation_logprobs(settings, model, tokenizer, prompt)
        of_nll, info = settings.task.score_nll(logprobs, example)
        metrics, answer = {**metrics, **of_nll}, fed if settings.task.only_nll else answer
        head["info"] |= {**info, "nll_tokens": len(logprobs)}
    head["info"] |= answer.info
    row = {
        **head,
        **continuation_digest(settings, tokenizer, prompt),
        "metrics": metrics,
        "new_tokens": answer.new_tokens,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seconds": answer.seconds,
        "receipt": answer.receipt,
        "output": answer.output,
        "reference": example.reference,
    }
    if parted is not None:
        row |= {"answer": scored, "thinking_tokens": parted.thinking_tokens, "thinking_cut": parted.cut}
    if answer.tokens:
        row["output_tokens"] = answer.tokens
    if answer.logprobs:
        row["choices"] = {"logprobs": answer.logprobs, "tokens": answer.counts}
    return row


def _row_header(settings: Settings, index: int, prompt: TokenizedExample) -> dict[str, Any]:
    """Fields that a row has whatever came of its example."""
    example, model, cache = prompt.example, settings.model, settings.cache
    head: dict[str, Any] = {
        "example": example.id,
        "index": index,
        "prompt_digest": prompt.digest,
        "prompt_tokens": len(prompt.ids) or prompt.tokens,
        "question": getattr(settings.task, "question", None),
        "question_tokens": len(prompt.question_ids),
        "prompt_cut": prompt.truncated,
        "chat_template": model.chat and settings.task.uses_chat_template,
        "skipped": prompt.skipped,
        "failed": None,
        "halved": 0,
        "info": dict(example.info),
    }
    if example.questions:  # one of several about an evicted context
        digest = prompt.context_digest if prompt.ids else None
        head["context"] = {"digest": digest, "question": example.number, "questions": len(example.questions)}
    if model.trust_remote_code:
        head["trust_remote_code"] = True
    if model.gguf is not None:
        sha256, quantisation = model.gguf
        head["weights"] = {"gguf_sha256": sha256, "quantisation": quantisation}
    if cache.calibration is not None:
        head["calibration"] = cache.calibration.digest
    if cache.surrogate is not None:
        head["surrogate"] = cache.surrogate.digest
    return head


def continuation_digest(settings: Settings, tokenizer: Tokenizer, prompt: TokenizedExample) -> dict[str, str]:
    """The row's digest of token ids that are fed in addition to prompt and question; empty where there are none.

    These are choices, a continuation, lm-eval's texts, and what the user says in the turns up to this one.
    """
    example, chat = prompt.example, settings.model.chat
    fed: list[Any] = [*prompt.choices]
    if isinstance(prompt, ItemPrompt):
        fed += [[each.context, each.question, each.continuation] for each in prompt.asks]
    if prompt.ids and settings.task.needs_nll:
        fed.append(prompt.following)
    turns = example.turns[1 : example.number + 1] if prompt.ids else ()
    fed += [turn_ids(prompt, tokenizer, turn.message, chat=chat) for turn in turns]
    if not fed:
        return {}
    return {"continuation_digest": hashlib.sha256(json.dumps(fed).encode()).hexdigest()[:16]}


def skipped_row(settings: Settings, index: int, prompt: TokenizedExample) -> dict[str, Any]:
    empty: dict[str, Any] = {"metrics": {}, "new_tokens": 0, "finish_reason": None, "stop_reason": None}
    empty |= {"seconds": dict(NO_TIMES), "receipt": None}
    return {**_row_header(settings, index, prompt), **empty, "output": "", "reference": prompt.example.reference}


def failed_row(settings: Settings, index: int, prompt: TokenizedExample, why: str, more: str = "") -> dict[str, Any]:
    """The row of an example that was tried and failed, skipped for this reason. why: MEMORY or TIME of `limits`."""
    words = f"no answer within timeout_s={settings.timeout_s:g}{more}" if why == TIME else "out of memory, alone"
    row = skipped_row(settings, index, dataclasses.replace(prompt, skipped=f"{words}; retry=true tries again"))
    return {**row, "failed": why}


@functools.cache  # asked for by every run of a sweep, and git is a process
def environment() -> dict[str, Any]:
    """Versions, device, commit."""
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
