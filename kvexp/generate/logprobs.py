"""Log-probabilities of given continuations under eviction: prefill, evict, feed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvexp.core import Budget, Method
from kvexp.errors import ConfigError
from kvexp.generate.run import check_length, pad_id, pad_left
from kvexp.models import EvictionCache


@torch.inference_mode()
def continuation_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    method: Method,
    budget: Budget | None = None,
    *,
    seeds: int | Sequence[int] = 0,
    beyond_context: bool = False,
    **plan: Any,
) -> list[list[float]]:
    """Natural-log probability of every continuation token: prefill the prompt, evict, feed the continuation one by one.

    The first token is judged by the full prefill, every later one by what survived. One list per row.
    """
    if len(prompts) != len(continuations) or not prompts:
        raise ConfigError(f"got {len(prompts)} prompts and {len(continuations)} continuations: give one for each")
    longest_new = max(len(c) for c in continuations)
    if min(len(c) for c in continuations) == 0:
        raise ConfigError("a continuation is empty: every continuation needs at least one token")
    check_length(model, max(len(p) for p in prompts), longest_new, beyond_context)
    device = model.get_input_embeddings().weight.device
    ids, mask = pad_left(prompts, pad_id(model, None), device)
    cache = EvictionCache(
        model,
        method,
        budget,
        prompt_tokens=ids.shape[1],
        max_new_tokens=longest_new,
        seeds=seeds if isinstance(seeds, int) else list(seeds),
        beyond_context=beyond_context,
        **plan,
    )
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
    return [row[: len(c)].tolist() for row, c in zip(result, continuations, strict=True)]


def forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: EvictionCache) -> Tensor:
    """One forward of ids [B, Q] through the cache; mask [B, columns so far]. Returns the last logits [B, V]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {} if model.config.model_type == "mpt" else {"position_ids": positions}
    output = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
    logits: Tensor = output.logits[:, -1]
    return logits
