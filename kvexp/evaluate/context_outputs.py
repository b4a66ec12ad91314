"""Answers from contexts that are prefilled once: questions after the eviction, and choices by log-probability."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvexp.config.group_checks import batch_cache
from kvexp.config.model_spec import moving_rope
from kvexp.config.settings import Settings
from kvexp.evaluate.limits import Pace
from kvexp.evaluate.model_output import ModelOutput
from kvexp.evaluate.outputs import SharedOutputs, noise_seed, outputs_of, sampling_seed
from kvexp.evaluate.tokenized_examples import TokenizedExample

if TYPE_CHECKING:
    from kvexp.evaluate.forced_texts import ForcedTexts
    from kvexp.models.types import Model, Tokenizer

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
    from kvexp.evaluate.forced_texts import force_texts

    answering = list(range(len(runs))) if forced is None else forced.answering
    first = runs[0]
    for part in _parts(first, batch):
        each, place_of = _prefilled(runs, model, tokenizer, part)
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


def tokens_to_come(settings: Settings, prompt: TokenizedExample) -> int:
    """Tokens to come after the prefill: the question's, and the longest choice's or the answer's."""
    return len(prompt.question_ids) + max(map(len, prompt.choices), default=settings.decoding.max_new_tokens)


def _prefilled(
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
