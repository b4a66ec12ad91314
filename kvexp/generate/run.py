"""Prefill, evict, decode under Hugging Face's own generate(), with timing."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvexp.core import Budget, Ledger, Method
from kvexp.errors import CacheError, ConfigError
from kvexp.generate.context import Context, forward, prefill
from kvexp.generate.decoding import Decoding, processors
from kvexp.generate.request import check_length, check_questions, check_request, eos_ids, pad_id, pad_left, seeds_of
from kvexp.models import EvictionCache


@dataclass
class Timing:
    """Seconds from the call to the first and second token, then per output token; NaN where there were too few."""

    ttft_s: float = float("nan")
    tt2t_s: float = float("nan")
    tpot_s: float = float("nan")

    @classmethod
    def of(cls, start: float, stamps: list[float]) -> Timing:
        nan = float("nan")
        first = stamps[0] - start if stamps else nan
        second = stamps[1] - start if len(stamps) > 1 else nan
        per_token = (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else nan
        return cls(first, second, per_token)


@dataclass
class Generation:
    """tokens: new token ids per row, cut after the end token; sequences [B, columns] as generate() returned them.

    beam_scores [B] with beams; timing of the whole batch; ledger of bytes; cache: what was left of it.
    """

    tokens: list[list[int]]
    sequences: Tensor
    timing: Timing
    ledger: Ledger
    cache: EvictionCache
    beam_scores: list[float] | None = None
    logits: tuple[Tensor, ...] = field(default=(), repr=False)


class _Stamps(StoppingCriteria):  # type: ignore[misc]
    """Notes the time each token became known. generate() reads the tokens itself, so the device has finished."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    method: Method,
    budget: Budget | None = None,
    *,
    questions: Sequence[Sequence[int]] | None = None,
    decoding: Decoding | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    beyond_context: bool = False,
    keep_logits: bool = False,
    **plan: Any,
) -> Generation:
    """Generate for a batch of prompts (token ids per row) under an eviction method.

    questions: fed token by token after the prompts were prefilled and evicted, all of one length; the budget is that
    of the prompt alone. seeds: of sampling and of noise inside methods, one for all rows or one per row: a row's
    tokens depend on its prompt, question and seed alone. plan: cadence, mode, positions, observe, block of
    `EvictionCache`. Errors are ConfigError before the model runs. keep_logits keeps one [B, vocabulary] tensor per
    step.
    """
    decoding = decoding or Decoding()
    check_request(model, prompts, method, budget)
    row_seeds = seeds_of(seeds, len(prompts))
    new = decoding.max_new_tokens + (check_questions(model, len(prompts), questions) if questions is not None else 0)
    check_length(model, max(len(p) for p in prompts), new, beyond_context)
    ahead: dict[str, Any] = {"num_beams": decoding.num_beams, "max_new_tokens": new, "beyond_context": beyond_context}
    if questions is not None:
        ahead |= {"chunk": decoding.prefill_chunk, "tokenizer": tokenizer}
        context = prefill(model, prompts, method, budget, seeds=row_seeds, **ahead, **plan)
        options: dict[str, Any] = {"decoding": decoding, "tokenizer": tokenizer, "seeds": row_seeds}
        return ask(model, context, questions, **options, keep_logits=keep_logits)
    ids, mask = pad_left(prompts, pad_id(model, tokenizer), model.get_input_embeddings().weight.device)
    cache = EvictionCache(model, method, budget, prompt_tokens=ids.shape[1], seeds=row_seeds, **ahead, **plan)
    cache.resolve([len(p) for p in prompts], ids.shape[1])
    start = time.perf_counter()
    return _decode(model, cache, ids, mask, decoding, tokenizer, row_seeds, start=start, keep_logits=keep_logits)


