"""Tiny twins of transformers' causal types: what a configuration has of the fields below is made small, the rest stays.

`twin(name)` is a random model of that type with every mechanism of the type in it: windows and chunks shorter than the
prompts of the tests, grouped heads, several experts, states. Weights are large enough for attention to be uneven.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from kvexp.hf.traits import text_config

VOCABULARY, WINDOW, LAYERS = 97, 20, 4  # LAYERS is also the number of heads, of experts and of states
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"

# Value -> the fields that have it, as the types' configurations name them.
_COMMON: dict[float, str] = {
    64: "hidden_size d_model n_embd embed_dim embedding_size lru_width",
    LAYERS: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads "
        "decoder_attention_heads linear_num_value_heads num_local_experts num_experts moe_num_experts "
        "n_routed_experts linear_conv_kernel_dim mamba_d_conv conv_kernel"
    ),
    2: (
        "num_key_value_heads num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk linear_num_key_heads "
        "mamba_expand attn_layer_period expert_layer_period"
    ),
    1: (
        "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups n_groups "
        "mamba_ngroups num_hidden_groups attn_layer_offset"
    ),
    16: (
        "head_dim attention_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim "
        "mamba_headdim mamba_chunk_size chunk_size"
    ),
    96: "intermediate_size ffn_dim decoder_ffn_dim n_inner",
    32: (
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "shared_intermediate_size expert_ffn_hidden_size"
    ),
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    211: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    WINDOW: "sliding_window attention_window local_attention attention_chunk_size window_size attention_window_size",
    8: (
        "hidden_size_per_layer_input rotary_dim mamba_d_state state_size ssm_state_size mamba_n_heads num_heads "
        "mamba_num_heads mamba_dt_rank time_step_rank"
    ),
    128: "mamba_d_ssm",
    12: "v_head_dim",
    0.0: "hidden_dropout attention_dropout embd_pdrop attn_pdrop resid_pdrop dropout",
}
_SWITCHES = {
    **dict.fromkeys(("use_mamba_kernels", "tie_word_embeddings", "add_cross_attention"), False),
    **dict.fromkeys(("use_cache", "is_decoder"), True),
}
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {name: value for value, names in _COMMON.items() for name in names.split()} | _SWITCHES | _SPECIAL_TOKENS
# Of types whose cache holds latents: every width another, the rotary part's the one that RoPE is made for.
LATENT = {"num_key_value_heads": LAYERS, "kv_lora_rank": 24, "q_lora_rank": 20, "v_head_dim": 12, "qk_head_dim": 22}
# Index heads enough for no token to have a score of 0 in all of them: of equal scores no order says which is chosen.
LATENT |= {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 9}
LATENT |= {"qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "head_dim": 8}
_MIXED = [SLIDING, FULL] * 3
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What a type needs besides, or instead.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rope_parameters": {SLIDING: _ROPE, FULL: _ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gemma3n": {
        "num_hidden_layers": 6,
        "layer_types": _MIXED,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "laurel_rank": 8,
    },
    "gemma4_unified_text": {"num_hidden_layers": 6, "layer_types": _MIXED, "global_head_dim": 32},
    "gemma4_unified_assistant": {"num_hidden_layers": 6, "layer_types": _MIXED, "global_head_dim": 32},
    "granitemoehybrid": {
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "layers_block_type": [LINEAR, FULL, LINEAR, FULL],
        "position_embedding_type": "rope",
    },
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "lfm2": {"layer_types": ["conv", FULL, "conv", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv", FULL], "num_dense_layers": 1},
    "llama4_text": {
        "layer_types": [CHUNKED, FULL, CHUNKED, FULL],
        "no_rope_layers": [1, 0, 1, 0],
        "intermediate_size_mlp": 96,
        "moe_layers": [1, 3],
        "interleave_moe_layer_step": 2,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 6, "block_types": ["recurrent", "recurrent", "attention"]},
    "zamba2": {"num_hidden_layers": 6},
    "zaya": {"num_experts_per_tok": 1},
}
SPECIAL["gemma4_text"] = SPECIAL["gemma4_unified_text"] | {"num_kv_shared_layers": 2}
SAME = {name: f"{name}_text" for name in ("gemma4", "gemma4_unified", "llama4")} | {"gemma3n_text": "gemma3n"}
SMALLER = {"gemma2": 0.1}  # a spread of weights at which the type's numbers stay finite


def config_of(name: str) -> Any:
    """The small configuration of a type: that of its decoder."""
    kind = type(text_config(AutoConfig.for_model(name)))
    fresh = kind()
    wanted = COMMON | (LATENT if _has(fresh, "kv_lora_rank") else {}) | SPECIAL.get(SAME.get(name, name), {})
    fields = {field: value for field, value in wanted.items() if _has(fresh, field)}
    count = fields.get("num_hidden_layers", LAYERS)
    for field in ("layer_types", "mlp_layer_types", "layers_block_type", "hybrid_layer_types"):
        if field not in wanted and _has(fresh, field) and getattr(fresh, field):
            kinds = list(dict.fromkeys(getattr(fresh, field)))  # each kind, in turn
            fields[field] = (kinds * count)[:count]
    return kind(**fields)


def _has(config: Any, field: str) -> bool:
    """Whether the configuration has the field and takes it."""
    field = (getattr(config, "attribute_map", None) or {}).get(field, field)
    held = getattr(type(config), field, None)
    if isinstance(held, property) and held.fset is None:
        return False
    try:
        return hasattr(config, field)
    except Exception:  # of fields that differ between layers
        return field in getattr(type(config), "__dataclass_fields__", {})


@functools.lru_cache(maxsize=4)
def twin(name: str, scale: float = 0.25) -> PreTrainedModel:
    """A random model of the type `name`, not patched, with transformers' eager attention."""
    config = config_of(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        except ValueError:  # a decoder that only its whole model is registered for
            model = getattr(transformers, NAMES[name])._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    kept = ("a_log", "dt_", ".d", "conv1d", "norm")  # of states: their scale is part of the mechanism
    for path, weight in model.named_parameters():
        low = path.lower()
        small = any(part in low for part in kept) and weight.ndim < 3 and "dense" not in low and "down" not in low
        if weight.ndim > 1 and not small:
            weight.data.normal_(0, SMALLER.get(name, scale), generator=generator)
        elif "sink" in low:
            weight.data.normal_(0, 1, generator=generator)
        elif "norm" in low and weight.ndim == 1:  # else keys behind a norm are all of one length
            weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return model.float().eval()


def ids_of(seed: int, rows: int, columns: int) -> Tensor:
    """Random token ids [rows, columns], none of them special."""
    return torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))


NOT_BUILT = ("phi4_multimodal",)  # types of which no small model can be made
