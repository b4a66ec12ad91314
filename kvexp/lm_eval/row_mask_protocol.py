"""The protocol row_mask: one forward over context and continuation, each row under its own mask (the papers' lm-eval).

Which mask a method stands for, and how a kv_ratio becomes its two numbers, follows each paper's own script.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core import Budget, CacheConfig, Method, Noise
from kvexp.core.budget import floor_share
from kvexp.core.masked_layer import MaskFn
from kvexp.core.row_mask import causal_probs, global_mask, ideal_mask, local_mask, window_mask
from kvexp.errors import ConfigError
from kvexp.methods import A2SF, H2O, Full, Ideal, KeyAttention, Keyformer, KeyformerA2SF, Window

KNOWN = (Full, Window, H2O, KeyAttention, Keyformer, KeyformerA2SF, A2SF, Ideal)
# Settings of a method that a mask of one forward cannot have: they must be as the class has them.
IDLE: dict[type, tuple[str, ...]] = {
    H2O: ("impl", "score_batch"),
    Keyformer: ("score_scope", "key_window", "score_batch"),
    KeyformerA2SF: ("score_scope", "key_window", "score_batch"),
    A2SF: ("score_source",),
}


def check_row_mask(cache: CacheConfig, mask: str) -> None:
    """ConfigError for what has no meaning in one masked forward; mask: local or global."""
    method, budget = cache.method, cache.budget
    if type(method) not in KNOWN:
        raise ConfigError(
            f"protocol=row_mask has no mask for method {method.name}; it has for "
            f"{', '.join(cls.name for cls in KNOWN)}. Use protocol=prefill_then_step"
        )
    if mask == "global" and not isinstance(method, H2O | Full):
        raise ConfigError(f"mask=global is H2O's alone (its LLaMA script), not for method {method.name}")
    for name in IDLE.get(type(method), ()):
        own = type(method).__dataclass_fields__[name].default
        if getattr(method, name) != own:
            raise ConfigError(
                f"method.{name}={getattr(method, name)} means nothing under protocol=row_mask: leave it at {own}"
            )
    plain = budget is None or (
        budget.of == "prompt" and budget.counts_self and not budget.pyramid and not budget.layers
    )
    if not plain or (budget is not None and budget.shares_heads):
        raise ConfigError(
            "protocol=row_mask takes kv_ratio (or tokens) and nothing else of a budget: leave of, counts_self, "
            "pyramid, layers, heads and threshold alone"
        )
    if not cache.select.plain:
        raise ConfigError("protocol=row_mask masks by the method's own priorities: leave the group select alone")
    if method.evicts and (not cache.cadence.at_prefill or cache.cadence.every != 1):
        raise ConfigError("protocol=row_mask masks every row: leave cache.evict_at_prefill and cache.evict_every alone")
    if cache.quantization is not None:
        raise ConfigError("protocol=row_mask is one forward of plain keys and values: set cache.bits=16")
    if cache.renumbered:
        raise ConfigError("protocol=row_mask keeps original positions: set cache.positions=original")


def mask_fn_of(
    method: Method, budget: Budget | None, mask: str, length: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> MaskFn:
    """The mask of a request that counts `length` tokens for its budget; seed: of Keyformer's noise.

    H2O floors heavy and recent each (its heavy_ratio and recent_ratio); Keyformer floors the budget, then the recent
    part of it, and keeps tau at tau_init; A2SF and key attention have no window; Local (Window) is the recent band
    alone. All bands let the row's own token in besides, as the scripts do.
    """
    if isinstance(method, Full):
        return lambda x, layer: window_mask(x.shape[-1], x.shape[-1], x.device).expand_as(x)
    assert budget is not None
    whole = budget.tokens if budget.tokens is not None else floor_share(budget.kv_ratio or 0, length)
    if isinstance(method, Ideal):
        return lambda x, layer: ideal_mask(x, max(whole, 1))
    if isinstance(method, Window):
        return lambda x, layer: local_mask(x, 0, whole, dtype=dtype)
    if isinstance(method, H2O):
        heavy, recent = _floor_each(budget, method.recent_ratio, length)
        if mask == "global":
            return lambda x, layer: global_mask(x, heavy, recent)
        return lambda x, layer: local_mask(x, heavy, recent, dtype=dtype)
    recent = method.protect_recent if isinstance(method, A2SF) else method.recent(whole)
    decay = method.alpha if isinstance(method, A2SF | KeyformerA2SF) else 1.0
    noise = _noise_of(method)
    if noise is None:
        return lambda x, layer: local_mask(x, max(whole - recent, 0), recent, decay=decay, dtype=dtype)
    tau, zeta = noise

    def mask_fn(x: Tensor, layer: int) -> Tensor:
        scores = causal_probs(x, None if zeta is None else draw(zeta, x, seed, layer), tau)
        return local_mask(x, max(whole - recent, 0), recent, decay=decay, scores=scores, dtype=dtype)

    return mask_fn


def _noise_of(method: Method) -> tuple[float, Noise | None] | None:
    """(tau, noise) of Keyformer's scores, None where the scores are the plain softmax."""
    if not isinstance(method, Keyformer):
        return None
    return method.tau_init, None if method.noise == "none" else Noise(method.noise, method.fresh)


def draw(noise: Noise, x: Tensor, seed: int, layer: int) -> Tensor:
    """Noise for logits [1, heads, n, n]: every row its own draw, as the release draws anew for every row."""
    places = torch.arange(x.shape[-1], device=x.device)[None]
    return noise.draw(torch.tensor([seed], device=x.device), layer, x.shape[1], places, places[:, None])


def _floor_each(budget: Budget, recent_ratio: float, length: int) -> tuple[int, int]:
    """(heavy, recent): two ratios of the length, floored apart; a budget in tokens is parted instead."""
    if budget.tokens is not None:
        recent = floor_share(recent_ratio, budget.tokens)
        return budget.tokens - recent, recent
    ratio = budget.kv_ratio or 0
    return floor_share(ratio * (1 - recent_ratio), length), floor_share(ratio * recent_ratio, length)
