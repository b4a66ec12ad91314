"""Settings of different groups that do not go together: ConfigError before any model loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvexp.config.model_spec import generation_config_of
from kvexp.core import Budget, BytesBudget, CacheConfig
from kvexp.errors import ConfigError
from kvexp.generate import GenerationParams
from kvexp.tasks import LMEval

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


def check_chat(settings: Settings) -> None:
    """ConfigError where a frame or a template is asked for and model.chat=false would leave it out."""
    task = settings.task
    if settings.model.chat:
        return
    if task.frame is not None:
        raise ConfigError(
            f"task.chat_frame={task.frame!r} goes around a chat model's prompts, and model.chat=false: set "
            "model.chat=true or task.chat_frame=null"
        )
    for asked, default in ((True, "false"), ("always", "official")):
        if getattr(task, "chat_wrap", None) == asked:
            raise ConfigError(
                f"task.chat_wrap={str(asked).lower()} puts a chat template around prompts, and model.chat=false: set "
                f"model.chat=true or task.chat_wrap={default}"
            )


def check_padding(settings: Settings) -> None:
    """ConfigError where padding would do nothing, or where a row's budget would be its neighbours'."""
    task, budget = settings.task, settings.budget
    if task.pad_to is not None and isinstance(task, LMEval):
        raise ConfigError("task.pad_to does not reach lm-eval's tasks: leave it at null")
    if budget is None:
        return
    if task.pad_to is not None and isinstance(budget, BytesBudget):
        raise ConfigError(
            f"task.pad_to={task.pad_to} makes pads count towards a ratio of tokens, bytes_ratio={budget.bytes_ratio:g} "
            "is of the real prompt's bytes: set task.pad_to=null, or leave out bytes_ratio"
        )
    if task.pad_to is not None and budget.tokens is not None and budget.of != "padded":
        raise ConfigError(
            f"task.pad_to={task.pad_to} has no effect with budget.tokens={budget.tokens}, a number of slots for "
            "prompts of any length: set task.pad_to=null"
        )
    if task.pad_to is not None and budget.of != "padded":
        raise ConfigError(
            f"task.pad_to={task.pad_to} makes pads count towards the budget, budget.of={budget.of} leaves them out: "
            "set budget.of=padded, or task.pad_to=null"
        )
    whole = task.pad_to is not None and task.pad_to == task.max_prompt_tokens  # then all prompts are of one width
    if budget.of == "padded" and settings.batch_size > 1 and not whole:
        raise ConfigError(
            f"batch_size must be 1 with budget.of=padded, got {settings.batch_size}: the longest prompt of a batch "
            "would set the budget of all (unless task.pad_to is task.max_prompt_tokens)"
        )


def check_turns(settings: Settings) -> None:
    """ConfigError where a conversation is asked for that settings of other groups cannot go on after its first turn."""
    task, decoding, budget = settings.task, settings.decoding, settings.budget
    if not task.has_turns:
        return
    if decoding.num_beams > 1 or decoding.stop_strings or generation_config_of(settings.model).stop_strings:
        raise ConfigError(
            f"task={task.name} goes on behind an answer token by token, which generation.num_beams above 1 and "
            "generation.stop_strings (or those of the model's generation_config.json) do not leave at its end: set "
            "generation=greedy, and use a model without stop_strings"
        )
    if budget is not None and budget.of == "sequence":
        raise ConfigError(
            f"task={task.name} has tokens to come in every turn: set budget.of=prompt, got budget.of=sequence"
        )


def check_keep(settings: Settings) -> None:
    """ConfigError where marked spans are to be spared (`keep`) and the task's prompts cannot be marked."""
    keep, task = settings.cache.keep, settings.task
    if keep is None:
        return
    if isinstance(task, LMEval):
        raise ConfigError(
            f"keep={keep} does not reach lm-eval's tasks, whose prompts have no marked spans: leave it out"
        )
    if task.truncate == "halves":
        raise ConfigError(
            f"keep={keep} needs to know where a prompt's parts stand, which task.truncate=halves takes apart: set "
            "task.truncate=middle or skip"
        )


def batch_cache(settings: Settings, lengths: Sequence[int]) -> CacheConfig:
    """What the cache of a batch of prompts of so many tokens does: the run's, with the batch's budget."""
    return dataclasses.replace(settings.cache, budget=batch_budget(settings, lengths))


def batch_budget(settings: Settings, lengths: Sequence[int]) -> Budget | None:
    """The budget of a batch of prompts of so many tokens.

    Keyformer's release pads every prompt on the left and takes its ratio of the whole. With task.pad_to the budget is a
    number of slots, the ratio of the padded prompt (floored, as everywhere). The pads themselves are left out: a pad is
    seen by nothing and is the first to go, so it could only hold memory that no token needs. Of the release
    (summarize.py, padding="max_length") this keeps budget and recent window, which are of the padded prompt; it leaves
    out the constant that padded query rows add to the scores of all real prompt tokens, and StreamingLLM's pads that
    serve as sinks (kvexp.reference_check reproduces both).
    """
    budget, pad_to = settings.budget, settings.task.pad_to
    if budget is None or pad_to is None or budget.kv_ratio is None:
        return budget
    widths = {max(pad_to, length) for length in lengths}
    if len(widths) > 1:
        raise ConfigError(f"prompts padded to {min(widths)} and {max(widths)} tokens in one batch: set batch_size=1")
    flat = dataclasses.replace(budget, pyramid=0.0)  # the pyramid spreads these slots over the layers later
    (slots,) = flat.resolve([0], widths.pop(), None, 0, 1)
    return dataclasses.replace(budget, kv_ratio=None, tokens=slots)


def check_item_settings(settings: Settings) -> None:
    """What lm-eval decides by itself must not be set; and the method must have a row mask where one is asked for."""
    from kvexp.lm_eval import check_row_mask

    task, plain = settings.task, GenerationParams(max_new_tokens=settings.task.max_new_tokens)
    assert isinstance(task, LMEval)
    for option in dataclasses.fields(GenerationParams):
        if getattr(settings.decoding, option.name) != getattr(plain, option.name):
            raise ConfigError(
                f"generation.{option.name} does not reach lm-eval's tasks, which say themselves how they are answered: "
                "leave the group generation at greedy"
            )
    if task.measured.mode == "row_mask":
        check_row_mask(settings.cache, task.measured.mask)
