"""Three ways to drop slots that must agree: overwrite in place, compact by gathering, mask and drop nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.core.budget import Budget
from kvexp.core.cache_config import CacheConfig
from kvexp.core.method import EvictionContext, Method, checked
from kvexp.core.select import keepers, victims
from kvexp.core.slots import Slots
from kvexp.errors import ConfigError

PROTECTING = ("n_sinks", "recent_ratio", "protect_recent", "window")  # settings of methods


@dataclass
class ResolvedBudget:
    """The integers of one layer: slots k, kept between steps, protected; per batch row, host list and tensor [B]."""

    slots: list[int]
    kept: list[int]
    recent: list[int]
    slots_t: Tensor
    kept_t: Tensor
    recent_t: Tensor

    @classmethod
    def of(cls, method: Method, slots: list[int], *, counts_self: bool, device: torch.device) -> ResolvedBudget:
        # The token being generated is one of the recent ones where it is one of the budget.
        windows = [window(method, k, counts_self=counts_self) for k in slots]
        recents = [max(recent - 1, 0) if counts_self else recent for recent in windows]
        kept = [k - 1 if counts_self else k for k in slots]
        tensors = [torch.tensor(x, dtype=torch.int64, device=device) for x in (slots, kept, recents)]
        return cls(slots, kept, recents, *tensors)

    @classmethod
    def resolved(
        cls,
        config: CacheConfig,
        lengths: Sequence[int],
        padded: int,
        new: int | None,
        layer: int,
        layers: int,
        device: Any,
    ) -> ResolvedBudget:
        """What the configuration's budget grants a layer for prompts of these lengths; `new`: max_new_tokens."""
        budget, method = config.budget, config.method
        assert budget is not None
        slots = granted(method, budget, lengths, padded, new, layer, layers)
        return cls.of(method, slots, counts_self=budget.counts_self, device=device)

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        if not same_prompts:
            self.slots = [self.slots[i] for i in rows.tolist()]
            self.kept = [self.kept[i] for i in rows.tolist()]
            self.recent = [self.recent[i] for i in rows.tolist()]
        rows = rows.to(self.slots_t.device)
        self.slots_t, self.kept_t, self.recent_t = self.slots_t[rows], self.kept_t[rows], self.recent_t[rows]


def granted(
    method: Method, budget: Budget, lengths: Sequence[int], padded: int, new: int | None, layer: int, layers: int
) -> list[int]:
    """Slots per kv head of one layer for prompts of so many tokens; `new`: max_new_tokens. ConfigError where they
    cannot hold what the method protects."""
    slots = budget.resolve(lengths, padded, new, layer, layers)
    slots = [method.allowance(k, length) for k, length in zip(slots, lengths, strict=True)]
    for k in slots:
        window(method, k, counts_self=budget.counts_self)
    return slots


def check_budget(config: CacheConfig, lengths: Sequence[int], padded: int, new: int | None, layers: int) -> None:
    """ConfigError where some layer's slots cannot hold what the method protects of prompts of these lengths.

    padded: columns of the prompts; new: max_new_tokens.
    """
    if config.budget is None or not config.method.evicts:
        return
    for layer in range(layers):
        granted(config.method, config.budget, lengths, padded, new, layer, layers)


def window(method: Method, slots: int, *, counts_self: bool) -> int:
    """The newest tokens that are protected; ConfigError where the slots cannot hold them and the sinks."""
    recent = method.recent(slots)
    if not isinstance(recent, int):
        raise ConfigError(
            f"{type(method).__qualname__}.recent must return a whole number of tokens, got {recent!r:.60}"
        )
    itself = 1 if counts_self and method.sinks and not recent else 0
    if method.sinks + recent + itself > slots:
        protects = [name for name in PROTECTING if hasattr(method, name)]
        raise ConfigError(
            f"budget of {slots} slots cannot hold sink={method.sinks} + recent={recent}"
            + (" + the token being generated" if itself else "")
            + f" of {method.name}; raise kv_ratio (or budget.tokens), or lower method.{' or method.'.join(protects)}"
        )
    return recent


def protected(method: Method, now: EvictionContext, quota: ResolvedBudget) -> Tensor:
    """[B, H, S] bool: sinks and the recent window. By mask, never by adding a large number to a score."""
    positions = now.positions
    recent = positions > (now.newest - quota.recent_t)[:, None, None]
    return (positions >= 0) & (recent | (positions < method.sinks))


def ranked(method: Method, now: EvictionContext, sliding_window: int | None) -> Tensor:
    """The method's rank, with slots that a sliding window has already passed put last, and NaN never first."""
    made = checked(method.rank(now), now.positions.shape, method, "rank", "[B, H, S]")
    rank = made.to(torch.float32).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if sliding_window is not None:
        rank = rank.masked_fill(now.age() + 1 >= sliding_window, -torch.inf)
    return rank


