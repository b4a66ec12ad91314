"""What kvexp reads of a model: which of its layers keep what, their shapes and positions; and the types it refuses.

What is read needs no list of known models. A type of transformers that is not in `VERIFIED` works where the self-check
(`kvexp.hf.self_check`) finds the model's own logits.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvexp.core import AttentionParams, CacheConfig, EngineQuantization, RoPE, triton_ops
from kvexp.core.budget import OtherLayers, PromptSizes
from kvexp.core.codecs import TURNED
from kvexp.core.config import Sliding
from kvexp.core.quantized import AnyQuantization
from kvexp.util.errors import ConfigError

Kind = Literal["full", "window", "chunk", "state", "hybrid", "shared", "none"]
Position = Literal["rope", "learned", "alibi", "none"]

# What a model's forward and generate() call the cache: transformers 5.24 warns of the name before.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

# Layers of transformers' own cache, by the class that holds what the layer keeps.
KINDS: dict[str, Kind] = {
    "DynamicLayer": "full",
    "DynamicIndexedLayer": "full",
    "DynamicSlidingWindowLayer": "window",
    "LinearAttentionLayer": "state",
    "LinearAttentionAndFullAttentionLayer": "hybrid",
    "DummyLayer": "none",
}
KIND_TITLES: dict[Kind, str] = {
    "full": "full attention",
    "window": "a sliding window",
    "chunk": "chunks",
    "state": "a state (linear attention, convolution)",
    "hybrid": "full attention and a state",
    "shared": "the keys of another layer",
    "none": "nothing",
}
UNLIMITED = 1 << 30  # tokens
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "seq_length", "n_ctx")
TITLES = {"gptj": "GPT-J", "gpt2": "GPT-2 (and Cerebras-GPT)", "mpt": "MPT", "opt": "OPT"}
# Types whose attention modules turn pairs of neighbours by a table of their own that ends at the limit.
TABLE_ROPE = ("gptj", "codegen")

# Types whose tiny twins have stock's logits and tokens with the full cache, padded, fed in chunks, forked and in beam
# search (tests/hf/test_twins.py).
VERIFIED = frozenset(
    " ".join(
        [
            "afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam biogpt bitnet bloom codegen cohere",
            "cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1 emu3",
            "ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3",
            "gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_assistant",
            "gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode",
            "gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa",
            "granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax",
            "internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4",
            "llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral",
            "ministral3 mistral mixtral modernbert-decoder moss_transcribe_diarize mpt nanochat nemotron nemotron_h",
            "olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5",
            "qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm",
            "starcoder2 vaultgemma youtu zamba zamba2 zaya",
        ]
    ).split()
)

# Types with RoPE pairs half a head apart in transformers whose keys llama.cpp holds with the pairs as neighbours:
# those whose query and key weights its conversion permutes. Other types have there the order of transformers.
NEIGHBOURS = frozenset(
    [
        *("arcee", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "internlm3", "iquestcoder"),
        *("llama", "ministral3", "mistral", "mixtral", "olmo", "smollm3"),
    ]
)

# Types whose states are right only after a prompt that was fed whole, in transformers too.
WHOLE_PROMPTS = frozenset({"jamba", "zamba", "zamba2"})

# Types whose heads have attention sinks, one logit per query head.
SINK_TYPES = frozenset({"gpt_oss", "flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})

# With older versions caches hold the keys and values that latents are expanded to.
LATENTS_SINCE = (5, 17)
_OLD = "its cache holds latents, which transformers expands before it caches them below version {}.{}: update it"
_OWN = "its attention does not go through transformers' attention interface"
_STATES = "no layer of it keeps the keys of its tokens, so there is nothing to evict"
_SHARED_INDEX = "some of its layers attend to slots that another layer's index has chosen"
_NOT_A_DECODER = "it is an encoder, one half of an encoder-decoder, or not a model of text alone"
# Types that kvexp cannot serve, by the reason.
REFUSED: dict[str, str] = {
    name: why
    for why, names in {
        _OWN: "xglm openai-gpt rwkv",
        _STATES: "mamba mamba2 falcon_mamba xlstm",
        "it adds a bias to every pair of tokens": "inkling_text inkling2_text",
        "each of its layers attends twice, to values of its own": "diffllama",
        "an index chooses blocks of neighbouring tokens, which eviction parts": "qwen4_exp qwen4_exp_text",
        "its layers with a window keep latents of another width": "dots3_note dots3_note_text",
        _SHARED_INDEX: "hy_v4",
        "it adds a number made of a token's value to the logits of that token": "doge",
        "it attends to images by cross-attention": "mllama",
        "it keeps keys for its experts and repeats them afterwards": "jetmoe",
        "it compresses its own cache": "deepseek_v4",
        "it takes only a cache of its own class": "minimax",
        "it reads bytes by two models at once": "blt",
        "its own logits change with a row's padding": "recurrent_gemma",
        "it needs the states of the model that it assists": "gemma4_assistant",
        _NOT_A_DECODER: (
            "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert cpmant "
            "data2vec-text electra ernie git marian mbart megatron-bert moshi musicgen musicgen_melody mvp pegasus "
            "plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm "
            "xlm-roberta xlm-roberta-xl xlnet xmod"
        ),
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class Layer:
    """One layer of a model's cache. size: of its window or chunk in tokens, None for other kinds."""

    kind: Kind
    size: int | None = None

    @property
    def text(self) -> str:
        """The kind as a message names it."""
        return KIND_TITLES[self.kind] + (f" of {self.size} tokens" if self.size is not None else "")


