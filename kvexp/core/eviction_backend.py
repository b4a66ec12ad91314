"""Budgets as integers per row, and three ways to drop slots that keep the same ones: overwrite, compact, mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.core.budget import Budget
from kvexp.core.cache_config import CacheConfig
from kvexp.core.head_budgets import StreamingHeads, retrieval_heads
from kvexp.core.layer_budgets import LayerBudgets, layer_budgets_of
from kvexp.core.method import EvictionContext, Method, checked
from kvexp.core.ragged_slots import RaggedSlots
from kvexp.core.select import select_evict, select_keep
from kvexp.core.slots import Slots
from kvexp.errors import ConfigError

# On a CPU, MKL sums the last columns of a product in another order where their number is no multiple of this.
CPU_WIDTH_MULTIPLE = 4
PROTECTING = ("n_sinks", "recent_ratio", "protect_recent", "window")  # settings of methods


@dataclass
class ResolvedBudget:
    """The budget of one layer as integers per batch row, each as a list on the host and as an int64 tensor [B].

    slots: the budget k; keep: slots kept after an eviction (k - 1 where the token being generated counts); recent:
    newest tokens that are protected at an eviction. head_keep [B][H]: slots that each kv head keeps, where heads were
    given different numbers (`share_out`); None: `keep` for all. streaming: which kv heads hold sinks and newest tokens
    whatever the method says; None: no head.
    """

    slots: list[int]
    keep: list[int]
    recent: list[int]
    slots_t: Tensor
    keep_t: Tensor
    recent_t: Tensor
    head_keep: list[list[int]] | None = None
    head_keep_t: Tensor | None = None
    streaming: StreamingHeads | None = None

    @classmethod
    def from_slots(cls, method: Method, slots: list[int], *, counts_self: bool, device: torch.device) -> ResolvedBudget:
        """Keep and recent window for `slots` slots per kv head, one number per batch row.

        counts_self: as of `Budget`. ConfigError where sinks and recent window of the method do not fit into the slots.
        """
        # The token being generated is one of the recent ones where it is one of the budget.
        windows = [window(method, k, counts_self=counts_self) for k in slots]
        recents = [max(recent - 1, 0) if counts_self else recent for recent in windows]
        kept = [k - 1 if counts_self else k for k in slots]
        slots_t, kept_t, recent_t = (torch.tensor(x, dtype=torch.int64, device=device) for x in (slots, kept, recents))
        return cls(slots, kept, recents, slots_t, kept_t, recent_t)

    @classmethod
    def from_config(
        cls,
        config: CacheConfig,
        lengths: Sequence[int],
        padded: int,
        new: int | None,
        layer: int,
        layers: int,
        device: Any,
        preferences: Sequence[Sequence[float]] | None = None,
    ) -> ResolvedBudget:
        """The budget of layer `layer` (of `layers`) under a configuration.

        lengths: real prompt tokens of each row; padded: prompt columns; new: max_new_tokens; preferences: as of
        `granted`. ConfigError as of `granted`.
        """
        budget, method = config.budget, config.method
        assert budget is not None
        slots = granted(method, budget, lengths, padded, new, layer, layers, preferences)
        made = cls.from_slots(method, slots, counts_self=budget.counts_self, device=device)
        if budget.threshold is not None:
            made.recent = [min(budget.newest, length) for length in lengths]
            made.recent_t = torch.tensor(made.recent, dtype=torch.int64, device=device)
        if budget.heads == "duo" and config.head_scores is not None:
            itself = 1 if budget.counts_self else 0
            heads = [
                retrieval_heads(budget, k, n, new, config.head_scores) for k, n in zip(slots, lengths, strict=True)
            ]
            full = torch.stack([each[layer] for each in heads]).to(device)
            whole = torch.tensor([n + (new or 0) for n in lengths], device=device)[:, None]
            made.streaming = StreamingHeads(~full, budget.stream[0])
            made.share_out(torch.where(full, whole, sum(budget.stream)) - itself, full.shape[1])
        return made

    def share_out(self, by_head: Tensor | None, heads: int) -> None:
        """From now on kv heads keep by_head [B, H] slots; None: `keep` each. heads: H."""
        by_head = self.keep_t[:, None].expand(-1, heads) if by_head is None else by_head
        self.head_keep, self.head_keep_t = by_head.tolist(), by_head.contiguous()

    @property
    def recent_by_head(self) -> Tensor:
        """Newest tokens that are protected at an eviction, [B, H], or [B, 1] where heads do not differ."""
        recent = self.recent_t[:, None]
        return recent if self.streaming is None else recent.masked_fill(self.streaming.heads, 0)

    def sinks_by_head(self, method: Method) -> int | Tensor:
        """First tokens that are never evicted: the method's, or [B, H] where heads differ."""
        if self.streaming is None:
            return method.sinks
        return torch.where(self.streaming.heads, self.streaming.sinks, method.sinks)

    def by_stream(self, priority: Tensor, positions: Tensor) -> Tensor:
        """The priority [B, H, S] of the method, and recency in streaming heads; positions [B, H, S]."""
        if self.streaming is None:
            return priority
        return torch.where(self.streaming.heads[..., None], positions.to(priority.dtype), priority)

    @property
    def keep_by_head(self) -> Tensor:
        """Slots kept after an eviction, [B, H], or [B, 1] where all heads keep the same number."""
        return self.keep_t[:, None] if self.head_keep_t is None else self.head_keep_t

    @property
    def most(self) -> list[int]:
        """Per row, the slots kept by the head that keeps most."""
        return self.keep if self.head_keep is None else [max(heads) for heads in self.head_keep]

    @property
    def least(self) -> list[int]:
        """Per row, the slots kept by the head that keeps fewest."""
        return self.keep if self.head_keep is None else [min(heads) for heads in self.head_keep]

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: only among the beams of a sample, of equal budgets."""
        if self.streaming is not None:
            self.streaming = self.streaming.of_rows(rows)
        if self.head_keep is not None and self.head_keep_t is not None:
            self.head_keep = [self.head_keep[i] for i in rows.tolist()]
            self.head_keep_t = self.head_keep_t[rows.to(self.head_keep_t.device)]
        if not same_prompts:
            self.slots = [self.slots[i] for i in rows.tolist()]
            self.keep = [self.keep[i] for i in rows.tolist()]
            self.recent = [self.recent[i] for i in rows.tolist()]
        rows = rows.to(self.slots_t.device)
        self.slots_t, self.keep_t, self.recent_t = self.slots_t[rows], self.keep_t[rows], self.recent_t[rows]


def granted(
    method: Method,
    budget: Budget,
    lengths: Sequence[int],
    padded: int,
    new: int | None,
    layer: int,
    layers: int,
    preferences: Sequence[Sequence[float]] | None = None,
) -> list[int]:
    """Slots per kv head of one layer, one number per prompt: its share, after the method's `effective_budget`.

    lengths: real tokens of each prompt; padded: columns of the prompts; new: max_new_tokens; layer: its number, of
    `layers`; preferences [B][L]: of every prompt and layer, where shares go by them; None: not known yet, and every
    layer has the mean. ConfigError where the slots cannot hold sinks and recent window of the method.
    """
    slots = budget.resolve(lengths, padded, new, layer, layers)
    how = layer_budgets_of(method, budget)
    told: Sequence[Sequence[float] | None] = [None] * len(lengths) if preferences is None else preferences
    if type(how) is not LayerBudgets:
        least = [least_slots(method, k, n, budget.counts_self) for k, n in zip(slots, lengths, strict=True)]
        rows = zip(slots, lengths, least, told, strict=True)
        slots = [how.share(k, n, few, layers, each)[layer] for k, n, few, each in rows]
    slots = [method.effective_budget(k, length) for k, length in zip(slots, lengths, strict=True)]
    for k in slots:
        window(method, k, counts_self=budget.counts_self)
    return slots


def check_budget(config: CacheConfig, lengths: Sequence[int], padded: int, new: int | None, layers: int) -> None:
    """ConfigError where in some layer sinks and recent window do not fit into the slots of one of these prompts.

    lengths: real tokens of each prompt; padded: columns of the prompts; new: max_new_tokens.
    """
    if config.budget is None or not config.method.evicts:
        return
    for layer in range(layers):
        slots = granted(config.method, config.budget, lengths, padded, new, layer, layers)
    if config.budget.heads == "duo" and config.head_scores is not None:
        for k, length in zip(slots, lengths, strict=True):
            retrieval_heads(config.budget, k, length, new, config.head_scores)


def may_evict(config: CacheConfig, lengths: Sequence[int], padded: int, new: int | None, layers: int) -> bool:
    """Whether some layer's budget is smaller than one of these prompts; arguments as of `check_budget`."""
    if config.budget is None or not config.method.evicts:
        return False
    if config.budget.threshold is not None:
        return True
    itself = 1 if config.budget.counts_self else 0
    budgets = (granted(config.method, config.budget, lengths, padded, new, layer, layers) for layer in range(layers))
    return any(n > k - itself for slots in budgets for n, k in zip(lengths, slots, strict=True))


