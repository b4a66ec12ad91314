"""Prompts that a run's budget cannot hold, known by their tokens alone: their examples are skipped and not tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvexp.config.padding import budget_of
from kvexp.config.settings import Settings
from kvexp.core import Budget
from kvexp.core.eviction_backend import check_budget
from kvexp.errors import ConfigError
from kvexp.evaluate.context_outputs import tokens_ahead
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation
from kvexp.models.families import layers_of
from kvexp.tasks import LMEval


def within_budget(settings: Settings, config: Any, tokenizer: Any, prompt: TokenizedExample) -> TokenizedExample:
    """The prompt, skipped where the budget cannot hold what the method protects of it. config: the model's."""
    why = None if prompt.skipped else obstacle(settings, config, tokenizer, prompt)
    if why is None:
        return prompt
    return TokenizedExample(prompt.example, "", [], skipped=why.partition(";")[0], tokens=len(prompt.ids))


def obstacle(settings: Settings, config: Any, tokenizer: Any, prompt: TokenizedExample) -> str | None:
    """Why some layer's budget cannot hold what the method protects, and what to change; None where all can."""
    if settings.budget is None or isinstance(settings.task, LMEval):
        return None  # lm-eval's items are looked at as they are made (Bench.obstacle)
    try:
        check_length(settings, settings.budget, config, len(prompt.ids), _fed(settings, tokenizer, prompt))
    except ConfigError as error:
        return str(error)
    return None


def check_length(settings: Settings, budget: Budget, config: Any, size: int, fed: Sequence[int]) -> None:
    """ConfigError where some layer's budget cannot hold a prompt of so many tokens; fed: what `_fed` says."""
    budget = budget_of(settings, [size]) or budget
    cache = dataclasses.replace(settings.cache, budget=budget)
    for new in fed:
        check_budget(cache, [size], size, new, layers_of(config))


def _fed(settings: Settings, tokenizer: Any, prompt: TokenizedExample) -> list[int]:
    """Tokens to come after each prefill of this prompt, which budgets of the whole sequence count."""
    given = [] if settings.task.only_nll else [tokens_ahead(settings, prompt)]
    if settings.task.needs_nll:
        words = continuation(prompt, tokenizer, chat=settings.model.chat)
        given.append(len(prompt.question) + len(words))
    return given