@dataclass(frozen=True)
class Traits:
    """What a model's configuration says of the cache it needs.

    type: transformers' `model_type` of the decoder; layers: of the cache, in order. kv_heads H, group G (query heads
    per kv head), key_dim D, value_dim Dv: of the layers whose keys kvexp holds. limit: the longest sequence in tokens
    that the configuration names, before a stretched RoPE; None: it names none. shared: numbers of layers whose keys
    later layers attend to as well. verified: whether tests hold a tiny model of this type against transformers.
    sliding: as of `held_layers`. latent: whether a slot of them is a latent and its rotary key, of which attention
    makes keys and values of all query heads: then H is 1, D the rotary key's and Dv the latent's width. indexed: and
    an index chooses for each query among the slots, by keys of its own that lie behind the latents: Dv is of both.
    """

    type: str
    layers: tuple[Layer, ...]
    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    position: Position
    limit: int | None
    shared: frozenset[int] = frozenset()
    verified: bool = False
    sliding: Sliding = "auto"
    latent: bool = False
    indexed: bool = False

    @property
    def whole_prompts(self) -> bool:
        """Whether states are not known to be right where several tokens are fed after the first forward."""
        has_states = any(layer.kind in ("state", "hybrid") for layer in self.layers)
        return has_states and (not self.verified or self.type in WHOLE_PROMPTS)

    @property
    def title(self) -> str:
        """The type as messages name it."""
        return TITLES.get(self.type, self.type)

    @property
    def has_position_table(self) -> bool:
        """Whether positions come from a table that ends at the limit."""
        return self.position == "learned" or self.type in TABLE_ROPE

    @property
    def composed(self) -> bool:
        """Whether some layers keep what kvexp does not hold."""
        return len(self.held) < len(self.layers) or any(layer.kind == "hybrid" for layer in self.layers)

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of the layers whose keys and values kvexp holds and evicts."""
        return held_layers(self.layers, self.sliding)

    @property
    def evicts_in_windows(self) -> bool:
        """Whether windows are evicted from though other layers keep every token, which they are where it was asked."""
        return self.held != held_layers(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that the window of each held layer has, None for one that keeps every token.

        Empty where all held layers are alike: a budget is then of the prompt, as it is without windows.
        """
        return tuple(self.layers[number].size for number in self.held) if self.evicts_in_windows else ()

    @property
    def of_layers(self) -> str:
        """The held layers among all as text, such as "3 of 18 layers"."""
        return f"{len(self.held)} of {len(self.layers)} layers"


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments of a forward, under either of its names; None without one."""
    return arguments.get("cache", arguments.get("past_key_values"))


def held_layers(layers: Sequence[Layer], sliding: Sliding = "auto") -> tuple[int, ...]:
    """Numbers of the layers that kvexp evicts from, those that keep every token among them.

    sliding: whether those with a sliding window are; auto: where no layer keeps every token.
    """
    whole = tuple(number for number, layer in enumerate(layers) if layer.kind in ("full", "hybrid"))
    if sliding is False or (sliding == "auto" and whole):
        return whole
    return tuple(number for number, layer in enumerate(layers) if layer.kind in ("full", "hybrid", "window"))


def text_config(config: Any) -> Any:
    """The configuration of the decoder inside a model's, which is the same for a model of text alone."""
    return config.get_text_config(decoder=True)


