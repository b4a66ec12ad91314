"""Greedy and sampled decoding, token by token: the tokens of Hugging Face's generate() without its cost per step."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.core.decode.bookkeeping import cat_rows
from kvexp.generate.decode_graph import DecodeSteps, GraphCounts
from kvexp.generate.eviction_stats import EvictionStats, receipt_of
from kvexp.generate.finish_reason import StopStrings, truncate_at_end
from kvexp.generate.generation_params import GenerationParams, RowProcessors, logits_processors, stop_strings_of
from kvexp.generate.inputs import eos_ids, pad_id
from kvexp.generate.output import Generation, Timing, check_finite, check_seq_length
from kvexp.generate.prefilled_context import PrefilledContext
from kvexp.models import EvictionCache, MultiMethodCache

# Contexts of several batches that have ended are left out of a step once they are such a share of all: leaving some out
# copies the caches of the others, which takes as long as several steps. Those of one batch are left out at once.
MIN_ENDED_SHARE = 0.25


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

    seeds: of sampling, one per prompt; start: the `time.perf_counter()` from which the times count. Returns one
    Generation per context.
    """
    return decode_batches(model, [contexts], decoding, [seeds], tokenizer, start=start, keep_logits=keep_logits)[0]


@torch.no_grad()
def decode_batches(
    model: PreTrainedModel,
    batches: Sequence[Sequence[PrefilledContext]],
    decoding: GenerationParams,
    seeds: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool = False,
) -> list[list[Generation]]:
    """`decode` for several batches of prompts at once, so that a step reads the model's weights once for all of them.

    batches: the contexts of each batch of prompts; seeds: those of each batch. Returns one list of Generations per
    batch.
    """
    eos, pad = eos_ids(model, decoding.eos), pad_id(model, tokenizer)
    stops, parts = StopStrings(stop_strings_of(model, decoding), tokenizer, decoding.thinking), []
    for contexts, some in zip(batches, seeds, strict=True):
        own = RowProcessors.of(model, decoding, contexts[0].ids, contexts[0].mask, eos)
        parts.append(_Part(contexts, decoding, some, eos, pad, stops, own))
    note = _decode_loop(model, parts, decoding.max_new_tokens, keep_logits)
    return [part.generations(start, note) for part in parts]


def _decode_loop(model: PreTrainedModel, parts: list[_Part], max_new_tokens: int, keep_logits: bool) -> str | None:
    """Up to max_new_tokens tokens per row, of which the last is not fed; returns `Generation.cuda_graph`."""
    going, counts = parts, GraphCounts()
    cache = batched_cache([context for part in parts for context in part.batch.contexts])
    steps = DecodeSteps(model, cache, counts)
    for left in reversed(range(max_new_tokens)):
        # 1. Choose the next token of every row.
        tokens = [part.next_token(keep_logits) for part in going]
        # 2. See which rows have ended. This waits for the device, so that the time is true.
        done = [part.sampler.done.view(-1, part.batch.size).tolist() for part in going]
        now = time.perf_counter()
        for part, ended in zip(going, done, strict=True):
            part.record(ended, now, last=left == 0)
        if left == 0 or not any(part.num_going for part in going):
            break
        # 3. Leave out the contexts all of whose rows have ended, once they are many; the others go on.
        ended_share = _ended_share(going)
        if ended_share >= MIN_ENDED_SHARE or (ended_share and len(parts) == 1):
            pairs = [(part, token) for part, token in zip(going, tokens, strict=True) if part.num_going]
            going, tokens = [part for part, _ in pairs], [part.drop_ended(token) for part, token in pairs]
            cache = batched_cache([context for part in going for context in part.batch.contexts])
            steps = DecodeSteps(model, cache, counts)
        for part in going:
            part.copy_ended()
        # 4. Feed the tokens.
        positions = cat_rows([part.batch.positions for part in going])
        logits = steps(cat_rows(tokens), positions)
        for part, own in zip(going, logits.split([len(token) for token in tokens]), strict=True):
            part.batch.logits = own
    return counts.note


def _ended_share(parts: list[_Part]) -> float:
    """Share of the contexts that all of their rows have ended."""
    return 1 - sum(part.num_going for part in parts) / sum(len(part.outputs) for part in parts)