@torch.no_grad()
def ask(
    model: PreTrainedModel,
    context: Context,
    questions: Sequence[Sequence[int]],
    *,
    decoding: Decoding | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    keep_logits: bool = False,
) -> Generation:
    """Generate the answer to one question (token ids) per row of a context, which this uses up.

    Questions are of one length and count as decode steps, so eviction goes on while they are read. seeds: of sampling;
    noise inside methods keeps the context's. Times include the context's prefill.
    """
    decoding, cache = decoding or Decoding(), context.cache
    rows, beams = len(context.ids), decoding.num_beams
    row_seeds, length = seeds_of(seeds, rows), check_questions(model, rows, questions)
    if cache.timeline.num_beams != beams:
        raise ConfigError(f"the context was prefilled for num_beams={cache.timeline.num_beams}, not for {beams}")
    new = length + decoding.max_new_tokens
    check_length(model, max(context.lengths), new, cache.timeline.max_positions is None)
    context.expects(new)
    start = time.perf_counter() - context.seconds
    asked = torch.as_tensor([list(q) for q in questions]).to(context.ids.device)
    ids = torch.cat([context.ids, asked], dim=1)
    mask = torch.cat([context.mask, torch.ones_like(asked)], dim=1)
    steps, rows_mask = asked.repeat_interleave(beams, 0), mask.repeat_interleave(beams, 0)
    for j in range(length - 1):  # generate() feeds the last one
        forward(model, steps[:, j : j + 1], rows_mask[:, : context.ids.shape[1] + j + 1], cache)
    whole = dataclasses.replace(decoding, prefill_chunk=None)
    return _decode(model, cache, ids, mask, whole, tokenizer, row_seeds, start=start, keep_logits=keep_logits)


def _decode(
    model: PreTrainedModel,
    cache: EvictionCache,
    ids: Tensor,
    mask: Tensor,
    decoding: Decoding,
    tokenizer: PreTrainedTokenizerBase | None,
    seeds: list[int],
    *,
    start: float,
    keep_logits: bool,
) -> Generation:
    """Hugging Face's generate() on ids and mask [B, columns], of which the cache may have seen a part already."""
    stamps, eos = _Stamps(), eos_ids(model, decoding.eos)
    output: Any = without_defaults(model).generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        do_sample=False,
        num_beams=decoding.num_beams,
        early_stopping=decoding.early_stopping if decoding.num_beams > 1 else None,
        length_penalty=decoding.length_penalty if decoding.num_beams > 1 else None,
        max_new_tokens=decoding.max_new_tokens,
        min_new_tokens=decoding.min_new_tokens if decoding.num_beams > 1 and decoding.min_new_tokens else None,
        eos_token_id=eos or None,
        pad_token_id=pad_id(model, tokenizer),
        stop_strings=list(decoding.stop_strings) or None,
        tokenizer=tokenizer if decoding.stop_strings else None,
        prefill_chunk_size=decoding.prefill_chunk,
        logits_processor=processors(decoding, seeds, ids.shape[1], eos, ids.device),
        stopping_criteria=StoppingCriteriaList([stamps]),
        return_dict_in_generate=True,
        output_logits=keep_logits,
        output_scores=decoding.num_beams > 1,
    )
    _check_columns(cache, ids.shape[1], len(stamps.times))
    check_scores(cache)
    new = output.sequences[:, ids.shape[1] :]
    return Generation(
        tokens=[_cut(row, eos) for row in new.tolist()],
        sequences=output.sequences,
        timing=Timing.of(start, stamps.times),
        ledger=cache.ledger,
        cache=cache,
        beam_scores=output.sequences_scores.tolist() if decoding.num_beams > 1 else None,
        logits=tuple(output.logits) if keep_logits else (),
    )


def without_defaults(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, weights and all, without its own generation defaults: none of them may change a result unseen."""
    other = copy.copy(model)
    other.generation_config = GenerationConfig()
    return other


def check_scores(cache: EvictionCache) -> None:
    """After a run: NaN in a score means that slots were chosen by nothing."""
    if not cache.scores_are_finite():
        raise CacheError("the scores of this run hold NaN: the model produced NaN or inf, no number can be trusted")


def _cut(tokens: list[int], eos: list[int]) -> list[int]:
    """Tokens up to and including the first end token: what follows is padding."""
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[: i + 1]
    return tokens


def _check_columns(cache: EvictionCache, prompt: int, steps: int) -> None:
    seen = cache.get_seq_length()
    if seen != prompt + steps - 1:
        raise CacheError(
            f"the cache has seen {seen} columns, {prompt + steps - 1} were expected: this version of transformers "
            "feeds the model differently, no number of this run can be trusted"
        )
