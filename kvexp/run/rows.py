"""The rows of a run: made of answers, of what was skipped or failed, checked; and what all rows of a run share."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp.core.budget import BytesBudget, PromptSizes
from kvexp.core.quantized import SlotBytes
from kvexp.hf.load import one_row_per_forward
from kvexp.run.answers import NO_TIMES, ItemAnswer, ModelOutput, continuation_logprobs
from kvexp.run.model_spec import ModelSpec, is_verified, load
from kvexp.run.prompts import ItemPrompt, Items, Prompts, TokenizedExample, later_turns
from kvexp.run.settings import Settings, batch_budget
from kvexp.run.store import Run, sent_otherwise
from kvexp.tasks.lm_eval import Item, LMEval
from kvexp.util.errors import ConfigError
from kvexp.util.machine import machine_load

if TYPE_CHECKING:
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.run.answers import PromptBatch


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
    written: dict[str, Any] = {**_writable(row), "revision": commit}
    if wrong:
        written["metrics"] = {name: value for name, value in metrics.items() if _finite(value)}
        written["skipped"] = ", ".join(wrong)
    return written


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
        recorded = [index for index, example in enumerate(prompts.examples) if example.id in rows]
        if recorded and isinstance(settings.task, LMEval):  # whose items ask for the model itself
            prompts.use(*load(settings.model))
        for place in range(min(SAMPLE, len(recorded))):
            prompt = prompts[recorded[place * len(recorded) // min(SAMPLE, len(recorded))]]
            now = {"prompt_digest": prompt.digest, **continuation_digest(settings, prompts.tokenizer, prompt)}
            if why := sent_otherwise(rows[prompt.example.id], now):
                raise ConfigError(
                    f"{run.path} has rows of other prompts than this run would send: example {prompt.example.id} has "
                    f"{why} now. Chat template, tokenizer or a library has changed: remove that folder, or choose "
                    "another outputs_dir"
                )


def check_threads(record: Run, model: ModelSpec, threads: int, halves: str = "") -> None:
    """Half-precision products on a CPU are summed by the number of threads: one run has one number of them.

    halves: what of the run's engine sums in half precision, if anything does.
    """
    before, kind = record.env.get("threads", threads), halves or model.dtype
    if (halves or one_row_per_forward(model.dtype, model.resolved_device())) and record.rows() and before != threads:
        raise ConfigError(
            f"{record.path} has rows made with {before} threads, and in {kind} on a CPU {threads} would make "
            f"others: set threads={before}, or remove that folder"
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
    example, metrics = prompt.example, dict[str, float]()
    head = _row_header(settings, index, prompt)
    parted, scored = None, answer.output
    if answer.tokens and settings.thinking is not None:
        parted = settings.thinking.part(answer.tokens, tokenizer)
        scored = answer.results[0] if isinstance(answer, ItemAnswer) else parted.text
    if isinstance(answer, ItemAnswer):
        assert isinstance(settings.task, LMEval) and isinstance(example, Item)
        metrics, lists = settings.task.outcome_of(example, answer.results)
        head["info"] |= lists
    elif example.choices:
        metrics = settings.task.score_choices(answer.logprobs, answer.counts, example)
    elif not settings.task.only_nll:
        metrics = settings.task.score(scored, example.reference, example)
        head["info"] |= settings.task.of_answer(scored, example.reference, answer.finish_reason)
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
    if not is_verified(model):
        head["family"] = "unverified"
    if model.gguf is not None:
        sha256, quantisation = model.gguf
        head["weights"] = {"gguf_sha256": sha256, "quantisation": quantisation}
    elif model.scheme is not None:
        head["weights"] = {"quantisation": model.scheme}
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
        fed += [[ask.context, ask.question, ask.continuation] for ask in prompt.asks]
    if prompt.ids and settings.task.needs_nll:
        fed.append(prompt.following)
    if prompt.ids:
        fed += later_turns(prompt, tokenizer, example.number, chat=chat)
    if not fed:
        return {}
    return {"continuation_digest": hashlib.sha256(json.dumps(fed).encode()).hexdigest()[:16]}


def skipped_row(settings: Settings, index: int, prompt: TokenizedExample) -> dict[str, Any]:
    empty: dict[str, Any] = {"metrics": {}, "new_tokens": 0, "finish_reason": None, "stop_reason": None}
    empty |= {"seconds": dict(NO_TIMES), "receipt": None}
    return {**_row_header(settings, index, prompt), **empty, "output": "", "reference": prompt.example.reference}


def failed_row(settings: Settings, index: int, prompt: TokenizedExample) -> dict[str, Any]:
    """The row of an example that was tried alone and failed for want of memory."""
    why = "out of memory, alone; retry=true tries again"
    return {**skipped_row(settings, index, dataclasses.replace(prompt, skipped=why)), "failed": "memory"}


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
        "load": machine_load(),
    }


# -- memory: work that exceeds it is tried again by halves, and fails as a row that says so ----------------------------

SHARE = 0.6  # of the memory that is free: the rest is for what a prefill makes on its way


def is_out_of_memory(error: Exception) -> bool:
    """Whether less work may succeed."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU's allocator and CUDA's libraries have no type of their own for it.
    signs = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def free_memory() -> None:
    """Give back to the system what nothing holds any more: after a failed attempt, and between the runs of a sweep.

    glibc keeps freed blocks below one that is in use, a gigabyte and more after a group of runs, and other libraries
    take new ones instead. Where there is no malloc_trim (macOS, musl), the allocator has its own way.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def fit_together(batches: Sequence[PromptBatch], model: Model, processes: int = 1) -> bool:
    """Whether the caches of all runs of these batches fit into a process's share of the memory that is free.

    Of several batches a cache is copied as it stands when its answer ends, while others go on. An engine holds one.
    """
    if batches[0].runs[0].engine is not None:
        return True
    needed, several = 0, len(batches) > 1
    for batch in batches:
        prompts, sizes = kv_bytes_needed(batch.runs, model, batch.prompts)
        needed += prompts + (batch.copies + (several and bool(batch.answering))) * sum(sizes)
    return needed <= free_bytes(model) * SHARE / processes


def kv_bytes_needed(runs: Sequence[Settings], model: Model, batch: Items) -> tuple[int, list[int]]:
    """Bytes of the prompts, which the runs share, and of what each run keeps, in as many bits as it stores them."""
    from kvexp.hf.traits import traits_of

    lengths = [prompt.size for _, prompt in batch]

    def kept(settings: Settings) -> int:
        traits, itemsize = traits_of(model.config, settings.cache.evict_sliding), int(model.dtype.itemsize)
        cache = settings.cache
        held = SlotBytes(traits.key_dim, traits.value_dim, cache.quantization, itemsize, cache.slot_bias)
        return len(traits.held) * traits.kv_heads * sum(map(held.of, slots_held(settings, lengths, cached=True)))

    return token_bytes(model) * sum(lengths), [kept(settings) for settings in runs]


def slots_held(settings: Settings, lengths: Sequence[int], *, cached: bool = False) -> list[int]:
    """Slots per layer and kv head that each prompt holds at most once it is evicted.

    cached: with the copies in the block cache of a method that keeps every token.
    """
    from kvexp.retrieval.method import Retrieval

    new = settings.decoding.max_new_tokens
    budget = batch_budget(settings, lengths)
    cache = settings.cache
    if budget is None or cache.mode == "mask" or cache.keeps_everything or not cache.cadence.at_prefill:
        blocks = cache.method.cache if cached and isinstance(cache.method, Retrieval) else None
        return [length + new + (min(blocks.tokens, length) if blocks else 0) for length in lengths]
    if isinstance(budget, BytesBudget):
        budget = dataclasses.replace(budget, others=None)  # which leaves fewer slots
    held = budget.resolve(PromptSizes(lengths, max(lengths), new, 1), 0)
    return [min(slots + 1, length + new) for slots, length in zip(held, lengths, strict=True)]


def token_bytes(model: Model) -> int:
    """Bytes of one token's keys and values in all layers, if all of them were attention of one shape."""
    from kvexp.hf.traits import traits_of

    traits = traits_of(model.config)
    return len(traits.held) * traits.kv_heads * (traits.key_dim + traits.value_dim) * int(model.dtype.itemsize)


def free_bytes(model: Model) -> int:
    """Free memory of the devices the model is on: of a spread one, as if each had what the fullest has left."""
    import torch

    from kvexp.util.machine import available

    devices = {parameter.device for parameter in model.parameters()}
    cards = [int(torch.cuda.mem_get_info(device)[0]) for device in devices if device.type == "cuda"]
    if cards:
        return min(cards) * len(cards)
    return available()  # unknown: what does not fit is halved when it fails
