"""Texts to token ids exactly as lm-eval makes them of Hugging Face models."""

from __future__ import annotations

from typing import Any

from kvexp.errors import ConfigError
from kvexp.lm_eval.requests import Ask, fitted

Ids = list[int]


class Encoder:
    """tokenizer, and whether a start token goes in front (None: as the tokenizer does by itself).

    Facts of lm-eval 0.4.13: white space at a context's end moves to the continuation; the continuation's ids are what
    the whole text has beyond the context's number of ids; an empty context is the start (or else the end) token; a
    text that already begins with the start token gets no second one.
    """

    def __init__(self, tokenizer: Any, add_bos: bool | None = None) -> None:
        self.tokenizer, self.add_bos = tokenizer, add_bos
        start = tokenizer.bos_token_id
        self.prefix: int | None = tokenizer.eos_token_id if start is None else start

    def text(self, words: str, special: bool | None = None) -> Ids:
        """Ids of a text; special: with the tokenizer's special tokens or without (None: as `add_bos` says)."""
        if special is None:
            begins = self.prefix is not None and words.startswith(self.tokenizer.decode(self.prefix))
            special = False if begins else self.add_bos
        options = {} if special is None else {"add_special_tokens": special}
        ids: Ids = self.tokenizer(words, verbose=False, **options).input_ids
        return ids

    def pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """(context, continuation) of a log-likelihood; neither is empty."""
        if context == "":
            ids = self.text(continuation, special=False)
            made = (ids[:1], ids[1:]) if ids[:1] == [self.start()] else ([self.start()], ids)
        else:
            kept = context.rstrip()
            whole, before = self.text(context + continuation), self.text(kept)
            made = (before, whole[len(before) :])
        if not made[0] or not made[1]:
            raise ConfigError(
                f"there is nothing to judge in {continuation!r} after {context[-40:]!r}: no token is left"
            )
        return made

    def triple(self, context: str, question: str, continuation: str) -> tuple[Ids, Ids, Ids]:
        """(context, question, continuation): the ids of the pair (context + question, continuation), parted in two."""
        whole, rest = self.pair(context + question, continuation)
        return (*self.part(whole, context), rest) if question else (whole, [], rest)

    def ask(self, context: str, question: str, continuation: str, holds: int) -> Ask | None:
        """The texts as an `Ask` that `holds` positions can take; None where they cannot."""
        before, asked, after = self.triple(context, question, continuation)
        return fitted(Ask(tuple(before), tuple(after), tuple(asked)), holds)

    def part(self, whole: Ids, context: str) -> tuple[Ids, Ids]:
        """Ids of context + question, parted where the context ends; a token across the border is the question's."""
        alone = self.text(context)
        differ = (i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b)
        same = min(next(differ, len(alone)), len(whole) - 1)
        if same < 1:
            raise ConfigError(f"no token of the context {context[-40:]!r} is left before the question")
        return whole[:same], whole[same:]

    def start(self) -> int:
        """The token that stands for an empty context."""
        if self.prefix is None:
            raise ConfigError("this tokenizer has no start and no end token, so nothing can stand for an empty context")
        return self.prefix
