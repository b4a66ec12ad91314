"""What tokenizer and configuration can tell before weights load: a chat template, room for answers, set lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvexp.config.model_spec import holds
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.tokenized_examples import in_template, tokenise
from kvexp.tasks import Example, LMEval, Task

_TRIAL = "Hello there"


def check_template(settings: Settings, tokenizer: Any) -> None:
    """ConfigError where prompts of this task go through a chat template that is not there or does not hold them."""
    task = settings.task
    if not settings.model.chat or not task.wrapped or task.frame is not None:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model.chat=true, but this tokenizer has no chat template: set model.chat=false")
    if _TRIAL not in in_template(tokenizer, _TRIAL):
        raise ConfigError(
            "the tokenizer's chat template leaves out what the user says: correct chat_template in the model's folder, "
            "or set model.chat=false"
        )


def check_room(settings: Settings, todo: list[tuple[int, Example]]) -> None:
    """ConfigError where the answers to be generated leave no position for a prompt, or the model cannot be."""
    room, longest = holds(settings.model), settings.decoding.max_new_tokens
    generates = not settings.task.only_nll and not isinstance(settings.task, LMEval)
    if settings.cache.beyond_context or not generates or all(example.choices for _, example in todo):
        return
    if longest > room:
        raise ConfigError(
            f"max_new_tokens={longest} leaves no room for a prompt, the model holds {room} positions for both: lower "
            "task.max_new_tokens (or generation.max_new_tokens)"
        )


def fitted(settings: Settings, tokenizer: Any, todo: list[tuple[int, Example]]) -> list[tuple[int, Example]]:
    """The examples at the lengths their task sets in tokens (`Task.fit`)."""
    task, chat = settings.task, settings.model.chat
    if type(task).fit is Task.fit:
        return todo
    whole = dataclasses.replace(task, truncate="skip", max_prompt_tokens=None, pad_to=None)

    def count(words: str) -> int:
        return tokenise(Example("", words, ""), whole, tokenizer, 1 << 40, chat=chat).size

    room = 1 << 40 if settings.cache.beyond_context else holds(settings.model)
    return [(index, task.fit(example, count, room)) for index, example in todo]


def end_of_turn(tokenizer: Any) -> list[int]:
    """The token that the chat template puts behind an assistant's words; empty where that is no token of its own."""
    words = "An answer."
    turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": words}]
    _, found, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(words)
    ids = tokenizer(after, add_special_tokens=False).input_ids if found else []
    first = [token for token in ids if tokenizer.decode([token]).strip()][:1]
    return [token for token in first if token in tokenizer.added_tokens_decoder]


def with_ends(settings: Settings, model: Any, tokenizer: Any) -> Settings:
    """The settings with the end tokens that task and chat template add to the model's; a text of no token adds none.

    Files of a chat model often name the base model's end token alone, and what ends a turn stands in its template.
    """
    from kvexp.generate.inputs import eos_ids

    task = settings.task
    each = [tokenizer(text, add_special_tokens=False).input_ids for text in task.also_ends]
    more = [ids[-1] for ids in each if ids]
    if settings.model.chat and task.wrapped and task.frame is None and settings.decoding.eos == "model":
        more += end_of_turn(tokenizer)
    if not more:
        return settings
    eos = tuple(dict.fromkeys([*eos_ids(model, settings.decoding.eos), *more]))
    return dataclasses.replace(settings, decoding=dataclasses.replace(settings.decoding, eos=eos))
