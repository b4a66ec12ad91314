"""What Hugging Face calls in place of its own attention, and the model families that kvexp knows.

The attention function never receives the cache, so `EvictionCacheLayer.update` returns a view of the new keys that
carries its layer as a Python attribute. Keys without that attribute come from another cache or from none: they get
ordinary causal attention.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.mpt.modeling_mpt import MptAttention
from transformers.pytorch_utils import Conv1D

from kvexp.core.attention import AttentionInputs, AttentionParams, Expand, Index, compute_attention, expanded
from kvexp.core.config import Sliding
from kvexp.core.sequence import SequenceState
from kvexp.hf.traits import CACHE_ARGUMENT, Layer, cache_among, has_sinks, softcap_of, traits_of
from kvexp.util.errors import CacheError, ConfigError

ATTN_IMPLEMENTATION = "kvexp"
LAYER_ATTR = "_kvexp"
_FULL = Layer("full")
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
        raise error("this model does not attend through kvexp: call kvexp.hf.patch_model(model) first")


def check_not_compiled() -> None:
    """CacheError under torch.compile: while it traces, and where it could not and goes on without.

    An error that is raised while it traces is taken for code that cannot be traced, and nobody sees it.
    """
    callback = getattr(getattr(torch._C._dynamo, "eval_frame", None), "get_eval_frame_callback", lambda: None)
    if torch.compiler.is_compiling() or callback() is not None:
        raise CacheError(NOT_COMPILED)


class SeenMask(Tensor):
    """The padding mask [B, columns] that models are given, in place of one of four dimensions [B, 1, Q, columns].

    sight: what the model asked for; queries: how many queries it is for, Q or the newest of them. Some models cut it to
    their newest queries. Whatever else they compute from it is a tensor without these marks.
    """

    sight: Layer
    queries: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, padding: Tensor, sight: Layer, queries: int) -> SeenMask:
        """These marks on a view of the padding mask; on one of a kind of its own, which cannot be cut as these are."""
        mask = (
            padding.as_subclass(cls) if type(padding) in (Tensor, cls) else cast("SeenMask", padding.view_as(padding))
        )
        mask.sight, mask.queries = sight, queries
        return mask

    def to(self, *given: Any, **named: Any) -> SeenMask:
        """Mask with the same marks on another device, to which models on several move it."""
        return SeenMask.of(super().to(*given, **named), self.sight, self.queries)

    def __getitem__(self, index: Any) -> Tensor:
        """Part of the padding mask, or the mask of the newest queries for `[:, :, rows, :]`; CacheError for others."""
        if self.ndim == 4 or not (isinstance(index, tuple) and len(index) == 4):
            return super().__getitem__(index)
        rows = range(self.queries)[index[2]] if isinstance(index[2], slice) else range(0)
        whole = (slice(None), slice(None), index[2], slice(None))
        if index != whole or rows != range(self.queries)[-len(rows) :]:
            raise CacheError("the model takes a part of its attention mask that is not of its newest queries")
        return SeenMask.of(self, self.sight, len(rows))


def padding_mask(
    *,
    batch_size: int,
    q_length: int,
    attention_mask: Tensor | None = None,
    device: Any = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> SeenMask:
    """The padding mask [B, columns] as it came; [B, 0] for no padding, since some models call .to() on it.

    What the queries see, and how many they are (q_length), is noted on it. mask_function: which keys a query sees;
    local_size: of its window or chunk. CacheError for another one, such as of packed sequences or of attention in both
    directions.
    """
    sight = _sight_of(mask_function, local_size, batch_size, attention_mask, device)
    if sight is None:
        raise CacheError(
            "kvexp computes causal attention, whole, in a sliding window or in chunks, and the model asks for another "
            "mask: packed sequences (position_ids that start again; give each a row of its own), attention in both "
            "directions (is_causal=False) or a mask function of its own"
        )
    mask = torch.ones(batch_size, 0, dtype=torch.bool, device=device) if attention_mask is None else attention_mask
    # Modules with an index cut it as a mask of four dimensions, of which `begin_index` makes no use.
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        mask = mask[:, None, None]
    return SeenMask.of(mask, sight, q_length)


def _sight_of(
    mask_function: Callable[..., Any], size: int | None, batch: int, attention_mask: Tensor | None, device: Any
) -> Layer | None:
    """What queries see by one of transformers' own causal mask functions of this size; None for any other function."""
    if size is None:
        return _FULL if _same(mask_function, causal_mask_function) else None
    if _same(mask_function, sliding_window_causal_mask_function(size)):
        return Layer("window", size)
    # Chunks begin at the first real token of a row.
    padding = torch.zeros(batch, dtype=torch.long, device=device)
    if attention_mask is not None:
        padding = (attention_mask.cumsum(dim=-1) == 0).sum(dim=-1)
    return Layer("chunk", size) if _same(mask_function, chunked_causal_mask_function(size, padding)) else None