def least_slots(method: Method, slots: int, length: int, counts_self: bool) -> int:
    """The fewest slots, `slots` at most, that hold sinks and recent window of the method; length: of the prompt."""
    few, enough = 1, slots
    while few < enough:
        tried = (few + enough) // 2
        try:
            window(method, method.effective_budget(tried, length), counts_self=counts_self)
            enough = tried
        except ConfigError:
            few = tried + 1
    return few


def window(method: Method, slots: int, *, counts_self: bool) -> int:
    """How many of the newest tokens are protected where a kv head has `slots` slots: the method's `recent`.

    counts_self: as of `Budget`. ConfigError where the slots cannot hold sinks and recent window.
    """
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


def protected_mask(method: Method, ctx: EvictionContext, resolved: ResolvedBudget) -> Tensor:
    """[B, H, S] bool: the slots of sinks and of the recent window, which are never evicted."""
    positions, sinks = ctx.positions, resolved.sinks_by_head(method)
    recent = positions > (ctx.newest[:, None] - resolved.recent_by_head)[..., None]
    return (positions >= 0) & (recent | (positions < (sinks if isinstance(sinks, int) else sinks[..., None])))


def float_priority(method: Method, ctx: EvictionContext) -> Tensor:
    """The method's priority [B, H, S] in float32, NaN as -inf; ConfigError where it returns no tensor of that shape."""
    priority = checked(method.priority(ctx), ctx.positions.shape, method, "priority", "[B, H, S]")
    return priority.to(torch.float32).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def masked_priority(method: Method, ctx: EvictionContext, sliding_window: int | None) -> Tensor:
    """`float_priority` [B, H, S], with slots behind the model's sliding window (in tokens; None: no window) as -inf."""
    priority = float_priority(method, ctx)
    if sliding_window is not None:
        priority = priority.masked_fill(ctx.age() + 1 >= sliding_window, -torch.inf)
    return priority


