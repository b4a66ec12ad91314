"""The Hugging Face configuration of a GGUF file's model, of the families that kvexp runs and llama.cpp writes.

Every key of the file is read, is known to change no number, or is refused by name: what a family's configuration cannot
describe (experts, other scalings of positions, …) would leave a model that runs and computes other numbers. Keys mean
what they mean to llama.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvexp.errors import ConfigError
from kvexp.models.families import check_sizes
from kvexp.models.gguf_header import UNQUANTISED, GgufHeader

FAMILIES_OF_GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}  # architecture -> model_type
_READ = (
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv"),
)
_READ_ROTARY = (
    *("attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.scale", "attention.sliding_window", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor"),
)
# Keys of an architecture that a configuration is made of. The vocabulary's size is that of the embedding.
READ = {
    "gpt2": (*_READ, "attention.layer_norm_epsilon"),
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _READ + _READ_ROTARY),
}
# Keys of an architecture, and the values with which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.scale", "pooling_type", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "use_parallel_residual"), (0,)),
    **dict.fromkeys(("attention.causal", "rope.scaling.attn_factor"), (1,)),
    "tensor_data_layout": ("Meta AI original pth",),  # every llama's in llama.cpp: neighbouring rows are rotated
    "rope.scaling.finetuned": (False, True),  # how the scaling came about
}
# Beginnings of keys of any file that tell where it comes from, and how it was quantised; kvexp's own settings say how
# tokens are drawn (general.sampling), but for a penalty on tokens that were there.
ORIGIN = ("general.", "imatrix.", "quantize.imatrix.", "mradermacher.")
PENALTY, PENALTY_REACH = "general.sampling.penalty_repeat", "general.sampling.penalty_last_n"
SHOWN = 60  # characters of a value in a message
QUANTISATION = 2  # version of llama.cpp's formats of quantised tensors that `gguf` reads
# Of Llama 3.1 and 3.2; the file has what they make of the frequencies (rope_freqs.weight) and not them.
LLAMA3_ROPE = [
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
]


def config_of_header(header: GgufHeader, rope_factors: Tensor | None) -> Any:
    """The Hugging Face configuration of the model that a GGUF header describes.

    rope_factors: the file's rope_freqs.weight (float32 [D / 2]), None where it has none. ConfigError for a family that
    kvexp cannot read, and for what the family's configuration cannot describe.
    """
    architecture = header.architecture
    _check_kind(header)
    if architecture not in FAMILIES_OF_GGUF:
        raise ConfigError(
            f"{header.path} is of architecture {architecture!r}; GGUF files of {', '.join(FAMILIES_OF_GGUF)} (Mistral "
            "is a llama there) can be read. Other families load from a folder of safetensors"
        )
    _check_keys(header)
    if rope_factors is not None and architecture != "llama":
        raise ConfigError(f"{header.path} has factors of positions (rope_freqs.weight), which no {architecture} has")
    config = _gpt2(header) if architecture == "gpt2" else _llama_like(header, rope_factors)
    try:
        check_sizes(config)
    except ConfigError as error:
        raise ConfigError(f"the header of {header.path}: {error}") from error
    rows = config.vocab_size
    config.bos_token_id = _token(header, "bos", rows)
    config.eos_token_id = _ends(header, rows)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.pad_token_id = _token(header, "padding", rows)
    return config


def repetition_penalty(header: GgufHeader) -> float:
    """The penalty on tokens that were there already, which came from the model's generation_config.json; 1 for none."""
    penalty = header.fields.get(PENALTY, 1.0)
    if not isinstance(penalty, int | float) or not math.isfinite(penalty) or penalty <= 0:
        raise ConfigError(f"the header of {header.path}: {PENALTY} must be a positive number, got {penalty!r}")
    if penalty != 1 and header.fields.get(PENALTY_REACH, -1) != -1:
        raise ConfigError(
            f"{header.path} sets {PENALTY_REACH}={header.fields[PENALTY_REACH]!r}: a penalty that looks back so far is "
            "not offered, only one over the whole text. Load the model from a folder of safetensors"
        )
    return float(penalty)


def conversion(header: GgufHeader) -> int:
    """The version of the conversion: 2 for a file with keys that were passed over before, 1 for all others.

    A conversion that was kept by an older kvexp is not used for the former, and its runs are other runs.
    """
    found = header.fields
    unnamed = f"{header.architecture}.rope.scaling.type" not in found and header.architecture != "gpt2"
    more_ends = isinstance(_ends(header, None), list)
    return 2 if more_ends or repetition_penalty(header) != 1 or (unnamed and _linear_factor(header) != 1) else 1


