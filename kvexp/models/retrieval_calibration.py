"""What retrieval methods need to know of a model: the size of its heads, and how long one of its layers takes."""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvexp.errors import ConfigError
from kvexp.models.families import family_of, kv_heads, layers_of, longest
from kvexp.retrieval.base import Retrieval

_PREPARED: WeakKeyDictionary[PreTrainedModel, dict[Retrieval, Any]] = WeakKeyDictionary()


def head_dim(config: Any) -> int:
    """Components of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_retrieval(config: Any, method: Retrieval) -> None:
    """ConfigError where the method cannot work on a model of this configuration."""
    method.check_heads(head_dim(config))
    family = family_of(config)
    if method.clamps and family.position == "learned":
        raise ConfigError(
            f"method.far_positions=clamped cannot work on {family.title}: its learned positions are added to the "
            "input, not to the cache. Set method.far_positions=ordinary"
        )


def prepare(model: PreTrainedModel, method: Retrieval) -> Any:
    """Whatever the method wants to find out about model and machine before a prompt; once per model and method."""
    known = _PREPARED.setdefault(model, {})
    if method not in known:
        config, device = model.config, model.get_input_embeddings().weight.device
        shape = (longest(config), kv_heads(config), head_dim(config), str(device))
        known[method] = method.prepare(lambda tokens: layer_seconds(model, tokens), *shape)
    return known[method]


@torch.no_grad()
def layer_seconds(model: PreTrainedModel, tokens: int, repeats: int = 3) -> float:
    """Seconds one layer takes for a prompt of so many tokens: the fastest of a few full prefills, over the layers."""
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best / layers_of(model.config)
