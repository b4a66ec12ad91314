"""How many slots one layer gets of a budget, for prompts of given lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvexp.core.budget import Budget, PromptSizes
from kvexp.core.budget_shares import LayerBudgets, layer_budgets_of, retrieval_heads
from kvexp.core.sequence import Span
from kvexp.core.special_methods import GrantsSlots
from kvexp.util.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.core.config import CacheConfig
    from kvexp.core.method import Method

PROTECTING = ("n_sinks", "recent_ratio", "protect_recent", "window")  # settings of methods


def layer_slots(
    method: Method,
    budget: Budget,
    prompts: PromptSizes,
    layer: int,
    preferences: Sequence[Sequence[float]] | None = None,
    *,
    keep_prompt: bool = False,
) -> list[int]:
    """Slots per kv head of one layer, one number per prompt: its share, as the method grants it (`granted`).

    preferences [B][L]: of every prompt and layer, where shares go by them; None: not known yet, and every layer has the
    mean. keep_prompt: nothing of a prompt is evicted. ConfigError where the slots cannot hold what the method protects.
    """
    slots, lengths = budget.resolve(prompts, layer), prompts.lengths
    how = layer_budgets_of(method, budget)
    if type(how) is not LayerBudgets:
        stated: Sequence[Sequence[float] | None] = [None] * len(lengths) if preferences is None else preferences
        least = [least_slots(method, k, n, budget.counts_self) for k, n in zip(slots, lengths, strict=True)]
        rows = zip(slots, lengths, least, stated, strict=True)
        slots = [how.share(k, n, few, prompts.layers, preference)[layer] for k, n, few, preference in rows]
    slots = [granted(method, k, length) for k, length in zip(slots, lengths, strict=True)]
    for k, length in zip(slots, lengths, strict=True):
        recent_window(method, k, counts_self=budget.counts_self, prompt=length if keep_prompt else 0)
    return slots


def granted(method: Method, budget: int, tokens: int) -> int:
    """Slots for a budget of `budget` slots and a prompt of `tokens` tokens."""
    return method.effective_budget(budget, tokens) if isinstance(method, GrantsSlots) else budget


def least_slots(method: Method, slots: int, length: int, counts_self: bool) -> int:
    """The fewest slots, `slots` at most, that hold sinks and recent window of the method; length: of the prompt."""

    def suffices(tried: int) -> bool:
        with suppress(ConfigError):
            recent_window(method, granted(method, tried, length), counts_self=counts_self)
            return True
        return False

    return bisect_left(range(1, slots), True, key=suffices) + 1


def recent_window(method: Method, slots: int, *, counts_self: bool, prompt: int = 0) -> int:
    """How many of the newest tokens are protected where a kv head has `slots` slots: the method's `recent`.

    counts_self: as of `Budget`; prompt: first tokens that are never evicted, to which a share of the slots that the
    method asks for does not extend. ConfigError where the slots cannot hold these, sinks and recent window.
    """
    recent = method.recent(max(slots - prompt, 0))
    if not isinstance(recent, int):
        raise ConfigError(
            f"{type(method).__qualname__}.recent must return a whole number of tokens, got {recent!r:.60}"
        )
    if prompt and max(prompt, method.sinks) + max(recent, 1) > slots:
        raise ConfigError(
            f"budget of {slots} slots cannot hold the {prompt} tokens of a prompt that keep=prompt keeps, and recent="
            f"{max(recent, 1)} of {method.name}; raise kv_ratio (or budget.tokens), set budget.of=generated, which "
            "counts a prompt on top, or leave out keep=prompt"
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


@dataclass
class LayerSlots:
    """How many slots one layer has: integers per batch row, each as a list on the host and as an int64 tensor [B].

    slots: the budget k; kept: slots kept after an eviction (k - 1 where the token being generated counts); recent:
    newest tokens that are protected at an eviction. by_head [B][H]: slots that each kv head keeps, where heads were
    given different numbers (`share_out`); None: `kept` for all. streaming [B, H] bool: which kv heads hold
    `stream_sinks` sinks and newest tokens whatever the method says; None: no head. new_tokens: tokens after the prompt
    that retrieval heads, which are all others then, have room for.
    """

    slots: list[int]
    kept: list[int]
    recent: list[int]
    slots_t: Tensor
    kept_t: Tensor
    recent_t: Tensor
    by_head: list[list[int]] | None = None
    by_head_t: Tensor | None = None
    streaming: Tensor | None = None
    stream_sinks: int = 0
    new_tokens: int = 0

    def share_out(self, by_head: Tensor | None, heads: int) -> None:
        """From now on kv heads keep by_head [B, H] slots; None: `kept` each. heads: H."""
        by_head = self.kept_t[:, None].expand(-1, heads) if by_head is None else by_head
        self.by_head, self.by_head_t = by_head.tolist(), by_head.contiguous()

    def lacks_room(self, new: int | None) -> bool:
        """Whether retrieval heads, which evict nothing, have room for fewer than `new` tokens after the prompt."""
        return self.streaming is not None and (new or 0) > self.new_tokens

    def make_room(self, new: int) -> None:
        """Let retrieval heads hold `new` tokens after the prompt, more than they have room for (`lacks_room`)."""
        assert self.streaming is not None and self.by_head_t is not None
        more = self.by_head_t + (new - self.new_tokens)
        self.share_out(torch.where(self.streaming, self.by_head_t, more), more.shape[1])
        self.new_tokens = new

    @property
    def recent_by_head(self) -> Tensor:
        """Newest tokens that are protected at an eviction, [B, H], or [B, 1] where heads do not differ."""
        recent = self.recent_t[:, None]
        return recent if self.streaming is None else recent.masked_fill(self.streaming, 0)

    def sinks_by_head(self, method: Method) -> int | Tensor:
        """First tokens that are never evicted: the method's, or [B, H] where heads differ."""
        if self.streaming is None:
            return method.sinks
        return torch.where(self.streaming, self.stream_sinks, method.sinks)

    def by_stream(self, priority: Tensor, positions: Tensor) -> Tensor:
        """The priority [B, H, S] of the method, and recency in streaming heads; positions [B, H, S]."""
        if self.streaming is None:
            return priority
        return torch.where(self.streaming[..., None], positions.to(priority.dtype), priority)

    @property
    def kept_by_head(self) -> Tensor:
        """Slots kept after an eviction, [B, H], or [B, 1] where all heads keep the same number."""
        return self.kept_t[:, None] if self.by_head_t is None else self.by_head_t

    @property
    def most(self) -> list[int]:
        """Per row, the slots kept by the head that keeps most."""
        return self.kept if self.by_head is None else [max(heads) for heads in self.by_head]

    @property
    def least(self) -> list[int]:
        """Per row, the slots kept by the head that keeps fewest."""
        return self.kept if self.by_head is None else [min(heads) for heads in self.by_head]

    def select_rows(self, rows: Tensor, *, same_prompts: bool) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: only among the beams of a sample, of equal budgets."""
        index = rows.to(self.slots_t.device)
        if self.streaming is not None:
            self.streaming = self.streaming[index]
        if self.by_head is not None and self.by_head_t is not None:
            self.by_head, self.by_head_t = [self.by_head[i] for i in rows.tolist()], self.by_head_t[index]
        if not same_prompts:
            chosen = rows.tolist()
            self.slots, self.kept, self.recent = ([x[i] for i in chosen] for x in (self.slots, self.kept, self.recent))
        self.slots_t, self.kept_t, self.recent_t = self.slots_t[index], self.kept_t[index], self.recent_t[index]


def resolve_layer_slots(
    config: CacheConfig,
    prompts: PromptSizes,
    layer: int,
    device: torch.device,
    preferences: Sequence[Sequence[float]] | None = None,
) -> LayerSlots:
    """The slots of one layer under a configuration; preferences and ConfigError: as of `layer_slots`."""
    budget, method = config.budget, config.method
    assert budget is not None
    lengths, new = prompts.lengths, prompts.new_tokens
    keeps = config.keep == "prompt"
    slots = layer_slots(method, budget, prompts, layer, preferences, keep_prompt=keeps)
    # The token being generated is one of the recent ones where it is one of the budget.
    itself = 1 if budget.counts_self else 0
    first = lengths if keeps else [0] * len(lengths)
    recent = [
        max(recent_window(method, k, counts_self=budget.counts_self, prompt=n) - itself, 0)
        for k, n in zip(slots, first, strict=True)
    ]
    if budget.threshold is not None:
        # Of a prompt that sinks and newest tokens cover, every slot stays; from then on as many, its sinks among them.
        recent = [min(budget.newest, max(length - method.sinks, 0)) for length in lengths]
    kept = [k - itself for k in slots]
    slots_t, kept_t, recent_t = (torch.tensor(x, dtype=torch.int64, device=device) for x in (slots, kept, recent))
    resolved = LayerSlots(slots, kept, recent, slots_t, kept_t, recent_t)
    if budget.heads == "duo" and config.head_scores is not None:
        heads = [retrieval_heads(budget, k, n, new, config.head_scores) for k, n in zip(slots, lengths, strict=True)]
        full = torch.stack([row_heads[layer] for row_heads in heads]).to(device)
        whole = torch.tensor([n + (new or 0) for n in lengths], device=device)[:, None]
        resolved.streaming, resolved.stream_sinks, resolved.new_tokens = ~full, budget.stream[0], new or 0
        resolved.share_out(torch.where(full, whole, sum(budget.stream)) - itself, full.shape[1])
    return resolved


def check_budget(config: CacheConfig, prompts: PromptSizes) -> None:
    """ConfigError where in some layer sinks and recent window do not fit into the slots of one of these prompts."""
    if config.budget is None or not config.method.evicts:
        return
    for layer in range(prompts.layers):
        slots = layer_slots(config.method, config.budget, prompts, layer, keep_prompt=config.keep == "prompt")
    if config.budget.heads == "duo" and config.head_scores is not None:
        for k, length in zip(slots, prompts.lengths, strict=True):
            retrieval_heads(config.budget, k, length, prompts.new_tokens, config.head_scores)


def may_evict(config: CacheConfig, prompts: PromptSizes) -> bool:
    """Whether some layer's budget is smaller than one of these prompts."""
    if config.budget is None or not config.method.evicts:
        return False
    if config.budget.threshold is not None:
        return True
    itself = 1 if config.budget.counts_self else 0
    budgets = (layer_slots(config.method, config.budget, prompts, layer) for layer in range(prompts.layers))
    return any(n > k - itself for slots in budgets for n, k in zip(prompts.lengths, slots, strict=True))


