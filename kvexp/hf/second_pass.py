"""What is fed in a second pass over a prompt: the instruction to repeat it, and the prompt's own tokens in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvexp.core import CacheConfig
from kvexp.core.method import SecondPass
from kvexp.core.second_pass import RepeatedChunk
from kvexp.hf.chat_template import render
from kvexp.util import ConfigError

_USER, _MARK = "A context.", "\n##########"  # a user's turn, and what its end is found by


@dataclass
class RepeatedPrompt:
    """A second pass over one batch of prompts: its declaration, and token ids.

    first, later: fed ahead of the first chunk and of later ones; turn: between that and the chunk. fed: the prompt's
    token ids [B, columns], forward by forward, until the pass is over.
    """

    how: SecondPass
    first: list[int]
    later: list[int]
    turn: list[int]
    fed: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, how: SecondPass, tokenizer: Any, method: str) -> RepeatedPrompt:
        """The declaration with its texts as token ids; ConfigError where that takes a tokenizer and there is none."""
        if not how.instruction:
            return cls(how, [], [], [])
        if tokenizer is None:
            raise ConfigError(
                f"method {method} repeats the prompt behind an instruction, which takes the model's tokenizer: pass "
                "tokenizer=, or set method.instruct=false"
            )
        texts = (how.instruction, how.next_instruction, end_of_user_turn(tokenizer) if how.end_turn else "\n")
        first, later, turn = (list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
        return cls(how, first, later, turn)

    @property
    def same_pass(self) -> tuple[Any, ...]:
        """Equal for caches of the same prompts that one second pass serves."""
        return self.how, tuple(self.first), tuple(self.later), tuple(self.turn)

    def most_tokens(self, prompt: int) -> int:
        """Tokens of the longest forward for a prompt of so many tokens; 0 where nothing of it is repeated."""
        left = prompt - self.how.start
        if left <= 0:
            return 0
        chunk = min(left, self.how.chunk)
        behind = len(self.later) + min(self.how.overlap, self.how.chunk) if left > chunk else 0
        return max(len(self.first), behind) + len(self.turn) + chunk

    def check_room(self, prompt: int, holds: int, method: str) -> None:
        """ConfigError where a prompt of so many tokens and its longest forward are more than the model `holds`."""
        most = self.most_tokens(prompt)
        if prompt + most > holds:
            raise ConfigError(
                f"method {method} feeds up to {most} tokens behind the prompt of {prompt} to repeat it, the model "
                f"holds {holds}: lower method.chunk (now {self.how.chunk}), or shorten the prompt"
            )

    def chunks(self, lengths: Sequence[int], pad: int) -> list[tuple[Tensor, RepeatedChunk]]:
        """The forwards of the pass: token ids [n, Q], padded with `pad` on the left, and what the layers are told.

        lengths: real tokens of every row.
        """
        ids = torch.cat([part.cpu() for part in self.fed], dim=1)
        columns = ids.shape[1]
        rows = [row[columns - length :] for row, length in zip(ids.tolist(), lengths, strict=True)]
        starts = range(self.how.start, max(lengths), self.how.chunk)
        return [self._chunk(start, rows, columns, pad) for start in starts]

    def _chunk(self, start: int, rows: Sequence[list[int]], columns: int, pad: int) -> tuple[Tensor, RepeatedChunk]:
        """The forward that repeats what begins at position `start`; rows: of real tokens; else as of `chunks`."""
        how = self.how
        members = [row for row, ids in enumerate(rows) if len(ids) > start]
        ahead, overlap = (self.first, 0) if start == how.start else (self.later, min(how.overlap, how.chunk))
        texts = [
            [*ahead, *rows[row][start - overlap : start], *self.turn, *rows[row][start : start + how.chunk]]
            for row in members
        ]
        width, lengths = max(map(len, texts)), torch.tensor([[len(rows[row])] for row in members])
        place = torch.arange(width) - torch.tensor([[width - len(text)] for text in texts])

        def columns_of(first: int, end: int) -> Tensor:
            positions = torch.arange(first, end).expand(len(members), -1)
            return torch.where(positions < lengths, positions + columns - lengths, -1)

        return torch.tensor([[pad] * (width - len(text)) + text for text in texts]), RepeatedChunk(
            rows=torch.tensor(members),
            positions=torch.where(place >= 0, lengths + place, -1),
            before=columns_of(0, how.start),
            repeated=columns_of(start, min(start + how.chunk, int(lengths.max()))),
        )


def check_second_pass(cache: CacheConfig, tokenizer: Any, prompt: int, holds: int) -> None:
    """ConfigError where the method's second pass over a prompt of so many tokens needs more positions than `holds`."""
    how = cache.method.needs.second_pass
    if how is not None:
        RepeatedPrompt.of(how, tokenizer, cache.method.name).check_room(prompt, holds, cache.method.name)


def end_of_user_turn(tokenizer: Any) -> str:
    """What the tokenizer's chat template puts between a user's words and the answer; a newline without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    turn = [{"role": "user", "content": _USER + _MARK}]
    text = render(tokenizer, turn, add_generation_prompt=True)
    _, found, after = text.rpartition(_MARK)
    if not found:
        raise ConfigError(
            "the tokenizer's chat template changes what the user says, so its end of a turn is not known: set "
            "method.end_turn=false"
        )
    return str(after)
