"""Shared prefill: one forward of the prompts that the caches of several methods observe and store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import CacheConfig
from kvexp.core.spans import Span
from kvexp.generate.inputs import check_length, check_prompts, check_rows, pad_id, pad_left, seeds_per_row
from kvexp.generate.prefilled_context import PrefilledContext, forward_last, new_cache, prefill
from kvexp.models import EvictionCache, MultiMethodCache


@torch.no_grad()
def prefill_together(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[CacheConfig],
    *,
    max_new_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    spans: Sequence[Sequence[Span]] | None = None,
) -> list[PrefilledContext]:
    """One prefilled context per configuration, from a single forward of the prompts; arguments as of `prefill`.

    Each context can be used like any other; its `seconds` is the time of the whole prefill. ConfigError as of
    `prefill`, and for a method that changes how prompt tokens attend. A configuration that evicts between chunks has a
    prefill of its own: what its later chunks attend to depends on what it has evicted.
    """
    row_seeds = seeds_per_row(seeds, len(prompts))
    check_prompts(model, prompts)
    check_length(model, max(map(len, prompts)), max_new_tokens, all(config.beyond_context for config in configs))
    check_rows(model, prompts, max_new_tokens)
    ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
    made: dict[int, PrefilledContext] = {}
    whole = [place for place, config in enumerate(configs) if config.bounded_chunk is None]
    caches = [
        new_cache(
            model, prompts, configs[place], ids.shape[1], max_new_tokens, row_seeds, tokenizer=tokenizer, spans=spans
        )
        for place in whole
    ]
    for place in set(range(len(configs))) - set(whole):
        made[place] = prefill(
            model,
            prompts,
            configs[place],
            max_new_tokens=max_new_tokens,
            tokenizer=tokenizer,
            seeds=row_seeds,
            spans=spans,
        )
    if whole:
        made |= zip(whole, _read_together(model, caches, ids, mask), strict=True)
    return [made[place] for place in range(len(configs))]


def _read_together(
    model: PreTrainedModel, caches: list[EvictionCache], ids: Tensor, mask: Tensor
) -> list[PrefilledContext]:
    """Contexts of these empty caches after one forward of ids [B, columns]; mask [B, columns]: 0 for padding."""
    start = time.perf_counter()
    logits = forward_last(model, ids, mask, MultiMethodCache(caches, len(ids)))
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    seconds = time.perf_counter() - start
    return [PrefilledContext(cache, ids, mask, logits, seconds) for cache in caches]
