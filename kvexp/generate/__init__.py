"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from kvexp.core import CacheConfig
from kvexp.generate.api import generate, generate_from_context, generate_from_contexts
from kvexp.generate.decode_loop import decode, decode_batches
from kvexp.generate.divergence import ForcedBatch, TextDivergence, divergence_from_full, divergence_of_batches
from kvexp.generate.eviction_stats import EvictionStats, receipts
from kvexp.generate.generation_params import GenerationParams
from kvexp.generate.inputs import pad_left
from kvexp.generate.loglikelihood import (
    Token,
    can_score_in_one_forward,
    continuation_logprobs,
    score_continuations,
    score_tokens,
)
from kvexp.generate.output import Generation, Timing
from kvexp.generate.prefilled_context import PrefilledContext, forward_last, prefill
from kvexp.generate.shared_prefill import prefill_together

__all__ = [
    "CacheConfig",
    "EvictionStats",
    "ForcedBatch",
    "Generation",
    "GenerationParams",
    "PrefilledContext",
    "TextDivergence",
    "Timing",
    "Token",
    "can_score_in_one_forward",
    "continuation_logprobs",
    "decode",
    "decode_batches",
    "divergence_from_full",
    "divergence_of_batches",
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