class _Part:
    """The contexts of one batch of prompts while they decode: their rows, their sampler and their outputs.

    outputs: of the contexts that are still fed; all_outputs: of all, in the order of the contexts.
    """

    def __init__(
        self,
        contexts: Sequence[PrefilledContext],
        decoding: GenerationParams,
        seeds: list[int],
        eos: list[int],
        pad: int,
        stops: StopStrings,
        own: RowProcessors | None,
    ) -> None:
        self.eos, self.stops = eos, stops
        self.batch = _Batch.of(contexts, seeds)
        own = own and own.keep(list(range(self.batch.size)) * len(contexts))
        self.sampler = _Sampler(decoding, self.batch, eos, pad, stops, own)
        self.outputs = self.all_outputs = [_Output(context) for context in contexts]

    @property
    def num_going(self) -> int:
        """Contexts with a row that goes on."""
        return sum(not output.ended for output in self.outputs)

    def next_token(self, keep_logits: bool) -> Tensor:
        """[R, 1]: the next token of every row; with keep_logits, the outputs keep the logits it was chosen by."""
        if keep_logits:
            for output, logits in zip(self.outputs, self.batch.logits.split(self.batch.size), strict=True):
                output.keep_logits(logits)
        return self.sampler.next_token(self.batch)

    def record(self, done: list[list[bool]], now: float, *, last: bool) -> None:
        """Record one step in the outputs. done: per context, which rows have ended; last: no step follows."""
        for output, ids, ended in zip(self.outputs, self.batch.ids.split(self.batch.size), done, strict=True):
            output.record(ids, ended, now, last=last)

    def drop_ended(self, token: Tensor) -> Tensor:
        """Leave out the contexts that have ended; returns the others' tokens out of token [R, 1]."""
        going = [not output.ended for output in self.outputs]
        self.outputs = [output for output, on in zip(self.outputs, going, strict=True) if on]
        return token if all(going) else self.sampler.keep(self.batch.keep(going), self.batch, token)

    def copy_ended(self) -> None:
        """Let the outputs of contexts that have ended and will be fed padding hold a copy of their cache as it is."""
        for output, context in zip(self.outputs, self.batch.contexts, strict=True):
            if output.ended and output.cache is context.cache:
                output.cache = context.cache.fork(range(self.batch.size))
                # A copy has no room to grow: its own bytes would be fewer than those that were held.
                output.cache.memory_tracker = copy.deepcopy(context.cache.memory_tracker)

    def generations(self, start: float, cuda_graph: str | None) -> list[Generation]:
        """One Generation per context; start: the `time.perf_counter()` from which its times count; cuda_graph: its."""
        made, columns = [], self.sampler.columns
        for output in self.all_outputs:
            check_seq_length(output.cache, columns, len(output.token_times))
            check_finite(output.cache)
            tokens, ends = truncate_at_end(output.ids, columns, self.eos, self.stops)
            made.append(
                Generation(
                    tokens=tokens,
                    endings=ends,
                    sequences=output.ids,
                    timing=Timing.of(start, output.token_times),
                    memory_tracker=output.cache.memory_tracker,
                    cache=output.cache,
                    logits=tuple(output.logits),
                    early_stats=output.early_stats,
                    cuda_graph=cuda_graph,
                )
            )
        return made


@dataclass
class _Batch:
    """The rows R of one batch of prompts: `size` rows of each context, one context's behind the other's.

    ids [R, columns]: all tokens read and written; positions [R, 1]: of the last one; logits [R, V]: of the next one;
    seeds: of sampling, by row.
    """

    contexts: list[PrefilledContext]
    size: int
    ids: Tensor
    positions: Tensor
    logits: Tensor
    seeds: list[int]

    @classmethod
    def of(cls, contexts: Sequence[PrefilledContext], seeds: list[int]) -> _Batch:
        """The rows of contexts of the same prompts; seeds: one per prompt."""
        first, many = contexts[0], len(contexts)
        last = first.mask.sum(1, keepdim=True) - 1
        return cls(
            contexts=list(contexts),
            size=len(first.ids),
            ids=first.ids.repeat(many, 1),
            positions=last.repeat(many, 1),
            logits=torch.cat([context.logits for context in contexts]),
            seeds=seeds * many,
        )

    def append(self, token: Tensor) -> None:
        """Append one token per row, [R, 1]."""
        self.ids = torch.cat([self.ids, token], dim=1)
        self.positions = self.positions + 1

    def keep(self, going: list[bool]) -> Tensor:
        """Drop the contexts that are not `going`; returns the indices of the rows that are left."""
        rows = torch.tensor(going, device=self.ids.device).repeat_interleave(self.size).nonzero()[:, 0]
        self.contexts = [context for context, on in zip(self.contexts, going, strict=True) if on]
        self.ids, self.positions = self.ids[rows], self.positions[rows]
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        return rows