def check_type(config: Any) -> None:
    """ConfigError for a type that kvexp cannot serve, with the reason; sizes are not looked at."""
    text = text_config(config)
    for name in (str(_field(config, "model_type")), str(_field(text, "model_type"))):
        if name in REFUSED:
            raise _refused(name, REFUSED[name])
    if _field(text, "model_type") == "falcon" and text.alibi:
        raise _refused("falcon with ALiBi", "transformers adds its ALiBi twice in eager attention, and rounded")
    if "shared" in (_field(text, "indexer_types") or ()):
        raise _refused(str(_field(text, "model_type")), _SHARED_INDEX)
    installed = tuple(map(int, transformers.__version__.split(".")[:2]))
    if _field(text, "kv_lora_rank") is not None and installed < LATENTS_SINCE:
        raise _refused(str(_field(text, "model_type")), _OLD.format(*LATENTS_SINCE))


def traits_of(config: Any, sliding: Sliding = "auto") -> Traits:
    """The traits of a Hugging Face configuration; ConfigError for a model that kvexp cannot serve, with the reason.

    sliding: `CacheConfig.evict_sliding`. ConfigError too where it leaves no layer to evict from.
    """
    check_type(config)
    text = text_config(config)
    model_type = str(_field(text, "model_type"))
    layers = _layers(text, model_type)
    held = held_layers(layers)
    if not held:
        raise _refused(model_type, _STATES)
    if not held_layers(layers, sliding):
        raise ConfigError(
            f"cache.evict_sliding=false leaves nothing to evict in {TITLES.get(model_type, model_type)}, of whose "
            f"layers none keeps every token ({layers_in_words(layers)}): leave cache.evict_sliding at auto"
        )
    layer = (_field(text, "per_layer_config") or [text] * len(layers))[held[0]]
    heads = _field(layer, "num_attention_heads")
    single = model_type == "falcon" and text.multi_query and not text.new_decoder_architecture
    kv_heads = (
        1
        if single
        else _field(layer, "num_key_value_heads")
        or _field(layer, "num_kv_heads")
        or _field(_field(layer, "attn_config"), "kv_n_heads")
        or heads
    )
    key_dim = _field(layer, "head_dim") or layer.hidden_size // heads
    value_dim = _field(layer, "v_head_dim") or key_dim
    latent = _field(layer, "kv_lora_rank")
    if latent is not None:
        kv_heads, key_dim, value_dim = 1, layer.qk_rope_head_dim, latent
    indexed = latent is not None and "indexed_attention" in (_field(text, "layer_types") or ())
    if indexed:
        value_dim += layer.index_head_dim
    rope = _field(text, "rope_parameters") is not None or model_type in TABLE_ROPE
    without: Position = "none" if any(layer.kind in ("state", "hybrid") for layer in layers) else "learned"
    return Traits(
        type=model_type,
        layers=layers,
        kv_heads=int(kv_heads),
        group=int(heads) // int(kv_heads),
        key_dim=int(key_dim),
        value_dim=int(value_dim),
        position="alibi" if model_type in ("mpt", "bloom") else "rope" if rope else without,
        limit=next((int(value) for name in LIMITS if isinstance(value := _field(text, name), int)), None),
        shared=frozenset(i for i, mode in enumerate(_field(text, "kv_sharing_modes") or ()) if mode == "store"),
        verified=not VERIFIED.isdisjoint((model_type, _field(config, "model_type"))),
        sliding=sliding,
        latent=latent is not None,
        indexed=indexed,
    )


