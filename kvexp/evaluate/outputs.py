"""What a model puts out for prompts: answers as a row tells of them, and log-probabilities of given texts."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvexp.config.group_checks import batch_cache
from kvexp.config.settings import Settings
from kvexp.evaluate.forced_texts import ANSWERS, ForcedText, ForcedTexts, force_texts, learn_step
from kvexp.evaluate.limits import Pace
from kvexp.evaluate.model_output import NO_TIMES, ModelOutput
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.record.divergence_lines import Line
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


@dataclass(frozen=True)
class SharedOutputs:
    """What one run made of a batch. batch, run: their places; answers: by index; lines: divergences."""

    batch: int
    run: int
    answers: dict[int, ModelOutput] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)


def generate_outputs_shared(
    runs: Sequence[Settings],
    model: Model,
    tokenizer: Tokenizer,
    batch: Sequence[tuple[int, TokenizedExample]],
    forced: ForcedTexts | None,
    pace: Pace,
) -> Iterator[SharedOutputs]:
    """`generate_outputs`, for several runs that differ in method and budget: one prefill, then they decode together.

    forced: texts that some of them are forced, after the same prefill, and which of them answer; None: all answer.
    """
    return generate_outputs_of_batches(model, tokenizer, [SharedBatch(runs, batch, forced)], pace)


def generate_outputs_of_batches(
    model: Model, tokenizer: Tokenizer, batches: Sequence[SharedBatch], pace: Pace
) -> Iterator[SharedOutputs]:
    """`generate_outputs_shared` for several batches: prefilled one after the other, decoded and forced together.

    A step then reads the model's weights once for the rows of all of them, as many as `pace` allows. What is yielded is
    to be written before the next is asked for.
    """
    left = list(enumerate(batches))
    while left:
        pace.written()
        some: list[_Prefilled] = []
        while pace.may_prefill(len(some), len(left)):
            some.append(_prefilled(model, tokenizer, *left.pop(0)))
        full: dict[int, dict[int, ModelOutput]] = {}
        for made in _answers(model, tokenizer, some, pace):
            forced = batches[made.batch].forced
            if forced is not None and made.run == forced.full:
                full[made.batch] = made.answers
            yield made
        texts: list[ForcedText] = []
        place_of = {}
        for one in some:
            if (forced := one.batch.forced) is not None:
                place_of[id(forced)] = one.place
                lead, own = one.batch.runs[0], full.get(one.place, {})
                texts += forced.prepare(lead, model, tokenizer, one.copies, one.batch.prompts, own, one.batch.seeds)
        del some  # the texts hold what of the contexts they need
        for into, lines in force_texts(batches[0].runs[0], model, texts, pace):
            yield from (SharedOutputs(place_of[id(into)], run, lines=each) for run, each in lines.items())


@dataclass
class _Prefilled:
    """A batch that was prefilled: the contexts that answer, by place of the run, and copies for each kind of text."""

    place: int
    batch: SharedBatch
    contexts: dict[int, Any]
    copies: list[dict[int, Any]]


def _prefilled(model: Model, tokenizer: Tokenizer, place: int, batch: SharedBatch) -> _Prefilled:
    from kvexp.generate import prefill_together

    prompts = [prompt.ids for _, prompt in batch.prompts]
    contexts = prefill_together(
        model,
        prompts,
        [batch_cache(settings, [len(ids) for ids in prompts]) for settings in batch.runs],
        max_new_tokens=batch.runs[0].decoding.max_new_tokens,
        tokenizer=tokenizer,
        seeds=batch.seeds,
        spans=[prompt.spans for _, prompt in batch.prompts],
    )
    forced = batch.forced
    copies = forced.copies(contexts, range(len(prompts)), keep=False) if forced is not None else []
    return _Prefilled(place, batch, {run: contexts[run] for run in batch.answering}, copies)


def _answers(model: Model, tokenizer: Tokenizer, some: Sequence[_Prefilled], pace: Pace) -> Iterator[SharedOutputs]:
    """The answers of all runs to several batches; uses their contexts up."""
    from kvexp.generate import decode_batches

    decoding = some[0].batch.runs[0].decoding
    left = [(one, run) for one in some for run in one.contexts]
    while left:
        each = [(one.contexts[run], one.batch.prompts) for one, run in left]
        learn_step(model, ANSWERS, each, decoding.max_new_tokens, pace)
        del each
        count = pace.take(ANSWERS, [len(one.batch.prompts) for one, _ in left], decoding.max_new_tokens)
        now, left = left[:count], left[count:]
        runs = [(one, [run for other, run in now if other is one]) for one in some]
        runs = [(one, places) for one, places in runs if places]
        start = time.perf_counter()
        results = decode_batches(
            model,
            [[one.contexts.pop(run) for run in places] for one, places in runs],
            decoding,
            [one.batch.seeds for one, _ in runs],
            tokenizer,
            start=start,
        )
        seconds, steps = time.perf_counter() - start, 0
        made = []
        for (one, places), generations in zip(runs, results, strict=True):
            for run, generation in zip(places, generations, strict=True):
                steps = max(steps, *map(len, generation.tokens))
                outputs = outputs_of(generation, tokenizer)
                answers = dict(zip((index for index, _ in one.batch.prompts), outputs, strict=True))
                made.append(SharedOutputs(one.place, run, answers))
        del results
        pace.measured(ANSWERS, sum(len(one.batch.prompts) for one, _ in now), steps, seconds)
        yield from made
        pace.written()


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
