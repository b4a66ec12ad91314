"""Model families: what kvexp needs to know of each, read off a Hugging Face model or its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvexp.core import CacheConfig, Quantization, RoPE
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What kvexp knows of a model family: the kind of its positions, and names in its configuration and module.

    position: rope, alibi or learned; limit: the configuration's field that holds the longest sequence.
    """

    title: str
    position: Literal["rope", "learned", "alibi"]
    limit: str = "max_position_embeddings"
    has_position_table: bool = False  # positions come from a table that ends at the limit
    attention_class: str | None = None  # set where the family ignores Hugging Face's attention interface


FAMILIES: dict[str, Family] = {
    "gptj": Family("GPT-J", "rope", limit="n_positions", has_position_table=True, attention_class="GPTJAttention"),
    "gpt2": Family("GPT-2 (and Cerebras-GPT)", "learned", limit="n_positions", has_position_table=True),
    "mpt": Family("MPT", "alibi", limit="max_seq_len", attention_class="MptAttention"),
    "llama": Family("Llama", "rope"),
    "opt": Family("OPT", "learned", has_position_table=True),
    "mistral": Family("Mistral", "rope"),
    "qwen2": Family("Qwen2", "rope"),
    "qwen3": Family("Qwen3", "rope"),
    "gpt_neox": Family("GPT-NeoX (and Pythia)", "rope"),
}


def family_of(config: Any) -> Family:
    """The family of a Hugging Face config; ConfigError for one kvexp does not know."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model family {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}. "
            "Adding one is a line in kvexp/models/families.py and the parity tests"
        )
    return FAMILIES[model_type]


def num_layers(config: Any) -> int:
    """Number of attention layers L."""
    return int(config.num_hidden_layers)


def num_kv_heads(config: Any) -> int:
    """Number of kv heads H."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Dimensions D of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def query_shape(config: Any) -> tuple[int, int, int, int]:
    """Numbers of layers L, kv heads H, query heads per kv head G and dimensions D of a query head."""
    heads = num_kv_heads(config)
    return num_layers(config), heads, config.num_attention_heads // heads, head_dim(config)


def check_positions(config: Any, cache: CacheConfig) -> None:
    """ConfigError where the model's kind of positions cannot do what the cache is configured for."""
    family = family_of(config)
    if cache.renumbered and family.position == "learned":
        raise ConfigError(
            f"positions=renumbered cannot work on {family.title}: its learned positions are added to the input, "
            f"not to the cache. Set positions=original for method={cache.method.name}"
        )
    if cache.beyond_context and family.has_position_table:
        raise ConfigError(f"{family.title} has a table of positions for {max_positions(config)} tokens and no more")


def check_quantization(config: Any, quantization: Quantization, dtype: torch.dtype) -> None:
    """ConfigError where keys and values of the model's heads, or of its dtype, cannot be quantised so."""
    quantization.check_head(head_dim(config), head_dim(config))
    quantization.check_dtype(dtype)


def max_positions(config: Any) -> int:
    """The longest sequence, in tokens, that the model is made for.

    A RoPE that is stretched by a factor reaches so many times as far as the length that its config gives for the model
    before: `original_max_position_embeddings`, or for linear and dynamic max_position_embeddings itself. A config that
    was written for the stretched model says its length in max_position_embeddings (llama3 always does); the larger
    counts.
    """
    family = family_of(config)
    held = int(getattr(config, family.limit))
    rope = rope_parameters(config)
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind in ("default", "llama3") or not isinstance(factor, int | float):
        return held
    return max(held, int((rope.get("original_max_position_embeddings") or held) * factor))


def rope_parameters(config: Any) -> dict[str, Any]:
    """The config's settings of a RoPE that transformers computes from them; empty for families with none or another."""
    family, given = family_of(config), getattr(config, "rope_parameters", None)
    computed = family.position == "rope" and not family.has_position_table  # GPT-J makes a table of its own
    return given if computed and isinstance(given, dict) else {}


def check_activations(config: Any) -> None:
    """ConfigError for a checkpoint whose activations are rounded by the values of all rows of a forward."""
    given = getattr(config, "quantization_config", None)
    plain: dict[str, Any] = given if isinstance(given, dict) else given.to_dict() if given is not None else {}
    groups = (plain.get("config_groups") or {}).values()
    inputs = [(group.get("input_activations") or {}) for group in groups if isinstance(group, dict)]
    what = "load_in_8bit" if plain.get("load_in_8bit") else None  # LLM.int8 looks for outliers in every row
    kind = str(plain.get("quant_type", "")).lower().replace("_", "")
    if "float8dynamicactivation" in kind and "perrow" not in kind:  # one scale for all, unless said otherwise
        what = f"quant_type {plain['quant_type']}"
    if any(each.get("dynamic") and each.get("strategy") == "tensor" for each in inputs):
        what = "input_activations by tensor"
    if what is not None:
        raise ConfigError(
            f"quantization_config rounds activations by the values of a whole forward ({what}), so that rows and "
            "chunks would change each other: take weights that are not quantised, or whose weights alone are"
        )


def check_sizes(config: Any) -> None:
    """ConfigError for sizes that no model can have, and for kinds of RoPE that transformers does not know.

    transformers takes most of them: -1 layers make a model of none, other values fail far away from here.
    """
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", family_of(config).limit)
    for name in sizes:
        value = getattr(config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{_own(config, name)} must be a whole number of at least 1, got {value!r}")
    heads, grouped = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if grouped is not None and (not isinstance(grouped, int) or grouped < 1 or heads % grouped):
        raise ConfigError(
            f"{config.num_hidden_layers} layers of {heads} heads in {grouped!r} groups: num_key_value_heads must be a "
            "whole number that divides num_attention_heads"
        )
    if not getattr(config, "head_dim", None) and config.hidden_size % heads:
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

    Not for one whose frequencies move (`kvexp.models.moving_rope`). Frequencies come from the model's own rotary
    module, so linear, llama3 and yarn scaling are in them. GPT-J, which has no such module, makes its table from the
    base 10000.
    """
    config = model.config
    if family_of(config).position != "rope":
        return None
    if config.model_type == "gptj":
        width = config.rotary_dim or config.n_embd // config.n_head
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        device = model.get_input_embeddings().weight.device  # or each step would copy it there
        return RoPE((1.0 / 10000**exponent).to(device), interleaved=True)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            return RoPE(module.inv_freq.detach(), interleaved=False)
    raise ConfigError(f"found no rotary embedding in this {config.model_type} model")