def _same(left: Any, right: Any) -> bool:
    """Whether two functions, or what their closures hold, are the same code over the same numbers."""
    if isinstance(right, Tensor):
        return isinstance(left, Tensor) and left.shape == right.shape and bool((left == right).all())
    if isinstance(right, tuple):
        return isinstance(left, tuple) and len(left) == len(right) and all(map(_same, left, right))
    if not isinstance(right, FunctionType):
        return type(left) is type(right) and bool(left == right)
    if not isinstance(left, FunctionType) or left.__code__ is not right.__code__:
        return False
    held = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (left, right)]
    return _same(*held)


def check_mask(mask: Any) -> None:
    """CacheError for an attention mask that is not the padding mask [B, columns]."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        got = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise CacheError(f"kvexp takes the 2-D attention mask [batch, columns], got {got}: pass the padding mask")


class _Forward(threading.local):
    """The forward through a kvexp cache that this thread computes.

    cache: None outside of such a forward; columns: that its sequences had seen before it; width: new columns.
    """

    cache: Any = None
    columns: tuple[int, ...] = ()
    width: int = 0


_forward = _Forward()


def _sequences(cache: Any) -> list[SequenceState]:
    """Sequences of the cache, or of the caches that it joins; none where it counts no tokens."""
    sequences = (getattr(member, "sequence", None) for member in getattr(cache, "caches", (cache,)))
    return [sequence for sequence in sequences if sequence is not None]


def tagging_layers(cache: Any) -> list[Any]:
    """The layers of a cache whose keys attention finds by their tag; none of a cache that is not kvexp's."""
    return [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "attended")]


def begin_forward(cache: Any, width: int) -> None:
    """Note that a forward of `width` new columns begins; one without a cache of kvexp is not guarded."""
    layers = tagging_layers(cache)
    for layer in layers:
        layer.attended = 0
    _forward.cache = cache if layers else None
    _forward.columns, _forward.width = tuple(sequence.seq_len for sequence in _sequences(cache)), width


