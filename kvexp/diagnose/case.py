"""One example of a run as it was generated: enough to generate it again, watched, twinned or with evictions undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvexp.core import CacheConfig
from kvexp.generate import Generation, GenerationParams, PrefilledContext, generate, prefill
from kvexp.methods import Full
from kvexp.models import EvictionCache


@dataclass(frozen=True)
class Case:
    """prompt, question: token ids, the question fed after the eviction (or empty); seed: of noise inside the method.

    `decoding` must be greedy.
    """

    model: Any
    prompt: list[int]
    question: list[int]
    cache: CacheConfig
    decoding: GenerationParams
    tokenizer: Any = None
    seed: int = 0

    @property
    def ahead(self) -> int:
        """Tokens to come after the prompt at most."""
        return len(self.question) + self.decoding.max_new_tokens

    def full(self) -> Case:
        """The same example under full attention."""
        return dataclasses.replace(self, cache=CacheConfig(Full(), beyond_context=self.cache.beyond_context))

    def generated(self, prepare: Callable[[EvictionCache], object] | None = None) -> Generation:
        """The generation of the run, alone in its batch; prepare: is given the cache before anything is fed."""
        return generate(
            self.model,
            [self.prompt],
            self.cache,
            questions=[self.question] if self.question else None,
            decoding=self.decoding,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
        )

    def prefilled(
        self, prepare: Callable[[EvictionCache], object] | None = None, cache: CacheConfig | None = None
    ) -> PrefilledContext:
        """The prompt alone, prefilled and evicted; cache: what it does where that is not what the run's does."""
        return prefill(
            self.model,
            [self.prompt],
            cache or self.cache,
            max_new_tokens=self.ahead,
            chunk=self.decoding.prefill_chunk,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
        )
