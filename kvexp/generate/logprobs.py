"""Log-probabilities of given continuations under eviction: prefill, evict, feed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvexp.core import Budget, Method
from kvexp.errors import ConfigError
from kvexp.generate.run import check_length, check_request, check_scores, pad_id, pad_left, seeds_of
from kvexp.models import EvictionCache


@torch.no_grad()
def continuation_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    method: Method,
    budget: Budget | None = None,
    *,
    seeds: int | Sequence[int] = 0,
    beyond_context: bool = False,
    max_new_tokens: int | None = None,
    **plan: Any,
) -> list[list[float]]:
    """Natural-log probability of every continuation token: prefill the prompt, evict, feed the continuation one by one.

    The first token is judged by the full prefill, every later one by what survived. One list per row.
    max_new_tokens: the length that tau schedules and budget.of=sequence go by; needed where continuations differ in
    length, since a row must not depend on its neighbours'.
    """
    check_request(model, prompts, method, budget)
    if len(prompts) != len(continuations) or not prompts:
        raise ConfigError(f"got {len(prompts)} prompts and {len(continuations)} continuations: give one for each")
    longest_new = max(len(c) for c in continuations)
    if min(len(c) for c in continuations) == 0:
        raise ConfigError("a continuation is empty: every continuation needs at least one token")
    length = _schedule(method, budget, max_new_tokens, [len(c) for c in continuations])
    check_length(model, max(len(p) for p in prompts), longest_new, beyond_context)
    device = model.get_input_embeddings().weight.device
    ids, mask = pad_left(prompts, pad_id(model, None), device)
    cache = EvictionCache(
        model,
        method,
        budget,
        prompt_tokens=ids.shape[1],
        max_new_tokens=length,
        seeds=seeds_of(seeds, len(prompts)),
        beyond_context=beyond_context,
        **plan,
    )
    cache.resolve([len(p) for p in prompts], ids.shape[1])
    targets = torch.zeros(len(prompts), longest_new, dtype=torch.int64)
    for row, continuation in enumerate(continuations):
        targets[row, : len(continuation)] = torch.as_tensor(list(continuation))
    targets = targets.to(device)
    result = torch.empty(len(prompts), longest_new)
    step, step_mask = ids, mask
    for j in range(longest_new):
        logits = forward(model, step, step_mask, cache)
        chosen = logits.float().log_softmax(-1).gather(1, targets[:, j : j + 1].to(logits.device))
        result[:, j] = chosen[:, 0].cpu()
        step = targets[:, j : j + 1]
        step_mask = torch.cat([step_mask, torch.ones_like(step)], dim=1)
    check_scores(cache)
    return [row[: len(c)].tolist() for row, c in zip(result, continuations, strict=True)]


def _schedule(method: Method, budget: Budget | None, asked: int | None, lengths: list[int]) -> int:
    """The max_new_tokens that schedules go by; ConfigError where it would depend on the batch."""
    view = method.view
    matters = (view is not None and view.tau[0] != view.tau[1]) or (budget is not None and budget.of == "sequence")
    if asked is None and matters and len(set(lengths)) > 1:
        raise ConfigError(
            f"continuations of {min(lengths)} to {max(lengths)} tokens: a tau schedule or budget.of=sequence needs "
            "max_new_tokens, else a row would depend on its neighbours"
        )
    if asked is not None and asked < max(lengths):
        raise ConfigError(f"max_new_tokens={asked}, but a continuation has {max(lengths)} tokens")
    return asked or max(lengths)


def forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: EvictionCache) -> Tensor:
    """One forward of ids [B, Q] through the cache; mask [B, columns so far]. Returns the last logits [B, V]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {} if model.config.model_type == "mpt" else {"position_ids": positions}
    output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
    logits: Tensor = output.logits[:, -1]
    return logits
