"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any

from kvexp.core.config import CacheConfig
from kvexp.generate.inputs import EvictionStats, Generation, GenerationParams, Timing, failed_fits, pad_left, receipts
from kvexp.generate.kl import KL, Forcing, divergence_from_full, divergence_of_batches
from kvexp.generate.loglikelihood import (
    Token,
    continuation_logprobs,
    score_continuations,
    score_tokens,
)
from kvexp.generate.loop import decode, decode_batches, generate, generate_from_context, generate_from_contexts
from kvexp.generate.prefill import PrefilledContext, forward_last, prefill, prefill_together

__all__ = [
    "KL",
    "CacheConfig",
    "EvictionStats",
    "Forcing",
    "Generation",
    "GenerationParams",
    "PrefilledContext",
    "Timing",
    "Token",
    "continuation_logprobs",
    "decode",
    "decode_batches",
    "divergence_from_full",
    "divergence_of_batches",
    "failed_fits",
    "forward_last",
    "generate",
    "generate_from_context",
    "generate_from_contexts",
    "pad_left",
    "prefill",
    "prefill_together",
    "receipts",
    "score_continuations",
    "score_tokens",
]


class _Callable(types.ModuleType):
    """This package, which can be called: `kvexp.generate("a text", "smollm2_135m", method="h2o")`.

    What is called is `kvexp.run.notebook.generate`, which knows models by name, as this package must not. Signature and
    docstring are that function's, for help() and editors.
    """

    def __call__(self, *args: Any, **options: Any) -> Generation:
        answer: Generation = _by_name()(*args, **options)
        return answer

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_by_name())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return f"{inspect.getdoc(_by_name())}\n\nkvexp.generate{self.__signature__}\n\nAlso a package. {PACKAGE}"


def _by_name() -> Any:
    return importlib.import_module("kvexp.run.notebook").generate


PACKAGE = __doc__
sys.modules[__name__].__class__ = _Callable
