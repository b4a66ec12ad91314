"""Answers of a model to prompts: texts, conversations, choices, forced texts."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvexp.run.limits import TRIED_ROWS, TRIED_STEPS, Pace
from kvexp.run.model_spec import moving_rope
from kvexp.run.prompts import (
    ItemPrompt,
    TokenizedExample,
    bench_of,
    continuation,
    reference_ids,
    tokens_to_come,
    turn_ids,
)
from kvexp.run.settings import Settings, batch_cache
from kvexp.run.store import OWN, Line
from kvexp.tasks import Example
from kvexp.tasks.dialogues import DialogueTask
from kvexp.tasks.lm_eval import Item
from kvexp.util import ConfigError

if TYPE_CHECKING:
    from kvexp.generate import PrefilledContext, TextDivergence
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.lm_eval import Bench


# What a model put out for one prompt, as a row tells of it.


NO_TIMES: dict[str, float | None] = {"ttft": None, "tt2t": None, "tpot": None}


@dataclass(frozen=True)
class ModelOutput:
    """output and what it cost; logprobs and counts: summed log-probability and tokens of every choice, if any.

    finish_reason: "stop" or "length", stop_reason: the text of the end token or stop string; None of what was not
    generated. tokens: ids of a generated answer, its end token included. info: joins the row's.
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
    info: dict[str, Any] = field(default_factory=dict)


# Divergence of runs that share a prefill: which of them are forced which texts, and the lines that come out.


ANSWERS, TEXTS = "answers", "texts"  # kinds of work whose steps a `Pace` knows


@dataclass
class ForcedTexts:
    """What a batch's shared prefill is used for, runs being named by their place among those that share it.

    answering: places of the runs that generate their own answers; full: the full cache's place; texts: kind of text ->
    places of the runs that are forced it.
    """

    answering: list[int]
    full: int
    texts: dict[str, list[int]]

    def copies(self, contexts: Sequence[Any], rows: Sequence[int], *, keep: bool) -> list[dict[int, Any]]:
        """For each kind of text the contexts it uses up, by place: these rows of contexts of all runs.

        keep: the contexts will be needed again. Without it a context that nothing else uses up is not copied.
        """
        spare = not keep and len(self.texts) == 1

        def taken(place: int) -> Any:
            return contexts[place] if spare and place not in self.answering else contexts[place].fork(rows)

        return [{place: taken(place) for place in (self.full, *places)} for places in self.texts.values()]

    def prepare(
        self,
        settings: Settings,
        model: Model,
        tokenizer: Tokenizer,
        copies: Sequence[dict[int, Any]],
        batch: Items,
        answers: Mapping[int, ModelOutput],
        seeds: Sequence[int],
    ) -> list[ForcedText]:
        """What is to be forced on a batch of prompts with questions of one length, or none: for `force_texts`.

        settings: any of the runs'; answers: the full cache's by index, none where it has not generated; seeds: of its
        generation.
        """
        own = [answers[index].tokens for index, _ in batch] if answers else None
        each = (
            _one_text(self, settings, model, tokenizer, kind, contexts, batch, own, seeds)
            for kind, contexts in zip(self.texts, copies, strict=True)
        )
        return [text for text in each if text is not None]


