"""Whether budgets hold the marked spans of prompts, looked at before a model runs."""

from __future__ import annotations

from collections.abc import Sequence

from kvexp.core.cache_config import CacheConfig
from kvexp.core.granted_slots import granted, window
from kvexp.core.spans import Span
from kvexp.errors import ConfigError


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
