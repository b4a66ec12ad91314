"""Model layouts with random weights, made on the device they run on, and one real model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks import real_model


@dataclass(frozen=True)
class Shape:
    """A layout by its Hugging Face configuration; family is the model_type, dtype a torch dtype's name.

    real: whether it has the weights and prompts of `benchmarks.real_model`; else both are random.
    """

    name: str
    family: str
    dtype: str
    config: dict[str, Any]
    real: bool = False

    def fitted(self, positions: int) -> Shape:
        """The same layout for at least so many positions (more change no weight: RoPE and ALiBi have no table)."""
        field = "max_seq_len" if self.family == "mpt" else "max_position_embeddings"
        return replace(self, config={**self.config, field: max(positions, self.config.get(field, 0))})

    def tiny(self) -> Shape:
        """The layout made small enough for a test: the same family, heads grouped where they were."""
        if self.family == "mpt":
            small = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "expansion_ratio": 2}
        else:
            grouped = self.config["num_key_value_heads"] < self.config["num_attention_heads"]
            small = {
                **{"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 97},
                **{"num_attention_heads": 4, "num_key_value_heads": 2 if grouped else 4},
            }
        return replace(self, name=f"{self.name}, tiny", dtype="float32", config={**self.config, **small}, real=False)


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    return {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "vocab_size": 32000},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, **more},
    }


# "to_beat" is the shape other libraries were measured on; its vocabulary is the Llama configuration's default.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("to_beat", "llama", "float32", _llama(512, 8, 8, 4, 1408)),
        Shape("llama_100m", "llama", "float32", _llama(768, 12, 12, 4, 2048, tie_word_embeddings=True)),
        Shape("llama2_7b", "llama", "bfloat16", _llama(4096, 32, 32, 32, 11008)),
        Shape("mistral_7b", "mistral", "bfloat16", _llama(4096, 32, 32, 8, 14336, sliding_window=None)),
        Shape(
            "mpt_7b",
            "mpt",
            "bfloat16",
            {"d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "vocab_size": 50432},
        ),
        Shape(real_model.NAME, "llama", "float32", _llama(576, 30, 9, 3, 1536), real=True),
    )
}


def stock(shape: Shape, device: str, attention: str | None = None) -> PreTrainedModel:
    """The layout as Hugging Face runs it, weights drawn on `device` in their own dtype: no copy passes elsewhere; or
    the real model.

    attention: as attn_implementation; None takes sdpa where the family has it.
    """
    if shape.real:
        return real_model.load(attention or "sdpa").to(device).eval()
    config = AutoConfig.for_model(shape.family, **shape.config)
    attention = attention or ("eager" if shape.family in ("mpt", "gptj") else "sdpa")
    dtype = getattr(torch, shape.dtype)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.config.use_cache = True
    return model.eval()


def ours(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights (shared, not copied) in a model that attends through kvexp, packed as run.py packs it."""
    from kvexp.hf import pack_linear, patch_model

    return pack_linear(patch_model(_sharing(model), check_weights=False))


def packed(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in Hugging Face's own model, with the linear layers that `ours` has and its own attention."""
    from kvexp.hf import pack_linear

    return pack_linear(_sharing(model))


def _sharing(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def prompt_of(shape: Shape, tokens: int, device: str = "cpu") -> torch.Tensor:
    """[1, tokens] token ids, the same for every variant."""
    if shape.real:
        return torch.tensor([real_model.text_ids()[:tokens]], device=device)
    dice = torch.Generator().manual_seed(tokens)
    return torch.randint(0, shape.config["vocab_size"], (1, tokens), generator=dice).to(device)