@dataclass(frozen=True)
class ForcedText:
    """One kind of text of a batch, ready to be forced: into: what it is part of; batch: prompts that have such a text.

    places: of the runs that are forced it; contexts: theirs and the full cache's, by place.
    """

    into: ForcedTexts
    kind: str
    batch: Items
    contexts: Mapping[int, Any]
    texts: Sequence[Sequence[int]] | None
    places: Sequence[int]

    @property
    def full(self) -> Any:
        """The full cache's context."""
        return self.contexts[self.into.full]

    def split(self, count: int) -> tuple[ForcedText, ForcedText]:
        """The text for the first `count` runs and for the others, each with the full cache beside it."""
        copy = {**self.contexts, self.into.full: self.full.fork(range(len(self.batch)))}
        first = replace(self, contexts=copy, places=self.places[:count])
        return first, replace(self, places=self.places[count:])

    def lines(self, found: Sequence[Sequence[Any]]) -> dict[int, list[Line]]:
        """Of `divergence_of_batches`, one list of rows per place: lines by place."""
        made: dict[int, list[Line]] = {}
        for place, rows in zip(self.places, found, strict=True):
            # Nothing was evicted yet, unless the prompt was evicted between chunks.
            unevicted = self.contexts[place].cache.config.bounded_chunk is None
            for (index, prompt), one in zip(self.batch, rows, strict=True):
                by_prefill = not prompt.question_ids and unevicted
                line = {"example": prompt.example.id, "index": index, "text": self.kind, "first_by_prefill": by_prefill}
                line |= asdict(one) | {"same_top1": [int(same) for same in one.same_top1]}
                made.setdefault(place, []).append(line)
        return made


def force_texts(
    settings: Settings, model: Model, texts: Sequence[ForcedText], pace: Pace
) -> Iterator[tuple[ForcedTexts, dict[int, list[Line]]]]:
    """Force the texts, as many in the same steps as `pace` allows, and yield lines by place.

    settings: any of the runs'.
    """
    from kvexp.generate import ForcedBatch, divergence_of_batches
    from kvexp.generate.inputs import eos_ids

    decoding, left = settings.decoding, list(texts)
    while left:
        steps = max(decoding.max_new_tokens if text.texts is None else max(map(len, text.texts)) for text in left)
        learn_step(
            model, TEXTS, [(text.contexts[place], text.batch) for text in left for place in text.places], steps, pace
        )
        count = pace.take(TEXTS, [len(text.batch) for text in left for _ in text.places], steps)
        some, left = _first_places(left, count)
        start = time.perf_counter()
        found = divergence_of_batches(
            model,
            [ForcedBatch(text.full, [text.contexts[place] for place in text.places], text.texts) for text in some],
            max_new_tokens=decoding.max_new_tokens,
            eos=eos_ids(model, decoding.eos),
        )
        fed = max(len(row.tokens) for each in found for rows in each for row in rows)
        pace.measured(TEXTS, sum(len(text.batch) * len(text.places) for text in some), fed, time.perf_counter() - start)
        for text, rows in zip(some, found, strict=True):
            yield text.into, text.lines(rows)
        pace.written()


def _first_places(texts: Sequence[ForcedText], count: int) -> tuple[list[ForcedText], list[ForcedText]]:
    """The texts for the first `count` of all their runs, and what is left."""
    taken: list[ForcedText] = []
    for place, text in enumerate(texts):
        if count < len(text.places):
            if not count:
                return taken, [*texts[place:]]
            first, rest = text.split(count)
            return [*taken, first], [rest, *texts[place + 1 :]]
        taken.append(text)
        count -= len(text.places)
    return taken, []


