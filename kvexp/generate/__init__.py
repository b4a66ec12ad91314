"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from kvexp.generate.context import Context, forward, prefill
from kvexp.generate.decoding import Decoding
from kvexp.generate.logprobs import Token, continuation_logprobs, feeds_at_once, judge, judged
from kvexp.generate.receipt import Receipt, receipts
from kvexp.generate.request import pad_left
from kvexp.generate.run import Generation, Timing, ask, generate

__all__ = [
    "Context",
    "Decoding",
    "Generation",
    "Receipt",
    "Timing",
    "Token",
    "ask",
    "continuation_logprobs",
    "feeds_at_once",
    "forward",
    "generate",
    "judge",
    "judged",
    "pad_left",
    "prefill",
    "receipts",
]