def check_spans(config: CacheConfig, prompts: PromptSizes, spans: Sequence[Sequence[Span]] | None) -> None:
    """ConfigError where spans are to be spared and a prompt has none, or some layer's budget cannot hold them.

    spans: of each prompt, None where none were marked.
    """
    if config.keep in (None, "prompt") or config.budget is None:
        return
    method, budget = config.method, config.budget
    for row, length in enumerate(prompts.lengths):
        marked = list(spans[row]) if spans is not None else []
        if not marked:
            raise ConfigError(f"keep={config.keep} spares marked spans, and nothing of the prompt is marked")
        if config.keep != "span":
            continue
        held = {place for first, behind in marked for place in range(first, behind)} | set(range(method.sinks))
        for layer in range(prompts.layers):
            (slots,) = layer_slots(method, budget, replace(prompts, lengths=[length]), layer)
            recent = recent_window(method, slots, counts_self=budget.counts_self)
            # While an answer grows the recent window leaves the prompt, and the spans stay.
            needed = len(held) + max(recent, 1 if budget.counts_self else 0)
            if needed > slots:
                raise ConfigError(
                    f"budget of {slots} slots cannot hold the {sum(b - a for a, b in marked)} marked tokens of keep="
                    f"span, sink={method.sinks} and recent={recent} of {method.name}; raise kv_ratio (or "
                    "budget.tokens), or take keep=fair"
                )
