"""What the gate asks of each of its two models, and how two next-token distributions are compared. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvexp.util.strict_json import Json

Token: TypeAlias = int | str  # an id; of servers that take text alone, the text of a token
Role = Literal["baseline", "candidate"]

FLOOR = -104.0  # log-probability that float32 cannot tell from that of nothing
ROUNDING = 1e-4  # by which probabilities of servers may miss their sum; a bucket of the rest is never smaller
OFF = 0.02  # from which on numbers are no probabilities


class SideError(RuntimeError):
    """A model did not give what it was asked for. The message is one sentence with its role and what came back."""


@dataclass(frozen=True)
class Prompt:
    """A row of the user's file. name: its id or place; text: as it is fed, or messages for the chat template."""

    name: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Answer:
    """Greedy answer. tokens: the end token included; ended: whether it came to its end by itself.

    prompt_tokens: how many the server says it read; None where it does not say.
    """

    tokens: list[Token]
    text: str
    ended: bool
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Place:
    """Log-probabilities of the likeliest tokens at one place of a text: tokens [K], logprobs [K] float64.

    whole: whether the tokens are all of the vocabulary, 0 to K - 1.
    """

    tokens: NDArray[Any]
    logprobs: NDArray[np.float64]

    @classmethod
    def of(cls, role: Role, tokens: Sequence[Token], logprobs: Sequence[Any]) -> Place:
        """Check what a server sent; SideError where it is no distribution."""
        try:
            values = np.array(logprobs, dtype=np.float64)
        except (TypeError, ValueError):
            raise SideError(f"{role}: a log-probability is no number") from None
        if len(values) == 0 or len(values) != len(tokens) or len(set(tokens)) != len(tokens):
            raise SideError(f"{role}: sent {len(values)} log-probabilities of {len(set(tokens))} tokens")
        if not np.isfinite(values).all() or values.max() > ROUNDING or np.exp(values).sum() > 1 + OFF:
            raise SideError(
                f"{role}: its log-probabilities are none: the largest is {values.max():.4g} and the probabilities sum "
                f"to {np.exp(np.minimum(values, 0)).sum():.4g}"
            )
        names = np.array(tokens)
        if np.issubdtype(names.dtype, np.integer):
            order = np.argsort(names)
            names, values = names[order], values[order]
        return cls(names, np.maximum(values, FLOOR))

    @property
    def whole(self) -> bool:
        ids = self.tokens
        is_range = np.issubdtype(ids.dtype, np.integer) and ids[0] == 0 and ids[-1] == len(ids) - 1
        return bool(is_range and np.exp(self.logprobs).sum() > 1 - ROUNDING * 10)

    @property
    def likeliest(self) -> Token:
        token: Token = self.tokens[self.logprobs.argmax()].item()
        return token

    def logprob(self, token: Token) -> float:
        """Log-probability of a token; of one that was not sent, that of the least likely one sent, which is no less."""
        here = np.flatnonzero(self.tokens == token)
        return float(self.logprobs[here[0]] if len(here) else self.logprobs.min())


def divergence(full: Place, other: Place) -> float:
    """KL(full || other) in nats, with whole distributions, else a lower bound.

    The bound takes the tokens that both sent and all others as one bucket: a coarser partition never has more KL (log
    sum inequality; Cover and Thomas, Elements of Information Theory, theorem 2.7.1).
    """
    if full.whole and other.whole:
        p, q = (place.logprobs - np.log(np.exp(place.logprobs).sum()) for place in (full, other))
        return max(0.0, float((np.exp(p) * (p - q)).sum()))
    _, ours, theirs = np.intersect1d(full.tokens, other.tokens, assume_unique=True, return_indices=True)
    p, q = full.logprobs[ours], other.logprobs[theirs]
    p_rest, q_rest = (max(ROUNDING, 1 - float(np.exp(logs).sum())) for logs in (p, q))
    return max(0.0, float((np.exp(p) * (p - q)).sum() + p_rest * np.log(p_rest / q_rest)))


class Side:
    """One of the two models, served or in this process.

    name: for the header; by_text: whether it takes texts in place of token ids; context: tokens that it can hold, None
    where it does not say; note: how a text is read again, for the header.
    """

    role: Role
    name: str
    context: int | None
    by_text: bool = False
    note: str

    def identity(self) -> Json:
        """What it says of itself: by it, recorded rows are known to be of the same model."""
        raise NotImplementedError

    def tokenize(self, prompt: Prompt) -> list[Token]:
        """Token ids of a prompt, by the model's own tokenizer and chat template; the text as one piece by_text."""
        raise NotImplementedError

    def answer(self, prompt: Sequence[Token], new: int) -> Answer:
        """Greedy answer of at most `new` tokens."""
        raise NotImplementedError

    def places(self, prompt: Sequence[Token], text: Sequence[Token], top: int | None) -> Iterator[Place]:
        """Distribution in front of each token of a text behind a prompt. top: how many tokens of it; None: all."""
        raise NotImplementedError
