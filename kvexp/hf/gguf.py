"""GGUF files as Hugging Face has them: header, configuration, tokenizer and weights.

Header: llama.cpp's docs, "GGUF", versions 2 and 3, little-endian. Every count is bounded by the bytes that are there,
and no tensor is read with it.

Configuration: every key of the file is read, is known to change no number, or is refused by name: what a family's
configuration cannot describe (experts, other scalings of positions, …) would leave a model that runs and computes other
numbers. Keys mean what they mean to llama.cpp.

Tokenizer: a byte-level vocabulary (tokenizer.ggml.model = gpt2) is put together here: the file names the pattern by
which its model splits text (tokenizer.ggml.pre), and another pattern would give other tokens than the model learned. A
SentencePiece vocabulary (llama) is converted by transformers. A pattern or a key that is not listed here gives no
tokenizer, rather than a nearly right one.

Weights are dequantised to float32, a tensor at a time.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvexp.hf.patch import named_weights
from kvexp.hf.traits import check_sizes
from kvexp.util.errors import ConfigError, Rule, refuse

STRING, ARRAY = 8, 9  # types of values that have no fixed width
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UNQUANTISED = ("F32", "F16", "BF16")
READABLE = (
    *UNQUANTISED,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


@dataclass(frozen=True)
class GgufTensor:
    """Place of one tensor in the file.

    shape: in torch's order; kind: F32, Q4_1 …; start: its first byte in the file; size: its bytes there.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int

    @property
    def elements(self) -> int:
        """Number of the tensor's elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file: metadata by key and tensors by name, both in the file's order."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's family, such as llama or qwen2."""
        return str(self.fields["general.architecture"])

    @property
    def quantisation(self) -> str:
        """The type that holds most of the weights: Q4_1, Q8_0, F16 …"""
        held: Counter[str] = Counter()
        for tensor in self.tensors.values():
            held[tensor.kind] += tensor.elements
        return held.most_common(1)[0][0]

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    def get(self, key: str, default: Any = None) -> Any:
        """The value under the architecture's `key`, such as llama.block_count for block_count."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """The whole number under the architecture's `key`; ConfigError where it is none, or missing, no default."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise ConfigError(
                f"the header of {self.path}: {self.architecture}.{key} must be a whole number, got {value!r}"
            )
        return value

    @property
    def head_size(self) -> int:
        """Numbers of a head's key."""
        heads = self.integer("attention.head_count")
        return self.integer("attention.key_length", self.integer("embedding_length") // max(heads, 1))

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under the architecture's `key`; ConfigError where it is none, or missing, no default."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"the header of {self.path}: {self.architecture}.{key} must be a number, got {value!r}")
        return float(value)

    def refused(self, reason: str) -> ConfigError:
        """The ConfigError for settings that the family's configuration has no field for; reason: what the file sets."""
        return ConfigError(
            f"{self.path} {reason}: left out, it could change what the model puts out. Load the model from a folder of "
            "safetensors"
        )


class _Bytes:
    """Reads a file's bytes from front to back; ValueError past the end. at: the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > len(self.data) - self.at:
            raise ValueError("it ends within its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """The next number, of a format of Python's `struct`, little-endian."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        """The next string: its length as 64 bits, then UTF-8."""
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int, inside: bool = False) -> Any:
        """The next value of metadata, of GGUF's type number `kind`; inside: of an array, which holds no arrays."""
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or inside:
            raise ValueError(f"its header holds a value of unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in FORMATS:
            form = FORMATS[inner]
            raw = self.take(count * struct.calcsize(f"<{form}"))
            return list(struct.unpack(f"<{count}{form}", raw))
        return [self.value(inner, inside=True) for _ in range(count)]  # every one takes bytes, which run out


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`.

    ConfigError for a file that cannot be read, is no GGUF file, is damaged or cut short, or has tensors of unknown
    types.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ConfigError:
        raise
    except ValueError as error:  # of damaged bytes, of no bytes (mmap), of a text that is no UTF-8
        raise ConfigError(f"{path} is no whole GGUF file ({error}): fetch or copy it again") from error


def _header(path: Path, data: mmap.mmap) -> GgufHeader:
    """The header in the bytes `data` of the file at `path`; ValueError where they are damaged."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    read = _Bytes(data)
    if read.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = read.number("I")
    if version not in (2, 3):
        raise ConfigError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
    count, keys = read.number("Q"), read.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(keys):
        key = read.text()
        if key in fields:
            raise ValueError(f"it sets {key} twice")
        fields[key] = read.value(read.number("I"))
    if not isinstance(fields.get("general.architecture"), str):
        raise ValueError("it does not name its architecture")
    kinds, tensors = {int(kind): kind for kind in GGMLQuantizationType}, dict[str, GgufTensor]()
    for _ in range(count):
        name, axes = read.text(), read.number("I")
        if name in tensors or not 0 < axes <= 4:
            raise ValueError(f"it holds tensor {name} twice, or with {axes} axes")
        shape = tuple(reversed([read.number("Q") for _ in range(axes)]))
        number, offset = read.number("I"), read.number("Q")
        if number not in kinds or kinds[number].name not in READABLE:
            kind = kinds[number].name if number in kinds else f"type {number}"
            raise ConfigError(
                f"{path}: tensor {name} is of {kind}, which cannot be turned into numbers here; the types that can: "
                f"{', '.join(READABLE)}"
            )
        block, size = GGML_QUANT_SIZES[kinds[number]]
        if shape[-1] % block:
            raise ValueError(
                f"tensor {name} has rows of {shape[-1]} numbers, {kinds[number].name} packs {block} at a time"
            )
        tensors[name] = GgufTensor(name, shape, kinds[number].name, offset, math.prod(shape) // block * size)
    alignment = fields.get("general.alignment", 32)  # bytes
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-read.at // alignment) * alignment
    tensors = {name: replace(tensor, start=start + tensor.start) for name, tensor in tensors.items()}
    end = max((tensor.start + tensor.size for tensor in tensors.values()), default=0)
    if not tensors or end > len(data):
        raise ValueError(f"it has {len(data)} of {end} bytes, and {len(tensors)} tensors")
    return GgufHeader(path, fields, tensors)


FAMILIES_OF_GGUF = {  # architecture -> model_type
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"},
}
_READ = (
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv"),
    *("attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.scale", "attention.sliding_window", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor"),
)
# Keys of an architecture that a configuration is made of. The vocabulary's size is that of the embedding.
READ = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _READ),
    "gemma3": (*_READ, "rope.freq_base_swa"),
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
# Of Llama 3.1 and 3.2; the file has what they make of the frequencies (rope_freqs.weight) and not them.
LLAMA3_ROPE = [
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
]


def config_of_header(header: GgufHeader, factors: Tensor | None) -> Any:
    """The Hugging Face configuration of the model that a GGUF header describes.

    factors: as `rope_factors` reads them. ConfigError for a family that kvexp cannot read, and for what the family's
    configuration cannot describe.
    """
    refuse(header, NO_MODEL)
    _check_keys(header)
    config = _rotary(header, factors)
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
        raise header.refused(
            f"sets {PENALTY_REACH}={header.fields[PENALTY_REACH]!r}, and a penalty that looks back so far is not "
            "offered, only one over all text"
        )
    return float(penalty)


def conversion(header: GgufHeader) -> int:
    """The version of the conversion: 2 for a file with keys that were passed over before, 1 for all others.

    A conversion that was kept by an older kvexp is not used for the former, and its runs are other runs.
    """
    unnamed = header.get("rope.scaling.type") is None
    more_ends = isinstance(_ends(header, None), list)
    return 2 if more_ends or repetition_penalty(header) != 1 or (unnamed and _linear_factor(header) != 1) else 1


# Files that are no whole model: adapters, parts of a model, formats of another version.
NO_MODEL: tuple[Rule[GgufHeader], ...] = (
    (
        lambda c: c.fields.get("general.type") == "adapter",
        "{c.path} is a LoRA adapter and no model: merge it into its model (llama.cpp's llama-export-lora) and give the "
        "file that comes out",
    ),
    (
        lambda c: c.fields.get("general.type", "model") != "model",
        "{c.path} is of general.type={c.fields[general.type]!r}, not a model",
    ),
    (
        lambda c: c.fields.get("split.count", 0) not in (0, 1),
        "{c.path} is one of {c.fields[split.count]!r} parts of a model (split.count): merge them into one file "
        "(llama.cpp's llama-gguf-split --merge) and give that",
    ),
    (
        lambda c: (
            c.fields.get("general.quantization_version", 2) != 2
            and any(tensor.kind not in UNQUANTISED for tensor in c.tensors.values())
        ),
        "{c.path} has general.quantization_version={c.fields[general.quantization_version]!r}; weights of version 2 "
        "can be read",
    ),
    (
        lambda c: c.architecture not in FAMILIES_OF_GGUF,
        "{c.path} is of architecture {c.architecture!r}; GGUF files of "
        f"{', '.join(FAMILIES_OF_GGUF)} (Mistral is a llama there) can be read. Other families load from a folder of "
        "safetensors",
    ),
    (
        lambda c: "token_embd.weight" not in c.tensors,
        "{c.path} has no token_embd.weight: it is part of a model; give the first file or all",
    ),
    (
        lambda c: LLAMA3_FACTORS in c.tensors and c.architecture != "llama",
        "{c.path} has factors of positions (rope_freqs), which no {c.architecture} has",
    ),
)


def _check_keys(header: GgufHeader) -> None:
    """ConfigError for a key that is not known, or whose value would change numbers; tokenizers check their own."""
    prefix = f"{header.architecture}."
    for key, value in header.fields.items():
        name = key.removeprefix(prefix)
        if key.startswith((*ORIGIN, "tokenizer.", "split.")) or (name != key and name in READ[header.architecture]):
            continue
        if name == "rope.scaling.original_context_length":
            continue  # of YaRN and longrope alone, which `_rope` refuses
        if name != key and value in NEUTRAL.get(name, ()):
            continue
        known = f" (it may be {' or '.join(map(repr, NEUTRAL[name]))})" if name in NEUTRAL else ""
        raise header.refused(f"sets {key}={value!r:.60}{known}, which kvexp cannot honour")


def _token(header: GgufHeader, name: str, rows: int | None) -> int | None:
    """The id under tokenizer.ggml.NAME_token_id, None without one; ConfigError for what is no row of the embedding."""
    key = f"tokenizer.ggml.{name}_token_id"
    token = header.fields.get(key)
    if token is None:
        return None
    if not isinstance(token, int) or isinstance(token, bool) or token < 0 or (rows is not None and token >= rows):
        raise ConfigError(f"the header of {header.path}: {key}={token!r} is no token of its vocabulary ({rows} tokens)")
    return token


def _ends(header: GgufHeader, rows: int | None) -> int | list[int] | None:
    """The tokens that end an answer: end of text, and of turn and message where the file names others for them."""
    tokens = [_token(header, name, rows) for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in tokens if token is not None))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _rotary(header: GgufHeader, factors: Tensor | None) -> Any:
    """Configuration of a family with RoPE and RMS norms; arguments and errors as of `config_of_header`."""
    architecture = header.architecture
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    head_dim = header.head_size
    for key in ("attention.value_length", "rope.dimension_count"):
        channels = header.integer(key, head_dim)
        if channels != head_dim:
            raise header.refused(f"sets {architecture}.{key}={channels} and heads of {head_dim}")
    more = _MORE[architecture](header, head_dim)
    width = more.get("query_pre_attn_scalar", head_dim)
    scale = header.get("attention.scale") or width**-0.5
    if not isinstance(scale, int | float) or not math.isclose(scale, width**-0.5, rel_tol=1e-6):
        raise header.refused(f"sets {architecture}.attention.scale={scale!r}, which its family does not have")
    if architecture == "qwen2":
        if head_dim * heads != hidden:
            raise ConfigError(
                f"{header.path}: {heads} heads of {head_dim} in {hidden}: {architecture} has no such heads"
            )
    else:
        more["head_dim"] = head_dim
    family = "mistral" if architecture == "llama" and "sliding_window" in more else FAMILIES_OF_GGUF[architecture]
    fields = {
        "vocab_size": header.tensors["token_embd.weight"].shape[
            0
        ],  # the file's list of tokens may be of another length
        "hidden_size": hidden,
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", heads),
        "max_position_embeddings": header.integer("context_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    try:
        config = AutoConfig.for_model(family, **{**fields, **more})
    except (ValueError, TypeError) as error:  # transformers' own checks of a configuration
        raise ConfigError(f"the header of {header.path}: {' '.join(str(error).split())[:300]}") from error
    if factors is not None:
        config.rope_parameters = _llama3_rope(header, config, factors)
    return config


def _llama(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Fields of a llama's configuration, or with a window of a mistral's."""
    window = header.integer("attention.sliding_window", 0)
    if window:
        return {"sliding_window": window}
    first = {name.removeprefix("blk.0.") for name in header.tensors}
    return {"attention_bias": "attn_q.bias" in first, "mlp_bias": "ffn_up.bias" in first}


def _qwen(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """No more fields; ConfigError for a window."""
    if window := header.integer("attention.sliding_window", 0):
        raise header.refused(f"has a sliding window of {window}")
    return {}


def _gemma3(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Fields of a gemma3_text's configuration: every sixth layer attends to everything, with a RoPE of its own.

    llama.cpp knows the pattern, the base of the windows' RoPE and the 27B's scale without the file.
    """
    layers, window = header.integer("block_count"), header.integer("attention.sliding_window", 0)
    full = [not window or index % GEMMA3_PATTERN == GEMMA3_PATTERN - 1 for index in range(layers)]
    local = {"rope_type": "default", "rope_theta": header.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)}
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    return {
        "layer_types": ["full_attention" if is_full else "sliding_attention" for is_full in full],
        "rope_parameters": {"full_attention": _rope(header), "sliding_attention": local},
        "query_pre_attn_scalar": hidden // heads if layers == GEMMA3_27B_LAYERS else head_dim,
        **({"sliding_window": window} if window else {}),
    }


_MORE: dict[str, Callable[[GgufHeader, int], dict[str, Any]]] = {
    **{"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "gemma3": _gemma3}
}
GEMMA3_PATTERN, GEMMA3_LOCAL_THETA, GEMMA3_27B_LAYERS = 6, 10_000.0, 62


def _rope(header: GgufHeader) -> dict[str, Any]:
    """The configuration's `rope_parameters`: base and linear scaling; ConfigError for scalings of other kinds.

    A factor without a kind is linear, as in llama.cpp; so is one under the key of older files, rope.scale_linear.
    """
    base = {"rope_theta": header.number("rope.freq_base", 10000.0)}
    kind = header.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise header.refused(f"scales its positions by {kind!r}, which cannot be read off a GGUF file exactly")
    factor = _linear_factor(header)
    if kind == "none" or factor == 1:
        return {**base, "rope_type": "default"}
    return {**base, "rope_type": "linear", "factor": factor}


def _linear_factor(header: GgufHeader) -> float:
    """The factor by which positions are divided; 1 where the file has none, or 0, which stands for none."""
    key = "rope.scaling.factor" if header.get("rope.scaling.factor") is not None else "rope.scale_linear"
    return header.number(key) if header.get(key, 0) != 0 else 1.0


def _llama3_rope(header: GgufHeader, config: Any, factors: Tensor) -> dict[str, Any]:
    """The `rope_parameters` under which RoPE's frequencies are divided by `factors` (float32 [D / 2]).

    ConfigError where neither Llama 3.1's nor 3.2's parameters give these factors.
    """
    plain = config.rope_parameters
    if plain["rope_type"] != "default":
        raise header.refused(f"scales its positions twice, by a factor of {plain['factor']} and by rope_freqs.weight")
    length = config.head_dim // 2
    frequencies = 1.0 / plain["rope_theta"] ** (torch.arange(length, dtype=torch.float32) * 2 / config.head_dim)
    for known in LLAMA3_ROPE:
        config.rope_parameters = {**plain, "rope_type": "llama3", **known}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if factors.shape == scaled.shape and torch.allclose(frequencies / scaled, factors.float(), rtol=1e-5):
            return dict(config.rope_parameters)
    raise header.refused("scales its positions by factors (rope_freqs.weight) that neither Llama 3.1 nor 3.2 has")


CONTROL, USER_DEFINED = 3, 4  # types of tokens
TYPES = {"gpt2": (1, CONTROL, USER_DEFINED, 5), "llama": (1, 2, CONTROL, USER_DEFINED, 5, 6)}  # 2 unknown, 6 a byte
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> the file's
# Keys after "tokenizer.": read, or of tokens that no prompt of kvexp is made with.
KEYS = (
    *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.merges", "ggml.scores", "ggml.add_bos_token"),
    *(f"ggml.{name}_token_id" for name in (*NAMED.values(), "eot", "eom", "seperator", "mask", "cls")),
    *(f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")),
    *(f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *("chat_template", "chat_templates"),
)
NAMED_TEMPLATE = "chat_template."  # tokenizer.chat_template.NAME: templates for other uses than a conversation
OFF = ("ggml.add_eos_token", "ggml.add_sep_token", "ggml.remove_extra_whitespaces", "ggml.precompiled_charsmap")
SPACE = "ggml.add_space_prefix"  # whether a text begins with a space that is not there
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Of the published tokenizer.json files of Llama 3 and Qwen2: they differ in how many digits stand together.
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS: dict[str, Any] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), lambda: _by(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _by(QWEN2)),
}
LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is that token; a start token comes first
NFC = ("qwen2", "deepseek-r1-qwen")


def check_tokenizer(header: GgufHeader) -> None:
    """ConfigError that says why the tokenizer which a GGUF header describes cannot be made exactly."""
    kind, fields = header.fields.get("tokenizer.ggml.model"), header.fields
    if kind not in TYPES:
        raise ConfigError(
            f"its vocabulary is of kind {kind!r}; gpt2 (byte-level) and llama (SentencePiece) can be read"
        )
    split, known = fields.get("tokenizer.ggml.pre"), SPLITS if kind == "gpt2" else (None, "default")
    if split not in known:
        raise ConfigError(f"it splits text as {split!r}; the known ways are {', '.join(map(str, known))}")
    space = kind == "llama" and header.architecture != "gemma3"
    if f"tokenizer.{SPACE}" not in fields and space != (kind == "llama"):
        raise ConfigError(f"it does not set tokenizer.{SPACE}={space}, as every {header.architecture} does")
    for key, value in fields.items():
        name = key.removeprefix("tokenizer.")
        if name == key or name in KEYS or name.startswith(NAMED_TEMPLATE):
            continue
        if not (name == SPACE and value == space) and not (name in OFF and not value):
            raise ConfigError(f"it sets {key}={str(value)[:40]}, which kvexp does not know how to follow")
    if not isinstance(fields.get("tokenizer.chat_template", ""), str):
        raise ConfigError("its chat template is no text")
    tokens, types, scores, merges = (
        fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "scores", "merges")
    )
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError("its vocabulary has no tokens")
    if (merges is None) if kind == "gpt2" else (merges is None and scores is None):
        raise ConfigError(f"its vocabulary has no {'merges' if kind == 'gpt2' else 'scores'}")
    embedding = header.tensors.get("token_embd.weight")
    if len(set(tokens)) != len(tokens):
        raise ConfigError("its vocabulary has a token twice")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ConfigError(f"its vocabulary has {len(tokens)} tokens and its embedding {embedding.shape[0]}")
    for name, values in (("token_type", types), ("scores", scores)):
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            raise ConfigError(f"tokenizer.ggml.{name} is not one number for each of its {len(tokens)} tokens")
    if strange := set(types or ()) - set(TYPES[kind]):
        raise ConfigError(f"it has tokens of type {min(strange)}, which a vocabulary of kind {kind!r} does not have")
    for name in NAMED.values():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in fields and fields[key] not in range(len(tokens)):
            raise ConfigError(f"{key}={fields[key]!r} is none of its {len(tokens)} tokens")
    if kind == "gpt2":
        _bpe(header)


def _bpe(header: GgufHeader) -> models.BPE:
    """A byte-level vocabulary with its merges; ConfigError for a merge that is not of two tokens into a third."""
    split, tokens, merges = (header.fields[f"tokenizer.ggml.{name}"] for name in ("pre", "tokens", "merges"))
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split in LLAMA3_SPLITS)
    except Exception as error:  # tokenizers' own: no base but this
        reason = " ".join(str(error).split())[:100]
        raise ConfigError(f"its merges are not pairs of tokens that make a third one: {reason}") from error


def tokenizer_of_header(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF header describes, with its chat template; ConfigError as of `check_tokenizer`."""
    check_tokenizer(header)
    tokenizer = _byte_level(header) if header.fields["tokenizer.ggml.model"] == "gpt2" else _sentencepiece(header)
    if "tokenizer.chat_template" in header.fields:
        tokenizer.chat_template = header.fields["tokenizer.chat_template"]
    return tokenizer


def _sentencepiece(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a SentencePiece vocabulary; ConfigError where transformers makes another one than the file's."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(header.path.parent), gguf_file=header.path.name
        )
        ids = tokenizer("a").input_ids
    except Exception as error:  # transformers' and tokenizers' own: no common base
        raise ConfigError(f"transformers cannot read it: {' '.join(str(error).split())[:200]}") from error
    start = header.fields.get("tokenizer.ggml.bos_token_id")
    wanted = start is not None and bool(header.fields.get("tokenizer.ggml.add_bos_token", True))
    if (ids[:1] == [start]) != wanted:
        raise ConfigError(
            f"the installed transformers {'leaves out' if wanted else 'adds'} its start token: a newer one may not"
        )
    return tokenizer


def _byte_level(header: GgufHeader) -> PreTrainedTokenizerBase:
    """The tokenizer of a byte-level BPE vocabulary that `check_tokenizer` has passed."""
    fields = header.fields
    split, tokens = (fields[f"tokenizer.ggml.{name}"] for name in ("pre", "tokens"))
    backend = Tokenizer(_bpe(header))
    backend.pre_tokenizer = SPLITS[split]()
    backend.decoder = decoders.ByteLevel()
    if split in NFC:
        backend.normalizer = normalizers.NFC()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        types = fields.get("tokenizer.ggml.token_type") or []
        added = [token for token, of in zip(tokens, types, strict=False) if of == kind]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in added])
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in NAMED.items()
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    if "bos_token" in named and fields.get("tokenizer.ggml.add_bos_token", split in LLAMA3_SPLITS):
        start = named["bos_token"]
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokens.index(start))]
                ),
            ]
        )
    longest = fields.get(f"{header.architecture}.context_length")
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, model_max_length=longest, **named
    )
    return tokenizer


def _by(pattern: str) -> Any:
    """A pre-tokenizer that splits text by a regular expression, and then into bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PART = 2 << 30  # bytes of a safetensors file: what is held in memory on the way
LLAMA3_FACTORS = "rope_freqs.weight"  # no weight, but a llama's scaling of positions
LLAMA = {
    **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{name: f"self_attn.{name[-1]}_proj" for name in ("attn_q", "attn_k", "attn_v")},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
GEMMA3 = LLAMA | {
    "ffn_norm": "pre_feedforward_layernorm",
    **{"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
}
LAYERS = "model.layers"


def name_of(name: str, architecture: str) -> str | None:
    """Hugging Face's name of the GGUF tensor `name`; None where the architecture has no such tensor."""
    names = GEMMA3 if architecture == "gemma3" else LLAMA
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if parts is None or parts[2] not in names:
        return None
    place = f"{LAYERS}.{parts[1]}." if parts[1] is not None else ""
    return f"{place}{names[parts[2]]}.{parts[3]}"


def read_tensor(data: mmap.mmap, tensor: GgufTensor) -> Tensor:
    """The tensor's elements, dequantised to float32, in torch's shape; data: the file's bytes."""
    from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType[tensor.kind]
    raw = np.frombuffer(data, np.uint8, tensor.size, tensor.start)
    plain: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
    if tensor.kind in plain:
        numbers = raw.view(plain[tensor.kind]).astype(np.float32)
    else:
        numbers = dequantize(raw.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind)
    return torch.from_numpy(np.array(numbers, np.float32).reshape(tensor.shape))


def check_names(header: GgufHeader, config: Any) -> None:
    """ConfigError where tensors of the configuration are missing in the file, unknown to it or of another shape."""
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    wanted = {name: tuple(weight.shape) for name, weight in state.items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    shapes = {
        name_of(name, header.architecture) or name: tensor.shape
        for name, tensor in header.tensors.items()
        if name != LLAMA3_FACTORS
    }
    wrong = {
        "missing": [name for name in wanted if name not in shapes],
        "unknown": [name for name in shapes if name not in wanted],
        "of another shape": [name for name, shape in shapes.items() if name in wanted and wanted[name] != shape],
    }
    if said := named_weights(wrong):
        raise ConfigError(f"the tensors of {header.path} do not fit its header ({said}): fetch it again")


def write_weights(header: GgufHeader, folder: Path, advance: Callable[[], None]) -> None:
    """Write the file's weights into the folder as safetensors.

    In files of at most PART bytes, or of one tensor where that is larger. advance: is called after each tensor.
    """
    parts: list[dict[str, GgufTensor]] = [{}]
    held = total = 0
    for name, tensor in header.tensors.items():
        if name == LLAMA3_FACTORS:
            continue
        size = tensor.elements * 4
        if parts[-1] and held + size > PART:
            parts.append({})
            held = 0
        parts[-1][name_of(name, header.architecture) or name] = tensor
        held, total = held + size, total + size
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    files = files if len(files) > 1 else ["model.safetensors"]
    with header.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for file, tensors in zip(files, parts, strict=True):
            weights = {}
            for known, tensor in tensors.items():
                weights[known] = _weight(header, data, known, tensor)
                advance()
            save_file(weights, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        places = {known: file for file, tensors in zip(files, parts, strict=True) for known in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True), "utf-8")


def rope_factors(header: GgufHeader) -> Tensor | None:
    """Numbers by which RoPE's frequencies are divided, float32 [D / 2]; None where the file has none."""
    if (tensor := header.tensors.get(LLAMA3_FACTORS)) is None:
        return None
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_tensor(data, tensor)


def _weight(header: GgufHeader, data: mmap.mmap, known: str, tensor: GgufTensor) -> Tensor:
    """One weight in float32, in Hugging Face's layout; known: Hugging Face's name of it, data: the file's bytes."""
    weight = read_tensor(data, tensor)
    heads = header.integer("attention.head_count")
    if header.architecture == "llama" and ".q_proj." in known:
        weight = _halves_apart(weight, heads)
    elif header.architecture == "llama" and ".k_proj." in known:
        weight = _halves_apart(weight, header.integer("attention.head_count_kv", heads))
    elif header.architecture == "gemma3" and known.endswith("norm.weight"):
        weight = weight - 1  # Hugging Face's multiply by 1 + weight, llama.cpp's by the weight
    return weight.contiguous()


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """A llama's query or key projection in Hugging Face's order of rows.

    llama.cpp's RoPE rotates neighbouring rows of a head, Hugging Face's rows half a head apart. weight: [H * D, ...],
    the rows of the projection or its bias.
    """
    width = weight.shape[0] // heads
    return weight.reshape(heads, width // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
