"""The function that Hugging Face calls for attention, and the one it calls for masks, both registered as "kvexp".

The attention function never receives the cache, so `EvictionCacheLayer.update` returns a view of the new keys that
carries its layer as a Python attribute. Keys without that attribute come from another cache or none: then this is
ordinary causal attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvexp.core.attention import AttentionInputs, AttentionParams, attend_prompt
from kvexp.errors import CacheError, ConfigError

NAME = "kvexp"
TAG = "_kvexp"


def check_patched(config: Any, error: type[CacheError | ConfigError] = CacheError) -> None:
    """`error` where a model of this configuration does not attend through kvexp: a cache would be ignored in part."""
    if getattr(config, "_attn_implementation", None) != NAME:
        raise error("this model does not attend through kvexp: call kvexp.models.patch_model(model) first")


def pass_padding(*, batch_size: int, attention_mask: Tensor | None = None, device: Any = None, **_: Any) -> Tensor:
    """Hand the raw [B, columns] padding mask through; (B, 0) stands for "no padding" (some models call .to() on it)."""
    if attention_mask is None:
        return torch.ones(batch_size, 0, dtype=torch.bool, device=device)
    return attention_mask


def attend(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, geometry: AttentionParams) -> Tensor:
    """query [B, H * G, Q, D], key [B, H, *, D], value -> [B, H * G, Q, Dv], through kvexp's cache if there is one."""
    if padding is not None and padding.ndim != 2:
        raise CacheError(
            f"kvexp takes the 2-D attention mask [batch, columns], got {padding.ndim} dimensions: pass the padding mask"
        )
    padding = padding if padding is not None and padding.shape[-1] else None
    layer = getattr(key, TAG, None)
    if layer is None:
        return _without_cache(query, key, value, padding, geometry)
    if geometry.rotation is None and layer.rotation is not None:
        geometry = replace(geometry, rotation=layer.rotation)
    out: Tensor = layer.state.forward(query, key, value, geometry, padding)
    return out


def _without_cache(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, geometry: AttentionParams
) -> Tensor:
    b, h, s = key.shape[:3]
    count = query.shape[2]
    columns = torch.arange(s, device=key.device).expand(b, s)
    if padding is not None:
        real = padding[:, -s:].to(torch.bool)
        columns = torch.where(real, columns, -1)
    sight = AttentionInputs(
        query=query.unflatten(1, (h, query.shape[1] // h)),
        keys=key,
        values=value,
        positions=columns[:, None],
        query_positions=columns[:, -count:],
        geometry=geometry,
        in_order=True,
        padded=padding is not None,
    )
    return attend_prompt(sight).flatten(1, 2)


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
    """Hugging Face's attention interface: returns [B, Q, H * G, Dv] and no weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = attend(query, key, value, attention_mask, AttentionParams(scale, sliding_window))
    return out.transpose(1, 2).contiguous(), None