class _Sampler:
    """Chooses one token per row, and tracks which rows have ended: at an end token or at a stop string.

    eos: ids of end tokens; pad: id of padding; own: the model's own logits processors. done [R] bool: the rows that
    have ended.
    """

    def __init__(
        self,
        decoding: GenerationParams,
        batch: _Batch,
        eos: list[int],
        pad: int,
        stops: StopStrings,
        own: RowProcessors | None,
    ) -> None:
        self.decoding, self.eos, self.pad, self.stops, self.own = decoding, eos, pad, stops, own
        self.columns, device = batch.ids.shape[1], batch.ids.device
        self.logits_processors = logits_processors(decoding, batch.seeds, self.columns, eos, device, own)
        self.done = torch.zeros(len(batch.ids), dtype=torch.bool, device=device)
        self.eos_ids = torch.tensor(eos, dtype=torch.int64, device=device)

    def next_token(self, batch: _Batch) -> Tensor:
        """Choose the next token [R, 1] of every row, padding for rows that have ended, and append it to the batch."""
        scores: Tensor = self.logits_processors(batch.ids, batch.logits.to(batch.ids.device, torch.float32, copy=True))
        token = scores.argmax(-1).masked_fill_(self.done, self.pad)[:, None]
        batch.append(token)
        if len(self.eos_ids):
            self.done = self.done | torch.isin(token[:, 0], self.eos_ids)
        if self.stops:
            self.done = self.done | self.stops.done(batch.ids, self.columns)
        return token

    def keep(self, rows: Tensor, batch: _Batch, token: Tensor) -> Tensor:
        """Keep the state of rows `rows` [n], which are the batch's rows from now on; returns token[rows], [n, 1]."""
        self.own = self.own and self.own.keep(rows.tolist())
        self.logits_processors = logits_processors(
            self.decoding, batch.seeds, self.columns, self.eos, batch.ids.device, self.own
        )
        self.done = self.done[rows]
        return token[rows]


class _Output:
    """The output of one context's rows.

    ended: whether all rows have. cache: the context's own, or where that is fed padding after the end, a copy as it
    stood then. ids [B, columns]; token_times: when each token was known; logits: [B, V] of each
    token, if asked for; early_stats: of rows that ended before the others of this context, as they stood then.
    """

    def __init__(self, context: PrefilledContext) -> None:
        self.cache, self.ids = context.cache, context.ids
        self.ended = False
        self.token_times: list[float] = []
        self.logits: list[Tensor] = []
        self.early_stats: dict[int, EvictionStats] = {}

    def keep_logits(self, logits: Tensor) -> None:
        """Keep the logits [B, V] of the next token, unless all rows have ended."""
        if not self.ended:
            self.logits.append(logits.float())

    def record(self, ids: Tensor, ended: list[bool], now: float, *, last: bool) -> None:
        """Record one step: ids [B, columns] with the new tokens; ended: which rows have; last: no step follows."""
        if self.ended:
            return
        self.ids = ids
        self.token_times.append(now)
        if last:
            return
        if all(ended):
            self.ended = True
            return
        fresh = (row for row, over in enumerate(ended) if over and row not in self.early_stats)
        self.early_stats |= {row: receipt_of(self.cache, row) for row in fresh}


def batched_cache(contexts: Sequence[PrefilledContext]) -> EvictionCache | MultiMethodCache:
    """The cache through which the rows of all contexts take their next token together."""
    if len(contexts) == 1:
        return contexts[0].cache
    return MultiMethodCache([context.cache for context in contexts], [len(context.ids) for context in contexts])
