"""One example of a run as it was generated: enough to generate it again, watched, twinned or with evictions undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvexp.core import Budget, Method
from kvexp.generate import Generation, GenerationParams, PrefilledContext, generate, prefill
from kvexp.methods import Full
from kvexp.models import EvictionCache


@dataclass(frozen=True)
class Case:
    """prompt, question: token ids, the question fed after the eviction (or empty); seed: of noise inside the method.

    plan: cadence, mode, positions, observe, beyond_context of `kvexp.generate.generate`. `decoding` must be greedy.
    """

    model: Any
    prompt: list[int]
    question: list[int]
    method: Method
    budget: Budget | None
    decoding: GenerationParams
    tokenizer: Any = None
    seed: int = 0
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ahead(self) -> int:
        """Tokens to come after the prompt at most."""
        return len(self.question) + self.decoding.max_new_tokens

    def full(self) -> Case:
        """The same example under full attention."""
        beyond = {key: value for key, value in self.plan.items() if key == "beyond_context"}
        return dataclasses.replace(self, method=Full(), budget=None, plan=beyond)

    def generated(self, prepare: Callable[[EvictionCache], object] | None = None) -> Generation:
        """The generation of the run, alone in its batch; prepare: is given the cache before anything is fed."""
        return generate(
            self.model,
            [self.prompt],
            self.method,
            self.budget,
            questions=[self.question] if self.question else None,
            decoding=self.decoding,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
            **self.plan,
        )

    def prefilled(self, prepare: Callable[[EvictionCache], object] | None = None, **plan: Any) -> PrefilledContext:
        """The prompt alone, prefilled and evicted; plan: what shall differ from the run's."""
        return prefill(
            self.model,
            [self.prompt],
            self.method,
            self.budget,
            max_new_tokens=self.ahead,
            chunk=self.decoding.prefill_chunk,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
            **{**self.plan, **plan},
        )
