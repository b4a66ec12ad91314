"""What the exports share: a tiny Llama drawn from a seed, what a press has left, and the file that is written."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
GROUPED: dict[str, Any] = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 2, "num_attention_heads": 6, "head_dim": 14},
    **{"hidden_size": 66, "intermediate_size": 37},
}
BIASED: dict[str, Any] = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 3, "num_attention_heads": 15, "head_dim": 10},
    **{"hidden_size": 75, "intermediate_size": 41, "vocab_size": 137, "attention_bias": True},
}


def model_of(
    config: dict[str, Any], dice: torch.Generator, attention: str = "sdpa", norms: float = 0.1, weights: float = 0.3
) -> LlamaForCausalLM:
    """A model whose weights are drawn; large ones, so that attention is far from flat. norms, weights: their spread."""
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation=attention)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            centre, spread = (1.0, norms) if "norm" in name else (0.0, weights)
            weight.copy_(centre + spread * torch.randn(weight.shape, generator=dice))
    return model


def draw(case: dict[str, Any], **how: Any) -> tuple[LlamaForCausalLM, Tensor]:
    """Model and prompt [B, T] from the case's seed alone.

    No token occurs twice in a prompt: in layer 0 its keys would have the same norm wherever they stand.
    """
    dice = torch.Generator().manual_seed(case["seed"])
    model, (rows, columns) = model_of(case["config"], dice, **how), case["shape"]
    words = [torch.randperm(case["config"]["vocab_size"], generator=dice)[:columns] for _ in range(rows)]
    return model, torch.stack(words)


def drawn_directions(case: dict[str, Any]) -> Tensor:
    """Unit vectors [L, H, G, D], one for every query head, from the case's own seed for them."""
    dice, config = torch.Generator().manual_seed(case["directions"]), case["config"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shape = (config["num_hidden_layers"], kv_heads, heads // kv_heads, config["head_dim"])
    return torch.nn.functional.normalize(torch.randn(*shape, generator=dice), dim=-1)


def weights_of(model: LlamaForCausalLM, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}weights/{name}": weight.numpy() for name, weight in model.state_dict().items()}


def keys_of(cache: DynamicCache) -> list[Tensor]:
    """[B, H, N, D] of each layer."""
    return [layer.keys for layer in cache.layers]


def held_of(cache: DynamicCache, full: list[Tensor], where: str) -> Tensor:
    """[L, B, H, T] bool: which of the keys `full` [B, H, T, D] of each layer the press left, each of them once."""
    found = []
    for left, keys in zip(keys_of(cache), full, strict=True):
        same = (left[..., :, None, :] == keys[..., None, :, :]).all(-1)  # [B, H, N, T]
        if not (same.sum(-1) == 1).all() or same.sum(-2).max() > 1:
            raise SystemExit(f"{where}: a kept key is not exactly one of the full cache's keys")
        found.append(same.any(-2))
    return torch.stack(found)


def seen_under(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[L, B, H, T] bool: what attention may still see, of a press in force that leaves the cache whole."""
    model(ids, past_key_values=DynamicCache())
    masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    seen = torch.ones(len(masked), ids.shape[0], model.config.num_key_value_heads, ids.shape[1], dtype=torch.bool)
    for layer, indices in enumerate(masked):
        if indices is not None:
            seen[(layer, *indices)] = False
    return seen


def check_clear(apart: Tensor | float, least: float, where: str) -> None:
    """Refuse a prompt in which a choice hangs on rounding: its smallest relative difference is not above `least`."""
    gap = float(torch.as_tensor(apart).min())
    if not gap > least:
        raise SystemExit(f"{where}: a choice hangs on a relative difference of {gap:.1e}; take another seed")


def digest(script: Path) -> str:
    """Identifies a script together with this file."""
    return hashlib.sha256(script.read_bytes() + Path(__file__).read_bytes()).hexdigest()


def write(script: str, arrays: dict[str, Any], **about: Any) -> None:
    """Write .peers/NAME.npz of the script export_NAME.py: the arrays, and `about` with the versions that made them."""
    path = Path(script).resolve()
    out = ROOT / ".peers" / f"{path.stem.removeprefix('export_')}.npz"
    about["versions"] = {package: version(package) for package in ("kvpress", "transformers", "torch")}
    out.parent.mkdir(exist_ok=True)
    np.savez_compressed(out, about=json.dumps(about | {"script": digest(path)}), **arrays)
    print(f"{out}: {out.stat().st_size >> 10} KiB, {about['versions']}")
