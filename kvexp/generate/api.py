"""Prefill, evict, decode, with timing: token by token, or with beams."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core import Budget, CacheConfig, Method
from kvexp.core.spans import Span
from kvexp.errors import ConfigError
from kvexp.generate.beam_search import beam_search
from kvexp.generate.decode_loop import batched_cache, decode
from kvexp.generate.finish_reason import StopStrings
from kvexp.generate.generation_params import (
    GenerationOptions,
    GenerationParams,
    RowProcessors,
    parted,
    stop_strings_of,
    with_keywords,
)
from kvexp.generate.inputs import (
    check_bounded,
    check_length,
    check_questions,
    check_rows,
    eos_ids,
    pad_id,
    pad_left,
    real_prompts,
    seeds_per_row,
)
from kvexp.generate.output import Generation
from kvexp.generate.prefilled_context import PrefilledContext, forward_last, new_cache, prefill
from kvexp.models import EvictionCache


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]] | Mapping[str, Any] | Tensor,
    method: Method | CacheConfig,
    budget: Budget | None = None,
    *,
    attention_mask: Sequence[Sequence[int]] | Tensor | None = None,
    questions: Sequence[Sequence[int]] | None = None,
    decoding: GenerationParams | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    keep_logits: bool = False,
    prepare: Callable[[EvictionCache], object] | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
    **options: Unpack[GenerationOptions],
) -> Generation:
    """Generate for a batch of prompts (token ids per row, or all that the tokenizer gave) under an eviction method.

    method, budget, options: what the cache does, as of `CacheConfig`; or a CacheConfig in place of the method.
    attention_mask: of the prompts, 0 for padding, which is left out; None: a tokenizer's output has its own, and token
        ids by themselves are unpadded.
    questions: token ids, one list per prompt, all of one length, fed token by token after the prompts were prefilled
        and evicted; the budget is that of the prompt alone.
    decoding: how tokens are chosen, and how many; or in transformers' words among the options: max_new_tokens,
        min_new_tokens, num_beams, do_sample, temperature, top_k, top_p, eos_token_id, stop_strings and so on.
    tokenizer: needed for stop strings.
    seeds: of sampling and of noise inside methods, one for all rows or one per row: a row's tokens depend on its
        prompt, question and seed alone.
    keep_logits: keep one [B, V] tensor per step.
    prepare: is called with the new cache before anything is fed.
    spans: of each prompt what `keep` of the options spares, as (first token, one behind the last).

    Errors are ConfigError, before the model runs.
    """
    decoding, of_cache = parted(decoding, options)
    config = CacheConfig.of(method, budget, **of_cache)
    prompts = real_prompts(model, prompts, attention_mask, tokenizer)
    _check_decoding(model, decoding, tokenizer)
    row_seeds = seeds_per_row(seeds, len(prompts))
    new = decoding.max_new_tokens + (check_questions(model, len(prompts), questions) if questions is not None else 0)
    check_length(model, max(len(p) for p in prompts), new, config.beyond_context)
    check_bounded(config, prompts, decoding.num_beams, decoding.prefill_chunk)
    check_rows(model, prompts, new, decoding.prefill_chunk)
    if questions is None and decoding.num_beams > 1:  # Hugging Face's generate() does the prefill too
        ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
        cache = new_cache(model, prompts, config, ids.shape[1], new, row_seeds, decoding.num_beams, tokenizer, spans)
        if prepare is not None:
            prepare(cache)
        start = time.perf_counter()
        return beam_search(model, cache, ids, mask, decoding, tokenizer, start=start, keep_logits=keep_logits)
    start = time.perf_counter()
    context = prefill(
        model,
        prompts,
        config,
        max_new_tokens=new,
        num_beams=decoding.num_beams,
        chunk=decoding.prefill_chunk,
        tokenizer=tokenizer,
        seeds=row_seeds,
        prepare=prepare,
        spans=spans,
    )
    if questions is None:
        return decode(model, [context], decoding, row_seeds, tokenizer, start=start, keep_logits=keep_logits)[0]
    return generate_from_context(
        model, context, questions, decoding=decoding, tokenizer=tokenizer, seeds=row_seeds, keep_logits=keep_logits
    )


@torch.no_grad()
def generate_from_context(
    model: PreTrainedModel,
    context: PrefilledContext,
    questions: Sequence[Sequence[int]],
    *,
    decoding: GenerationParams | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    keep_logits: bool = False,
    **options: Any,
) -> Generation:
    """Generate the answer to one question (token ids) per row of a prefilled context; uses the context up.

    Questions are of one length and count as decode steps, so eviction goes on while they are read. seeds: of sampling;
    noise inside methods keeps the context's. options: of decoding, in transformers' words, as of `generate`. Times
    include the context's prefill.
    """
    decoding = with_keywords(decoding, options)
    return generate_from_contexts(
        model, [context], questions, decoding=decoding, tokenizer=tokenizer, seeds=seeds, keep_logits=keep_logits
    )[0]


@torch.no_grad()
def generate_from_contexts(
    model: PreTrainedModel,
    contexts: Sequence[PrefilledContext],
    questions: Sequence[Sequence[int]],
    *,
    decoding: GenerationParams | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    keep_logits: bool = False,
    **options: Any,
) -> list[Generation]:
    """`generate_from_context` for several caches of the same contexts (`prefill_together`), as rows of one batch.

    Not with beams. Returns one Generation per context.
    """
    decoding, first = with_keywords(decoding, options), contexts[0]
    _check_decoding(model, decoding, tokenizer)
    rows, beams = len(first.ids), decoding.num_beams
    row_seeds, length = seeds_per_row(seeds, rows), check_questions(model, rows, questions)
    new = length + decoding.max_new_tokens
    for context in contexts:
        if context.cache.sequence.num_beams != beams:
            was = context.cache.sequence.num_beams
            raise ConfigError(f"the context was prefilled for num_beams={was}, not for {beams}")
        check_length(model, max(context.lengths), new, context.cache.sequence.max_positions is None)
        context.set_max_new_tokens(new)
    start = time.perf_counter() - first.seconds
    asked = torch.as_tensor([list(q) for q in questions]).to(first.ids.device)
    before, ids = first.ids.shape[1], torch.cat([first.ids, asked], dim=1)
    mask = torch.cat([first.mask, torch.ones_like(asked)], dim=1)
    steps = asked.repeat_interleave(beams, 0).repeat(len(contexts), 1)
    seen = mask.repeat_interleave(beams, 0).repeat(len(contexts), 1)
    cache, logits = batched_cache(contexts), first.logits
    for j in range(length - 1 if beams > 1 else length):  # generate(), which does the beams, feeds the last one itself
        logits = forward_last(model, steps[:, j : j + 1], seen[:, : before + j + 1], cache)
    if beams > 1:
        whole = dataclasses.replace(decoding, prefill_chunk=None)
        return [beam_search(model, first.cache, ids, mask, whole, tokenizer, start=start, keep_logits=keep_logits)]
    for context, last in zip(contexts, logits.split(rows), strict=True):
        context.ids, context.mask, context.logits = ids, mask, last
    return decode(model, contexts, decoding, row_seeds, tokenizer, start=start, keep_logits=keep_logits)


def _check_decoding(
    model: PreTrainedModel, decoding: GenerationParams, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """ConfigError for stop strings without a tokenizer, and for the model's own settings that cannot be followed."""
    StopStrings(stop_strings_of(model, decoding), tokenizer)
    one = torch.zeros(1, 1, dtype=torch.int64)
    RowProcessors.of(model, decoding, one, one + 1, eos_ids(model, decoding.eos))
