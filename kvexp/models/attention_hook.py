"""The attention function and the mask function that Hugging Face calls, both registered under the name "kvexp".

The attention function never receives the cache, so `EvictionCacheLayer.update` returns a view of the new keys that
carries its layer as a Python attribute. Keys without that attribute come from another cache or from none: they get
ordinary causal attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvexp.core.attention import AttentionInputs, AttentionParams, sdpa_attention
from kvexp.errors import CacheError, ConfigError

ATTN_IMPLEMENTATION = "kvexp"
LAYER_ATTR = "_kvexp"
_WINDOW_ATTR = "_kvexp_window"  # of a mask: the window that the model asked for, None for none
# Arguments of attention that models hand through and that cannot change its output. What is not here raises.
_NO_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "layer_idx", "token_type_ids"),
    *("tokenizer", "assistant_tokenizer"),  # of generate(), which hands them on
    *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),  # of the model around it
}
NOT_COMPILED = (
    "torch.compile cannot compile a model that attends through kvexp: slots, schedules and shapes are computed on the "
    "host. Call the model without torch.compile"
)


def check_patched(config: Any, error: type[CacheError | ConfigError] = CacheError) -> None:
    """Raise `error` where a model of this configuration does not attend through kvexp, which would bypass the cache."""
    if getattr(config, "_attn_implementation", None) != ATTN_IMPLEMENTATION:
        raise error("this model does not attend through kvexp: call kvexp.models.patch_model(model) first")


def check_not_compiled() -> None:
    """CacheError under torch.compile: while it traces, and where it could not and goes on without.

    An error that is raised while it traces is taken for code that cannot be traced, and nobody sees it.
    """
    callback = getattr(getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", lambda: None)
    if torch.compiler.is_compiling() or callback() is not None:
        raise CacheError(NOT_COMPILED)


def padding_mask(
    *,
    batch_size: int,
    attention_mask: Tensor | None = None,
    device: Any = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """The padding mask [B, columns] as it came; [B, 0] for no padding, since some models call .to() on it.

    mask_function: which keys a query sees; local_size: of its window. CacheError for one that is neither causal nor a
    sliding window, such as of packed sequences or of attention in both directions.
    """
    if not _is_causal(mask_function, local_size):
        raise CacheError(
            "kvexp computes causal attention, in a sliding window or without, and the model asks for another mask: "
            "packed sequences (position_ids that start again; give each a row of its own), chunks, attention in both "
            "directions (is_causal=False) or a mask function of its own"
        )
    mask = torch.ones(batch_size, 0, dtype=torch.bool, device=device) if attention_mask is None else attention_mask
    mask = mask.view_as(mask)
    setattr(mask, _WINDOW_ATTR, local_size)
    return mask


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether this is transformers' own function for queries that see all keys up to their own, or `window` of them."""
    return _same(mask_function, causal_mask_function if window is None else sliding_window_causal_mask_function(window))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions, or what their closures hold, are the same code over the same numbers."""
    if isinstance(other, tuple):
        return isinstance(one, tuple) and len(one) == len(other) and all(map(_same, one, other))
    if not isinstance(other, FunctionType):
        return type(one) is type(other) and bool(one == other)
    if not isinstance(one, FunctionType) or one.__code__ is not other.__code__:
        return False
    held = [tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (one, other)]
    return _same(*held)


def check_mask(mask: Any) -> None:
    """CacheError for an attention mask that is not the padding mask [B, columns]."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        what = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise CacheError(f"kvexp takes the 2-D attention mask [batch, columns], got {what}: pass the padding mask")


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attention output [B, H * G, Q, Dv] through the cache that tagged `key`, or without a cache.

    query [B, H * G, Q, D]; key [B, H, Q, D], value [B, H, Q, Dv]: of the new tokens (of all tokens without a cache of
    kvexp); padding: [B, columns so far] with 0 for padding, or None.
    """
    check_not_compiled()
    check_mask(padding)
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


def _check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    """CacheError for arguments of attention that change its output and that kvexp does not compute with."""
    arguments = {"is_causal": getattr(module, "is_causal", True)} | {
        name: value for name, value in arguments.items() if value is not None and name not in _NO_EFFECT
    }
    neutral = {"is_causal": True, "dropout": 0.0, "output_attentions": False}
    for name, value in arguments.items():
        if name not in neutral or value != neutral[name]:
            shown = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
            raise CacheError(
                f"{type(module).__name__} asks for attention with {shown}, which kvexp does not compute: leave it out, "
                "or call the model without kvexp (unpatch_model)"
            )


def check_dropout(module: nn.Module, rate: float) -> None:
    """CacheError for a module in training mode whose attention drops probabilities at this rate."""
    _check_arguments(module, {"dropout": rate if module.training else 0.0})


def kvexp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: returns the output [B, Q, H * G, Dv] and None for the weights.

    CacheError for an argument that would change the output and that kvexp does not compute with.
    """
    _check_arguments(module, {**others, "dropout": dropout})
    window = getattr(attention_mask, _WINDOW_ATTR, sliding_window)
    if window != sliding_window:
        raise CacheError(
            f"{type(module).__name__} was given a mask with a window of {window} and sliding_window={sliding_window}: "
            "kvexp takes the window from sliding_window, and they must agree"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = cached_attention(query, key, value, attention_mask, AttentionParams(scale, sliding_window))
    return out.transpose(1, 2).contiguous(), None
