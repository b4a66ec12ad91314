"""The four layouts the testbed is trained in, at equal width and depth."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvexp.testbed.words import END, PAD, START, vocabulary

WIDTH, LAYERS, HEADS, MLP = 128, 4, 4, 512
POSITIONS = 2048

NAMES = ("testbed_rope", "testbed_learned", "testbed_alibi", "testbed_gqa")


def config_of(name: str) -> Any:
    """The Hugging Face configuration of one of NAMES."""
    from transformers import GPT2Config, GPTJConfig, LlamaConfig, MptConfig

    words = vocabulary()
    ids = {"bos_token_id": words.index(START), "eos_token_id": words.index(END), "pad_token_id": words.index(PAD)}
    shared = {"vocab_size": len(words), "tie_word_embeddings": True, **ids}
    if name == "testbed_rope":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP, "n_positions": POSITIONS}
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPTJConfig(rotary_dim=WIDTH // HEADS, **sizes, **quiet, **shared)
    if name == "testbed_learned":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": MLP, "n_positions": POSITIONS}
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(**sizes, **quiet, **shared)
    if name == "testbed_alibi":
        sizes = {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "expansion_ratio": MLP // WIDTH}
        return MptConfig(max_seq_len=POSITIONS, **sizes, **shared)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": MLP * 2 // 3 // 8 * 8}
    # As many kv heads as the others have: with half of them the model was still at 82 % recall after 1500 steps.
    heads = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS}
    return LlamaConfig(max_position_embeddings=POSITIONS, **sizes, **heads, **shared)


def untrained(name: str, seed: int) -> Any:
    """A model with random weights. Learned positions begin as waves: a fixed step is the same rotation anywhere."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name == "testbed_learned":
        with torch.no_grad():
            model.transformer.wpe.weight.copy_(0.05 * waves(POSITIONS, WIDTH))
    return model


def waves(positions: int, width: int) -> torch.Tensor:
    """[positions, width]: sines and cosines of width / 2 frequencies spread evenly up to half a turn per position.

    With the geometric frequencies of Vaswani et al. 2017 (arXiv:1706.03762, section 3.5) most change too little from
    one position to the next to tell neighbours apart, and recall had not begun to form after 200 steps.
    """
    rates = (torch.arange(width // 2) + 0.5) * (2 * math.pi / width)
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
