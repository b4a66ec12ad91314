"""The attention function and the mask function that Hugging Face calls, both registered under the name "kvexp".

The attention function never receives the cache, so `EvictionCacheLayer.update` returns a view of the new keys that
carries its layer as a Python attribute. Keys without that attribute come from another cache or from none: they get
ordinary causal attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvexp.core.attention import AttentionInputs, AttentionParams, sdpa_attention
from kvexp.errors import CacheError, ConfigError

ATTN_IMPLEMENTATION = "kvexp"
LAYER_ATTR = "_kvexp"


def check_patched(config: Any, error: type[CacheError | ConfigError] = CacheError) -> None:
    """Raise `error` where a model of this configuration does not attend through kvexp, which would bypass the cache."""
    if getattr(config, "_attn_implementation", None) != ATTN_IMPLEMENTATION:
        raise error("this model does not attend through kvexp: call kvexp.models.patch_model(model) first")


def padding_mask(*, batch_size: int, attention_mask: Tensor | None = None, device: Any = None, **_: Any) -> Tensor:
    """The padding mask [B, columns] as it came; [B, 0] for no padding, since some models call .to() on it."""
    if attention_mask is None:
        return torch.ones(batch_size, 0, dtype=torch.bool, device=device)
    return attention_mask


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attention output [B, H * G, Q, Dv] through the cache that tagged `key`, or without a cache.

    query [B, H * G, Q, D]; key [B, H, Q, D], value [B, H, Q, Dv]: of the new tokens (of all tokens without a cache of
    kvexp); padding: [B, columns so far] with 0 for padding, or None.
    """
    if padding is not None and padding.ndim != 2:
        raise CacheError(
            f"kvexp takes the 2-D attention mask [batch, columns], got {padding.ndim} dimensions: pass the padding mask"
        )
    padding = padding if padding is not None and padding.shape[-1] else None
    layer = getattr(key, LAYER_ATTR, None)
    if layer is None:
        return _without_cache(query, key, value, padding, params)
    if params.rope is None and layer.rope is not None:
        params = replace(params, rope=layer.rope)
    out: Tensor = layer.state.forward(query, key, value, params, padding)
    return out


def _without_cache(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, params: AttentionParams
) -> Tensor:
    """Ordinary causal attention [B, H * G, Q, Dv] over all keys; arguments as of `cached_attention`."""
    b, h, s = key.shape[:3]
    count = query.shape[2]
    positions = torch.arange(s, device=key.device).expand(b, s)
    if padding is not None:
        real = padding[:, -s:].to(torch.bool)
        positions = torch.where(real, positions, -1)
    inputs = AttentionInputs(
        query=query.unflatten(1, (h, query.shape[1] // h)),
        keys=key,
        values=value,
        positions=positions[:, None],
        query_positions=positions[:, -count:],
        params=params,
        in_column_order=True,
        padded=padding is not None,
    )
    return sdpa_attention(inputs).flatten(1, 2)


def kvexp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: returns the output [B, Q, H * G, Dv] and None for the weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = cached_attention(query, key, value, attention_mask, AttentionParams(scale, sliding_window))
    return out.transpose(1, 2).contiguous(), None
