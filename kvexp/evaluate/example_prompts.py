"""Examples as batches of prompts, or the reason why one is skipped; and whether any of them can be run at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvexp.config.model_spec import config_of_spec, max_positions
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.lm_eval_items import item_prompt
from kvexp.evaluate.marked_spans import token_spans
from kvexp.evaluate.preflight import budget_obstacle, check_max_new_tokens, check_template, fit_examples, within_budget
from kvexp.evaluate.tokenized_examples import TokenizedExample, continuation, tokenize
from kvexp.models.families import check_positions
from kvexp.tasks import Example
from kvexp.tasks.lm_eval import Item

if TYPE_CHECKING:
    from kvexp.models.types import Model, Tokenizer

MAX_QUESTIONS_PER_CONTEXT = (
    8  # questions about one context that are answered from one prefill before their rows are written
)

Batch = list[tuple[int, Example]]


IndexedPrompts = list[tuple[int, TokenizedExample]]


def pending_batches(
    examples: Sequence[Example], size: int, shared: int, lacks: Callable[[Example], bool]
) -> list[Batch]:
    """The batches of the whole task in which an example is missing.

    Cut from all examples and not from the missing ones: the last digits of a float32 sum go by the rows of a batch, and
    a run that goes on is to write what it would have written undisturbed. Examples of such a batch that have their row
    are computed once more and not written again.
    """
    batches_ = batches(list(enumerate(examples)), size, shared)
    return [batch for batch in batches_ if any(lacks(example) for _, example in batch)]


def batches(todo: Sequence[tuple[int, Example]], size: int, shared: int) -> Iterator[Batch]:
    """Batches of `size` examples, or up to `shared` where more questions about the last one's context follow.

    Examples that are to share a context (`questions`), and the turns of a conversation, are never parted.
    """
    batch: Batch = []
    for item in todo:
        same = bool(batch) and bool(item[1].question) and item[1].prompt == batch[-1][1].prompt
        together = same and bool(item[1].questions) and item[1].number > 0
        if item[1].turns and batch and item[1].prompt == batch[-1][1].prompt:
            together = True
        if not together and len(batch) >= (max(size, shared) if same else size):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


@dataclass(frozen=True)
class Weightless:
    """What of a model its prompts depend on."""

    config: Any

    @property
    def generation_config(self) -> Any:
        """Read for the end tokens of texts whose length alone counts here."""
        return SimpleNamespace(eos_token_id=getattr(self.config, "eos_token_id", None))


def check_beforehand(settings: Settings, tokenizer: Tokenizer, examples: Sequence[Example]) -> None:
    """ConfigError for a run that cannot be, which its configuration and its prompts' tokens tell; no weights needed."""
    settings.task.check_examples(examples)
    config = config_of_spec(settings.model)
    check_positions(config, settings.cache)
    check_max_new_tokens(settings, list(enumerate(examples)))
    check_template(settings, tokenizer)
    _check_runnable(settings, config, tokenizer, examples)


def _check_runnable(settings: Settings, config: Any, tokenizer: Tokenizer, examples: Sequence[Example]) -> None:
    """ConfigError where not one of the examples can be run; looks at none behind the first that can."""
    model = Weightless(config)
    longest, why = -1, ""
    for item in enumerate(examples):
        ((_, example),) = fit_examples(settings, tokenizer, [item])
        prompt = prompt_of(settings, model, tokenizer, example)
        reason = example.skipped or prompt.skipped or budget_obstacle(settings, config, tokenizer, prompt)
        if reason is None:
            return
        if prompt.size > longest:  # what even the longest prompt lacks says most
            longest, why = prompt.size, reason
    if why.startswith("too long"):
        why += (
            f"; the model holds {max_positions(settings.model)} positions: see task.truncate and "
            "task.max_prompt_tokens, or go beyond them with cache.beyond_context=true (not for learned positions)"
        )
    raise ConfigError(why if len(examples) == 1 else f"none of the {len(examples)} examples can be run: {why}")


def prompts_of(
    settings: Settings, model: Model | Weightless, tokenizer: Tokenizer, batch: Sequence[tuple[int, Example]]
) -> IndexedPrompts:
    """The prompts of a batch, the same for all methods and budgets."""
    return [(index, prompt_of(settings, model, tokenizer, example)) for index, example in batch]


def answerable(
    settings: Settings, model: Model, tokenizer: Tokenizer, prompts: IndexedPrompts
) -> tuple[IndexedPrompts, IndexedPrompts]:
    """The prompts, skipped where this run's budget cannot hold them, and those of them that can be answered."""
    held = [(index, within_budget(settings, model.config, tokenizer, prompt)) for index, prompt in prompts]
    return held, [(index, prompt) for index, prompt in held if prompt.skipped is None]


def _with_spans(settings: Settings, tokenizer: Tokenizer, prompt: TokenizedExample) -> TokenizedExample:
    """The prompt with the tokens of its marked texts, of those that are not skipped."""
    if prompt.skipped:
        return prompt
    spans = token_spans(prompt.example, prompt.text, len(prompt.ids), tokenizer, templated=settings.templated)
    return dataclasses.replace(prompt, spans=spans)


def prompt_of(
    settings: Settings, model: Model | Weightless, tokenizer: Tokenizer, example: Example
) -> TokenizedExample:
    """The example's tokens, which leave room for its answer: what is generated, the longest choice, a continuation.

    model: its configuration is all that is looked at.
    """
    from kvexp.models import families

    if example.skipped:
        return TokenizedExample(example, "", [], skipped=example.skipped.partition(";")[0])
    if isinstance(example, Item):
        return item_prompt(settings, model, tokenizer, example)
    most = 1 << 40 if settings.cache.beyond_context else families.max_positions(model.config)
    alone = [len(tokenizer(words, add_special_tokens=False).input_ids) for words in example.choices]
    new = 1 if settings.task.only_nll else settings.decoding.max_new_tokens
    room = most - max(alone, default=new) + 1
    prompt = tokenize(example, settings.task, tokenizer, room, chat=settings.model.chat)
    if not prompt.skipped and not prompt.ids:
        return TokenizedExample(example, "", [], skipped="its prompt has no tokens")
    prompt = _with_spans(settings, tokenizer, prompt)
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
