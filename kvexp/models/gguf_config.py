"""The Hugging Face configuration of a GGUF file's model, of the families that kvexp runs and llama.cpp writes.

A file whose model its family's configuration cannot describe (experts, other scalings of positions, …) is refused: with
that left out, the model would run and compute other numbers.
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
from kvexp.models.gguf_header import GgufHeader

FAMILIES_OF_GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}  # architecture -> model_type
CHANGES_NUMBERS = (
    *("expert_count", "logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.clamp_kqv"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.max_alibi_bias"),
)
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
    if architecture not in FAMILIES_OF_GGUF:
        raise ConfigError(
            f"{header.path} is of architecture {architecture!r}; GGUF files of {', '.join(FAMILIES_OF_GGUF)} (Mistral "
            "is a llama there) can be read. Other families load from a folder of safetensors"
        )
    for key in CHANGES_NUMBERS:
        if header.fields.get(f"{architecture}.{key}"):
            raise ConfigError(
                f"{header.path} sets {architecture}.{key}={header.fields[f'{architecture}.{key}']}, which its family "
                "does not have in kvexp: the model would put out other numbers. Load it from a folder of safetensors"
            )
    config = _gpt2(header) if architecture == "gpt2" else _llama_like(header, rope_factors)
    try:
        check_sizes(config)
    except ConfigError as error:
        raise ConfigError(f"the header of {header.path}: {error}") from error
    for name in ("bos", "eos"):
        setattr(config, f"{name}_token_id", header.fields.get(f"tokenizer.ggml.{name}_token_id"))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.pad_token_id = header.fields.get("tokenizer.ggml.padding_token_id")
    return config


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
    """Configuration of a GPT-2."""
    return AutoConfig.for_model(
        "gpt2",
        vocab_size=_vocabulary(header),
        n_positions=_whole(header, "context_length"),
        n_embd=_whole(header, "embedding_length"),
        n_layer=_whole(header, "block_count"),
        n_head=_whole(header, "attention.head_count"),
        n_inner=_whole(header, "feed_forward_length"),
        layer_norm_epsilon=_real(header, "attention.layer_norm_epsilon"),
        tie_word_embeddings="output.weight" not in header.tensors,
    )


def _rope(header: GgufHeader) -> dict[str, Any]:
    """The configuration's `rope_parameters`: base and linear scaling; ConfigError for scalings of other kinds."""
    base = {"rope_theta": _real(header, "rope.freq_base", 10000.0)}
    kind = header.fields.get(f"{header.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {**base, "rope_type": "default"}
    if kind == "linear":
        return {**base, "rope_type": "linear", "factor": _real(header, "rope.scaling.factor")}
    raise ConfigError(
        f"{header.path} scales its positions by {kind!r}, which cannot be read off a GGUF file exactly: load the model "
        "from a folder of safetensors"
    )


def _llama3_rope(header: GgufHeader, config: Any, factors: Tensor) -> dict[str, Any]:
    """The `rope_parameters` under which RoPE's frequencies are divided by `factors` (float32 [D / 2]).

    ConfigError where neither Llama 3.1's nor 3.2's parameters give these factors.
    """
    plain = config.rope_parameters
    length = config.head_dim // 2
    frequencies = 1.0 / plain["rope_theta"] ** (torch.arange(length, dtype=torch.float32) * 2 / config.head_dim)
    for known in LLAMA3_ROPE:
        config.rope_parameters = {**plain, "rope_type": "llama3", **known}
        made, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if factors.shape == made.shape and torch.allclose(frequencies / made, factors.float(), rtol=1e-4):
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
