"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from kvexp.core import CacheConfig
from kvexp.deprecation import deprecated_names
from kvexp.generate.api import ask, ask_together, generate
from kvexp.generate.decode_loop import decode
from kvexp.generate.divergence import TextDivergence, divergence_from_full
from kvexp.generate.eviction_stats import EvictionStats, receipts
from kvexp.generate.generation_params import GenerationParams
from kvexp.generate.inputs import pad_left
from kvexp.generate.loglikelihood import Token, continuation_logprobs, feeds_at_once, judge, judged
from kvexp.generate.output import Generation, Timing
from kvexp.generate.prefilled_context import PrefilledContext, forward, prefill
from kvexp.generate.shared_prefill import prefill_together

__all__ = [
    "CacheConfig",
    "EvictionStats",
    "Generation",
    "GenerationParams",
    "PrefilledContext",
    "TextDivergence",
    "Timing",
    "Token",
    "ask",
    "ask_together",
    "continuation_logprobs",
    "decode",
    "divergence_from_full",
    "feeds_at_once",
    "forward",
    "generate",
    "judge",
    "judged",
    "pad_left",
    "prefill",
    "prefill_together",
    "receipts",
]

__getattr__ = deprecated_names(
    __name__,
    {
        "Context": ("PrefilledContext", PrefilledContext),
        "Decoding": ("GenerationParams", GenerationParams),
        "finish": ("decode", decode),
        "MethodSpec": ("CacheConfig", CacheConfig),
        "Receipt": ("EvictionStats", EvictionStats),
        "Variant": ("CacheConfig", CacheConfig),
    },
)
