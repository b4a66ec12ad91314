"""Where each row's answer ended, and at what: an end token, a stop string or its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvexp.errors import ConfigError
from kvexp.models.chat_template import Thinking


@dataclass(frozen=True)
class Ending:
    """What ended a row.

    reason, in vLLM's words: "stop" at an end token (its id: token) or a stop string (text), else "length".
    """

    reason: str
    token: int | None = None
    text: str | None = None


class StopStrings:
    """Tells which rows have written a stop string. The prompt is no part of what a row has written.

    strings: the stop strings, none for never stopping; tokenizer: the model's. A row has written a string once the
    text of its new tokens holds it, as lm-eval sees it, special tokens included. thinking: tags of what no stop string
    ends: none inside the thinking, nor the white space behind it. ConfigError where there are strings but no tokenizer.
    """

    def __init__(
        self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None, thinking: Thinking | None = None
    ) -> None:
        if strings and tokenizer is None:
            raise ConfigError("stop_strings need the tokenizer: pass tokenizer=")
        self.strings, self.tokenizer, self.thinking = tuple(strings), tokenizer, thinking
        # A token may be a part of a character, or no text at all. The newest tokens suffice: the search is made anew
        # after every one of them.
        self.window = 16 + 2 * max((len(string.encode()) for string in self.strings), default=0)

    def __bool__(self) -> bool:
        return bool(self.strings)

    def found(self, new: Sequence[int]) -> str | None:
        """The stop string that ends last in the text of a row's new tokens; None: it holds none."""
        if not self.strings:
            return None
        assert self.tokenizer is not None
        text: str = self.tokenizer.decode(list(new[-self.window :]))
        ends = {string: text.rfind(string) + len(string) for string in self.strings if string in text}
        if ends and self.thinking is not None:
            answer = self.thinking.part(list(new), self.tokenizer)
            ends = {} if answer.cut else {string: end for string, end in ends.items() if string in answer.raw}
        return max(ends, key=ends.__getitem__) if ends else None

    def done(self, ids: Tensor, columns: int) -> Tensor:
        """[R] bool: the rows of ids [R, columns + new] that have written a stop string. columns: of the prompt."""
        new = ids[:, columns:]
        rows = (new if self.thinking is not None else new[:, -self.window :]).tolist()
        return torch.tensor([self.found(row) is not None for row in rows], device=ids.device)


def truncate_at_end(
    ids: Tensor, columns: int, eos: Sequence[int], stops: StopStrings
) -> tuple[list[list[int]], list[Ending]]:
    """New tokens of every row of ids [R, columns + new], cut at the row's end, and how it ended.

    The cut is behind the first end token, or behind the token that completes a stop string: what follows is padding.
    columns: of the prompt; eos: ids of end tokens.
    """
    ends = set(eos)
    tokens, made = [], []
    for new in ids[:, columns:].tolist():
        ending = Ending("length")
        for count, token in enumerate(new, 1):
            if token in ends:
                ending = Ending("stop", token=token)
            elif stops and (text := stops.found(new[:count])):
                ending = Ending("stop", text=text)
            if ending.reason == "stop":
                new = new[:count]
                break
        tokens.append(new)
        made.append(ending)
    return tokens, made
