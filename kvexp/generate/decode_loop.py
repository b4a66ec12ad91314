"""Greedy and sampled decoding, token by token: the tokens of Hugging Face's generate() without its cost per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvexp.generate.eviction_stats import EvictionStats, receipt_of
from kvexp.generate.finish_reason import endings, stop_criteria
from kvexp.generate.generation_params import GenerationParams, processors
from kvexp.generate.inputs import eos_ids, pad_id
from kvexp.generate.output import Generation, Timing, check_columns, check_scores
from kvexp.generate.prefilled_context import PrefilledContext, one_step
from kvexp.models import EvictionCache, MultiMethodCache


@dataclass
class _Rows:
    """ids [R, columns] of all read or written; positions [R, 1] and logits [R, V] of the last column; seeds."""

    ids: Tensor
    positions: Tensor
    logits: Tensor
    seeds: list[int]

    @classmethod
    def of(cls, contexts: Sequence[PrefilledContext], seeds: list[int]) -> _Rows:
        """One context's rows behind the other's; every context has the same seeds."""
        first, many = contexts[0], len(contexts)
        last = first.mask.sum(1, keepdim=True) - 1
        logits = torch.cat([context.logits for context in contexts])
        return cls(first.ids.repeat(many, 1), last.repeat(many, 1), logits, seeds * many)

    def keep(self, rows: Tensor) -> None:
        self.ids, self.positions = self.ids[rows], self.positions[rows]
        self.seeds = [self.seeds[row] for row in rows.tolist()]

    def append(self, token: Tensor) -> None:
        self.ids = torch.cat([self.ids, token], dim=1)
        self.positions = self.positions + 1


class _Chooser:
    """Takes one token per row and knows which rows have ended: an end token, or a stop string has been written."""

    def __init__(
        self,
        decoding: GenerationParams,
        rows: _Rows,
        eos: list[int],
        pad: int,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.decoding, self.eos, self.pad = decoding, eos, pad
        self.columns, device = rows.ids.shape[1], rows.ids.device
        self.processors = processors(decoding, rows.seeds, self.columns, eos, device)
        self.done = torch.zeros(len(rows.ids), dtype=torch.bool, device=device)
        self.ends = torch.tensor(eos, dtype=torch.int64, device=device)
        self.stops = stop_criteria(decoding.stop_strings, tokenizer)

    def take(self, rows: _Rows) -> Tensor:
        """[R, 1]: the next token of every row, padding for those that have ended; appends it to the rows."""
        scores: Tensor = self.processors(rows.ids, rows.logits.to(rows.ids.device, torch.float32, copy=True))
        token = scores.argmax(-1).masked_fill_(self.done, self.pad)[:, None]
        rows.append(token)
        if len(self.ends):
            self.done = self.done | torch.isin(token[:, 0], self.ends)
        if self.stops is not None:
            self.done = self.done | self.stops(rows.ids, scores)
        return token

    def keep(self, kept: Tensor, rows: _Rows) -> None:
        """Go on with the rows `kept`, which `rows` now are."""
        self.processors = processors(self.decoding, rows.seeds, self.columns, self.eos, rows.ids.device)
        self.done = self.done[kept]


@dataclass
class _Written:
    """What one cache's rows have become: ids, when each token was known, and the logits [B, V] of each if asked for."""

    ids: Tensor
    stamps: list[float]
    logits: list[Tensor] = field(default_factory=list)
    ends: dict[int, EvictionStats] = field(default_factory=dict)  # of rows that ended before the others


@torch.no_grad()
def finish(
    model: PreTrainedModel,
    contexts: Sequence[PrefilledContext],
    decoding: GenerationParams,
    seeds: list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    start: float,
    keep_logits: bool = False,
) -> list[Generation]:
    """Go on from contexts of the same prompts, together; uses them up. Every row is what it would be alone.

    seeds: of sampling, one per prompt; start: when the times begin.
    """
    eos, columns = eos_ids(model, decoding.eos), contexts[0].ids.shape[1]
    written = _write(model, contexts, decoding, seeds, eos, tokenizer, keep_logits)
    made = []
    for context, one in zip(contexts, written, strict=True):
        check_columns(context.cache, columns, len(one.stamps))
        check_scores(context.cache)
        tokens, ends = endings(one.ids, columns, eos, decoding.stop_strings, tokenizer)
        made.append(
            Generation(
                tokens=tokens,
                endings=ends,
                sequences=one.ids,
                timing=Timing.of(start, one.stamps),
                ledger=context.cache.ledger,
                cache=context.cache,
                logits=tuple(one.logits),
                ends=one.ends,
            )
        )
    return made


def _write(
    model: PreTrainedModel,
    contexts: Sequence[PrefilledContext],
    decoding: GenerationParams,
    seeds: list[int],
    eos: list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    keep_logits: bool,
) -> list[_Written]:
    """Up to max_new_tokens tokens per row; the last one is not fed. A cache whose rows have all ended is left alone."""
    size, rows = len(contexts[0].ids), _Rows.of(contexts, seeds)
    chooser = _Chooser(decoding, rows, eos, pad_id(model, tokenizer), tokenizer)
    written = [_Written(context.ids, []) for context in contexts]
    going = list(range(len(contexts)))
    cache = joined(contexts)
    for left in reversed(range(decoding.max_new_tokens)):
        if keep_logits:
            for place, which in enumerate(going):
                written[which].logits.append(rows.logits[place * size : (place + 1) * size].float())
        token = chooser.take(rows)
        done = chooser.done.view(-1, size).tolist()  # waits for the device, so that the stamp is true
        ended = [all(each) for each in done]
        now = time.perf_counter()
        for place, which in enumerate(going):
            written[which].stamps.append(now)
            if left and not ended[place]:
                fresh = (row for row, over in enumerate(done[place]) if over and row not in written[which].ends)
                written[which].ends |= {row: receipt_of(contexts[which].cache, row) for row in fresh}
            if ended[place] or not left:
                written[which].ids = rows.ids[place * size : (place + 1) * size]
        if all(ended) or not left:
            break
        if any(ended):
            going = [which for which, end in zip(going, ended, strict=True) if not end]
            kept = (~torch.tensor(ended, device=rows.ids.device)).repeat_interleave(size).nonzero()[:, 0]
            rows.keep(kept)
            chooser.keep(kept, rows)
            token, cache = token[kept], joined([contexts[which] for which in going])
        rows.logits = one_step(model, token, rows.positions, cache)
    return written


def joined(contexts: Sequence[PrefilledContext]) -> EvictionCache | MultiMethodCache:
    """The cache through which all of them take their next token."""
    if len(contexts) == 1:
        return contexts[0].cache
    return MultiMethodCache([context.cache for context in contexts], len(contexts[0].ids))
