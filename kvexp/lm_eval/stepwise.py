"""The protocol prefill_then_step: a context is prefilled and evicted once, then forked for what follows it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvexp.core import CacheConfig
from kvexp.generate import PrefilledContext, can_score_in_one_forward, prefill, receipts, score_tokens
from kvexp.generate.inputs import rows_that_fit
from kvexp.lm_eval.requests import Ask, Judged
from kvexp.models.moving_rope import MovingRope


@dataclass(frozen=True)
class Stepwise:
    """A model and what its caches do; at most `batch_size` rows in a forward. tokenizer: the model's."""

    model: Any
    cache: CacheConfig
    batch_size: int
    tokenizer: Any = None

    def measure(self, asks: Sequence[Ask]) -> list[Judged]:
        """One per ask, in order: what it would be alone, whatever is measured beside it.

        Asks of equal context and seed share a prefill. Of a text alone a ratio is a share of the whole text, for its
        context is the start token.
        """
        made: dict[int, Judged] = {}
        ahead = _ahead(asks)
        for whole, places in self._alike(asks, ahead):
            contexts: dict[Any, list[int]] = defaultdict(list)
            for place in places:
                contexts[asks[place].seed, asks[place].context].append(place)
            keys = list(contexts)
            for start in range(0, len(keys), self.batch_size):
                some = keys[start : start + self.batch_size]
                rows = [(row, place) for row, key in enumerate(some) for place in contexts[key]]
                longest = max(ahead[place] for _, place in rows)
                cache = of_whole(self.cache) if whole else self.cache
                seeds, prompts = [seed for seed, _ in some], [ids for _, ids in some]
                context = prefill(
                    self.model, prompts, cache, max_new_tokens=longest, seeds=seeds, tokenizer=self.tokenizer
                )
                made |= self._judge(asks, context, rows, longest)
        return [made[place] for place in range(len(asks))]

    def _alike(self, asks: Sequence[Ask], ahead: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
        """(whole, places): asks that one cache can serve; schedules and budgets that look ahead must end together."""
        spec, budget = self.cache.method.score_spec, self.cache.budget
        scheduled = (spec is not None and spec.tau[0] != spec.tau[1]) or (
            budget is not None and budget.of == "sequence"
        )
        parts: dict[Any, list[int]] = defaultdict(list)
        for place, ask in enumerate(asks):
            parts[ask.whole, ahead[place] if scheduled or ask.whole else None].append(place)
        for (whole, _), places in parts.items():
            yield whole, places

    def _judge(
        self, asks: Sequence[Ask], context: PrefilledContext, rows: Sequence[tuple[int, int]], ahead: int
    ) -> dict[int, Judged]:
        """rows: (row of the context, place of the ask); ahead: tokens the context expects."""
        made, moves = {}, MovingRope.of(self.model.config) is not None
        once = [row for row, _ in rows] == list(range(len(context.ids)))
        for some in self._together(asks, context, rows):
            forks = context if once and len(some) == len(rows) else context.fork([row for row, _ in some])
            tokens = score_tokens(
                self.model,
                forks,
                [asks[place].continuation for _, place in some],
                [asks[place].question for _, place in some],
                max_new_tokens=ahead,
                one_forward=can_score_in_one_forward(forks.cache.config) and not moves,
            )
            for (_, place), judgement, receipt in zip(some, tokens, receipts(forks.cache), strict=True):
                made[place] = Judged(judgement, receipt, context.seconds)
        return made

    def _together(
        self, asks: Sequence[Ask], context: PrefilledContext, rows: Sequence[tuple[int, int]]
    ) -> Iterator[Sequence[tuple[int, int]]]:
        """The rows in groups of at most batch_size that the model holds together."""
        lengths, endless = context.lengths, context.cache.sequence.max_positions is None
        for start in range(0, len(rows), self.batch_size):
            some = rows[start : start + self.batch_size]
            ahead = [asks[place].ahead for _, place in some]
            for size in rows_that_fit(self.model, [lengths[row] for row, _ in some], ahead, endless):
                yield some[:size]
                some = some[size:]


def of_whole(cache: CacheConfig) -> CacheConfig:
    """The same for a text alone, whose context is the start token: a ratio is of the whole text."""
    if cache.budget is None or cache.budget.kv_ratio is None:
        return cache
    return dataclasses.replace(cache, budget=dataclasses.replace(cache.budget, of="sequence"))


def _ahead(asks: Sequence[Ask]) -> list[int]:
    """Tokens to come after each ask's prefill as schedules see it: those of the longest ask of its group."""
    groups = [place if ask.group is None else (ask.group,) for place, ask in enumerate(asks)]
    longest: dict[Any, int] = defaultdict(int)
    for group, ask in zip(groups, asks, strict=True):
        longest[group] = max(longest[group], ask.ahead)
    return [longest[group] for group in groups]
