"""Options that shape a chat model's prompts mean nothing where the model is used as a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvexp.errors import ConfigError

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