class EvictionBackend:
    """How slots are dropped. As it stands here a mode keeps no state and appends every newcomer."""

    full = False  # after the last eviction every row held as many tokens as its budget allows: dead is what is closed
    dense = False  # and nothing was closed: dead were only the slots for the next newcomers

    def place(self) -> Tensor | None:
        """The slot [B, H, 1] that the next single newcomer takes, or None: append."""
        return None

    def loosen(self) -> None:
        """Several tokens come at once: they are appended, and the next eviction gathers again."""

    def evict(self, slots: Slots, rank: Tensor, guard: Tensor, quota: ResolvedBudget, limbo: Tensor | None) -> None:
        """Bring every row down to its quota. rank, guard, limbo [B, H, S]."""
        raise NotImplementedError

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""


class InPlace(EvictionBackend):
    """Fixed capacity: kept slots plus `every` free ones that newcomers fill; then as many are freed. No gather, no cat.

    Until the first row runs out of budget, slots simply grow; that moment gathers once, into the fixed layout.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.free: Tensor | None = None  # [B, H, every] slots for the next newcomers
        self.closed: Tensor | None = None  # [B, 1, P] slots beyond a row's own budget
        self.cursor = 0

    def place(self) -> Tensor | None:
        if self.free is None or self.cursor >= self.free.shape[-1]:
            return None
        self.cursor += 1
        return self.free[..., self.cursor - 1 : self.cursor]

    @property
    def steady(self) -> bool:
        """Is exactly one slot per head free, so that the next token fits and the next eviction frees one again?"""
        return self.every == 1 and self.free is not None and self.closed is not None and self.cursor == 0

    def take(self) -> Tensor:
        """`place`, of a steady cache."""
        assert self.free is not None
        self.cursor += 1
        return self.free

    def give(self, free: Tensor) -> None:
        """These slots [B, H, every] are free for the next newcomers."""
        self.free, self.cursor = free, 0

    def loosen(self) -> None:
        self.free = self.closed = None

    def evict(self, slots: Slots, rank: Tensor, guard: Tensor, quota: ResolvedBudget, limbo: Tensor | None) -> None:
        if self.free is not None and self.closed is not None and slots.used == self.closed.shape[-1]:
            self.give(victims(rank, slots.positions, guard, self.closed, self.free.shape[-1]))
            slots.kill(self.free)
            return
        if self.every is None:
            gather(slots, rank, guard, quota, 0)
            return
        # Room for the longest row, even if that row has not filled its budget yet.
        gather(slots, rank, guard, quota, max(max(quota.kept) - slots.used, 0) + self.every)
        places = torch.arange(slots.used, device=rank.device)
        self.closed = places >= (quota.kept_t + self.every)[:, None, None]
        first = quota.kept_t[:, None, None]
        self.free = (first + torch.arange(self.every, device=rank.device)).expand(-1, rank.shape[1], -1).contiguous()
        self.cursor = 0

    def select_rows(self, rows: Tensor) -> None:
        if self.free is not None and self.closed is not None:
            rows = rows.to(self.free.device)
            self.free, self.closed = self.free[rows], self.closed[rows]


class Compacting(EvictionBackend):
    """Gather the kept slots, in order of position, at every eviction: slow, obvious."""

    def evict(self, slots: Slots, rank: Tensor, guard: Tensor, quota: ResolvedBudget, limbo: Tensor | None) -> None:
        gather(slots, rank, guard, quota, 0)


class Mask(EvictionBackend):
    """Simulate: nothing is dropped, evicted slots are no longer visible and their score is -inf for good."""

    def evict(self, slots: Slots, rank: Tensor, guard: Tensor, quota: ResolvedBudget, limbo: Tensor | None) -> None:
        score, positions = slots.score[:, :, : slots.used], slots.positions[:, :, : slots.used]
        assert slots.visible is not None
        visible = slots.visible[:, :, : slots.used]
        candidates = score > -torch.inf
        if limbo is not None:
            candidates = candidates & ~limbo
        eligible = positions.masked_fill(~candidates, -1)
        index, keep = keepers(rank, eligible, guard & candidates, quota.kept_t, min(max(quota.kept), slots.used))
        visible.zero_()
        visible.scatter_(-1, index, keep)
        stays = visible if limbo is None else visible | (limbo & (score > -torch.inf))
        score.masked_fill_(~stays, -torch.inf)


def gather(slots: Slots, rank: Tensor, guard: Tensor, quota: ResolvedBudget, spare: int) -> None:
    """Keep every row's best slots in order of position, with `spare` dead slots behind the longest row."""
    widest = min(max(quota.kept), slots.used)
    index, keep = keepers(rank, slots.positions[:, :, : slots.used], guard, quota.kept_t, widest)
    slots.gather(index, keep, spare)


def mode_of(name: str, every: int | None) -> EvictionBackend:
    """The mode called `name`; `every` is the cadence in decode steps."""
    if name == "overwrite":
        return InPlace(every)
    return Compacting() if name == "compact" else Mask()
