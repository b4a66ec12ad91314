"""Examples as prompts, or the reason why one is skipped; and whether any of them can be run at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvexp.config.model_spec import config_of_spec, holds
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.budget_check import obstacle, within_budget
from kvexp.evaluate.lm_eval_items import item_prompt
from kvexp.evaluate.preflight import check_room, check_template, fitted
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation, tokenise
from kvexp.models.families import check_positions
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item

Numbered = list[tuple[int, TokenizedExample]]


@dataclass(frozen=True)
class Weightless:
    """What of a model its prompts depend on."""

    config: Any

    @property
    def generation_config(self) -> Any:
        """Read for the end tokens of texts whose length alone counts here."""
        return SimpleNamespace(eos_token_id=getattr(self.config, "eos_token_id", None))


def check_beforehand(settings: Settings, tokenizer: Any, examples: Sequence[Example]) -> None:
    """ConfigError for a run that cannot be, which its configuration and its prompts' tokens tell; no weights needed."""
    config = config_of_spec(settings.model)
    check_positions(config, settings.cache)
    check_room(settings, list(enumerate(examples)))
    check_template(settings, tokenizer)
    _check_runnable(settings, config, tokenizer, examples)


def _check_runnable(settings: Settings, config: Any, tokenizer: Any, examples: Sequence[Example]) -> None:
    """ConfigError where not one of the examples can be run; looks at none behind the first that can."""
    model = Weightless(config)
    longest, why = -1, ""
    for item in enumerate(examples):
        ((_, example),) = fitted(settings, tokenizer, [item])
        prompt = prompt_of(settings, model, tokenizer, example)
        reason = example.skipped or prompt.skipped or obstacle(settings, config, tokenizer, prompt)
        if reason is None:
            return
        if prompt.size > longest:  # what even the longest prompt lacks says most
            longest, why = prompt.size, reason
    if why.startswith("too long"):
        why += f"; the model holds {holds(settings.model)} positions: see task.truncate and task.max_prompt_tokens"
    raise ConfigError(why if len(examples) == 1 else f"none of the {len(examples)} examples can be run: {why}")


def prompts_of(settings: Settings, model: Any, tokenizer: Any, batch: Sequence[tuple[int, Example]]) -> Numbered:
    """The prompts of a batch, the same for all methods and budgets."""
    return [(index, prompt_of(settings, model, tokenizer, example)) for index, example in batch]


def answerable(settings: Settings, model: Any, tokenizer: Any, prompts: Numbered) -> tuple[Numbered, Numbered]:
    """The prompts, skipped where this run's budget cannot hold them, and those of them that can be answered."""
    held = [(index, within_budget(settings, model.config, tokenizer, prompt)) for index, prompt in prompts]
    return held, [(index, prompt) for index, prompt in held if prompt.skipped is None]


def prompt_of(settings: Settings, model: Any, tokenizer: Any, example: Example) -> TokenizedExample:
    """The example's tokens, which leave room for its answer: what is generated, the longest choice, a continuation.

    model: its configuration is all that is looked at.
    """
    from kvexp.models.families import longest

    if example.skipped:
        return TokenizedExample(example, "", [], skipped=example.skipped.partition(";")[0])
    if isinstance(example, Item):
        return item_prompt(settings, model, tokenizer, example)
    most = 1 << 40 if settings.cache.beyond_context else longest(model.config)
    alone = [len(tokenizer(words, add_special_tokens=False).input_ids) for words in example.choices]
    new = 1 if settings.task.only_nll else settings.decoding.max_new_tokens
    room = most - max(alone, default=new) + 1
    prompt = tokenise(example, settings.task, tokenizer, room, chat=settings.model.chat)
    if not prompt.skipped and not prompt.ids:
        return TokenizedExample(example, "", [], skipped="its prompt has no tokens")
    given = example.choices or ((example.continuation,) if settings.task.needs_nll else ())
    if prompt.skipped or not given:
        return prompt
    after = [continuation(prompt, tokenizer, chat=settings.model.chat, words=words) for words in given]
    if not all(after):
        why = "a choice has no tokens" if example.choices else "its continuation has no tokens"
        return TokenizedExample(example, "", [], skipped=why, tokens=prompt.tokens)
    if prompt.size + max(map(len, after)) > most + 1:  # a choice may have more tokens where it stands than alone
        why = "too long" if example.choices else "too long with its continuation"
        return TokenizedExample(example, "", [], skipped=why, tokens=prompt.tokens)
    return dataclasses.replace(prompt, choices=after) if example.choices else prompt
