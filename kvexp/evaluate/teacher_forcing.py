"""Log-probabilities of a text that is given, not generated: prefill the prompt, evict, feed the rest."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvexp.config.padding import batch_cache
from kvexp.config.settings import Settings
from kvexp.evaluate.outputs import UNTIMED, Answer
from kvexp.evaluate.seeds import noise_seed
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation


def forced(settings: Settings, model: Any, tokenizer: Any, prompt: TokenizedExample) -> tuple[list[float], Answer]:
    """Log-probabilities of the continuation's tokens, all of which the model holds; and their cost, in an empty answer.

    One row by itself: a tau schedule goes by the length of the row's own continuation, not by its neighbours'.
    """
    from kvexp.generate import judge, prefill, receipts

    words = continuation(prompt, tokenizer, chat=settings.model.chat)
    ahead = len(prompt.question) + len(words)
    context = prefill(
        model,
        [prompt.ids],
        batch_cache(settings, [len(prompt.ids)]),
        max_new_tokens=ahead,
        tokenizer=tokenizer,
        seeds=[noise_seed(settings, prompt.example, asked=bool(prompt.question))],
    )
    questions = [prompt.question] if prompt.question else None
    start = time.perf_counter()
    (logprobs,) = judge(model, context, [words], questions, max_new_tokens=ahead)
    spent = (time.perf_counter() - start) / max(len(words), 1)
    seconds = {**UNTIMED, "ttft": context.seconds, "tpot": spent}
    (receipt,) = receipts(context.cache)
    return logprobs, Answer("", len(words), dataclasses.asdict(receipt), seconds)
