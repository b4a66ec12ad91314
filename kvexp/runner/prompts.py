"""Examples to token ids: chat template, cutting to what the model holds, or the reason for not running one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvexp.tasks import Example, Task


@dataclass(frozen=True)
class Prompt:
    """ids: the prompt's tokens; cut: something was left out; skipped: why it is not run (then ids are empty)."""

    example: Example
    ids: list[int]
    cut: bool = False
    skipped: str | None = None
    tokens: int = 0  # before cutting


def tokenise(example: Example, task: Task, tokenizer: Any, room: int, *, chat: bool) -> Prompt:
    """The example's prompt in at most `room` tokens (and the task's own maximum), cut as the task says.

    task.truncate: "middle" shortens the example's body at its end and keeps prefix and suffix; "right" cuts the whole
    prompt's end; "skip" keeps the example as a skipped row.
    """
    limit = min(room, task.max_prompt_tokens or room)
    prefix, body, suffix = example.prefix, example.body, example.suffix
    if chat:
        before, after = _chat_frame(tokenizer)
        prefix, suffix = before + prefix, suffix + after
    special = not chat  # a chat template brings its own start token
    ids: list[int] = tokenizer(prefix + body + suffix, add_special_tokens=special).input_ids
    count = len(ids)
    if count <= limit:
        return Prompt(example, ids, tokens=count)
    if task.truncate == "skip":
        return Prompt(example, [], skipped="too long", tokens=count)
    if task.truncate == "right":
        return Prompt(example, ids[:limit], cut=True, tokens=count)
    first = tokenizer(prefix, add_special_tokens=special).input_ids
    last = tokenizer(suffix, add_special_tokens=False).input_ids if suffix else []
    space = limit - len(first) - len(last)
    if space < 1:
        return Prompt(example, [], skipped="too long", tokens=count)
    middle = tokenizer(body, add_special_tokens=False).input_ids[:space]
    return Prompt(example, [*first, *middle, *last], cut=True, tokens=count)


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What the tokenizer's chat template puts before and after a user's words."""
    mark = "\x00kvexp\x00"
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(mark)
    return before, after
