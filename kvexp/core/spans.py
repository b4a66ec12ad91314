"""Marked spans of a prompt, such as a system prompt or one instruction of several, which an eviction is to spare.

Two remedies for any method, after "The Pitfalls of KV Cache Compression" (arXiv:2510.00231): spans that are never
evicted ("span"; the paper whitelists tokens), and spans that lose no larger share than the rest of the prompt ("fair").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.core.cache_settings import CacheSettings, Keep
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.select import keep_mask
from kvexp.errors import ConfigError

Span = tuple[int, int]  # first position and the one behind the last, among the real tokens of a prompt


def obstacle(config: CacheSettings) -> str | None:
    """Why marked spans cannot be spared under this configuration, and what to change; None if they can."""
    method = config.method
    if not method.evicts or method.full_cache or method.per_query:
        return f"method {method.name} evicts nothing that could be spared: leave out keep={config.keep}"
    if config.shares_by_preference:
        setting = config.layers_setting
        return f"{setting} gives layers numbers that no span is known to fit: leave out keep={config.keep}"
    if config.is_ragged:
        assert config.budget is not None
        gives = f"{config.budget.heads_setting} gives heads different numbers"
        return f"{gives}, and a span's share is of one: leave out keep={config.keep}"
    if config.mode == "mask" and method.simulation_only:
        return f"method {method.name} hides slots by a rule of its own: leave out keep={config.keep}"
    return None


@dataclass
class MarkedSpans:
    """The marked spans of a batch of prompts, by position id.

    number [B, P + 1] int64: which span a prompt position belongs to, from 0, -1 for none; the last entry stands for
    positions behind the prompts. lengths: tokens of each span of each row; prompts: real tokens of each row.
    """

    number: Tensor
    lengths: list[list[int]]
    prompts: list[int]

    @classmethod
    def of(cls, spans: Sequence[Sequence[Span]], prompts: Sequence[int]) -> MarkedSpans:
        """Spans per row, in order and apart; ConfigError where one is empty, overlaps another or leaves its prompt."""
        number = torch.full((len(prompts), max(prompts) + 1), -1, dtype=torch.int64)
        for row, (each, length) in enumerate(zip(spans, prompts, strict=True)):
            end = 0
            for place, (first, behind) in enumerate(each):
                if not end <= first < behind <= length:
                    raise ConfigError(
                        f"row {row}: span {place} is tokens {first} to {behind} of a prompt of {length}; spans are not "
                        "empty, in order, and do not overlap"
                    )
                number[row, first:behind] = place
                end = behind
        return cls(number, [[behind - first for first, behind in each] for each in spans], list(prompts))

    def of_slots(self, positions: Tensor) -> Tensor:
        """The span [B, H, S] of every slot, -1 for none; positions [B, H, S]: position ids, -1 for dead slots."""
        last = self.number.shape[1] - 1
        places = torch.where(positions < 0, last, positions.clamp_max(last)).flatten(1)
        self.number = self.number.to(positions.device)
        return self.number.gather(1, places).view_as(positions)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        self.number = self.number[rows.to(self.number.device)]
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        self.prompts = [self.prompts[row] for row in rows.tolist()]


def spare(
    keep: Keep,
    spans: MarkedSpans,
    priority: Tensor,
    protected: Tensor,
    held: Tensor,
    positions: Tensor,
    resolved: ResolvedBudget,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """Priority and protected slots [B, H, S] of an eviction that spares the spans, from those of the method.

    held [B, H, S] bool: slots that hold a token; positions [B, H, S]; sinks: of the method. "span" protects every slot
    of a span. "fair" gives a span of n of a prompt's T tokens floor((kept - recent - sinks) * n / T) slots, the best by
    the method's priority, and takes its other slots first: so all parts of the prompt lose the same share. What sinks
    and recent window protect anyway is not counted. The share stays while the answer grows.
    """
    number = spans.of_slots(positions)
    if keep == "span":
        return priority, protected | ((number >= 0) & held)
    chosen = torch.zeros_like(protected)
    for place in range(max(map(len, spans.lengths))):
        members = (number == place) & held & ~protected
        shares = [
            max(0, kept - recent - sinks) * lengths[place] // prompt if place < len(lengths) else 0
            for kept, recent, lengths, prompt in zip(
                resolved.keep, resolved.recent, spans.lengths, spans.prompts, strict=True
            )
        ]
        most = min(max(shares), priority.shape[-1])
        if most:
            share = torch.tensor(shares, device=priority.device)
            eligible = positions.masked_fill(~members, -1)
            chosen |= keep_mask(priority, eligible, torch.zeros_like(protected), share, most) & members
    rest = (number >= 0) & ~chosen & ~protected
    return priority.masked_fill(rest, -torch.inf), protected | chosen