def end_forward(cache: Any, *, failed: bool) -> None:
    """CacheError where the forward that ends did not attend once through each layer, or the cache missed its tokens.

    failed: whether it raised an error, which is the one to report. A cache whose forwards begin at a later layer names
    that as `first_layer`.
    """
    guarded, _forward.cache = _forward.cache is not None, None
    if failed or not guarded:
        return
    layers = tagging_layers(cache)
    for layer in layers:
        layer.end_forward()
    if hasattr(cache, "hand_out"):
        cache.hand_out()
    first = getattr(cache, "first_layer", 0)
    missed = [number for number, layer in enumerate(layers) if not layer.attended and number >= first]
    if missed:
        raise CacheError(
            f"attention did not come through {len(missed)} of the {len(layers)} layers of this cache (layer "
            f"{missed[0]} first), which hold nothing of this forward: the model keeps keys and values elsewhere, or "
            "attends by a function of its own; kvexp cannot evict from it"
        )
    for before, sequence in zip(_forward.columns, _sequences(cache), strict=True):
        # A step that is captured as a CUDA graph counts its token itself, before and after the forward.
        if sequence.seq_len not in (before, before + _forward.width):
            raise CacheError(
                f"a forward of {_forward.width} tokens ended with {sequence.seq_len} columns in the cache, of which "
                f"{before} were there before: attention did not come through the cache as often as tokens were fed"
            )


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attention output [B, H * G, Q, Dv] through the cache that tagged `key`, or without a cache.

    query [B, H * G, Q, D]; key [B, H, Q, D], value [B, H, Q, Dv]: of the new tokens (of all tokens without a cache of
    kvexp); padding: [B, columns so far] with 0 for padding, as `padding_mask` gave it to the model, or None.
    """
    check_not_compiled()
    queries = getattr(padding, "queries", None)
    if padding is not None and queries != query.shape[2]:
        seen = f"a tensor {list(padding.shape)} of its own" if queries is None else f"that of {queries} queries"
        raise CacheError(
            f"a layer attends for {query.shape[2]} queries, and its mask is {seen}, not the one that kvexp gave the "
            "model for them: kvexp computes causal attention over a padding mask, whole, in a window or in chunks"
        )
    padding = padding if padding is not None and padding.shape[-1] else None
    layer = getattr(key, LAYER_ATTR, None)
    if layer is None:
        if _forward.cache is not None:
            raise CacheError(
                "keys lost the mark of the cache between update() and attention, so what was cached would not be seen: "
                "the model changes or copies its keys there (latents that it expands, say); kvexp cannot evict from it"
            )
        return uncached_attention(query, key, value, padding, params)
    if layer.attended and not layer.shared:
        raise CacheError(
            "one forward attends twice to the keys of the same layer, whose tokens would be stored and counted twice: "
            "kvexp cannot evict from such a model"
        )
    out: Tensor = layer.attend(query, key, value, params, padding)
    return out


def uncached_attention(
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
    return compute_attention(expanded(inputs)).flatten(1, 2)


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


@dataclass(frozen=True)
class IndexedChoice:
    """The index of a layer with the inputs of a forward, an `Index`: it is asked again when the slots are known.

    hidden [B, Q, n], queries [B, Q, r]: what it makes its queries of; places: cosines and sines [B or 1, Q, d].
    """

    index: Any
    hidden: Tensor
    queries: Tensor
    places: tuple[Tensor, Tensor]

    def choose(self, states: Tensor, visible: Tensor) -> Tensor:
        """As `Index.choose`; the last numbers of the states are the index's keys."""
        held = _IndexKeys(states[..., -self.index.head_dim :])
        named = {CACHE_ARGUMENT: held}
        numbers = self.index.forward(self.hidden, self.queries, self.places, visible, None, **named)
        return torch.zeros_like(visible).scatter(-1, numbers.long(), True)

    def split(self, sizes: Sequence[int]) -> list[IndexedChoice]:
        """As `Index.split`."""
        rows = len(self.hidden)
        parts = [x.expand(rows, -1, -1).split(list(sizes)) for x in (self.hidden, self.queries, *self.places)]
        return [
            IndexedChoice(self.index, hidden, queries, (c, s)) for hidden, queries, c, s in zip(*parts, strict=True)
        ]


@dataclass(frozen=True)
class _IndexKeys:
    """The keys [B, S, n] of all slots, in place of a cache to which the index adds keys of new tokens."""

    keys: Tensor

    def update_indexer(self, *_: Any) -> Tensor:
        return self.keys


