"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from kvexp.generate.decoding import Decoding
from kvexp.generate.logprobs import continuation_logprobs, forward
from kvexp.generate.receipt import Receipt, receipts
from kvexp.generate.run import Generation, Timing, generate, pad_left

__all__ = [
    "Decoding",
    "Generation",
    "Receipt",
    "Timing",
    "continuation_logprobs",
    "forward",
    "generate",
    "pad_left",
    "receipts",
]
