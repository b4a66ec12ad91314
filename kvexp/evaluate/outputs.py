"""What a model puts out for prompts: answers as a row tells of them, and log-probabilities of given texts."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvexp.config.group_checks import batch_cache
from kvexp.config.settings import Settings
from kvexp.evaluate.forced_texts import ForcedText, ForcedTexts, force_texts
from kvexp.evaluate.model_output import NO_TIMES, ModelOutput
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.tasks import Example

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer


def sampling_seed(settings: Settings, example: Example) -> int:
    """Of the draws between tokens: the example's own, in any order of the rows and with any others left out."""
    return settings.seed + zlib.crc32(example.id.encode())


def noise_seed(settings: Settings, example: Example, *, asked: bool) -> int:
    """Of the noise inside methods. asked: a question follows the context, whose noise all its questions then share."""
    return settings.seed + zlib.crc32(example.prompt.encode()) if asked else sampling_seed(settings, example)


def generate_outputs(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Sequence[tuple[int, TokenizedExample]]
) -> dict[int, ModelOutput]:
    """Index -> answer generated after the prompt."""
    from kvexp.generate import generate

    result = generate(
        model,
        [prompt.ids for _, prompt in batch],
        batch_cache(settings, [len(prompt.ids) for _, prompt in batch]),
        attention_mask=[[1] * len(prompt.ids) for _, prompt in batch],
        decoding=settings.decoding,
        tokenizer=tokenizer,
        seeds=[sampling_seed(settings, prompt.example) for _, prompt in batch],
        spans=[prompt.spans for _, prompt in batch],
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
    return generate_outputs_of_batches(model, tokenizer, [SharedBatch(runs, batch, forced)])[0]


@dataclass(frozen=True)
class SharedBatch:
    """A batch of prompts, the runs that share its prefill, and what they are forced (`generate_outputs_shared`)."""

    runs: Sequence[Settings]
    prompts: Sequence[tuple[int, TokenizedExample]]
    forced: ForcedTexts | None

    @property
    def answering(self) -> list[int]:
        """Places of the runs that generate their own answers."""
        return list(range(len(self.runs))) if self.forced is None else self.forced.answering

    @property
    def seeds(self) -> list[int]:
        """Of sampling, one per prompt."""
        return [sampling_seed(self.runs[0], prompt.example) for _, prompt in self.prompts]


def generate_outputs_of_batches(
    model: Model, tokenizer: Tokenizer, batches: Sequence[SharedBatch]
) -> list[list[dict[int, ModelOutput]]]:
    """`generate_outputs_shared` for several batches: prefilled one after the other, decoded and forced together.

    A step then reads the model's weights once for the rows of all of them.
    """
    from kvexp.generate import decode_batches, prefill_together

    decoding, start = batches[0].runs[0].decoding, time.perf_counter()
    prefilled, copied = [], []
    for batch in batches:
        prompts = [prompt.ids for _, prompt in batch.prompts]
        configs = [batch_cache(settings, [len(ids) for ids in prompts]) for settings in batch.runs]
        contexts = prefill_together(
            model,
            prompts,
            configs,
            max_new_tokens=decoding.max_new_tokens,
            tokenizer=tokenizer,
            seeds=batch.seeds,
            spans=[prompt.spans for _, prompt in batch.prompts],
        )
        forced = batch.forced
        copied.append(forced.copies(contexts, range(len(prompts)), keep=False) if forced is not None else [])
        prefilled.append([contexts[place] for place in batch.answering])
    answering = [batch for batch in batches if batch.answering]
    results = iter(
        decode_batches(
            model,
            [contexts for contexts in prefilled if contexts],
            decoding,
            [batch.seeds for batch in answering],
            tokenizer,
            start=start,
        )
        if answering
        else []
    )
    made: list[list[dict[int, ModelOutput]]] = []
    texts: list[ForcedText] = []
    for batch, copies in zip(batches, copied, strict=True):
        each: list[dict[int, ModelOutput]] = [{} for _ in batch.runs]
        for place, result in zip(batch.answering, next(results) if batch.answering else (), strict=True):
            each[place] = dict(zip((index for index, _ in batch.prompts), outputs_of(result, tokenizer), strict=True))
        if batch.forced is not None:
            lead, answers = batch.runs[0], each[batch.forced.full]
            texts += batch.forced.prepare(lead, model, tokenizer, copies, batch.prompts, answers, batch.seeds)
        made.append(each)
    force_texts(batches[0].runs[0], model, texts)
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
            info={} if result.cuda_graph is None else {"cuda_graph": result.cuda_graph},
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
        spans=[prompt.spans],
    )
    questions = [prompt.question_ids] if prompt.question_ids else None
    start = time.perf_counter()
    (logprobs,) = score_continuations(model, context, [words], questions, max_new_tokens=ahead)
    spent = (time.perf_counter() - start) / max(len(words), 1)
    seconds = {**NO_TIMES, "ttft": context.seconds, "tpot": spent}
    (receipt,) = receipts(context.cache)
    return logprobs, ModelOutput("", len(words), dataclasses.asdict(receipt), seconds)
