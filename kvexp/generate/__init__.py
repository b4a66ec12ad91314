"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from __future__ import annotations

from kvexp.core.config import CacheConfig
from kvexp.generate.inputs import EvictionStats, Generation, GenerationParams, Timing, pad_left, receipts
from kvexp.generate.kl import KL, Forcing, divergence_from_full, divergence_of_batches
from kvexp.generate.loglikelihood import (
    Token,
    can_score_in_one_forward,
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