def learn_step(model: Model, kind: str, contexts: Sequence[tuple[Any, Items]], steps: int, pace: Pace) -> None:
    """Tell the pace what a step of this kind takes, where it does not know: by a few steps of copies of some contexts.

    contexts: each with its prompts; steps: that a row may take.
    """
    from kvexp.generate.kl import read_questions

    if pace.knows(kind, steps):
        return
    batch = contexts[0][1]
    same = [context for context, prompts in contexts if prompts is batch]
    copies = [context.fork(range(len(batch))) for context in same[: max(1, TRIED_ROWS // len(batch))]]
    start = 0.0
    for tokens in (1, TRIED_STEPS):  # the first makes what later ones find
        start = time.perf_counter()
        read_questions(model, copies, [list(prompt.ids[:1]) * tokens for _, prompt in batch])
    float(copies[0].logits[0, 0])  # waits for the device
    pace.measured(kind, len(copies) * len(batch), TRIED_STEPS, time.perf_counter() - start, ended=False)


def _one_text(
    into: ForcedTexts,
    settings: Settings,
    model: Model,
    tokenizer: Tokenizer,
    kind: str,
    contexts: Mapping[int, Any],
    batch: Items,
    own: Sequence[Sequence[int]] | None,
    seeds: Sequence[int],
) -> ForcedText | None:
    """None where no prompt of the batch has such a text."""
    from kvexp.generate import decode
    from kvexp.generate.inputs import is_plain_greedy
    from kvexp.generate.kl import read_questions

    new, decoding = settings.decoding.max_new_tokens, settings.decoding
    texts: Sequence[Sequence[int]] | None = own
    if kind != OWN:
        chat = settings.model.chat
        texts = [reference_tokens(prompt, tokenizer, new, chat=chat) for _, prompt in batch]
        rows = [row for row, text in enumerate(texts) if text]  # others have no reference answer to force
        if not rows:
            return None
        if len(rows) < len(batch):
            contexts = {place: context.fork(rows) for place, context in contexts.items()}
            batch, texts = [batch[row] for row in rows], [texts[row] for row in rows]
    question = batch[0][1].question_ids
    for context in contexts.values():
        context.set_max_new_tokens(len(question) + new)
    if question:
        read_questions(model, list(contexts.values()), [prompt.question_ids for _, prompt in batch])
    if texts is None and not is_plain_greedy(model, decoding):
        context = contexts[into.full].fork(list(range(len(batch))))
        texts = decode(model, [context], decoding, list(seeds), tokenizer, start=0.0)[0].tokens
    return ForcedText(into, kind, batch, contexts, texts, into.texts[kind])


def reference_tokens(prompt: TokenizedExample, tokenizer: Tokenizer, most: int, *, chat: bool) -> list[int]:
    """The reference answer's first `most` tokens as they stand behind the prompt; none where there is none."""
    words = prompt.example.reference
    return continuation(prompt, tokenizer, chat=chat, words=words)[:most] if words.strip() else []


# What a model puts out for prompts: answers as a row tells of them, and log-probabilities of given texts.


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


# Answers from contexts that are prefilled once: questions after the eviction, and choices by log-probability.


Items = Sequence[tuple[int, TokenizedExample]]


def outputs_from_context(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items
) -> dict[int, ModelOutput]:
    """Index -> answer, of prompts that have a question or choices; never more than batch_size forks at once.

    Prompts of equal tokens share a prefill. An answer is the one it would be alone: noise inside methods goes by the
    context (`noise_seed`), sampling by the example.
    """
    made: dict[int, ModelOutput] = {}
    for part in outputs_from_context_shared([settings], model, tokenizer, batch, None, Pace(None)):
        made |= part.answers
    return made


def outputs_from_context_shared(
    runs: Sequence[Settings], model: Model, tokenizer: Tokenizer, batch: Items, forced: ForcedTexts | None, pace: Pace
) -> Iterator[SharedOutputs]:
    """`outputs_from_context`, for several runs that differ in method and budget: they share every prefill.

    forced, pace: as of `generate_outputs_shared`; where there are choices nothing is forced.
    """

    answering = list(range(len(runs))) if forced is None else forced.answering
    first = runs[0]
    for part in _parts(first, batch):
        each, place_of = _context_outputs_prefilled(runs, model, tokenizer, part)
        groups = defaultdict(list)
        for index, prompt in part:
            if not prompt.choices:
                groups[len(prompt.question_ids)].append((index, prompt))
                continue
            for place in answering:
                chosen = _pick_choice(runs[place], model, prompt, each[place], place_of[index])
                yield SharedOutputs(0, place, {index: chosen})
        for group in groups.values():
            for start in range(0, len(group), first.batch_size):
                some = group[start : start + first.batch_size]
                rows = [place_of[i] for i, _ in some]
                copies = forced.copies(each, rows, keep=True) if forced is not None else []
                full: dict[int, ModelOutput] = {}
                if answering:
                    before = time.perf_counter()
                    forks = [each[place].fork(rows) for place in answering]
                    copying = (time.perf_counter() - before) / len(answering)
                    for place, more in zip(answering, _answered(first, model, tokenizer, some, forks), strict=True):
                        shared = {"prefill": each[place].seconds, "copy": copying}
                        answers = _with_shared_times(more, some, shared)
                        full = answers if forced is not None and place == forced.full else full
                        yield SharedOutputs(0, place, answers)
                if forced is not None:
                    seeds = [sampling_seed(first, prompt.example) for _, prompt in some]
                    texts = forced.prepare(first, model, tokenizer, copies, some, full, seeds)
                    for _, lines in force_texts(first, model, texts, pace):
                        yield from (SharedOutputs(0, place, lines=own) for place, own in lines.items())


def shares_score_across_batch(settings: Settings) -> bool:
    """Does the method add up scores over the whole batch, so that rows must not be multiplied?"""
    spec = settings.method.score_spec
    return spec is not None and spec.batch == "sum_all"


def _parts(settings: Settings, batch: Items) -> list[Items]:
    """Prompts to prefill together: of one kind and, where a budget counts the tokens to come, with equally many.

    One context at a time where rows would change each other.
    """
    groups = defaultdict(list)
    for item in batch:
        ahead = tokens_to_come(settings, item[1]) if _counts_ahead(settings) else None
        # One context can be cut to several lengths, by its questions.
        alone = tuple(item[1].ids) if moving_rope(settings.model) is not None else None
        groups[bool(item[1].choices), ahead, alone].append(item)
    return list(groups.values())


def _counts_ahead(settings: Settings) -> bool:
    return settings.budget is not None and settings.budget.of == "sequence"


def _context_outputs_prefilled(
    runs: Sequence[Settings], model: Model, tokenizer: Tokenizer, part: Items
) -> tuple[list[Any], dict[int, int]]:
    """Every context of the part once, for each run; and the place of each index among them."""
    from kvexp.generate import prefill, prefill_together

    settings = runs[0]
    places: dict[Any, int] = {}
    place_of = {}
    for index, prompt in part:
        seed = noise_seed(settings, prompt.example, asked=bool(prompt.question_ids))
        # Where scores are added up over a batch, prompts are prefilled one by one: batch_size is 1, and all
        # prompts of the part are one context's.
        alone = shares_score_across_batch(settings) and not prompt.example.questions
        key = (seed, tuple(prompt.ids), tuple(prompt.spans), index if alone else None)
        place_of[index] = places.setdefault(key, len(places))
    choosing, decoding = bool(part[0][1].choices), settings.decoding
    # Not of the longest question: what is allocated shall not depend on the company.
    ahead = tokens_to_come(settings, part[0][1]) if _counts_ahead(settings) else decoding.max_new_tokens
    prompts = [list(ids) for _, ids, _, _ in places]
    seeds, spans = [seed for seed, _, _, _ in places], [list(each) for _, _, each, _ in places]
    configs = [batch_cache(run, [len(ids) for ids in prompts]) for run in runs]
    if len(runs) > 1:
        made = prefill_together(
            model, prompts, configs, max_new_tokens=ahead, tokenizer=tokenizer, seeds=seeds, spans=spans
        )
        return made, place_of
    context = prefill(
        model,
        prompts,
        configs[0],
        max_new_tokens=ahead,
        num_beams=1 if choosing else decoding.num_beams,
        chunk=decoding.prefill_chunk,
        tokenizer=tokenizer,
        seeds=seeds,
        spans=spans,
    )
    return [context], place_of


def _answered(
    settings: Settings, model: Model, tokenizer: Tokenizer, some: Items, each: Sequence[Any]
) -> list[dict[int, ModelOutput]]:
    """Generated after questions of one length, for each run's contexts."""
    from kvexp.generate import generate_from_contexts

    results = generate_from_contexts(
        model,
        each,
        [prompt.question_ids for _, prompt in some],
        decoding=settings.decoding,
        tokenizer=tokenizer,
        seeds=[sampling_seed(settings, prompt.example) for _, prompt in some],
    )
    indices = [index for index, _ in some]
    return [dict(zip(indices, outputs_of(result, tokenizer), strict=True)) for result in results]


def _with_shared_times(
    answers: dict[int, ModelOutput], some: Items, seconds: dict[str, float | None]
) -> dict[int, ModelOutput]:
    """The answers, of questions that share a context by request (`questions`) with the seconds of what they share."""
    shared = {index for index, prompt in some if prompt.example.questions}
    return {
        index: dataclasses.replace(answer, seconds={**answer.seconds, **seconds}) if index in shared else answer
        for index, answer in answers.items()
    }


def _pick_choice(settings: Settings, model: Model, prompt: TokenizedExample, contexts: Any, place: int) -> ModelOutput:
    """The choice of the highest log-probability; its receipt, and the tokens of all choices."""
    from kvexp.generate import receipts, score_continuations

    words, ahead = prompt.choices, tokens_to_come(settings, prompt)
    at_once = 1 if shares_score_across_batch(settings) else settings.batch_size
    logprobs: list[float] = []
    kept = []
    for start in range(0, len(words), at_once):
        some = words[start : start + at_once]
        forks = contexts.fork([place] * len(some))
        judged = score_continuations(model, forks, some, [prompt.question_ids] * len(some), max_new_tokens=ahead)
        logprobs += [sum(steps) for steps in judged]
        kept += receipts(forks.cache)
    best = max(range(len(words)), key=logprobs.__getitem__)
    counts = [len(ids) for ids in words]
    receipt = dataclasses.asdict(kept[best])
    return ModelOutput(prompt.example.choices[best], sum(counts), receipt, logprobs=logprobs, counts=counts)


# Conversations: turns in one cache, each answer scored, and how far the cache has come from the full cache's.


def conversation_outputs(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items
) -> dict[int, ModelOutput]:
    """Index -> answer, of prompts that are turns of conversations: every conversation is held from its beginning.

    Its turns up to the last one in the batch are taken, one conversation after the other.
    """
    conversations = defaultdict(list)
    for index, prompt in batch:
        conversations[prompt.example.prompt].append((index, prompt))
    made: dict[int, ModelOutput] = {}
    for items in conversations.values():
        wanted = {prompt.example.number: index for index, prompt in items}
        answers = _Conversation.begin(settings, model, tokenizer, items[0][1], max(wanted)).hold()
        made |= {index: answers[number] for number, index in wanted.items()}
    return made


@dataclass
class _Conversation:
    """One conversation while it is held: the run's cache, and beside it the full cache, fed the same tokens.

    full: None of the full cache's own run. last: the number of the last turn; pending: the token of the answer before
    that no cache has seen yet.
    """

    settings: Settings
    model: Model
    tokenizer: Tokenizer
    prompt: TokenizedExample
    last: int
    own: PrefilledContext
    full: PrefilledContext | None
    pending: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(
        cls, settings: Settings, model: Model, tokenizer: Tokenizer, prompt: TokenizedExample, last: int
    ) -> _Conversation:
        """Prefill the first message. ConfigError where all turns and answers are more than the model holds."""
        from kvexp.generate import prefill
        from kvexp.generate.inputs import check_length

        turns, new = prompt.example.turns[: last + 1], settings.decoding.max_new_tokens
        asked = [turn_ids(prompt, tokenizer, turn.message, chat=settings.model.chat) for turn in turns[1:]]
        given = [len(reference_ids(turn.reference, tokenizer)) for turn in turns]  # where these stay
        ahead = sum(map(len, asked)) + sum(max(new, count) + 1 for count in given)
        check_length(model, len(prompt.ids), ahead, settings.cache.beyond_context)
        seed = noise_seed(settings, prompt.example, asked=True)

        def context(each: Settings) -> PrefilledContext:
            return prefill(
                model,
                [prompt.ids],
                batch_cache(each, [len(prompt.ids)]),
                max_new_tokens=ahead,
                chunk=each.decoding.prefill_chunk,
                tokenizer=tokenizer,
                seeds=[seed],
                spans=[prompt.spans],
            )

        full = None if settings.is_baseline else context(settings.baseline())
        return cls(settings, model, tokenizer, prompt, last, context(settings), full)

    @property
    def both(self) -> list[PrefilledContext]:
        """The run's context, and the full cache's beside it."""
        return [self.own] if self.full is None else [self.own, self.full]

    def hold(self) -> list[ModelOutput]:
        """The answers of all turns, in order; `info` says of each how far it is from the full cache."""
        from kvexp.generate.kl import read_questions

        answers = []
        for number, turn in enumerate(self.prompt.example.turns[: self.last + 1]):
            if number:
                asked = turn_ids(self.prompt, self.tokenizer, turn.message, chat=self.settings.model.chat)
                # An end token that was chosen is the one that the next turn begins with.
                ended = bool(self.pending) and self.pending[0] in self._ends()
                read_questions(self.model, self.both, [asked if ended else [*self.pending, *asked]])
            fed = self.own.ids.shape[1]
            answer = self._answer(self.own)
            text = self._stays(answer, turn.reference)
            found = self._feed(text, counts_first=number > 0 or self.settings.cache.bounded_chunk is not None)
            answers.append(dataclasses.replace(answer, info={"fed": fed, **found}))
        return answers

    def _answer(self, context: PrefilledContext) -> ModelOutput:
        """The answer to the turn that was read last; the context stays as it is."""
        from kvexp.generate import decode

        seeds = [sampling_seed(self.settings, self.prompt.example)]
        fork, start = context.fork([0]), time.perf_counter()
        made = decode(self.model, [fork], self.settings.decoding, seeds, self.tokenizer, start=start)[0]
        (answer,) = outputs_of(made, self.tokenizer)
        # The turn was read beside the full cache: when its first token came says nothing about the run alone.
        return dataclasses.replace(answer, seconds={**answer.seconds, "ttft": None, "tt2t": None})

    def _stays(self, answer: ModelOutput, reference: str) -> list[int]:
        """Token ids of the answer that stays in the conversation, as the task's `history` says."""
        task = self.settings.task
        assert isinstance(task, DialogueTask)
        if task.history == "reference":
            return reference_ids(reference, self.tokenizer)
        if task.history == "full" and self.full is not None:
            return self._answer(self.full).tokens
        return answer.tokens

    def _feed(self, text: list[int], *, counts_first: bool) -> dict[str, Any]:
        """Feed an answer but for its last token; how far the run's distributions are from the full cache's along it.

        counts_first: whether the first token was predicted after an eviction. Of the full cache's own run nothing.
        """
        from kvexp.generate import ForcedBatch, divergence_of_batches
        from kvexp.generate.kl import read_questions

        if not text:
            raise ConfigError("an answer of a conversation has no tokens: task.history=reference needs references")
        before = [(context.ids, context.mask) for context in self.both]
        self.pending = text[-1:]
        if self.full is None:
            if text[:-1]:
                read_questions(self.model, [self.own], [text[:-1]])
            return {}
        (((found,),),) = divergence_of_batches(self.model, [ForcedBatch(self.full, [self.own], [text])])
        for context, (ids, mask) in zip(self.both, before, strict=True):
            more = ids.new_tensor([text[:-1]])
            context.ids, context.mask = _behind(ids, more), _behind(mask, more.new_ones(more.shape))
        return _summary(found, skip=0 if counts_first else 1)

    def _ends(self) -> list[int]:
        from kvexp.generate.inputs import eos_ids

        return eos_ids(self.model, self.settings.decoding.eos)


def turns_fed(
    settings: Settings, model: Model, tokenizer: Tokenizer, prompt: TokenizedExample, last: int
) -> tuple[list[list[int]], int]:
    """What is fed behind the first message before each turn's answer, up to turn `last`, and the tokens to come in all.

    The conversation is held again; prompt: of any of its turns. Errors as of `conversation_outputs`.
    """
    talk = _Conversation.begin(settings, model, tokenizer, prompt, len(prompt.example.turns) - 1)
    talk.last = last
    answers = talk.hold()
    ids, ahead = talk.own.ids[0].tolist(), talk.own.cache.sequence.max_new_tokens
    assert ahead is not None
    return [ids[len(prompt.ids) : answer.info["fed"]] for answer in answers], ahead


def _behind(first: Any, second: Any) -> Any:
    """Two tensors [1, n] and [1, m] as one [1, n + m]."""
    import torch

    return torch.cat([first, second], dim=1)


def _summary(found: TextDivergence, *, skip: int) -> dict[str, Any]:
    """Mean KL in nats per token and share of equal top tokens behind the first `skip` tokens; None without any."""
    kl, same = [max(0.0, each) for each in found.kl[skip:]], found.same_top1[skip:]
    if not kl:
        return {"kl": None, "top1": None, "kl_tokens": 0}
    return {"kl": sum(kl) / len(kl), "top1": sum(same) / len(same), "kl_tokens": len(kl)}


# lm-eval's items as the runner asks them: their token ids as lm-eval makes them, and their answers.


@dataclass(frozen=True)
class ItemAnswer(ModelOutput):
    """results: what lm-eval's models return for the item's requests."""

    results: list[Any] = field(default_factory=list)


def item_answers(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Sequence[tuple[int, TokenizedExample]]
) -> dict[int, ModelOutput]:
    """Index -> answer. Items are measured together; what each answers does not depend on that."""
    bench = bench_of(settings, model, tokenizer)
    measured = [(index, prompt) for index, prompt in batch if isinstance(prompt, ItemPrompt) and prompt.asks]
    made: dict[int, ModelOutput] = {}
    judged = iter(bench.measure([ask for _, prompt in measured for ask in prompt.asks]))
    for index, prompt in measured:
        made[index] = _judged(bench, prompt, [next(judged) for _ in prompt.asks])
    others = {index: prompt for index, prompt in batch if index not in made}
    return made | {index: _generated(settings, bench, tokenizer, prompt) for index, prompt in others.items()}


def _judged(bench: Bench, prompt: ItemPrompt, judged: Sequence[Any]) -> ModelOutput:
    """The likeliest request gives the receipt and the output; a text in windows is one request."""
    item = prompt.example
    assert isinstance(item, Item)
    best = max(range(len(judged)), key=lambda i: judged[i].total)
    logprobs, counts = [each.total for each in judged], [len(each.tokens) for each in judged]
    results: list[Any] = [bench.result(each) for each in judged]
    output = item.requests[min(best, len(item.requests) - 1)].continuation
    if item.kind == "loglikelihood_rolling":
        results, output = [sum(logprobs)], ""
    # No time per token: full is fed a whole choice at once, what evicts while decoding one token at a time.
    seconds = {**NO_TIMES, "ttft": judged[best].prefill_s}
    receipt = dataclasses.asdict(judged[best].receipt)
    return ItemAnswer(output, sum(counts), receipt, seconds, logprobs, counts, results=results)


def _generated(settings: Settings, bench: Bench, tokenizer: Tokenizer, prompt: TokenizedExample) -> ModelOutput:
    item = prompt.example
    assert isinstance(item, Item)
    seed = settings.seed + item.number
    (text,), result = bench.generate([prompt.ids], [prompt.question_ids], item.generation, [seed])
    answer = outputs_of(result, tokenizer)[0]
    output = text if settings.thinking is None else answer.output  # the text with its thinking stays in the row
    return ItemAnswer(**{**vars(answer), "output": output}, results=[text])
