"""Prefill, evict and decode: generation with timing, and log-probabilities of given continuations."""

from kvexp.generate.context import Context, forward, prefill
from kvexp.generate.decoding import Decoding
from kvexp.generate.generation import Generation, Timing
from kvexp.generate.logprobs import Token, continuation_logprobs, feeds_at_once, judge, judged
from kvexp.generate.loop import finish
from kvexp.generate.receipt import Receipt, receipts
from kvexp.generate.request import pad_left
from kvexp.generate.run import ask, ask_together, generate
from kvexp.generate.together import Variant, prefill_together

__all__ = [
    "Context",
    "Decoding",
    "Generation",
    "Receipt",
    "Timing",
    "Token",
    "Variant",
    "ask",
    "ask_together",
    "continuation_logprobs",
    "feeds_at_once",
    "finish",
    "forward",
    "generate",
    "judge",
    "judged",
    "pad_left",
    "prefill",
    "prefill_together",
    "receipts",
]
