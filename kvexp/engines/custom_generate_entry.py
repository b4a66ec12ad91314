"""Generate under an eviction method of kvexp: what transformers calls for `model.generate(custom_generate=...)`.

    model.generate(ids, custom_generate=FOLDER, trust_remote_code=True, method="keyformer", kv_ratio=0.5)

method: one of `METHODS`; kv_ratio: slots per kv head over prompt tokens, or budget_tokens: a number of slots;
method_options, cache_options: fields of the method and of `CacheConfig`; seed: of noise inside the method. Everything
else is an argument of `generate` and means what it means there. The model is left as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvexp import methods as method_package
from kvexp.core.budget import Budget
from kvexp.core.config import CacheConfig
from kvexp.core.method import Method
from kvexp.hf.cache import EvictionCache
from kvexp.hf.load import patched
from kvexp.util import ConfigError

# Not those that need what a pass over texts or a training gives.
METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (getattr(method_package, name) for name in method_package.__all__)
    if cls.evicts and not (cls().needs.calibration or cls().needs.surrogate)
}


@torch.no_grad()
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    method: str = "h2o",
    kv_ratio: float | None = None,
    budget_tokens: int | None = None,
    method_options: Mapping[str, Any] | None = None,
    cache_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    **given: Any,
) -> Any:
    """What `model.generate` returns, with the KV cache evicted by `method`. Errors are ConfigError, before it runs."""
    config = cache_config(method, kv_ratio, budget_tokens, method_options or {}, cache_options or {})
    ids = inputs if inputs is not None else given.pop("input_ids", None)
    if ids is None:
        raise ConfigError("give the prompt as token ids: model.generate(input_ids, ...)")
    if given.pop("past_key_values", None) is not None:
        raise ConfigError("custom_generate makes the cache itself: leave past_key_values out")
    mask = given.get("attention_mask")
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    settings = given.get("generation_config") or model.generation_config
    beams = given.get("num_beams") or getattr(settings, "num_beams", None) or 1
    with patched(model):
        cache = EvictionCache(
            model,
            config,
            num_beams=beams,
            prompt_tokens=ids.shape[1],
            max_new_tokens=_new_tokens(given, settings, ids.shape[1]),
            seeds=seed,
            tokenizer=given.get("tokenizer"),
        )
        cache.check_budget([int(length) for length in lengths], ids.shape[1])
        return model.generate(ids, past_key_values=cache, **given)


def cache_config(
    method: str,
    kv_ratio: float | None,
    budget_tokens: int | None,
    method_options: Mapping[str, Any],
    cache_options: Mapping[str, Any],
) -> CacheConfig:
    """The cache that was asked for; ConfigError names what is wrong."""
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(sorted(METHODS))}, got {method!r}")
    if (kv_ratio is None) == (budget_tokens is None):
        raise ConfigError(
            "give kv_ratio (0.5 keeps half the prompt) or budget_tokens (a number of slots), and not both"
        )
    budget = Budget(kv_ratio=kv_ratio) if kv_ratio is not None else Budget(tokens=budget_tokens)
    try:
        made = METHODS[method](**method_options)
    except TypeError as error:
        raise ConfigError(f"method_options of {method}: {error}") from error
    simulated = made.simulation_only or (made.score_spec is not None and made.score_spec.over == "full")
    return CacheConfig(made, budget, **{"mode": "mask" if simulated else "overwrite", **cache_options})


def _new_tokens(given: Mapping[str, Any], settings: Any, prompt_tokens: int) -> int | None:
    """How many tokens may be generated, which schedules of tau go by; None where nothing says it."""
    for source in (given, vars(settings)):
        new, longest = source.get("max_new_tokens"), source.get("max_length")
        if new:
            return int(new)
        if longest and longest > prompt_tokens:
            return int(longest) - prompt_tokens
    return None
