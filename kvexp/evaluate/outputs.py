"""Answers of a batch of prompts as a row tells of them, and those that are generated straight from a prompt."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvexp.config.padding import batch_cache
from kvexp.config.settings import Settings
from kvexp.evaluate.seeds import sampling_seed
from kvexp.evaluate.tokenized_examples import TokenizedExample

UNTIMED: dict[str, float | None] = {"ttft": None, "tt2t": None, "tpot": None}


@dataclass(frozen=True)
class Answer:
    """output and what it cost; logprobs and counts: summed log-probability and tokens of every choice, if any.

    finish_reason: "stop" or "length", stop_reason: the text of the end token or stop string; None of what was not
    generated.
    """

    output: str
    new_tokens: int
    receipt: dict[str, Any]
    seconds: dict[str, float | None] = field(default_factory=UNTIMED.copy)
    logprobs: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None


def generated(
    settings: Settings, model: Any, tokenizer: Any, batch: Sequence[tuple[int, TokenizedExample]]
) -> dict[int, Answer]:
    """Index -> answer generated after the prompt."""
    from kvexp.generate import generate

    result = generate(
        model,
        [prompt.ids for _, prompt in batch],
        batch_cache(settings, [len(prompt.ids) for _, prompt in batch]),
        decoding=settings.decoding,
        tokenizer=tokenizer,
        seeds=[sampling_seed(settings, prompt.example) for _, prompt in batch],
    )
    return dict(zip((index for index, _ in batch), answers_of(result, tokenizer), strict=True))


def generated_together(
    runs: Sequence[Settings], model: Any, tokenizer: Any, batch: Sequence[tuple[int, TokenizedExample]]
) -> list[dict[int, Answer]]:
    """`generated`, for several runs that differ in method and budget: one prefill, and all decode together."""
    from kvexp.generate import decode, prefill_together

    first, prompts = runs[0], [prompt.ids for _, prompt in batch]
    seeds = [sampling_seed(first, prompt.example) for _, prompt in batch]
    start, new = time.perf_counter(), first.decoding.max_new_tokens
    configs = [batch_cache(settings, [len(ids) for ids in prompts]) for settings in runs]
    contexts = prefill_together(model, prompts, configs, max_new_tokens=new, tokenizer=tokenizer, seeds=seeds)
    results = decode(model, contexts, first.decoding, seeds, tokenizer, start=start)
    indices = [index for index, _ in batch]
    return [dict(zip(indices, answers_of(result, tokenizer), strict=True)) for result in results]


def answers_of(result: Any, tokenizer: Any) -> list[Answer]:
    """The rows of a `Generation`."""
    from kvexp.generate import receipts

    seconds = {key[: -len("_s")]: _number(value) for key, value in dataclasses.asdict(result.timing).items()}
    return [
        Answer(
            tokenizer.decode(tokens, skip_special_tokens=True),
            len(tokens),
            dataclasses.asdict(receipt),
            seconds,
            finish_reason=ending.reason,
            stop_reason=ending.text if ending.token is None else tokenizer.decode([ending.token]),
        )
        for tokens, ending, receipt in zip(
            result.tokens, result.endings, receipts(result.cache, result.ends), strict=True
        )
    ]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
