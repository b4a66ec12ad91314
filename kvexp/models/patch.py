"""Put kvexp's attention into a loaded Hugging Face model."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvexp.errors import CacheError, ConfigError
from kvexp.models.attention_hook import NAME, kvexp_attention, pass_padding
from kvexp.models.cpu_linear import quicken, renew
from kvexp.models.families import family_of
from kvexp.models.gptj import KvexpGPTJAttention
from kvexp.models.mpt import KvexpMptAttention

AttentionInterface.register(NAME, kvexp_attention)
AttentionMaskInterface.register(NAME, pass_padding)

_SHIMS: dict[str, type[torch.nn.Module]] = {"GPTJAttention": KvexpGPTJAttention, "MptAttention": KvexpMptAttention}


def install(model: PreTrainedModel, *, check_weights: bool = True) -> PreTrainedModel:
    """Make `model` attend through kvexp; returns the same object, in evaluation mode. Doing it twice is harmless.

    Without a kvexp cache the model still computes ordinary causal attention. `check_weights` looks for NaN and inf in
    every parameter, because a score of NaN would choose slots at random.
    """
    family = family_of(model.config)
    if check_weights:
        _check_finite(model)
    if family.attention_class is None:
        model.set_attn_implementation(NAME)
    else:
        # These two only warn in set_attn_implementation() and stay as they are, so their modules change class.
        shim = _SHIMS[family.attention_class]
        for module in model.modules():
            if type(module).__name__.startswith(family.attention_class[:4]) and hasattr(module, "layer_idx"):
                if type(module).__name__ not in (family.attention_class, shim.__name__):
                    raise ConfigError(
                        f"{type(module).__name__} cannot be adapted: load the model with attn_implementation='eager'"
                    )
                module.__class__ = shim
                if "_old_forward" in vars(module):  # accelerate's hook around the forward of the class it had
                    module._old_forward = MethodType(shim.forward, module)
                if shim is KvexpMptAttention:
                    module.alibi_power = _alibi_power(model)
        model.config._attn_implementation_internal = NAME
    quicken(model)
    if not getattr(model, "_kvexp_guard", False):
        model.register_forward_pre_hook(_guard, with_kwargs=True)
        model.register_forward_hook(_watch, with_kwargs=True)
        model._kvexp_guard = True
    # MPT's config says use_cache=False, and generate() would silently feed the whole sequence again at every step.
    model.config.use_cache = True
    if model.generation_config is not None:
        model.generation_config.use_cache = True
    return model.eval()


def _alibi_power(model: PreTrainedModel) -> float:
    settings = model.config.attn_config
    if not settings.alibi:
        raise ConfigError("this MPT was trained without ALiBi, which transformers adds all the same: not supported")
    return float(settings.alibi_bias_max) / 8


def _guard(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> None:
    """Say why what comes would fail or be wrong: a prompt cut to nothing by generate(), a static cache, wrong beams.

    A prompt is also when weights may have changed since they were last used.
    """
    ids = args[0] if args else kwargs.get("input_ids")
    cache = kwargs.get("past_key_values")
    if getattr(cache, "is_compileable", False):
        raise CacheError("a static cache pads its keys, which kvexp's attention does not expect: use a dynamic one")
    if cache is None or cache.get_seq_length() == 0:
        renew(model)
    timeline = getattr(cache, "timeline", None)
    if timeline is None or ids is None:
        return
    if ids.shape[1] == 0:
        raise timeline.occupied(0)
    beams = timeline.num_beams
    if beams > 1 and timeline.end == 0 and ids.shape[0] % beams == 0:
        first = ids.view(-1, beams, ids.shape[1])
        if bool((first != first[:, :1]).any()):
            raise CacheError(f"num_beams={beams}, but the rows of a sample hold different prompts")


def _watch(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Tell the cache whether the last column's logits were numbers, as a sum the device need not be waited for."""
    cache = kwargs.get("past_key_values")
    caches: list[Any] = [one for one in getattr(cache, "caches", (cache,)) if hasattr(one, "doubt")]
    if caches:
        doubt = 0 * output.logits[:, -1].sum(dtype=torch.float32)  # NaN unless all of them are finite
        for one in caches:
            one.doubt = one.doubt + doubt


def _check_finite(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.device.type != "meta" and not bool(torch.isfinite(parameter).all()):
                raise ConfigError(f"weight {name} holds NaN or inf: the checkpoint is damaged")