def _check_kind(header: GgufHeader) -> None:
    """ConfigError for a file that is no whole model: an adapter, a part of a model, formats of another version."""
    kind, parts = header.fields.get("general.type", "model"), header.fields.get("split.count", 0)
    if kind == "adapter":
        raise ConfigError(
            f"{header.path} is a LoRA adapter and no model: merge it into its model (llama.cpp's llama-export-lora) "
            "and give the file that comes out"
        )
    if kind != "model":
        raise ConfigError(f"{header.path} is of general.type={kind!r}, not a model")
    if parts not in (0, 1):
        raise ConfigError(
            f"{header.path} is one of {parts!r} parts of a model (split.count): merge them into one file (llama.cpp's "
            "llama-gguf-split --merge) and give that"
        )
    version = header.fields.get("general.quantization_version", QUANTISATION)
    packed = any(tensor.kind not in UNQUANTISED for tensor in header.tensors.values())
    if packed and version != QUANTISATION:
        raise ConfigError(
            f"{header.path} has general.quantization_version={version!r}; weights of version {QUANTISATION} can be read"
        )


def _check_keys(header: GgufHeader) -> None:
    """ConfigError for a key that is not known, or whose value would change numbers; tokenizers check their own."""
    own = f"{header.architecture}."
    for key, value in header.fields.items():
        name = key.removeprefix(own)
        if key.startswith((*ORIGIN, "tokenizer.", "split.")) or (name != key and name in READ[header.architecture]):
            continue
        if name == "rope.scaling.original_context_length" and header.architecture != "gpt2":
            continue  # of YaRN and longrope alone, which `_rope` refuses
        if name != key and value in NEUTRAL.get(name, ()):
            continue
        said = repr(value) if len(repr(value)) <= SHOWN else f"{repr(value)[:SHOWN]}..."
        known = f" (it may be {' or '.join(map(repr, NEUTRAL[name]))})" if name in NEUTRAL else ""
        raise ConfigError(
            f"{header.path} sets {key}={said}{known}, which kvexp cannot honour: left out, it could change what the "
            "model puts out. Load the model from a folder of safetensors"
        )


