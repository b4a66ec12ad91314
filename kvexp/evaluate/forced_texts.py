"""Divergence of runs that share a prefill: which of them are forced which texts, and the lines that come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvexp.config.settings import Settings
from kvexp.evaluate.model_output import ModelOutput
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.record.divergence_lines import OWN, Line

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

Items = Sequence[tuple[int, TokenizedExample]]


@dataclass
class ForcedTexts:
    """What a batch's shared prefill is used for, runs being named by their place among those that share it.

    answering: places of the runs that generate their own answers; full: the full cache's place; texts: kind of text ->
    places of the runs that are forced it. lines: what came out, by place.
    """

    answering: list[int]
    full: int
    texts: dict[str, list[int]]
    lines: dict[int, list[Line]] = field(default_factory=dict)

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
    """One kind of text of a batch, ready to be forced: into: where its lines go; batch: prompts that have such a text.

    contexts: the full cache's and those of the places that are forced it, by place.
    """

    into: ForcedTexts
    kind: str
    batch: Items
    contexts: Mapping[int, Any]
    texts: Sequence[Sequence[int]] | None

    @property
    def bounded(self) -> set[int]:
        """Places whose prompts were evicted between chunks."""
        return {place for place, one in self.contexts.items() if one.cache.config.bounded_chunk is not None}

    def add_lines(self, found: Sequence[Sequence[Any]]) -> None:
        """Of `divergence_of_batches`: one list of rows per place."""
        for place, rows in zip(self.into.texts[self.kind], found, strict=True):
            for (index, prompt), one in zip(self.batch, rows, strict=True):
                # Nothing was evicted yet, unless the prompt was evicted between chunks.
                by_prefill = not prompt.question_ids and place not in self.bounded
                line = {"example": prompt.example.id, "index": index, "text": self.kind, "first_by_prefill": by_prefill}
                line |= asdict(one) | {"same_top1": [int(same) for same in one.same_top1]}
                self.into.lines.setdefault(place, []).append(line)


def force_texts(settings: Settings, model: Model, texts: Sequence[ForcedText]) -> None:
    """Force all these texts in the same steps and fill in the lines; settings: any of the runs'."""
    from kvexp.generate import ForcedBatch, divergence_of_batches
    from kvexp.generate.inputs import eos_ids

    if not texts:
        return
    decoding = settings.decoding
    batches = [
        ForcedBatch(
            text.contexts[text.into.full], [text.contexts[place] for place in text.into.texts[text.kind]], text.texts
        )
        for text in texts
    ]
    found = divergence_of_batches(
        model, batches, max_new_tokens=decoding.max_new_tokens, eos=eos_ids(model, decoding.eos)
    )
    for text, rows in zip(texts, found, strict=True):
        text.add_lines(rows)


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
    return ForcedText(into, kind, batch, contexts, texts)


def reference_tokens(prompt: TokenizedExample, tokenizer: Tokenizer, most: int, *, chat: bool) -> list[int]:
    """The reference answer's first `most` tokens as they stand behind the prompt; none where there is none."""
    words = prompt.example.reference
    return continuation(prompt, tokenizer, chat=chat, words=words)[:most] if words.strip() else []