def begin_index(index: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of an index: note its inputs, and let it choose nothing yet but store its keys.

    CacheError without a cache of kvexp, whose slots it would choose among.
    """
    if _forward.cache is None:
        if index.config._attn_implementation != ATTN_IMPLEMENTATION:
            return None
        raise CacheError(
            "an index chooses among the slots of a cache of kvexp's, and this forward has none: give it an "
            "EvictionCache, or call the model without kvexp (unpatch_model)"
        )
    hidden, queries, places, _, *more = args
    _forward.cache.layers[index.layer_idx].index = IndexedChoice(index, hidden, queries, places)
    return (hidden, queries, places, torch.ones(1, 1, 1, dtype=torch.bool, device=hidden.device), *more), kwargs


def _fresh_latents(module: Any) -> tuple[Tensor, Tensor, Expand, Index | None] | None:
    """Rotary keys [B, 1, Q, d], marked, and latents [B, 1, Q, r] that this module has just cached.

    With them how it expands them, and what chooses among slots. Behind latents lie keys of that index. None where it
    caches keys and values, or the forward has no cache of kvexp. Found by the module's number, since what the module
    makes of latents are new tensors.
    """
    if _forward.cache is None or not hasattr(module, "expand_kv"):
        return None
    layer = _forward.cache.layers[module.layer_idx]
    if (latents := getattr(layer, "fresh", None)) is None:
        return None
    index, layer.fresh, layer.index = layer.index, None, None
    return *latents, lambda rotary, latent: module.expand_kv(latent[..., : module.kv_lora_rank], rotary), index


def kvexp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: returns the output [B, Q, H * G, Dv] and None for the weights.

    CacheError for an argument that would change the output and that kvexp does not compute with.
    """
    config = getattr(module, "config", None)  # a model that computes without them may be given them by its caller
    if softcap != softcap_of(config):
        others["softcap"] = softcap
    if s_aux is not None and not has_sinks(config):
        others["s_aux"] = s_aux
    expand, index = None, None
    if (latents := _fresh_latents(module)) is not None:
        key, value, expand, index = latents
    if index is not None:
        others["indices"] = None
    _check_arguments(module, {**others, "dropout": dropout})
    said = _FULL if sliding_window is None else Layer("window", sliding_window)
    sight: Layer = getattr(attention_mask, "sight", said)
    if index is not None and isinstance(attention_mask, SeenMask):
        attention_mask = SeenMask.of(attention_mask[:, 0, 0], sight, attention_mask.queries)
    layer = getattr(key, LAYER_ATTR, None)
    keeps = getattr(layer, "kind", _FULL)
    least = keeps.size if layer is not None and layer.is_sliding else None
    if (sliding_window is not None and sight != said) or (least is not None and sight != keeps):
        raise CacheError(
            f"{type(module).__name__} was given a mask of {sight.text} and sliding_window={sliding_window}, and its "
            f"cache keeps {keeps.text}, which must agree"
        )
    if sight.kind == "chunk" and least is None:
        raise CacheError(
            "attention in chunks needs a cache of kvexp's own (EvictionCache), which knows where they begin"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = sight.size if sight.kind == "window" else None
    params = AttentionParams(scale, window, softcap=softcap, sinks=s_aux, expand=expand, index=index)
    out = cached_attention(query, key, value, attention_mask, params)
    return out.transpose(1, 2).contiguous(), None


def _attn(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """Attention output [B, H, Q, D] in place of that of modules with an `_attn`, through kvexp; None for the weights.

    GPT-J, CodeGen and GPT-Neo compute logits in float32 whatever the model's dtype. GPT-Neo's are not scaled.
    """
    check_dropout(self, (getattr(self, "attn_dropout", None) or self.attention_dropout).p)
    divisor = getattr(self, "scale_attn", getattr(self, "norm_factor", 1.0))
    upcast = not isinstance(self, GPTNeoXJapaneseAttention)
    params = AttentionParams(1 / float(divisor), getattr(self, "window", None), upcast=upcast)
    return cached_attention(query, key, value, attention_mask, params), None


class KvexpGPTJAttention(GPTJAttention):  # type: ignore[misc]
    """GPT-J's attention, which ignores Hugging Face's interface, through kvexp."""

    embed_positions: Tensor
    _attn = _attn

    def _get_embed_positions(self, position_ids: Tensor) -> Tensor:
        """The table of positions [rows, positions, dim] as a view; the original copies it in every layer and step."""
        self.embed_positions = self.embed_positions.to(position_ids.device)
        return self.embed_positions.expand(position_ids.shape[0], -1, -1)


class KvexpCodeGenAttention(CodeGenAttention):  # type: ignore[misc]
    """As GPT-J's."""

    _attn = _attn


class KvexpGPTNeoSelfAttention(GPTNeoSelfAttention):  # type: ignore[misc]
    """As GPT-J's; window: tokens that a local layer sees, None for a global one."""

    _attn = _attn
    window: int | None = None


class KvexpGPTNeoXJapaneseAttention(GPTNeoXJapaneseAttention):  # type: ignore[misc]
    """As GPT-J's."""

    _attn = _attn


def _attend(module: Any, qkv: Iterable[Tensor], cache: Any, padding: Tensor | None, params: AttentionParams) -> Tensor:
    """Attention output [B, Q, H * G * Dv] of a module that calls no function for it; as `cached_attention` else."""
    query, key, value = qkv
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    return cached_attention(query, key, value, padding, params).transpose(1, 2).flatten(2)


class KvexpMptAttention(MptAttention):  # type: ignore[misc]
    """MPT's attention, which ignores Hugging Face's interface, through kvexp.

    ALiBi is slope * (slot position - query position), not by slot index as in the original, so that it is right for
    survivors that are not contiguous. alibi_power: the checkpoint's alibi_bias_max / 8. transformers
    builds its slopes for 8 whatever the checkpoint says, which is wrong for some (MPT-7B-StoryWriter: 16); slopes are
    powers of two, so raising them to this power gives the right ones.
    """

    alibi_power: float = 1.0

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, *, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        check_dropout(self, self.attn_dropout_p)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        qkv = (x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
        # The bias table is [heads, 1, max_seq_len], linear in its last axis.
        slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
        params = AttentionParams(float(self.softmax_scale), alibi=(slopes**self.alibi_power).to(mixed.device))
        return self.out_proj(_attend(self, qkv, cache_among(others), attention_mask, params)), None


class KvexpBloomAttention(BloomAttention):  # type: ignore[misc]
    """BLOOM's attention, as MPT's. slopes: of ALiBi, [H] (`bloom_slopes`)."""

    slopes: Tensor

    def forward(
        self, hidden_states: Tensor, residual: Tensor, *, layer_past: Any, attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        check_dropout(self, max(self.attention_dropout.p, self.hidden_dropout))
        qkv = self._reshape(self.query_key_value(hidden_states))
        params = AttentionParams(self.inv_norm_factor, alibi=self.slopes.to(hidden_states.device))
        return self.dense(_attend(self, qkv, layer_past, attention_mask, params)) + residual, None


def bloom_slopes(module: BloomAttention) -> Tensor:
    """The slopes [H] float32 of transformers' BLOOM, whose terms of ALiBi are 0 for the first place."""
    two_places = torch.ones(1, 2, device=module.dense.weight.device)
    slopes: Tensor = build_alibi_tensor(two_places, module.num_heads, torch.float32)[:, 0, 1]
    return slopes


class KvexpFalconAttention(FalconAttention):  # type: ignore[misc]
    """Falcon's attention with RoPE through kvexp, of kv heads as they are; the original repeats them in the cache."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        layer_past: Any,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        key, value = (x[:, :: x.shape[1] // self.num_kv_heads] for x in (key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        params = AttentionParams(self.inv_norm_factor)
        return self.dense(_attend(self, (query, key, value), layer_past, attention_mask, params)), None


# By type: attention modules that ignore transformers' interface change their class to these, whose base they had.
SHIMS: dict[str, type[nn.Module]] = {
    "gptj": KvexpGPTJAttention,
    "codegen": KvexpCodeGenAttention,
    "gpt_neo": KvexpGPTNeoSelfAttention,
    "gpt_neox_japanese": KvexpGPTNeoXJapaneseAttention,
    "mpt": KvexpMptAttention,
    "bloom": KvexpBloomAttention,
    "falcon": KvexpFalconAttention,
}


_ACCEPTED: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def _accepted(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Which of these arguments the model's forward takes; all, for a wrapper that hands on what it is given."""
    known = _ACCEPTED.get(type(model))
    if known is None:
        known = _ACCEPTED[type(model)] = frozenset(inspect.signature(type(model).forward).parameters)
    return [name for name in names if name in known or "input_ids" not in known]


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model's forward takes position ids."""
    return bool(_accepted(model, ["position_ids"]))


def forward_columns(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, keep: int
) -> Tensor:
    """Logits [B, keep, V] of one forward; position ids and number of logits are given to models that take them."""
    given = {"position_ids": positions, "logits_to_keep": keep}
    options: dict[str, Any] = {CACHE_ARGUMENT: cache} | {name: given[name] for name in _accepted(model, given)}
    logits: Tensor = model(ids, attention_mask=mask, use_cache=True, **options).logits
    return logits[:, -keep:]


def forward_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Any, keep: int) -> Tensor:
    """Logits [B, keep, V] of the last `keep` columns, after one forward of ids [B, Q] through a cache.

    mask [B, columns so far]: 0 for padding, by which real tokens are at positions 0, 1, 2, …
    """
    device = model.get_input_embeddings().weight.device
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return forward_columns(model, ids.to(device), mask.to(device), positions.to(device), cache, keep)


NAMES = ("o_proj", "out_proj", "c_proj", "dense")  # of the projection, in the attention modules of all families
_FACTORS: WeakKeyDictionary[PreTrainedModel, tuple[Any, list[Tensor]]] = WeakKeyDictionary()


def attention_modules(model: nn.Module, sliding: Sliding = "auto") -> list[nn.Module]:
    """The attention modules of a model whose keys kvexp holds (`held_layers`), in the order of its layers."""
    held = traits_of(model.config, sliding).held
    modules = [module for module in model.modules() if type(module).__name__.endswith(("Attention", "MLA"))]
    modules = [module for module in modules if not hasattr(module, "attention")]  # GPT-Neo has one around each
    return [module for module in modules if getattr(module, "layer_idx", getattr(module, "layer_id", held[0])) in held]


def output_factors(model: PreTrainedModel, sliding: Sliding = "auto") -> list[Tensor]:
    """R [H, G, n, Dv] float32 of every layer, with ||R v|| = ||W v|| for the block W of each query head's outputs.

    R is that of W = QR, so n is Dv where the model is wider than a head. Computed once per model and state of its
    weights. Arguments and ConfigError as of `output_blocks`.
    """
    blocks = output_blocks(model, sliding)
    state = [(block.data_ptr(), 0 if block.is_inference() else block._version) for block in blocks]
    known = _FACTORS.get(model)
    if known is None or known[0] != state:
        with torch.no_grad():
            _FACTORS[model] = known = (state, [torch.linalg.qr(block.float(), mode="r").R for block in blocks])
    return known[1]


def output_blocks(model: PreTrainedModel, sliding: Sliding = "auto") -> list[Tensor]:
    """W [H, G, n, Dv] of every layer, the block of the output projection behind each query head, n: the model's width.

    Views of the weights, which stay as they are. sliding: as of `held_layers`. ConfigError where a layer's projection
    is no matrix of floating-point numbers in memory.
    """
    kind, traits = model.config.model_type, traits_of(model.config, sliding)
    layers, kv_heads, group = len(traits.held), traits.kv_heads, traits.group
    blocks: list[Tensor] = []
    for attention in attention_modules(model, sliding):
        projection = next((getattr(attention, name) for name in NAMES if hasattr(attention, name)), None)
        weight = getattr(projection, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
            raise ConfigError(
                f"the output projection of this {kind} model is a {type(projection).__name__} whose weight is no "
                "matrix of floating-point numbers in memory (quantised or offloaded?), so the size of projected values "
                "is not known"
            )
        matrix = weight.detach().T if isinstance(projection, Conv1D) else weight.detach()
        blocks.append(matrix.unflatten(1, (kv_heads, group, -1)).permute(1, 2, 0, 3))
    if len(blocks) != layers:
        raise ConfigError(
            f"found {len(blocks)} output projections in {layers} layers of this {kind} model, so the size of projected "
            "values is not known"
        )
    return blocks


_HOLDER = "_kvexp_layer_input"  # attribute of a model


class LayerInput:
    """The input [B, Q, n] of the attention layer that computes right now, for methods that score tokens by it (KVzap).

    n: the model's width; hooks put it in. state [B, Q, n]: the hidden state, of which the layer's norm makes that input
    (EpiKV).
    """

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        self.state: Tensor | None = None
        self.hooks: list[RemovableHandle] = []

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of an attention module."""
        self.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def note_state(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a decoder layer."""
        self.state = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def forget(self, model: Any, args: Any, output: Any) -> None:
        """Forward hook of the model: nothing is kept beyond a forward, whose cache may be of another method.

        Called also where the forward raises.
        """
        self.hidden = self.state = None

    def take(self) -> Tensor | None:
        """The input, which is forgotten with that; None where no hook has put one in."""
        hidden, self.hidden = self.hidden, None
        return hidden


def layer_input(model: PreTrainedModel) -> LayerInput:
    """The model's one `LayerInput`; the hooks are put on it and its attention modules at the first call."""
    holder: LayerInput | None = vars(model).get(_HOLDER)
    if holder is None:
        holder = LayerInput()
        attentions = attention_modules(model)
        holder.hooks = [module.register_forward_pre_hook(holder.note, with_kwargs=True) for module in attentions]
        decoders = [module for module in model.modules() if any(child in attentions for child in module.children())]
        holder.hooks += [module.register_forward_pre_hook(holder.note_state, with_kwargs=True) for module in decoders]
        holder.hooks.append(model.register_forward_hook(holder.forget, always_call=True))
        setattr(model, _HOLDER, holder)
    return holder


def forget_layer_input(model: PreTrainedModel) -> None:
    """Take the hooks out again; harmless for a model without."""
    holder: LayerInput | None = vars(model).pop(_HOLDER, None)
    if holder is not None:
        for hook in holder.hooks:
            hook.remove()


SHOWN = 4  # names of each kind in a message


def named_weights(kinds: Mapping[str, Iterable[str]]) -> str:
    """Names of weights by kind ("missing", …) as text for a message: the first few of each, in the order of the layers.

    Empty where there is none.
    """

    def place(name: str) -> list[tuple[bool, int, str]]:
        return [(word.isdigit(), len(word) * word.isdigit(), word) for word in name.split(".")]

    parts = []
    for kind, names in kinds.items():
        if ordered := sorted(names, key=place):
            more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
            parts.append(f"{kind}: {', '.join(ordered[:SHOWN])}{more}")
    return "; ".join(parts)
