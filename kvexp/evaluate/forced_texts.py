"""Divergence of runs that share a prefill: which of them are forced which texts, and the lines that come out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvexp.config.settings import Settings
from kvexp.evaluate.limits import TRIED_ROWS, TRIED_STEPS, Pace
from kvexp.evaluate.model_output import ModelOutput
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.record.divergence_lines import OWN, Line

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

Items = Sequence[tuple[int, TokenizedExample]]
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
    from kvexp.generate.divergence import read_questions

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
    from kvexp.generate.divergence import read_questions
    from kvexp.generate.generation_params import is_plain_greedy

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
