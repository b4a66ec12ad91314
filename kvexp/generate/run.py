"""Prefill, evict, decode under Hugging Face's own generate(), with timing."""

from __future__ import annotations

import copy
import operator
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
from kvexp.generate.decoding import Decoding, processors
from kvexp.models import EvictionCache
from kvexp.models.families import longest


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


def pad_left(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Prompts of unequal length -> ids and mask [B, columns], padded on the left."""
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"row {row} of the batch has an empty prompt: every prompt needs at least one token")
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    method: Method,
    budget: Budget | None = None,
    *,
    decoding: Decoding | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seeds: int | Sequence[int] = 0,
    beyond_context: bool = False,
    keep_logits: bool = False,
    **plan: Any,
) -> Generation:
    """Generate for a batch of prompts (token ids per row) under an eviction method.

    seeds: of sampling and of noise inside methods, one for all rows or one per row: a row's tokens depend on its
    prompt and seed alone. plan: cadence, mode, positions, observe, block of `EvictionCache`. Errors are ConfigError
    before the model runs. keep_logits keeps one [B, vocabulary] tensor per step.
    """
    decoding = decoding or Decoding()
    check_request(model, prompts, method, budget)
    row_seeds = seeds_of(seeds, len(prompts))
    device = model.get_input_embeddings().weight.device
    pad = pad_id(model, tokenizer)
    ids, mask = pad_left(prompts, pad, device)
    check_length(model, max(len(p) for p in prompts), decoding.max_new_tokens, beyond_context)
    cache = EvictionCache(
        model,
        method,
        budget,
        num_beams=decoding.num_beams,
        prompt_tokens=ids.shape[1],
        max_new_tokens=decoding.max_new_tokens,
        seeds=row_seeds,
        beyond_context=beyond_context,
        **plan,
    )
    cache.resolve([len(p) for p in prompts], ids.shape[1])
    stamps, eos = _Stamps(), _eos_ids(model, decoding.eos)
    start = time.perf_counter()
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
        pad_token_id=pad,
        stop_strings=list(decoding.stop_strings) or None,
        tokenizer=tokenizer if decoding.stop_strings else None,
        prefill_chunk_size=decoding.prefill_chunk,
        logits_processor=processors(decoding, row_seeds, ids.shape[1], eos, device),
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


def seeds_of(seeds: int | Sequence[int], rows: int) -> list[int]:
    """One seed per row."""
    try:
        wanted = [operator.index(seeds)] * rows if not isinstance(seeds, Sequence | range) else list(seeds)
        result = [operator.index(seed) for seed in wanted]
    except TypeError as error:
        raise ConfigError(f"seeds must be a whole number or one per row, got {seeds!r}") from error
    if len(result) != rows:
        raise ConfigError(f"got {len(result)} seeds for a batch of {rows} rows: give one, or one per row")
    if any(not 0 <= seed < 1 << 63 for seed in result):
        raise ConfigError("seeds must be between 0 and 2**63 - 1")
    return result


def check_request(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], method: Method, budget: Budget | None
) -> None:
    """What a caller can get wrong, said before the model runs."""
    if not isinstance(method, Method):
        raise ConfigError(f"method must be a method object such as kvexp.methods.H2O(), got {method!r}")
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigError(f"budget must be a Budget such as Budget(kv_ratio=0.5), got {budget!r}")
    if isinstance(prompts, str | Tensor) or any(isinstance(p, str | int) for p in prompts):
        raise ConfigError("prompts must be lists of token ids, one per row: tokenize first (tokenizer(text).input_ids)")
    if not prompts:
        raise ConfigError("no prompts were given")
    size = model.get_input_embeddings().num_embeddings
    for row, prompt in enumerate(prompts):
        wrong = [t for t in prompt if not 0 <= int(t) < size]
        if wrong:
            raise ConfigError(f"row {row} holds token id {wrong[0]}, the model knows 0 to {size - 1}")


def check_scores(cache: EvictionCache) -> None:
    """After a run: NaN in a score means that slots were chosen by nothing."""
    if not cache.scores_are_finite():
        raise CacheError("the scores of this run hold NaN: the model produced NaN or inf, no number can be trusted")


def pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    for value in (getattr(tokenizer, "pad_token_id", None), model.config.pad_token_id, *_eos_ids(model, "model")):
        if isinstance(value, int) and 0 <= value < model.config.vocab_size:
            return value
    return 0


def _eos_ids(model: PreTrainedModel, eos: int | Sequence[int] | str | None) -> list[int]:
    if isinstance(eos, str):  # "model": Decoding lets no other word pass
        own: Any = getattr(model.generation_config, "eos_token_id", None)
        eos = own if own is not None else getattr(model.config, "eos_token_id", None)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def _cut(tokens: list[int], eos: list[int]) -> list[int]:
    """Tokens up to and including the first end token: what follows is padding."""
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[: i + 1]
    return tokens


def check_length(model: PreTrainedModel, prompt: int, new: int, beyond_context: bool) -> None:
    # The last new token is never fed back, so it needs no position.
    holds = longest(model.config)
    if not beyond_context and prompt + new - 1 > holds:
        raise ConfigError(
            f"the prompt has {prompt} tokens and max_new_tokens={new}, the model holds {holds}: shorten the prompt, "
            "lower max_new_tokens, or say beyond_context=True (not for learned positions)"
        )


def _check_columns(cache: EvictionCache, prompt: int, steps: int) -> None:
    seen = cache.get_seq_length()
    if seen != prompt + steps - 1:
        raise CacheError(
            f"the cache has seen {seen} columns, {prompt + steps - 1} were expected: this version of transformers "
            "feeds the model differently, no number of this run can be trusted"
        )
