"""Greedy and sampled decoding, token by token: the tokens of Hugging Face's generate() without its cost per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.generate.eviction_stats import EvictionStats, receipt_of
from kvexp.generate.finish_reason import stop_criteria, truncate_at_end
from kvexp.generate.generation_params import GenerationParams, logits_processors
from kvexp.generate.inputs import eos_ids, pad_id
from kvexp.generate.output import Generation, Timing, check_finite, check_seq_length
from kvexp.generate.prefilled_context import PrefilledContext, decode_step
from kvexp.models import EvictionCache, MultiMethodCache


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    contexts: Sequence[PrefilledContext],
    decoding: GenerationParams,
    seeds: list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool = False,
) -> list[Generation]:
    """Decode from contexts of the same prompts, together; uses them up. Every row is what it would be alone.

    seeds: of sampling, one per prompt; start: the `time.perf_counter()` from which the times count; other arguments as
    of `generate`. Returns one Generation per context.
    """
    eos, columns = eos_ids(model, decoding.eos), contexts[0].ids.shape[1]
    batch = _Batch.of(contexts, seeds)
    sampler = _Sampler(decoding, batch, eos, pad_id(model, tokenizer), tokenizer)
    outputs = _decode_loop(model, batch, sampler, decoding.max_new_tokens, keep_logits)
    made = []
    for context, output in zip(contexts, outputs, strict=True):
        check_seq_length(context.cache, columns, len(output.token_times))
        check_finite(context.cache)
        tokens, ends = truncate_at_end(output.ids, columns, eos, decoding.stop_strings, tokenizer)
        made.append(
            Generation(
                tokens=tokens,
                endings=ends,
                sequences=output.ids,
                timing=Timing.of(start, output.token_times),
                memory_tracker=context.cache.memory_tracker,
                cache=context.cache,
                logits=tuple(output.logits),
                early_stats=output.early_stats,
            )
        )
    return made


def _decode_loop(
    model: PreTrainedModel, batch: _Batch, sampler: _Sampler, max_new_tokens: int, keep_logits: bool
) -> list[_Output]:
    """Decode up to max_new_tokens tokens per row, of which the last is not fed; one output per context of the batch."""
    outputs = active = [_Output(context) for context in batch.contexts]
    for left in reversed(range(max_new_tokens)):
        # 1. Choose the next token of every row.
        if keep_logits:
            for output, logits in zip(active, batch.logits.split(batch.size), strict=True):
                output.logits.append(logits.float())
        token = sampler.next_token(batch)
        # 2. See which rows have ended. This waits for the device, so that the time is true.
        done = sampler.done.view(-1, batch.size).tolist()
        now = time.perf_counter()
        for output, ids, ended in zip(active, batch.ids.split(batch.size), done, strict=True):
            output.record(ids, ended, now, last=left == 0)
        # 3. Drop the contexts of which every row has ended; the others go on with all their rows.
        unfinished = [not all(ended) for ended in done]
        if left == 0 or not any(unfinished):
            break
        if not all(unfinished):
            active = [output for output, on in zip(active, unfinished, strict=True) if on]
            token = sampler.keep(batch.keep(unfinished), batch, token)
        # 4. Feed the tokens.
        batch.logits = decode_step(model, token, batch.positions, batch.cache)
    return outputs


@dataclass
class _Batch:
    """The R rows that are decoded together: `size` rows of the first context, then those of the second …

    ids [R, columns]: all tokens read and written; positions [R, 1]: of the last one; logits [R, V]: of the next one;
    seeds: of sampling, by row; cache: through which all rows take their next token.
    """

    contexts: list[PrefilledContext]
    size: int
    ids: Tensor
    positions: Tensor
    logits: Tensor
    seeds: list[int]
    cache: EvictionCache | MultiMethodCache

    @classmethod
    def of(cls, contexts: Sequence[PrefilledContext], seeds: list[int]) -> _Batch:
        """The rows of contexts of the same prompts; seeds: of sampling, one per prompt."""
        first, many = contexts[0], len(contexts)
        last = first.mask.sum(1, keepdim=True) - 1
        return cls(
            contexts=list(contexts),
            size=len(first.ids),
            ids=first.ids.repeat(many, 1),
            positions=last.repeat(many, 1),
            logits=torch.cat([context.logits for context in contexts]),
            seeds=seeds * many,
            cache=batched_cache(contexts),
        )

    def append(self, token: Tensor) -> None:
        """Append one token per row, [R, 1]."""
        self.ids = torch.cat([self.ids, token], dim=1)
        self.positions = self.positions + 1

    def keep(self, unfinished: list[bool]) -> Tensor:
        """Drop the contexts for which `unfinished` is False; returns the indices [n] of the rows that are left."""
        rows = torch.tensor(unfinished, device=self.ids.device).repeat_interleave(self.size).nonzero()[:, 0]
        self.contexts = [context for context, on in zip(self.contexts, unfinished, strict=True) if on]
        self.ids, self.positions = self.ids[rows], self.positions[rows]
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.cache = batched_cache(self.contexts)
        return rows


class _Sampler:
    """Chooses one token per row, and tracks which rows have ended: at an end token or at a stop string.

    eos: ids of end tokens; pad: id of padding. done [R] bool: the rows that have ended.
    """

    def __init__(
        self,
        decoding: GenerationParams,
        batch: _Batch,
        eos: list[int],
        pad: int,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.decoding, self.eos, self.pad = decoding, eos, pad
        self.columns, device = batch.ids.shape[1], batch.ids.device
        self.logits_processors = logits_processors(decoding, batch.seeds, self.columns, eos, device)
        self.done = torch.zeros(len(batch.ids), dtype=torch.bool, device=device)
        self.eos_ids = torch.tensor(eos, dtype=torch.int64, device=device)
        self.stops = stop_criteria(decoding.stop_strings, tokenizer)

    def next_token(self, batch: _Batch) -> Tensor:
        """Choose the next token [R, 1] of every row, padding for rows that have ended, and append it to the batch."""
        scores: Tensor = self.logits_processors(batch.ids, batch.logits.to(batch.ids.device, torch.float32, copy=True))
        token = scores.argmax(-1).masked_fill_(self.done, self.pad)[:, None]
        batch.append(token)
        if len(self.eos_ids):
            self.done = self.done | torch.isin(token[:, 0], self.eos_ids)
        if self.stops is not None:
            self.done = self.done | self.stops(batch.ids, scores)
        return token

    def keep(self, rows: Tensor, batch: _Batch, token: Tensor) -> Tensor:
        """Keep the state of rows `rows` [n], which are the batch's rows from now on; returns token[rows], [n, 1]."""
        self.logits_processors = logits_processors(self.decoding, batch.seeds, self.columns, self.eos, batch.ids.device)
        self.done = self.done[rows]
        return token[rows]


class _Output:
    """The output of one context's rows.

    ids [B, columns]; token_times: when each token was known; logits: [B, V] of each token, if asked for; early_stats:
    of rows that ended before the others of this context, as they stood then.
    """

    def __init__(self, context: PrefilledContext) -> None:
        self.cache, self.ids = context.cache, context.ids
        self.token_times: list[float] = []
        self.logits: list[Tensor] = []
        self.early_stats: dict[int, EvictionStats] = {}

    def record(self, ids: Tensor, ended: list[bool], now: float, *, last: bool) -> None:
        """Record one step: ids [B, columns] with the new tokens, and the time `now` in seconds.

        ended: per row, whether it has ended; last: whether no step follows.
        """
        self.ids = ids
        self.token_times.append(now)
        if not last and not all(ended):
            fresh = (row for row, over in enumerate(ended) if over and row not in self.early_stats)
            self.early_stats |= {row: receipt_of(self.cache, row) for row in fresh}


def batched_cache(contexts: Sequence[PrefilledContext]) -> EvictionCache | MultiMethodCache:
    """The cache through which the rows of all contexts take their next token together."""
    if len(contexts) == 1:
        return contexts[0].cache
    return MultiMethodCache([context.cache for context in contexts], len(contexts[0].ids))
