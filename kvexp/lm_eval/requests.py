"""What is to be measured, in token ids, and what was."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from kvexp.generate import EvictionStats, Token


@dataclass(frozen=True)
class Ask:
    """The log-probability of `continuation` after context and question; lists of ids as tuples.

    group: asks of one group are compared with each other, so they share the length that tau schedules go by: that of
    the longest, question included. seed: of noise inside methods. whole: a text alone, of which a ratio is taken whole.
    base: tokens that ratios are of under the row mask (0: the ask's own). cut: tokens lost on the left.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    question: tuple[int, ...] = ()
    group: Hashable = None
    seed: int = 0
    whole: bool = False
    base: int = 0
    cut: int = 0

    @property
    def ahead(self) -> int:
        """Tokens to come after the prefill."""
        return len(self.question) + len(self.continuation)

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.context, *self.question, *self.continuation)


@dataclass(frozen=True)
class Judged:
    """tokens of the continuation; what eviction did; seconds of its prefill."""

    tokens: list[Token]
    receipt: EvictionStats
    prefill_s: float

    @property
    def total(self) -> float:
        """Log-probability of the continuation, in nats."""
        return float(sum(token.logprob for token in self.tokens))

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would have given exactly this."""
        return all(token.is_greedy for token in self.tokens)


def fitted(ask: Ask, holds: int) -> Ask | None:
    """The ask with its left end cut so that `holds` positions do; the last token is fed to nobody. None: it cannot."""
    over = len(ask.ids) - 1 - holds
    if over <= 0:
        return ask
    return replace(ask, context=ask.context[over:], cut=over) if over < len(ask.context) else None


def padded(asks: Sequence[Ask], batch: int, whole_text: bool) -> list[Ask]:
    """The asks with the length of their batch as base: longest first, `batch` at a time, padded to the longest.

    What lm-eval 0.4.0 fed a model, except that batches hold one task. Whatever an ask's batch, its own logits are
    causal; only its budget comes to depend on the neighbours.
    """
    order = sorted(range(len(asks)), key=lambda i: (-len(asks[i].ids), asks[i].ids))
    made = list(asks)
    for place, index in enumerate(order):
        longest = len(asks[order[place - place % batch]].ids)
        made[index] = replace(asks[index], base=longest - (not whole_text))
    return made
