"""Shared prefill: one forward of the prompts that the caches of several methods observe and store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import CacheConfig
from kvexp.generate.inputs import check_length, check_prompts, pad_id, pad_left, seeds_per_row
from kvexp.generate.prefilled_context import PrefilledContext, forward_last, new_cache
from kvexp.models import MultiMethodCache


@torch.no_grad()
def prefill_together(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[CacheConfig],
    *,
    max_new_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
) -> list[PrefilledContext]:
    """One prefilled context per configuration, from a single forward of the prompts; arguments as of `prefill`.

    Each context can be used like any other; its `seconds` is the time of the whole prefill. ConfigError as of
    `prefill`, and for a method that changes how prompt tokens attend.
    """
    row_seeds = seeds_per_row(seeds, len(prompts))
    check_prompts(model, prompts)
    check_length(model, max(map(len, prompts)), max_new_tokens, all(config.beyond_context for config in configs))
    ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
    caches = [
        new_cache(model, prompts, config, ids.shape[1], max_new_tokens, row_seeds, tokenizer=tokenizer)
        for config in configs
    ]
    start = time.perf_counter()
    logits = forward_last(model, ids, mask, MultiMethodCache(caches, len(prompts)))
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    seconds = time.perf_counter() - start
    return [PrefilledContext(cache, ids, mask, logits, seconds) for cache in caches]
