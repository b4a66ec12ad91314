"""Three model families, one row of tokens at a time, in plain NumPy and float64; attention is passed in as a function.

attend(layer, q, k, v) takes what a forward adds, [heads, new, width] each, remembers it, and returns the like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

Array = np.ndarray
Attend = Callable[[int, Array, Array, Array], Array]
Weights = Mapping[str, Array]

gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))  # the exact one, not the tanh formula


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def by_head(x: Array, heads: int) -> Array:
    """[new, heads * width] -> [heads, new, width]"""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def joined(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def gpt2(w: Weights, heads: int, layers: int, ids: Array, positions: Array, attend: Attend) -> Array:
    """Learned positions, q | k | v from one matrix stored as [in, out], the head is the embedding."""
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][positions]
    for layer in range(layers):
        p = f"transformer.h.{layer}."
        y = layer_norm(x, w[p + "ln_1.weight"], w[p + "ln_1.bias"])
        mixed = y @ w[p + "attn.c_attn.weight"] + w[p + "attn.c_attn.bias"]
        q, k, v = (by_head(part, heads) for part in np.split(mixed, 3, axis=-1))
        x = x + joined(attend(layer, q, k, v)) @ w[p + "attn.c_proj.weight"] + w[p + "attn.c_proj.bias"]
        y = layer_norm(x, w[p + "ln_2.weight"], w[p + "ln_2.bias"])
        y = gelu(y @ w[p + "mlp.c_fc.weight"] + w[p + "mlp.c_fc.bias"])
        x = x + y @ w[p + "mlp.c_proj.weight"] + w[p + "mlp.c_proj.bias"]
    return layer_norm(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"]) @ w["transformer.wte.weight"].T


def rotated(x: Array, positions: Array, width: int) -> Array:
    """RoPE over the first `width` dimensions of [heads, new, D], paired in halves, base 10000."""
    half = width // 2
    angle = positions[:, None] / 10000 ** (np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half:width]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, x[..., width:]), axis=-1)


def gpt_neox(w: Weights, heads: int, layers: int, ids: Array, positions: Array, attend: Attend) -> Array:
    """RoPE on a quarter of each head, attention and feed-forward side by side, q k v interleaved by head."""
    x = w["gpt_neox.embed_in.weight"][ids]

    def linear(y: Array, name: str) -> Array:
        return y @ w[name + ".weight"].T + w[name + ".bias"]

    for layer in range(layers):
        p = f"gpt_neox.layers.{layer}."
        y = layer_norm(x, w[p + "input_layernorm.weight"], w[p + "input_layernorm.bias"])
        q, k, v = np.split(by_head(linear(y, p + "attention.query_key_value"), heads), 3, axis=-1)
        width = q.shape[-1] // 4
        q, k = rotated(q, positions, width), rotated(k, positions, width)
        y = layer_norm(x, w[p + "post_attention_layernorm.weight"], w[p + "post_attention_layernorm.bias"])
        beside = linear(gelu(linear(y, p + "mlp.dense_h_to_4h")), p + "mlp.dense_4h_to_h")
        x = x + linear(joined(attend(layer, q, k, v)), p + "attention.dense") + beside
    x = layer_norm(x, w["gpt_neox.final_layer_norm.weight"], w["gpt_neox.final_layer_norm.bias"])
    return x @ w["embed_out.weight"].T


def mpt(w: Weights, heads: int, layers: int, ids: Array, positions: Array, attend: Attend) -> Array:
    """No position in the embedding (ALiBi is the attention's), no bias anywhere, the head is the embedding."""
    x = w["transformer.wte.weight"][ids]
    for layer in range(layers):
        p = f"transformer.blocks.{layer}."
        mixed = layer_norm(x, w[p + "norm_1.weight"]) @ w[p + "attn.Wqkv.weight"].T
        q, k, v = (by_head(part, heads) for part in np.split(mixed, 3, axis=-1))
        x = x + joined(attend(layer, q, k, v)) @ w[p + "attn.out_proj.weight"].T
        y = gelu(layer_norm(x, w[p + "norm_2.weight"]) @ w[p + "ffn.up_proj.weight"].T)
        x = x + y @ w[p + "ffn.down_proj.weight"].T
    return layer_norm(x, w["transformer.norm_f.weight"]) @ w["transformer.wte.weight"].T


def drawn(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, Array]:
    """Weights N(0, 0.35), of normalisations 1 + 0.1 N, biases 0.05 N; in steps of 1/256, so that they pack well."""
    made = {}
    for name, shape in shapes.items():
        norm = any(part in name for part in ("ln_", "norm"))
        spread = 0.05 if name.endswith("bias") else 0.1 if norm else 0.35
        noise = np.round(256 * spread * rng.standard_normal(shape)) / 256
        made[name] = (noise + (norm and name.endswith("weight"))).astype(np.float32)
    return made


def gpt2_shapes(vocab: int, hidden: int, layers: int, positions: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocab, hidden)}
    shapes["transformer.wpe.weight"] = (positions, hidden)
    parts = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    parts |= {"mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden)}
    for layer in range(layers):
        for name, shape in ({"ln_1": (hidden,)} | parts | {"ln_2": (hidden,)}).items():
            shapes[f"transformer.h.{layer}.{name}.weight"] = shape
            shapes[f"transformer.h.{layer}.{name}.bias"] = shape[-1:]
    return shapes | {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}


def gpt_neox_shapes(vocab: int, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (vocab, hidden)}
    parts = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    parts |= {"attention.query_key_value": (3 * hidden, hidden), "attention.dense": (hidden, hidden)}
    parts |= {"mlp.dense_h_to_4h": (4 * hidden, hidden), "mlp.dense_4h_to_h": (hidden, 4 * hidden)}
    for layer in range(layers):
        for name, shape in parts.items():
            shapes[f"gpt_neox.layers.{layer}.{name}.weight"] = shape
            shapes[f"gpt_neox.layers.{layer}.{name}.bias"] = shape[:1]
    shapes |= {f"gpt_neox.final_layer_norm.{end}": (hidden,) for end in ("weight", "bias")}
    return shapes | {"embed_out.weight": (vocab, hidden)}


def mpt_shapes(vocab: int, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocab, hidden)}
    parts = {"norm_1": (hidden,), "attn.Wqkv": (3 * hidden, hidden), "attn.out_proj": (hidden, hidden)}
    parts |= {"norm_2": (hidden,), "ffn.up_proj": (4 * hidden, hidden), "ffn.down_proj": (hidden, 4 * hidden)}
    for layer in range(layers):
        shapes |= {f"transformer.blocks.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes | {"transformer.norm_f.weight": (hidden,)}
