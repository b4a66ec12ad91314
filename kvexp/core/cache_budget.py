"""The budget of a configured cache for given prompts: resolved for a layer, and checked before anything is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvexp.core.cache_config import CacheConfig
from kvexp.core.granted_slots import granted
from kvexp.core.head_budgets import StreamingHeads, retrieval_heads
from kvexp.core.resolved_budget import ResolvedBudget


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
