"""Prompts read once, alone or for many runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import Budget, CacheConfig, Method
from kvexp.core.sequence import Span
from kvexp.generate.inputs import (
    check_bounded,
    check_length,
    check_prompts,
    check_rows,
    pad_id,
    pad_left,
    seeds_per_row,
)
from kvexp.hf import EvictionCache, MultiMethodCache
from kvexp.hf.patch import forward_columns, forward_logits
from kvexp.util.errors import ConfigError
from kvexp.util.progress import PROMPTS, worked


@dataclass
class PrefilledContext:
    """A batch of B prefilled prompts, from which generation or scoring goes on.

    cache: of B * num_beams rows.
    ids, mask [B, columns]: token ids and padding mask (0: padding).
    logits [B * num_beams, V]: after each prompt's last token.
    seconds: duration of the prefill, eviction included.

    Generating or scoring uses a context up: `fork` it first to go on from it again.
    """

    cache: EvictionCache
    ids: Tensor
    mask: Tensor
    logits: Tensor
    seconds: float

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each prompt, without padding."""
        return [int(n) for n in self.mask.sum(1).tolist()]

    def fork(self, rows: Sequence[int]) -> PrefilledContext:
        """A copy of this context for these prompts, which may repeat; this context stays as it is."""
        pick = torch.as_tensor(list(rows), device=self.ids.device)
        beams = self.cache.sequence.num_beams
        expanded = (pick[:, None] * beams + torch.arange(beams, device=pick.device)).flatten()
        return PrefilledContext(
            self.cache.fork(rows),
            self.ids[pick],
            self.mask[pick],
            self.logits[expanded.to(self.logits.device)],
            self.seconds,
        )

    def set_max_new_tokens(self, new_tokens: int) -> None:
        """Set how many tokens will be fed or generated after the prompt, by which tau schedules and allocations go.

        ConfigError where a budget was resolved for another number (budget.of=sequence, generated).
        """
        budget, sequence = self.cache.config.budget, self.cache.sequence
        if budget is not None and budget.counts_ahead and sequence.max_new_tokens != new_tokens:
            raise ConfigError(
                f"budget.of={budget.of} was resolved for max_new_tokens={sequence.max_new_tokens}, and {new_tokens} "
                "tokens are to follow the context: prefill it with that number"
            )
        sequence.max_new_tokens = new_tokens


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    method: Method | CacheConfig,
    budget: Budget | None = None,
    *,
    max_new_tokens: int | None = None,
    num_beams: int = 1,
    chunk: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    prepare: Callable[[EvictionCache], object] | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
    **options: Any,
) -> PrefilledContext:
    """Feed a batch of prompts (token ids per row) and evict at their end, where the cadence says so.

    max_new_tokens: all tokens that will follow, questions included. num_beams: rows per prompt. chunk: columns per
    forward, None: all. seeds: of noise inside methods, one or one per row. prepare: is called with the new cache before
    anything is fed. spans: of each prompt, what `keep` spares (`EvictionCache.mark_spans`). method, budget, options: as
    of `generate`. Errors are ConfigError before the model runs.

    With `bounded_chunk` of the options that is the chunk, and the cache evicts after each of them.
    """
    # 1. Check what was asked for, and make one padded batch of it.
    config = CacheConfig.of(method, budget, **options)
    check_prompts(model, prompts)
    chunk = check_bounded(config, prompts, num_beams, chunk)
    check_rows(model, prompts, max_new_tokens or 0, chunk)
    ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
    # 2. An empty cache, whose budget is known to hold these prompts.
    row_seeds = seeds_per_row(seeds, len(prompts))
    cache = new_cache(model, prompts, config, ids.shape[1], max_new_tokens, row_seeds, num_beams, tokenizer, spans)
    if prepare is not None:
        prepare(cache)
    # 3. Feed the prompts, `chunk` columns at a time. The cache evicts by itself when the last column has come.
    start = time.perf_counter()
    beam_ids, beam_mask = ids.repeat_interleave(num_beams, 0), mask.repeat_interleave(num_beams, 0)
    end = 0
    for chunk_ids in beam_ids.split(chunk or beam_ids.shape[1], dim=1):
        end += chunk_ids.shape[1]
        logits = forward_last(model, chunk_ids, beam_mask[:, :end], cache)
    # 4. Wait for the device, so that the time is true.
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    worked(PROMPTS, len(prompts))
    return PrefilledContext(cache, ids, mask, logits, time.perf_counter() - start)


def new_cache(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: CacheConfig,
    columns: int,
    max_new_tokens: int | None,
    seeds: Sequence[int],
    num_beams: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
) -> EvictionCache:
    """An empty cache for these prompts, padded to `columns` columns; other arguments as of `prefill`.

    ConfigError where a prompt's budget cannot hold what the method protects, or a second pass does not fit the model.
    """
    cache = EvictionCache(
        model,
        config,
        num_beams=num_beams,
        prompt_tokens=columns,
        max_new_tokens=max_new_tokens,
        seeds=seeds,
        tokenizer=tokenizer,
    )
    lengths = [len(prompt) for prompt in prompts]
    cache.check_budget(lengths, columns)
    cache.mark_spans(spans, lengths, columns)
    cache.prompts = [list(prompt) for prompt in prompts]
    return cache


def forward_last(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: EvictionCache) -> Tensor:
    """Logits [B, V] of the last column after one forward of ids [B, Q]; mask [B, columns so far]: 0 for padding."""
    return forward_logits(model, ids, mask, cache, keep=1)[:, -1]


def decode_step(model: PreTrainedModel, token: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """Logits [B, V] after one forward of one real token per row: token [B, 1] at position ids [B, 1]."""
    # A mask of no columns: without a mask, some models look for padding in the tokens, a device sync at every step.
    return forward_columns(model, token, token.new_ones(token.shape[0], 0), positions, cache, keep=1)[:, -1]


def feed_chunk(model: PreTrainedModel, tokens: Tensor, positions: Tensor, cache: MultiMethodCache) -> Tensor:
    """Logits [R, n, V] after each of n known tokens per row: token ids and position ids [R, n].

    The numbers of n `decode_step`s, but layer by layer (`MultiMethodCache.chunk`).
    """
    with cache.chunk():
        return forward_columns(model, tokens, tokens.new_ones(len(tokens), 0), positions, cache, keep=tokens.shape[1])


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
    rest: dict[str, Any] = {"tokenizer": tokenizer, "spans": spans}
    columns, whole = ids.shape[1], [i for i, config in enumerate(configs) if config.bounded_chunk is None]
    caches = [new_cache(model, prompts, configs[i], columns, max_new_tokens, row_seeds, **rest) for i in whole]
    contexts = {
        i: prefill(model, prompts, config, max_new_tokens=max_new_tokens, seeds=row_seeds, **rest)
        for i, config in enumerate(configs)
        if config.bounded_chunk is not None
    }
    if whole:
        start = time.perf_counter()
        logits = forward_last(model, ids, mask, MultiMethodCache(caches, len(ids)))
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)
        seconds = time.perf_counter() - start
        worked(PROMPTS, len(ids))
        contexts |= {
            i: PrefilledContext(cache, ids, mask, logits, seconds) for i, cache in zip(whole, caches, strict=True)
        }
    return [contexts[i] for i in range(len(configs))]