def _field(config: Any, name: str) -> Any:
    """A field of a configuration, None where it has none; some raise for fields that differ between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # whatever their property raises
        return None


def _refused(model_type: str, why: str) -> ConfigError:
    return ConfigError(f"model family {model_type!r} is not supported: {why} (docs/models.md lists what is)")


def _layers(text: Any, model_type: str) -> tuple[Layer, ...]:
    """The layers of the cache that transformers would make for this configuration."""
    try:
        cache_layers = DynamicCache(config=text).layers
    except Exception as error:  # of a damaged configuration, or of layers whose class is not imported yet
        reason = " ".join(str(error).split())[:200]
        raise _refused(model_type, f"transformers makes no cache for it ({type(error).__name__} {reason})") from error
    kinds = _field(text, "layer_types") or _field(text, "attention_layers") or [None] * len(cache_layers)
    sharing = _field(text, "kv_sharing_modes") or [None] * len(cache_layers)
    layers = []
    for layer, named, mode in zip(cache_layers, kinds, sharing, strict=True):
        name = type(layer).__name__
        if name not in KINDS:
            raise _refused(model_type, f"what its layers of kind {named!r} keep is not known")
        kind = "shared" if mode == "reuse" else "chunk" if named == "chunked_attention" else KINDS[name]
        if named == "local":  # GPT-Neo's, of which transformers' cache keeps every token
            layers.append(Layer("window", text.window_size))
        else:
            layers.append(Layer(kind, getattr(layer, "sliding_window", None)))
    return tuple(layers)


def num_layers(config: Any, sliding: Sliding = "auto") -> int:
    """Number of layers L whose keys and values kvexp holds; sliding: as of `held_layers`."""
    return len(traits_of(config, sliding).held)


def num_kv_heads(config: Any) -> int:
    """Number of kv heads H."""
    return traits_of(config).kv_heads


def head_dim(config: Any) -> int:
    """Dimensions D of one attention head's keys."""
    return traits_of(config).key_dim


def query_shape(config: Any) -> tuple[int, int, int, int]:
    """Numbers of layers L, kv heads H, query heads per kv head G and dimensions D of a query head.

    Statistics of heads have this shape: ConfigError where a cache holds latents, which have none.
    """
    traits = traits_of(config)
    if traits.latent:
        raise ConfigError(
            f"in {traits.title} a slot is a latent that all heads of a layer expand: it has no use for statistics of "
            "keys and queries of heads, which a calibration pass makes. Take a method of attention: h2o, say"
        )
    return len(traits.held), traits.kv_heads, traits.group, traits.key_dim


def layers_in_words(layers: Sequence[Layer]) -> str:
    """Kinds of layers with their numbers, as "4 of full attention, 22 of a sliding window"."""
    counted = Counter(layer.kind for layer in layers)
    return ", ".join(f"{count} of {KIND_TITLES[kind]}" for kind, count in counted.items())


def other_layers_of(traits: Traits) -> OtherLayers | None:
    """Windows that are not evicted from, as a configuration has them; None: every layer is evicted from.

    States, and heads that differ between layers, only the model tells (`kvexp.hf.probe`).
    """
    if not traits.composed:
        return None
    numbers = traits.kv_heads * (traits.key_dim + traits.value_dim)
    sizes = [layer.size for number, layer in enumerate(traits.layers) if number not in traits.held]
    return OtherLayers(traits.kv_heads, tuple((numbers, size - 1) for size in sizes if size is not None))


def prompt_sizes(config: Any, cache: CacheConfig, tokens: int, new: int | None) -> PromptSizes:
    """One prompt of so many tokens, and `new` to come, as budgets of a model of this configuration are resolved for."""
    traits = traits_of(config, cache.evict_sliding)
    return PromptSizes([tokens], tokens, new, len(traits.held), traits.windows)


