"""What kvexp needs to know of each model family, and how to read it off a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvexp.core import Rotation
from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """position: how the model tells positions apart; limit: the config field with its longest sequence."""

    title: str
    position: Literal["rope", "learned", "alibi"]
    limit: str = "max_position_embeddings"
    finite: bool = False  # positions come from a table that ends at the limit
    attention_class: str | None = None  # set where the family ignores Hugging Face's attention interface


FAMILIES: dict[str, Family] = {
    "gptj": Family("GPT-J", "rope", limit="n_positions", finite=True, attention_class="GPTJAttention"),
    "gpt2": Family("GPT-2 (and Cerebras-GPT)", "learned", limit="n_positions", finite=True),
    "mpt": Family("MPT", "alibi", limit="max_seq_len", attention_class="MptAttention"),
    "llama": Family("Llama", "rope"),
    "opt": Family("OPT", "learned", finite=True),
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


def layers_of(config: Any) -> int:
    """Number of attention layers L."""
    return int(config.num_hidden_layers)


def kv_heads(config: Any) -> int:
    """Heads that keys and values have."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def longest(config: Any) -> int:
    """Positions the model holds."""
    return int(getattr(config, family_of(config).limit))


def rotation_of(model: Any) -> Rotation | None:
    """The model's RoPE as inverse frequencies, None for other families.

    Frequencies come from the model's own rotary module, so linear, llama3 and yarn scaling are as they are.
    GPT-J makes its table from the base 10000.
    """
    config = model.config
    if family_of(config).position != "rope":
        return None
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"positions=renumbered cannot work with rope_type {kind!r}: its frequencies change with length"
        )
    if config.model_type == "gptj":
        width = config.rotary_dim or config.n_embd // config.n_head
        exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
        return Rotation(1.0 / 10000**exponent, interleaved=True)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            return Rotation(module.inv_freq.detach(), interleaved=False)
    raise ConfigError(f"found no rotary embedding in this {config.model_type} model")
