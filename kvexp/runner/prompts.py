"""Examples to token ids: chat template, cutting to what the model holds, or the reason for not running one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvexp.errors import ConfigError
from kvexp.tasks import Example, Task


@dataclass(frozen=True)
class Prompt:
    """text and its ids; cut: something was left out; skipped: why it is not run (then ids are empty)."""

    example: Example
    text: str
    ids: list[int]
    cut: bool = False
    skipped: str | None = None
    tokens: int = 0  # before cutting


def tokenise(example: Example, task: Task, tokenizer: Any, room: int, *, chat: bool) -> Prompt:
    """The example's prompt in at most `room` tokens (and the task's own maximum), cut as the task says.

    task.truncate: "middle" shortens the body's text until the whole, tokenised as one, fits; "right" cuts the tokens'
    end; "skip" keeps the example as a skipped row. With `chat` the words go through the tokenizer's chat template.
    """
    if room < 1:
        raise ConfigError("max_new_tokens leaves no room for a prompt in this model: lower generation.max_new_tokens")
    limit = min(room, task.max_prompt_tokens or room)

    def made(kept: int) -> tuple[str, list[int]]:
        text = _framed(example.prefix + example.body[:kept] + example.suffix, tokenizer, chat)
        # A chat template brings its own start token.
        return text, tokenizer(text, add_special_tokens=not chat, verbose=False).input_ids

    text, ids = made(len(example.body))
    count = len(ids)
    if count <= limit:
        return Prompt(example, text, ids, tokens=count)
    if task.truncate == "right":
        return Prompt(example, text, ids[:limit], cut=True, tokens=count)
    if task.truncate == "middle":
        fits, over = -1, len(example.body)
        while over - fits > 1:
            half = (fits + over) // 2
            fits, over = (half, over) if len(made(half)[1]) <= limit else (fits, half)
        if fits > 0:
            text, ids = made(fits)
            return Prompt(example, text, ids, cut=True, tokens=count)
    return Prompt(example, "", [], skipped="too long", tokens=count)


def continuation(prompt: Prompt, tokenizer: Any, *, chat: bool) -> list[int]:
    """The continuation's ids as they stand in the whole text, where that begins with the prompt's ids."""
    words = prompt.example.continuation
    whole: list[int] = tokenizer(prompt.text + words, add_special_tokens=not chat, verbose=False).input_ids
    if whole[: len(prompt.ids)] == prompt.ids and len(whole) > len(prompt.ids):
        return whole[len(prompt.ids) :]
    alone: list[int] = tokenizer(words, add_special_tokens=False).input_ids
    return alone


def _framed(words: str, tokenizer: Any, chat: bool) -> str:
    if not chat:
        return words
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True
    )
    return text
