"""What a model puts out for prompts: answers as a row tells of them, and log-probabilities of given texts."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvexp.config.group_checks import batch_cache
from kvexp.config.settings import Settings
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.tasks import Example

if TYPE_CHECKING:
    from kvexp.config.settings import Settings
    from kvexp.evaluate.forced_texts import ForcedTexts
    from kvexp.models.types import Model, Tokenizer


NO_TIMES: dict[str, float | None] = {"ttft": None, "tt2t": None, "tpot": None}


def sampling_seed(settings: Settings, example: Example) -> int:
    """Of the draws between tokens: the example's own, in any order of the rows and with any others left out."""
    return settings.seed + zlib.crc32(example.id.encode())


def noise_seed(settings: Settings, example: Example, *, asked: bool) -> int:
    """Of the noise inside methods. asked: a question follows the context, whose noise all its questions then share."""
    return settings.seed + zlib.crc32(example.prompt.encode()) if asked else sampling_seed(settings, example)


@dataclass(frozen=True)
class ModelOutput:
    """output and what it cost; logprobs and counts: summed log-probability and tokens of every choice, if any.

    finish_reason: "stop" or "length", stop_reason: the text of the end token or stop string; None of what was not
    generated. tokens: ids of a generated answer, its end token included.
    """

    output: str
    new_tokens: int
    receipt: dict[str, Any]
    seconds: dict[str, float | None] = field(default_factory=NO_TIMES.copy)
    logprobs: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None
    tokens: list[int] = field(default_factory=list)


def generate_outputs(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Sequence[tuple[int, TokenizedExample]]
) -> dict[int, ModelOutput]:
    """Index -> answer generated after the prompt."""
    from kvexp.generate import generate

    result = generate(
        model,
        [prompt.ids for _, prompt in batch],
        batch_cache(settings, [len(prompt.ids) for _, prompt in batch]),
        decoding=settings.decoding,
        tokenizer=tokenizer,
        seeds=[sampling_seed(settings, prompt.example) for _, prompt in batch],
    )
    return dict(zip((index for index, _ in batch), outputs_of(result, tokenizer), strict=True))


def generate_outputs_shared(
    runs: Sequence[Settings],
    model: Model,
    tokenizer: Tokenizer,
    batch: Sequence[tuple[int, TokenizedExample]],
    forced: ForcedTexts | None = None,
) -> list[dict[int, ModelOutput]]:
    """`generate_outputs`, for several runs that differ in method and budget: one prefill, and all decode together.

    forced: texts that some of them are forced, after the same prefill, and which of them answer; None: all answer.
    """
    from kvexp.generate import decode, prefill_together

    first, prompts = runs[0], [prompt.ids for _, prompt in batch]
    seeds = [sampling_seed(first, prompt.example) for _, prompt in batch]
    start, new = time.perf_counter(), first.decoding.max_new_tokens
    configs = [batch_cache(settings, [len(ids) for ids in prompts]) for settings in runs]
    contexts = prefill_together(model, prompts, configs, max_new_tokens=new, tokenizer=tokenizer, seeds=seeds)
    copies = forced.copies(contexts, range(len(batch)), keep=False) if forced is not None else []
    answering = list(range(len(runs))) if forced is None else forced.answering
    made: list[dict[int, ModelOutput]] = [{} for _ in runs]
    if answering:
        results = decode(model, [contexts[i] for i in answering], first.decoding, seeds, tokenizer, start=start)
        for place, result in zip(answering, results, strict=True):
            made[place] = dict(zip((index for index, _ in batch), outputs_of(result, tokenizer), strict=True))
    if forced is not None:
        forced.measure(first, model, tokenizer, copies, batch, made[forced.full], seeds)
    return made


def outputs_of(result: Any, tokenizer: Tokenizer) -> list[ModelOutput]:
    """The rows of a `Generation`."""
    from kvexp.generate import receipts

    seconds = {key[: -len("_s")]: _number(value) for key, value in dataclasses.asdict(result.timing).items()}
    return [
        ModelOutput(
            tokenizer.decode(tokens, skip_special_tokens=True),
            len(tokens),
            dataclasses.asdict(receipt),
            seconds,
            finish_reason=ending.reason,
            stop_reason=ending.text if ending.token is None else tokenizer.decode([ending.token]),
            tokens=list(tokens),
        )
        for tokens, ending, receipt in zip(
            result.tokens, result.endings, receipts(result.cache, result.early_stats), strict=True
        )
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def continuation_logprobs(
    settings: Settings, model: Model, tokenizer: Tokenizer, prompt: TokenizedExample
) -> tuple[list[float], ModelOutput]:
    """Log-probabilities of the continuation's tokens, all of which the model holds; and their cost, in an empty answer.

    One row by itself: a tau schedule goes by the length of the row's own continuation, not by its neighbours'.
    """
    from kvexp.generate import prefill, receipts, score_continuations

    words = continuation(prompt, tokenizer, chat=settings.model.chat)
    ahead = len(prompt.question_ids) + len(words)
    context = prefill(
        model,
        [prompt.ids],
        batch_cache(settings, [len(prompt.ids)]),
        max_new_tokens=ahead,
        tokenizer=tokenizer,
        seeds=[noise_seed(settings, prompt.example, asked=bool(prompt.question_ids))],
    )
    questions = [prompt.question_ids] if prompt.question_ids else None
    start = time.perf_counter()
    (logprobs,) = score_continuations(model, context, [words], questions, max_new_tokens=ahead)
    spent = (time.perf_counter() - start) / max(len(words), 1)
    seconds = {**NO_TIMES, "ttft": context.seconds, "tpot": spent}
    (receipt,) = receipts(context.cache)
    return logprobs, ModelOutput("", len(words), dataclasses.asdict(receipt), seconds)
