"""What slots a layer gets of a budget, for a prompt of given length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.core.budget import Budget, LayerBudgets
from kvexp.core.budget_shares import StreamingHeads, layer_budgets_of, retrieval_heads
from kvexp.core.config import CacheConfig
from kvexp.core.method import Method
from kvexp.core.sequence import Span
from kvexp.util import ConfigError

# Slots that a budget grants to one layer for prompts of known lengths, and whether a method's own slots fit in.


PROTECTING = ("n_sinks", "recent_ratio", "protect_recent", "window")  # settings of methods


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


# The budget of one layer as integers per batch row, and per kv head where heads differ.


@dataclass
class ResolvedBudget:
    """The budget of one layer as integers per batch row, each as a list on the host and as an int64 tensor [B].

    slots: the budget k; keep: slots kept after an eviction (k - 1 where the token being generated counts); recent:
    newest tokens that are protected at an eviction. head_keep [B][H]: slots that each kv head keeps, where heads were
    given different numbers (`share_out`); None: `keep` for all. streaming: which kv heads hold sinks and newest tokens
    whatever the method says; None: no head. new_tokens: tokens after the prompt that retrieval heads, which are all
    others then, have room for.
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
    new_tokens: int = 0

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

    def share_out(self, by_head: Tensor | None, heads: int) -> None:
        """From now on kv heads keep by_head [B, H] slots; None: `keep` each. heads: H."""
        by_head = self.keep_t[:, None].expand(-1, heads) if by_head is None else by_head
        self.head_keep, self.head_keep_t = by_head.tolist(), by_head.contiguous()

    def lacks_room(self, new: int | None) -> bool:
        """Whether retrieval heads, which evict nothing, have room for fewer than `new` tokens after the prompt."""
        return self.streaming is not None and (new or 0) > self.new_tokens

    def make_room(self, new: int) -> None:
        """Let retrieval heads hold `new` tokens after the prompt, more than they have room for (`lacks_room`)."""
        assert self.streaming is not None and self.head_keep_t is not None
        more = self.head_keep_t + (new - self.new_tokens)
        self.share_out(torch.where(self.streaming.heads, self.head_keep_t, more), more.shape[1])
        self.new_tokens = new

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


# The budget of a configured cache for given prompts: resolved for a layer, and checked before anything is stored.


def resolve_budget(
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
    made = ResolvedBudget.from_slots(method, slots, counts_self=budget.counts_self, device=device)
    if budget.threshold is not None:
        # Of a prompt that sinks and newest tokens cover, every slot stays; from then on as many, its sinks among them.
        made.recent = [min(budget.newest, max(length - method.sinks, 0)) for length in lengths]
        made.recent_t = torch.tensor(made.recent, dtype=torch.int64, device=device)
    if budget.heads == "duo" and config.head_scores is not None:
        itself = 1 if budget.counts_self else 0
        heads = [retrieval_heads(budget, k, n, new, config.head_scores) for k, n in zip(slots, lengths, strict=True)]
        full = torch.stack([each[layer] for each in heads]).to(device)
        whole = torch.tensor([n + (new or 0) for n in lengths], device=device)[:, None]
        made.streaming, made.new_tokens = StreamingHeads(~full, budget.stream[0]), new or 0
        made.share_out(torch.where(full, whole, sum(budget.stream)) - itself, full.shape[1])
    return made


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


# Whether budgets hold the marked spans of prompts, looked at before a model runs.


def check_spans(
    config: CacheConfig,
    spans: Sequence[Sequence[Span]] | None,
    lengths: Sequence[int],
    padded: int,
    new: int | None,
    layers: int,
) -> None:
    """ConfigError where spans are to be spared and a prompt has none, or some layer's budget cannot hold them.

    spans: of each prompt, None where none were marked; lengths: real tokens of each; padded: columns of the prompts;
    new: max_new_tokens.
    """
    if config.keep is None or config.budget is None:
        return
    method, budget = config.method, config.budget
    for row, length in enumerate(lengths):
        marked = list(spans[row]) if spans is not None else []
        if not marked:
            raise ConfigError(f"keep={config.keep} spares marked spans, and nothing of the prompt is marked")
        if config.keep != "span":
            continue
        held = {place for first, behind in marked for place in range(first, behind)} | set(range(method.sinks))
        for layer in range(layers):
            (slots,) = granted(method, budget, [length], padded, new, layer, layers)
            recent = window(method, slots, counts_self=budget.counts_self)
            # While an answer grows the recent window leaves the prompt, and the spans stay.
            needed = len(held) + max(recent, 1 if budget.counts_self else 0)
            if needed > slots:
                raise ConfigError(
                    f"budget of {slots} slots cannot hold the {sum(b - a for a, b in marked)} marked tokens of keep="
                    f"span beside sink={method.sinks} and recent={recent} of {method.name}; raise kv_ratio (or "
                    "budget.tokens), or take keep=fair"
                )
