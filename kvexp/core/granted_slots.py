"""Slots that a budget grants to one layer for prompts of known lengths, and whether a method's own slots fit in."""

from __future__ import annotations

from collections.abc import Sequence

from kvexp.core.budget import Budget
from kvexp.core.layer_allocation import layer_budgets_of
from kvexp.core.layer_budgets import LayerBudgets
from kvexp.core.method import Method
from kvexp.errors import ConfigError

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