def _token(header: GgufHeader, name: str, rows: int | None) -> int | None:
    """The id under tokenizer.ggml.NAME_token_id, None without one; ConfigError for what is no row of the embedding."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = header.fields.get(key)
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or found < 0 or (rows is not None and found >= rows):
        raise ConfigError(f"the header of {header.path}: {key}={found!r} is no token of its vocabulary ({rows} tokens)")
    return found


def _ends(header: GgufHeader, rows: int | None) -> int | list[int] | None:
    """The tokens that end an answer: end of text, and of turn and message where the file names others for them."""
    found = [_token(header, name, rows) for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in found if token is not None))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _llama_like(header: GgufHeader, rope_factors: Tensor | None) -> Any:
    """Configuration of a llama, mistral, qwen2 or qwen3; arguments and errors as of `config_of_header`."""
    hidden, heads = _whole(header, "embedding_length"), _whole(header, "attention.head_count")
    head_dim = _whole(header, "attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if _whole(header, key, head_dim) != head_dim:
            raise ConfigError(
                f"{header.path} sets {header.architecture}.{key}={_whole(header, key)} and heads of {head_dim}: that "
                "cannot be said in its family's configuration. Load it from a folder of safetensors"
            )
    scale = header.fields.get(f"{header.architecture}.attention.scale") or head_dim**-0.5
    if not isinstance(scale, int | float) or not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise ConfigError(
            f"{header.path} sets {header.architecture}.attention.scale={scale!r}, which its family does not have: the "
            "model would put out other numbers. Load it from a folder of safetensors"
        )
    family, more = FAMILIES_OF_GGUF[header.architecture], {}
    window = _whole(header, "attention.sliding_window", 0)
    if window and header.architecture == "llama":
        family, more = "mistral", {"sliding_window": window}
    elif window:
        raise ConfigError(f"{header.path} has a sliding window of {window}: load it from a folder of safetensors")
    if family == "llama":
        more = {"attention_bias": _has(header, "attn_q.bias"), "mlp_bias": _has(header, "ffn_up.bias")}
    if family != "qwen2":
        more["head_dim"] = head_dim
    elif head_dim * heads != hidden:
        raise ConfigError(f"{header.path}: {heads} heads of {head_dim} in {hidden}: qwen2 has no such heads")
    config = AutoConfig.for_model(
        family,
        vocab_size=_vocabulary(header),
        hidden_size=hidden,
        intermediate_size=_whole(header, "feed_forward_length"),
        num_hidden_layers=_whole(header, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_whole(header, "attention.head_count_kv", heads),
        max_position_embeddings=_whole(header, "context_length"),
        rms_norm_eps=_real(header, "attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(header),
        tie_word_embeddings="output.weight" not in header.tensors,
        **more,
    )
    if rope_factors is not None:
        config.rope_parameters = _llama3_rope(header, config, rope_factors)
    return config


def _gpt2(header: GgufHeader) -> Any:
    """Configuration of a GPT-2; ConfigError for grouped heads, which it does not have."""
    heads = _whole(header, "attention.head_count")
    if _whole(header, "attention.head_count_kv", heads) != heads:
        raise ConfigError(
            f"{header.path}: {heads} heads in {_whole(header, 'attention.head_count_kv')} groups: no GPT-2"
        )
    return AutoConfig.for_model(
        "gpt2",
        vocab_size=_vocabulary(header),
        n_positions=_whole(header, "context_length"),
        n_embd=_whole(header, "embedding_length"),
        n_layer=_whole(header, "block_count"),
        n_head=heads,
        n_inner=_whole(header, "feed_forward_length"),
        layer_norm_epsilon=_real(header, "attention.layer_norm_epsilon"),
        tie_word_embeddings="output.weight" not in header.tensors,
    )


def _rope(header: GgufHeader) -> dict[str, Any]:
    """The configuration's `rope_parameters`: base and linear scaling; ConfigError for scalings of other kinds.

    A factor without a kind is linear, as in llama.cpp; so is one under the key of older files, rope.scale_linear.
    """
    base = {"rope_theta": _real(header, "rope.freq_base", 10000.0)}
    kind = header.fields.get(f"{header.architecture}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"{header.path} scales its positions by {kind!r}, which cannot be read off a GGUF file exactly: load the "
            "model from a folder of safetensors"
        )
    factor = _linear_factor(header)
    if kind == "none" or factor == 1:
        return {**base, "rope_type": "default"}
    return {**base, "rope_type": "linear", "factor": factor}


def _linear_factor(header: GgufHeader) -> float:
    """The factor by which positions are divided; 1 where the file has none, or 0, which stands for none."""
    key = "rope.scaling.factor"
    if f"{header.architecture}.{key}" not in header.fields:
        key = "rope.scale_linear"
    return 1.0 if header.fields.get(f"{header.architecture}.{key}", 0) == 0 else _real(header, key)


def _llama3_rope(header: GgufHeader, config: Any, factors: Tensor) -> dict[str, Any]:
    """The `rope_parameters` under which RoPE's frequencies are divided by `factors` (float32 [D / 2]).

    ConfigError where neither Llama 3.1's nor 3.2's parameters give these factors.
    """
    plain = config.rope_parameters
    if plain["rope_type"] != "default":
        raise ConfigError(
            f"{header.path} scales its positions twice, by a factor of {plain['factor']} and by rope_freqs.weight: "
            "load the model from a folder of safetensors"
        )
    length = config.head_dim // 2
    frequencies = 1.0 / plain["rope_theta"] ** (torch.arange(length, dtype=torch.float32) * 2 / config.head_dim)
    for known in LLAMA3_ROPE:
        config.rope_parameters = {**plain, "rope_type": "llama3", **known}
        made, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if factors.shape == made.shape and torch.allclose(frequencies / made, factors.float(), rtol=1e-5):
            return dict(config.rope_parameters)
    raise ConfigError(
        f"{header.path} scales its positions by factors (rope_freqs.weight) that are not those of Llama 3.1 or 3.2: "
        "load the model from a folder of safetensors"
    )


def _has(header: GgufHeader, ending: str) -> bool:
    """Whether the first layer has a tensor of this name, such as attn_q.bias."""
    return f"blk.0.{ending}" in header.tensors


def _vocabulary(header: GgufHeader) -> int:
    """Rows of the embedding, which is the model's vocabulary: the file's list of tokens may be longer or shorter."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{header.path} has no token_embd.weight: it is part of a model; give the first file or all")
    return embedding.shape[0]


def _whole(header: GgufHeader, key: str, default: int | None = None) -> int:
    """The whole number under the architecture's `key`; ConfigError where it is none, or missing, no default."""
    found = header.fields.get(f"{header.architecture}.{key}", default)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ConfigError(
            f"the header of {header.path}: {header.architecture}.{key} must be a whole number, got {found!r}"
        )
    return found


def _real(header: GgufHeader, key: str, default: float | None = None) -> float:
    """The positive number under the architecture's `key`; ConfigError where it is none, or missing, no default."""
    found = header.fields.get(f"{header.architecture}.{key}", default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found) or found <= 0:
        raise ConfigError(f"the header of {header.path}: {header.architecture}.{key} must be a number, got {found!r}")
    return float(found)
