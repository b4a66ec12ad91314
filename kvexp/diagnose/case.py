"""One example of a run as it was generated: enough to generate it again, watched, twinned or with evictions undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvexp.core import CacheConfig
from kvexp.core.spans import Span
from kvexp.generate import (
    Generation,
    GenerationParams,
    PrefilledContext,
    decode,
    generate,
    generate_from_context,
    prefill,
)
from kvexp.generate.divergence import read_questions
from kvexp.methods import Full
from kvexp.models import EvictionCache


@dataclass(frozen=True)
class Case:
    """One example of a run: enough to generate it again, watched, beside the full cache, or with evictions undone.

    prompt, question: token ids; the question is fed after the eviction (or empty). seed: of noise inside the method.
    `decoding` must be greedy. spans: of the prompt, what `keep` spares.
    ahead: of a turn of a conversation, the tokens that follow the first message in all turns. The question is then all
    that was fed behind the first message before this turn's answer, and the answer leaves it at that number.
    """

    model: Any
    prompt: list[int]
    question: list[int]
    cache: CacheConfig
    decoding: GenerationParams
    tokenizer: Any = None
    seed: int = 0
    spans: tuple[Span, ...] = ()
    ahead: int | None = None

    @property
    def max_tokens_to_come(self) -> int:
        """The largest number of tokens that follow the prompt: question and new tokens."""
        return self.ahead or len(self.question) + self.decoding.max_new_tokens

    def full(self) -> Case:
        """The same example under full attention."""
        return dataclasses.replace(self, cache=CacheConfig(Full(), beyond_context=self.cache.beyond_context))

    def generate_again(self, prepare: Callable[[EvictionCache], object] | None = None) -> Generation:
        """The generation of the run, alone in its batch; prepare: is called with the cache before anything is fed."""
        if self.ahead is not None:
            return self.answer(self.prefill_prompt(prepare))
        return generate(
            self.model,
            [self.prompt],
            self.cache,
            attention_mask=[[1] * len(self.prompt)],
            questions=[self.question] if self.question else None,
            decoding=self.decoding,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
            spans=[self.spans],
        )

    def answer(self, context: PrefilledContext) -> Generation:
        """The answers from a context of the prompt, of one row or of copies of it; uses the context up."""
        rows = len(context.ids)
        seeds = [self.seed] * rows
        if self.question and self.ahead is None:
            questions = [self.question] * rows
            options = {"decoding": self.decoding, "tokenizer": self.tokenizer}
            return generate_from_context(self.model, context, questions, seeds=seeds, **options)
        if self.question:
            read_questions(self.model, [context], [self.question] * rows)
        return decode(self.model, [context], self.decoding, seeds, self.tokenizer, start=0.0)[0]

    def prefill_prompt(
        self, prepare: Callable[[EvictionCache], object] | None = None, cache: CacheConfig | None = None
    ) -> PrefilledContext:
        """The prompt alone, prefilled and evicted.

        prepare: is called with the cache before anything is fed; cache: in place of the run's own configuration.
        """
        return prefill(
            self.model,
            [self.prompt],
            cache or self.cache,
            max_new_tokens=self.max_tokens_to_come,
            chunk=self.decoding.prefill_chunk,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
            spans=[self.spans],
        )