class EvictionBackend:
    """How evicted slots are dropped, and where new tokens are written. This base appends new tokens and holds no state.

    at_budget: after the last eviction every row held as many tokens as its budget allows, so dead slots are those
    outside the budget. no_padding_slots: at_budget, and no slot was outside a row's budget.
    """

    at_budget = False
    no_padding_slots = False

    def next_slot(self) -> Tensor | None:
        """The slot [B, H, 1] that the next single token is written to; None: it is appended."""
        return None

    def reset_layout(self) -> None:
        """Give up the fixed layout, because several tokens come at once: they are appended, and the next eviction
        compacts.
        """

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        """Evict until every row holds `resolved.keep` tokens.

        priority [B, H, S] float32, higher is kept; protected [B, H, S] bool; hidden_next_step: see `Method`.
        """
        raise NotImplementedError

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""


class InPlace(EvictionBackend):
    """Mode overwrite: buffers of fixed size, in which a new token takes the slot of an evicted one.

    They hold the budget's slots and `every` free ones, the decode steps between evictions. New tokens fill the free
    slots; when none is left, the next eviction frees `every` slots again, and no other slot moves. Before that, slots
    are appended until a row exceeds its budget: the first eviction compacts once, into this layout. every=None: no
    eviction while decoding. Caches that can share a decode step with others (every=1) have as many slots as
    `stackable_width` says; those beyond the budget are never used.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.free_slots: Tensor | None = None  # [B, H, every] slots for the next tokens
        self.out_of_budget: Tensor | None = None  # [B, 1 or H, C] bool: slots beyond a row's or head's own budget
        self.num_used = 0

    def next_slot(self) -> Tensor | None:
        """The next free slot [B, H, 1], taken from now on; None where none is left, or before the first eviction."""
        if self.free_slots is None or self.num_used >= self.free_slots.shape[-1]:
            return None
        self.num_used += 1
        return self.free_slots[..., self.num_used - 1 : self.num_used]

    @property
    def is_steady(self) -> bool:
        """Whether exactly one slot per head is free: the next token fits, and the next eviction frees one again."""
        return self.every == 1 and self.free_slots is not None and self.out_of_budget is not None and self.num_used == 0

    def pop_free(self) -> Tensor:
        """Take and return the free slot [B, H, 1] of every head; for backends that are `is_steady`."""
        assert self.free_slots is not None
        self.num_used += 1
        return self.free_slots

    def set_free(self, free: Tensor) -> None:
        """Declare the slots [B, H, every] free: the next tokens are written to them."""
        self.free_slots, self.num_used = free, 0

    def reset_layout(self) -> None:
        self.free_slots = self.out_of_budget = None

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        """Free `every` slots of the fixed layout; before there is one, compact into it."""
        if (
            self.free_slots is not None
            and self.out_of_budget is not None
            and slots.length == self.out_of_budget.shape[-1]
        ):
            self.set_free(
                select_evict(priority, slots.positions, protected, self.out_of_budget, self.free_slots.shape[-1])
            )
            slots.invalidate(self.free_slots)
            return
        if self.every is None:
            compact(slots, priority, protected, resolved, 0)
            return
        # Room for the longest row or head, even if it has not filled its budget yet.
        most = max(resolved.most)
        width = most + self.every
        if resolved.head_keep is not None:
            width = ragged_width(width)
        elif self.every == 1:
            width = stackable_width(width, priority.device)
        compact(slots, priority, protected, resolved, width - min(most, slots.length), free=self.every)
        index = torch.arange(slots.length, device=priority.device)
        first = resolved.keep_by_head[..., None]
        self.out_of_budget = index >= first + self.every
        self.free_slots = (
            (first + torch.arange(self.every, device=priority.device)).expand(-1, priority.shape[1], -1).contiguous()
        )
        self.num_used = 0

    def select_rows(self, rows: Tensor) -> None:
        if self.free_slots is not None and self.out_of_budget is not None:
            rows = rows.to(self.free_slots.device)
            self.free_slots, self.out_of_budget = self.free_slots[rows], self.out_of_budget[rows]


class Compacting(EvictionBackend):
    """Mode compact: copies the kept slots into new buffers, in order of position, at every eviction.

    Slower than `InPlace` and simpler, so tests compare `InPlace` with it.
    """

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        compact(slots, priority, protected, resolved, 0)


class Mask(EvictionBackend):
    """Mode mask, a simulation: nothing is dropped; evicted slots are no longer visible and their score stays -inf."""

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        score, positions = slots.score[:, :, : slots.length], slots.positions[:, :, : slots.length]
        assert slots.visible is not None
        visible = slots.visible[:, :, : slots.length]
        candidates = score > -torch.inf
        if hidden_next_step is not None:
            candidates = candidates & ~hidden_next_step
        eligible = positions.masked_fill(~candidates, -1)
        index, keep = select_keep(
            priority, eligible, protected & candidates, resolved.keep_by_head, min(max(resolved.most), slots.length)
        )
        visible.zero_()
        visible.scatter_(-1, index, keep)
        stays = visible if hidden_next_step is None else visible | (hidden_next_step & (score > -torch.inf))
        score.masked_fill_(~stays, -torch.inf)


def compact(
    slots: Slots, priority: Tensor, protected: Tensor, resolved: ResolvedBudget, reserve: int, free: int = 0
) -> None:
    """Keep the slots of highest priority in every row, in order of position, with `reserve` dead slots behind.

    priority [B, H, S] float32; protected [B, H, S] bool: slots that are kept first; `resolved.keep_by_head` slots are
    kept. free: where heads keep different numbers, dead slots behind each head's own, for tokens to come.
    """
    max_keep = min(max(resolved.most), slots.length)
    positions = slots.positions[:, :, : slots.length]
    index, keep = select_keep(priority, positions, protected, resolved.keep_by_head, max_keep)
    if isinstance(slots, RaggedSlots) and resolved.head_keep is not None:
        slots.pack(index, keep, reserve, [[kept + free for kept in heads] for heads in resolved.head_keep])
    else:
        slots.gather(index, keep, reserve)


def stackable_width(slots: int, device: torch.device) -> int:
    """`slots`, on a CPU rounded up to a multiple of CPU_WIDTH_MULTIPLE.

    Then dead slots behind its own, which a cache has in a stack with a larger one, change no bit of its logits (nor of
    its probabilities, from 16 slots on: torch sums a softmax of fewer in another order).
    """
    return -(-slots // CPU_WIDTH_MULTIPLE) * CPU_WIDTH_MULTIPLE if device.type == "cpu" else slots


def ragged_width(slots: int) -> int:
    """`slots` rounded up to a multiple of 16: columns of positions and score where heads keep different numbers.

    Then a softmax, which torch sums by 16 on some processors, does not depend on the widest head of the batch.
    """
    return -(-slots // 16) * 16


def make_backend(name: str, every: int | None) -> EvictionBackend:
    """The backend of cache.mode=name; every: decode steps between evictions, None for never."""
    if name == "overwrite":
        return InPlace(every)
    return Compacting() if name == "compact" else Mask()
