"""Many methods on the same prompts: one prefill that all of them observe, then all decode as rows of one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import Budget, Method
from kvexp.generate.inputs import check_length, check_request, pad_id, pad_left, seeds_of
from kvexp.generate.prefilled_context import PrefilledContext, forward
from kvexp.models import EvictionCache, MultiMethodCache


@dataclass(frozen=True)
class MethodSpec:
    """A method under a budget. plan: cadence, mode, positions, observe, block of `EvictionCache`."""

    method: Method
    budget: Budget | None = None
    plan: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def prefill_together(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    variants: Sequence[MethodSpec],
    *,
    max_new_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    beyond_context: bool = False,
) -> list[PrefilledContext]:
    """`prefill` for every variant, in one forward. ConfigError as there, and for a variant that cannot share it.

    The contexts are each variant's own and can be used like any other; `seconds` is that of the whole prefill.
    """
    row_seeds = seeds_of(seeds, len(prompts))
    for variant in variants:
        check_request(model, prompts, variant.method, variant.budget)
    check_length(model, max(map(len, prompts)), max_new_tokens, beyond_context)
    ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
    ahead: dict[str, Any] = {
        "prompt_tokens": ids.shape[1],
        "max_new_tokens": max_new_tokens,
        "beyond_context": beyond_context,
    }
    caches = []
    for variant in variants:
        cache = EvictionCache(model, variant.method, variant.budget, seeds=row_seeds, **ahead, **variant.plan)
        cache.resolve([len(p) for p in prompts], ids.shape[1])
        cache.prompts = [list(prompt) for prompt in prompts]
        caches.append(cache)
    start = time.perf_counter()
    logits = forward(model, ids, mask, MultiMethodCache(caches, len(prompts)))
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    seconds = time.perf_counter() - start
    return [PrefilledContext(cache, ids, mask, logits, seconds) for cache in caches]
