"""Calibration of retrieval methods to a model: the size of its heads, and the time one of its layers takes."""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvexp.errors import ConfigError
from kvexp.models.families import family_of, head_dim, max_positions, num_kv_heads, num_layers
from kvexp.retrieval.base import Retrieval

_CALIBRATIONS: WeakKeyDictionary[PreTrainedModel, dict[Retrieval, Any]] = WeakKeyDictionary()


def check_retrieval(config: Any, method: Retrieval) -> None:
    """ConfigError where the method cannot work on a model of this configuration."""
    method.check_heads(head_dim(config))
    family = family_of(config)
    if method.clamps_positions and family.position == "learned":
        raise ConfigError(
            f"method.far_positions=clamped cannot work on {family.title}: its learned positions are added to the "
            "input, not to the cache. Set method.far_positions=ordinary"
        )


def calibrate(model: PreTrainedModel, method: Retrieval) -> Any:
    """The result of `Retrieval.calibrate` for this model and machine; computed once per model and method."""
    known = _CALIBRATIONS.setdefault(model, {})
    if method not in known:
        config, device = model.config, model.get_input_embeddings().weight.device
        shape = (max_positions(config), num_kv_heads(config), head_dim(config), str(device))
        known[method] = method.calibrate(lambda tokens: measure_layer_time(model, tokens), *shape)
    return known[method]


@torch.no_grad()
def measure_layer_time(model: PreTrainedModel, tokens: int, repeats: int = 3) -> float:
    """Seconds that one layer takes for a prompt of `tokens` tokens: the fastest of `repeats` prefills."""
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best / num_layers(model.config)
