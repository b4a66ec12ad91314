"""What of a configuration lm-eval decides by itself, and so must not be set."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvexp.errors import ConfigError
from kvexp.generate import GenerationParams
from kvexp.tasks.lm_eval import LMEval

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


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
