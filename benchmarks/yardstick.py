"""Hugging Face's full cache, in the leanest loop its models allow: the measure common to kvexp and to its peers."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from benchmarks.clock import Sample, settle


@torch.no_grad()
def prefilled(model: PreTrainedModel, ids: Tensor, cache: Any | None = None) -> Any:
    """A cache (DynamicCache unless given) that has seen ids [B, T]; for MPT too, whose configuration says no cache."""
    cache = DynamicCache() if cache is None else cache
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def static_cache(model: PreTrainedModel, columns: int) -> StaticCache:
    """Hugging Face's preallocated cache for so many columns."""
    return StaticCache(config=model.config, max_cache_len=columns)


@torch.no_grad()
def decoded(model: PreTrainedModel, cache: Any, rows: int, seen: int, new: int, device: str) -> Sample:
    """Greedy decoding after `seen` columns: one token is fed, `new` come out; seconds per token as kvexp counts them.

    tpot_s: from the first token known to the last; wall_s, cpu_s: by either clock, per forward.
    """
    token = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    place, stamps = torch.full((rows, 1), seen, device=device), []
    takes_positions = model.config.model_type != "mpt"
    settle(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(new):
        options = {"position_ids": place} if takes_positions else {}
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1, **options).logits
        token, place = logits[:, -1:].argmax(-1), place + 1
        token[0].item()  # as generation does, which has to see whether it ended
        stamps.append(time.perf_counter())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"tpot_s": (stamps[-1] - stamps[0]) / max(1, new - 1), "wall_s": wall / new, "cpu_s": cpu / new}


def copied(cache: Any, rows: int) -> Any:
    """The cache of one prompt, as a cache of so many rows of it; the original stays as it is."""
    cache = copy.deepcopy(cache)
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    return cache