def check_positions(config: Any, cache: CacheConfig) -> None:
    """ConfigError where the model's kind of positions cannot do what the cache is configured for."""
    traits = traits_of(config)
    if cache.renumbered and traits.position == "learned":
        raise ConfigError(
            f"positions=renumbered cannot work on {traits.title}: its learned positions are added to the input, "
            f"not to the cache. Set positions=original for method={cache.method.name}"
        )
    if cache.beyond_context and traits.has_position_table:
        raise ConfigError(f"{traits.title} has a table of positions for {max_positions(config)} tokens and no more")


def has_sinks(config: Any) -> bool:
    """Whether attention heads of a model of this configuration have sinks (`AttentionParams`)."""
    return config is not None and text_config(config).model_type in SINK_TYPES


def softcap_of(config: Any) -> float | None:
    """The softcap of attention logits (`AttentionParams`) that a configuration names; None: it names none.

    Asked at every layer of every step, where looking for a text configuration takes longest: one without parts is its
    own.
    """
    text = text_config(config) if getattr(type(config), "sub_configs", None) else config
    return getattr(text, "attn_logit_softcapping", None)


def check_logits(config: Any, cache: CacheConfig) -> None:
    """ConfigError where what the cache observes has no meaning with, or was not written for, sinks or a softcap."""
    sinks = torch.zeros(1) if has_sinks(config) else None
    params = AttentionParams(1.0, softcap=softcap_of(config), sinks=sinks)
    if cache.score_spec is not None:
        cache.score_spec.observed_sinks(params)
    if cache.observe == "triton":
        triton_ops.check_logits(params)


def quantization_for(config: Any, quantization: AnyQuantization) -> AnyQuantization:
    """The quantisation with what an engine takes from the model: order of channels, no rotation of small heads."""
    if not isinstance(quantization, EngineQuantization) or not quantization.in_blocks:
        return quantization
    traits, rotate = traits_of(config), quantization.rotate
    if rotate is None and traits.key_dim % TURNED and traits.value_dim % TURNED:
        rotate = False
    return replace(quantization, rotate=rotate, neighbours=traits.type in NEIGHBOURS)


def check_quantization(config: Any, quantization: AnyQuantization, dtype: torch.dtype) -> None:
    """ConfigError where keys and values of the model's heads, or of its dtype, cannot be quantised so."""
    traits = traits_of(config)
    quantization.check_head(traits.key_dim, traits.value_dim)
    quantization.check_dtype(dtype)


def max_positions(config: Any) -> int:
    """The longest sequence, in tokens, that the model is made for; `UNLIMITED` where its configuration names none.

    A RoPE that is stretched by a factor reaches so many times as far as the length that its config gives for the model
    before: `original_max_position_embeddings`, or for linear and dynamic max_position_embeddings itself. A config that
    was written for the stretched model says its length in max_position_embeddings (llama3 always does); the larger
    counts.
    """
    traits = traits_of(config)
    held = UNLIMITED if traits.limit is None else traits.limit
    rope = rope_parameters(config)
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind in ("default", "llama3") or not isinstance(factor, int | float):
        return held
    return max(held, int((rope.get("original_max_position_embeddings") or held) * factor))


def rope_parameters(config: Any) -> dict[str, Any]:
    """The config's settings of the RoPE of layers that keep every token, as transformers computes it; empty for none.

    Empty too for types that make a table of their own.
    """
    by_kind = all_rope_parameters(config)
    return by_kind.get("full_attention") or next(iter(by_kind.values()), {})


def all_rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """The settings of each RoPE by kind of layer ("full_attention", …); "" for one that all layers have."""
    given = _field(text_config(config), "rope_parameters")
    if not isinstance(given, dict) or not given or traits_of(config).position != "rope":
        return {}
    nested = {name: settings for name, settings in given.items() if isinstance(settings, dict)}
    return nested or {"": given}


