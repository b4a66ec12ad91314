"""kvexp's attention in a model and out again; what every forward of such a model checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import (
    AttentionInterface,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface

from kvexp.hf.moving_rope import MovingRope, check_forward, reset_frequencies
from kvexp.hf.patch import (
    ATTN_IMPLEMENTATION,
    NOT_COMPILED,
    SHIMS,
    KvexpBloomAttention,
    KvexpGPTNeoSelfAttention,
    KvexpMptAttention,
    begin_forward,
    begin_index,
    bloom_slopes,
    check_mask,
    check_not_compiled,
    end_forward,
    forget_layer_input,
    kvexp_attention,
    padding_mask,
    tagging_layers,
)
from kvexp.hf.quantised_weights import plain_parts
from kvexp.hf.second_pass import second_pass_hook
from kvexp.hf.self_check import Check, check_model
from kvexp.hf.traits import Traits, cache_among, check_activations, traits_of
from kvexp.util.errors import CacheError, ConfigError

AttentionInterface.register(ATTN_IMPLEMENTATION, kvexp_attention)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, padding_mask)
_RECORD = "_kvexp_patch"  # attribute of a patched model


def patch_model(model: PreTrainedModel, *, check_weights: bool = True, check: Check | None = None) -> PreTrainedModel:
    """Make `model` attend through kvexp; returns the same object, in evaluation mode. Doing it twice is harmless.

    Without a kvexp cache the model still computes ordinary causal attention. Weights and linear layers stay as they
    are. check_weights: look for NaN and inf in every parameter, because a score of NaN would choose slots at random.
    check: compare kvexp's logits with the model's own (`kvexp.hf.self_check`); None: once for a type that no test of
    kvexp holds against transformers, never for the others. `unpatch_model` undoes everything. ConfigError for a model
    that cannot be patched, which is then as it was.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ConfigError(NOT_COMPILED)
    traits = traits_of(model.config)
    check_activations(model.config)
    if check_weights:
        _check_finite(model)
    unpatch_model(model)  # so that what is remembered below is the model without kvexp
    record = _Patch(MovingRope.of(model.config), traits.whole_prompts)
    try:
        if traits.type not in SHIMS:
            configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
            for config in configs.values():
                record.note(config, "_attn_implementation_internal")
            model.set_attn_implementation(ATTN_IMPLEMENTATION)
        else:
            # These only warn in set_attn_implementation() and stay as they are: their modules change class.
            _put_shims(model, traits, record)
            record.set(model.config, "_attn_implementation_internal", ATTN_IMPLEMENTATION)
        # MPT's config says use_cache=False, and generate() would silently feed the whole sequence again at every step.
        for config in (model.config, model.generation_config):
            if config is not None:
                record.set(config, "use_cache", True)
        for module in model.modules():
            record.note(module, "training")
            if traits.indexed and hasattr(module, "indexer"):
                record.hooks.append(module.indexer.register_forward_pre_hook(begin_index, with_kwargs=True))
        model.eval()
        record.hooks.append(model.register_forward_pre_hook(_check_inputs_hook, with_kwargs=True))
        record.hooks.append(model.register_forward_hook(_guard_hook, with_kwargs=True, always_call=True))
        record.hooks.append(model.register_forward_hook(_track_finite_hook, with_kwargs=True))
        record.hooks.append(model.register_forward_hook(second_pass_hook, with_kwargs=True))
        setattr(model, _RECORD, record)
        check_model(model, check or ("never" if traits.verified else "once"))
    except BaseException:
        vars(model).pop(_RECORD, None)
        record.undo()
        raise
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` what it was before `patch_model`; returns the same object. Harmless for a model not patched.

    Attention implementation, classes of attention modules, hooks, `use_cache` and training mode are as before, whatever
    was set meanwhile. A kvexp cache raises a CacheError when the model is called with it after this.
    """
    forget_layer_input(model)
    record: _Patch | None = vars(model).pop(_RECORD, None)
    if record is not None:
        record.undo()
    return model


@contextmanager
def patched(model: PreTrainedModel, *, check_weights: bool = True) -> Iterator[PreTrainedModel]:
    """`with patched(model):` attends through kvexp inside the block, and as before the block after it.

    A model that is patched already stays patched after the block, so blocks can be nested.
    """
    before = is_patched(model)
    if not before:
        patch_model(model, check_weights=check_weights)
    try:
        yield model
    finally:
        if not before:
            unpatch_model(model)


def is_patched(model: PreTrainedModel) -> bool:
    """Whether `patch_model` is in force on the model."""
    return _RECORD in vars(model)


class _Absent:
    """Marks an attribute that an object did not have. A class, so that its deep copy is the same marker."""


class _Patch:
    """What `patch_model` changed of a model: former values of attributes, and the hooks it added.

    Kept as data on the model, not as functions: a deep copy of a patched model has a record of its own modules.
    moving: the model's RoPE, if its frequencies depend on the longest row of a forward; whole_prompts: as of `Traits`.
    """

    def __init__(self, moving: MovingRope | None, whole_prompts: bool) -> None:
        self.moving, self.whole_prompts = moving, whole_prompts
        self.former: list[tuple[Any, str, Any]] = []  # object, attribute, value before
        self.hooks: list[RemovableHandle] = []

    def note(self, owner: Any, name: str) -> None:
        """Record the attribute's present value."""
        value = type(owner) if name == "__class__" else vars(owner).get(name, _Absent)
        self.former.append((owner, name, value))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute, and record its former value for `undo`."""
        self.note(owner, name)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Take hooks away and set back all attributes, the last one first."""
        for hook in self.hooks:
            hook.remove()
        for owner, name, value in reversed(self.former):
            if value is not _Absent:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        self.hooks, self.former = [], []


def _put_shims(model: PreTrainedModel, traits: Traits, record: _Patch) -> None:
    """Give every attention module of the model the class that attends through kvexp; ConfigError if it cannot."""
    shim = SHIMS[traits.type]
    stock: Any = shim.__mro__[1]
    if shim is KvexpMptAttention and not model.config.attn_config.alibi:
        raise ConfigError("this MPT was trained without ALiBi, which transformers adds all the same: not supported")
    for module in model.modules():
        if not isinstance(module, stock):
            continue
        if type(module) is not stock:
            name = type(module).__name__
            raise ConfigError(f"{name} cannot be adapted: load the model with attn_implementation='eager'")
        record.set(module, "__class__", shim)
        if "_old_forward" in vars(module):  # accelerate's hook around the forward of the class it had
            record.set(module, "_old_forward", MethodType(shim.forward, module))
        if shim is KvexpMptAttention:
            record.set(module, "alibi_power", float(model.config.attn_config.alibi_bias_max) / 8)
        elif shim is KvexpGPTNeoSelfAttention:
            record.set(module, "window", traits.layers[module.layer_id].size)
        elif shim is KvexpBloomAttention:
            record.set(module, "slopes", bloom_slopes(module))


def _check_inputs_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: CacheError for inputs that a kvexp cache cannot serve.

    These are a prompt cut to nothing by generate(), a static cache, packed sequences, a number of beams that is not
    the cache's, and rows that change each other (`kvexp.hf.moving_rope`).
    """
    check_not_compiled()
    check_mask(kwargs.get("attention_mask"))
    ids = args[0] if args else kwargs.get("input_ids")
    cache = cache_among(kwargs)
    if getattr(cache, "is_compileable", False):
        raise CacheError("a static cache pads its keys, which kvexp's attention does not expect: use a dynamic one")
    positions: Any = kwargs.get("position_ids")
    given = ids if ids is not None else kwargs.get("inputs_embeds")
    several = positions is not None and positions.shape[-1] > 1
    if several and kwargs.get("attention_mask") is None and bool((positions.diff(dim=-1) <= 0).any()):
        raise CacheError(
            "position_ids that start again within a row, without an attention mask, are packed sequences, which kvexp "
            "does not keep apart: give every sequence a row of its own"
        )
    moving = vars(model)[_RECORD].moving
    if moving is not None and given is not None:
        check_forward(moving, given.shape[1], positions, kwargs.get("attention_mask"), cache)
        reset_frequencies(model)
    if given is not None:
        several_now = vars(model)[_RECORD].whole_prompts and given.shape[1] > 1
        if several_now and cache is not None and tagging_layers(cache) and cache.get_seq_length():
            raise CacheError(
                f"states of {model.config.model_type} are right only where a prompt is fed in one forward and later "
                f"tokens one by one, and {given.shape[1]} came at once: leave out chunks of prompts (prefill_chunk)"
            )
        begin_forward(cache, given.shape[1])
    sequence = getattr(cache, "sequence", None)
    if sequence is None or ids is None:
        return
    if ids.shape[1] == 0:
        raise sequence.occupied(0)
    beams = sequence.num_beams
    if beams > 1 and sequence.seq_len == 0 and ids.shape[0] % beams == 0:
        first = ids.view(-1, beams, ids.shape[1])
        if bool((first != first[:, :1]).any()):
            raise CacheError(f"num_beams={beams}, but the rows of a sample hold different prompts")


def _guard_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: `end_forward`. Called also where the forward raises, without an output."""
    end_forward(cache_among(kwargs), failed=output is None)


def _track_finite_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: `track_finite`."""
    track_finite(cache_among(kwargs), output.logits[:, -1])


def track_finite(cache: Any, logits: torch.Tensor) -> None:
    """Add 0 times the logits [B, V] to the flags of the cache or caches, which are NaN from then on if one is.

    Without waiting for the device. A cache that is not kvexp's has no flag.
    """
    caches: list[Any] = [member for member in getattr(cache, "caches", (cache,)) if hasattr(member, "logits_nan_flag")]
    if caches:
        doubt = 0 * logits.sum(dtype=torch.float32)  # NaN unless all of them are finite
        for member in caches:
            member.logits_nan_flag = member.logits_nan_flag + doubt


def _check_finite(model: PreTrainedModel) -> None:
    """ConfigError for a parameter that holds NaN or inf."""
    with torch.no_grad():
        for name, x in ((name, x) for name, weight in model.named_parameters() for x in plain_parts(weight)):
            if x.device.type == "meta" or not x.is_floating_point() or bool(torch.isfinite(x.sum())):
                continue  # a finite sum has finite terms, and costs a thirtieth of looking at each
            if not bool(torch.isfinite(x).all()):
                raise ConfigError(f"weight {name} holds NaN or inf: the checkpoint is damaged")
