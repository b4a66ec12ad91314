"""What tokenizer and configuration can tell before weights load: templates, room for answers, budgets too small."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvexp.config.corrections import corrections_of
from kvexp.config.group_checks import batch_budget
from kvexp.config.model_spec import max_positions
from kvexp.config.settings import Settings
from kvexp.core import Budget
from kvexp.core.cache_budget import check_budget, may_evict
from kvexp.core.span_room import check_spans
from kvexp.errors import ConfigError
from kvexp.evaluate.context_outputs import tokens_to_come
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation, in_template, tokenize
from kvexp.models.chat_template import render
from kvexp.models.families import max_positions as positions_of
from kvexp.models.families import num_layers
from kvexp.models.repeated_prompt import check_second_pass
from kvexp.tasks import Example, LMEval, Task

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

_TRIAL = "Hello there"


def check_template(settings: Settings, tokenizer: Tokenizer) -> None:
    """ConfigError where prompts of this task go through a chat template that is not there or does not hold them."""
    if not settings.templated:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model.chat=true, but this tokenizer has no chat template: set model.chat=false")
    if _TRIAL not in in_template(tokenizer, _TRIAL):
        raise ConfigError(
            "the tokenizer's chat template leaves out what the user says: correct chat_template in the model's folder, "
            "or set model.chat=false"
        )
    if in_template(tokenizer, _TRIAL) != in_template(tokenizer, _TRIAL):
        raise ConfigError(
            "the tokenizer's chat template writes another text every time, so no two runs would have the same prompts: "
            "correct chat_template in the model's folder, or set model.chat=false"
        )
    if corrections_of(settings) != settings.identity.get("corrected", []):
        raise ConfigError("the model's tokenizer could not be read when this run was set up: start it again")


def check_max_new_tokens(settings: Settings, todo: list[tuple[int, Example]]) -> None:
    """ConfigError where the answers to be generated leave no position for a prompt, or the model cannot be."""
    room, longest = max_positions(settings.model), settings.decoding.max_new_tokens
    generates = not settings.task.only_nll and not isinstance(settings.task, LMEval)
    if settings.cache.beyond_context or not generates or all(example.choices for _, example in todo):
        return
    if longest > room:
        raise ConfigError(
            f"max_new_tokens={longest} leaves no room for a prompt, the model holds {room} positions for both: lower "
            "task.max_new_tokens (or generation.max_new_tokens), or go beyond them with cache.beyond_context=true (not "
            "for learned positions)"
        )


def fit_examples(
    settings: Settings, tokenizer: Tokenizer, todo: list[tuple[int, Example]]
) -> list[tuple[int, Example]]:
    """The examples at the lengths their task sets in tokens (`Task.fit`)."""
    task, chat = settings.task, settings.model.chat
    if type(task).fit is Task.fit:
        return todo
    whole = dataclasses.replace(task, truncate="skip", max_prompt_tokens=None, pad_to=None)

    def count(words: str) -> int:
        return tokenize(Example("", words, ""), whole, tokenizer, 1 << 40, chat=chat).size

    room = 1 << 40 if settings.cache.beyond_context else max_positions(settings.model)

    def fitted(example: Example) -> Example:
        made = task.fit(example, count, room)
        return dataclasses.replace(made, questions=example.questions, number=example.number)

    return [(index, fitted(example)) for index, example in todo]


def end_of_turn(tokenizer: Tokenizer) -> list[int]:
    """The token that the chat template puts behind an assistant's words; empty where that is no token of its own."""
    words = "An answer."
    turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": words}]
    _, found, after = render(tokenizer, turns).rpartition(words)
    ids = tokenizer(after, add_special_tokens=False).input_ids if found else []
    first = [token for token in ids if tokenizer.decode([token]).strip()][:1]
    return [token for token in first if token in tokenizer.added_tokens_decoder]


def with_stop_tokens(settings: Settings, model: Model, tokenizer: Tokenizer) -> Settings:
    """The settings with what task and chat template add to the model's: end tokens, and the tags of thinking.

    A text of no token adds none.
    Files of a chat model often name the base model's end token alone, and what ends a turn stands in its template.
    """
    from kvexp.generate.inputs import eos_ids

    task = settings.task
    each = [tokenizer(text, add_special_tokens=False).input_ids for text in task.extra_end_texts]
    more = [ids[-1] for ids in each if ids]
    if settings.templated and settings.decoding.eos == "model":
        more += end_of_turn(tokenizer)
    decoding = dataclasses.replace(settings.decoding, thinking=settings.thinking)
    if more:
        decoding = dataclasses.replace(decoding, eos=tuple(dict.fromkeys([*eos_ids(model, decoding.eos), *more])))
    return settings if decoding == settings.decoding else dataclasses.replace(settings, decoding=decoding)


def within_budget(settings: Settings, config: Any, tokenizer: Tokenizer, prompt: TokenizedExample) -> TokenizedExample:
    """The prompt, skipped where the budget cannot hold what the method protects of it. config: the model's."""
    why = None if prompt.skipped else budget_obstacle(settings, config, tokenizer, prompt)
    if why is None:
        return prompt
    return TokenizedExample(prompt.example, "", [], skipped=why.partition(";")[0], tokens=len(prompt.ids))


def budget_obstacle(settings: Settings, config: Any, tokenizer: Tokenizer, prompt: TokenizedExample) -> str | None:
    """Why some layer's budget cannot hold what the method protects, and what to change; None where all can.

    Also why a second pass over the prompt does not fit the model.
    """
    if settings.budget is None or isinstance(settings.task, LMEval):
        return None  # lm-eval's items are looked at as they are made (Bench.obstacle)
    try:
        size, fed = len(prompt.ids), _fed(settings, tokenizer, prompt)
        check_length(settings, settings.budget, config, size, fed)
        cache = dataclasses.replace(settings.cache, budget=batch_budget(settings, [size]) or settings.budget)
        for new in fed:
            check_spans(cache, [prompt.spans] if prompt.spans else None, [size], size, new, num_layers(config))
        if not cache.beyond_context and any(may_evict(cache, [size], size, new, num_layers(config)) for new in fed):
            check_second_pass(cache, tokenizer, size, positions_of(config))
    except ConfigError as error:
        return str(error)
    return None


def check_length(settings: Settings, budget: Budget, config: Any, size: int, fed: Sequence[int]) -> None:
    """ConfigError where some layer's budget cannot hold a prompt of so many tokens; fed: what `_fed` says."""
    budget = batch_budget(settings, [size]) or budget
    cache = dataclasses.replace(settings.cache, budget=budget)
    for new in fed:
        check_budget(cache, [size], size, new, num_layers(config))


def _fed(settings: Settings, tokenizer: Tokenizer, prompt: TokenizedExample) -> list[int]:
    """Tokens to come after each prefill of this prompt, which budgets of the whole sequence count."""
    given = [] if settings.task.only_nll else [tokens_to_come(settings, prompt)]
    if settings.task.needs_nll:
        words = continuation(prompt, tokenizer, chat=settings.model.chat)
        given.append(len(prompt.question_ids) + len(words))
    return given