def check_activations(config: Any) -> None:
    """ConfigError for a checkpoint whose activations are rounded by the values of all rows of a forward."""
    given = getattr(config, "quantization_config", None)
    plain: dict[str, Any] = given if isinstance(given, dict) else given.to_dict() if given is not None else {}
    groups = (plain.get("config_groups") or {}).values()
    inputs = [(group.get("input_activations") or {}) for group in groups if isinstance(group, dict)]
    reason = "load_in_8bit" if plain.get("load_in_8bit") else None  # LLM.int8 looks for outliers in every row
    kind = str(plain.get("quant_type", "")).lower().replace("_", "")
    if "float8dynamicactivation" in kind and "perrow" not in kind:  # one scale for all, unless said otherwise
        reason = f"quant_type {plain['quant_type']}"
    if any(activations.get("dynamic") and activations.get("strategy") == "tensor" for activations in inputs):
        reason = "input_activations by tensor"
    if reason is not None:
        raise ConfigError(
            f"quantization_config rounds activations by the values of a whole forward ({reason}), so that rows and "
            "chunks would change each other: take weights that are not quantised, or whose weights alone are"
        )


MOST_LAYERS = 10_000  # of a configuration whose layers are read one by one


def check_sizes(config: Any) -> None:
    """ConfigError for sizes that no model can have, and for kinds of RoPE that transformers does not know.

    transformers takes most of them: -1 layers make a model of none, other values fail far away from here.
    """
    config = text_config(config)
    limits = [name for name in LIMITS if _field(config, name) is not None][:1]
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", *limits):
        value = _field(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{_own(config, name)} must be a whole number of at least 1, got {value!r}")
    heads = config.num_attention_heads
    few = config.num_hidden_layers <= MOST_LAYERS  # one of more is refused by its weights, if no memory is asked for
    by_layer = list((_field(config, "per_layer_config") if few else None) or [config])
    for grouped in {_field(layer, "num_key_value_heads") for layer in by_layer} - {None}:
        if not isinstance(grouped, int) or grouped < 1 or heads % grouped:
            raise ConfigError(
                f"{config.num_hidden_layers} layers of {heads} heads in {grouped!r} groups: num_key_value_heads must "
                "be a whole number that divides num_attention_heads"
            )
    if _field(config, "kv_lora_rank") is not None and config.num_key_value_heads != heads:
        raise ConfigError(
            f"num_key_value_heads must be num_attention_heads ({heads}) where a latent is expanded for every query "
            f"head, got {config.num_key_value_heads!r}"
        )
    if not _field(by_layer[0], "head_dim") and config.hidden_size % heads:
        raise ConfigError(
            f"{_own(config, 'hidden_size')} must be a multiple of {_own(config, 'num_attention_heads')}, got "
            f"{config.hidden_size} and {heads}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = ("default", *ROPE_INIT_FUNCTIONS)
    if isinstance(rope, dict) and rope.get("rope_type", "default") not in kinds:
        raise ConfigError(f"rope_type must be one of {', '.join(sorted(kinds))}, got {rope['rope_type']!r}")


def _own(config: Any, name: str) -> str:
    """The name that this family's configuration has for a field."""
    return str(getattr(config, "attribute_map", {}).get(name, name))


def rope_of(model: Any) -> RoPE | None:
    """The model's RoPE as inverse frequencies; None for families without RoPE.

    Not for one whose frequencies move (`kvexp.hf.moving_rope`). Frequencies come from the model's own rotary
    module, so linear, llama3 and yarn scaling are in them. GPT-J and CodeGen, without such a module, make their table
    from the base 10000.
    """
    config = model.config
    if traits_of(config).position != "rope":
        return None
    if config.model_type in TABLE_ROPE:
        width = config.rotary_dim or config.n_embd // config.n_head
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        device = model.get_input_embeddings().weight.device  # or each step would copy it there
        return RoPE((1.0 / 10000**exponent).to(device), interleaved=True)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            return RoPE(module.inv_freq.detach(), interleaved=False)
    raise ConfigError(f"found no rotary embedding in this {config.model_type} model")
