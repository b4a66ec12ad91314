"""Tiny random models of every family, random streams, and a driver for the bare core. Prime sizes for every axis."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvexp.core import AttentionParams, CacheConfig, EvictionLayer, SequenceState
from kvexp.core.eviction import CacheState
from kvexp.generate.prefill import forward_last
from kvexp.hf import EvictionCache, patch_model

VOCAB = 61
_LLAMA = {
    "hidden_size": 30,  # a multiple of the heads, or the config refuses
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 15,  # H = 3 kv heads, G = 5
    "num_key_value_heads": 3,
    "head_dim": 14,
    "max_position_embeddings": 211,
}
_NO_ENDS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": None},
    "qwen2": _LLAMA | {"use_sliding_window": False},
    "qwen3": _LLAMA | {"use_sliding_window": False},
    "gptj": {"n_embd": 42, "n_layer": 2, "n_head": 3, "rotary_dim": 6, "n_positions": 211},
    "gpt2": {"n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": 211},
    "mpt": {"d_model": 33, "n_layers": 2, "n_heads": 3, "max_seq_len": 211, "expansion_ratio": 2},
    "opt": {
        "hidden_size": 33,
        "word_embed_proj_dim": 33,
        "ffn_dim": 26,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 211,
    },
    "gpt_neox": {
        "hidden_size": 42,
        "intermediate_size": 26,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 211,
    },
}
LAYERS = 2


class Hashable(dict[str, Any]):
    """Settings of a configuration as an argument of `stock` and `tiny`, which keep models by their arguments."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


@functools.cache
def stock(family: str, **changes: Any) -> PreTrainedModel:
    """The family's own Hugging Face model, eager attention, weights large enough for attention to be uneven."""
    config = AutoConfig.for_model(family, **(CONFIGS[family] | _NO_ENDS | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.6 if "embed" in name or "wte" in name else 0.35)
    return model.eval()


@functools.cache
def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A model with the weights of `stock`, attending through kvexp."""
    return patch_model(copy.deepcopy(stock(family, **changes)))


class Letters:
    """A tokenizer of one token per character, for what a method feeds in words."""

    chat_template = None
    pad_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(letter) % VOCAB for letter in text])

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(token) for token in ids)


LETTERS: Any = Letters()


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


# Equal tokens have equal keys in layer 0 up to the rounding of their rotation, so which of them goes would hang on
# rounding: where kept sets are compared, tokens do not repeat.


def distinct(seed: int, rows: int, count: int, tokens: range = range(VOCAB)) -> Tensor:
    """[rows, count] without a repeated token within a row."""
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(len(tokens), generator=g)[:count] + tokens[0] for _ in range(rows)])


def prompts_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts in which no token comes back within 37 (and none that `later` uses)."""
    rounds = 1 + max(lengths) // 37
    rows = torch.cat([distinct(seed + 101 * i, len(lengths), 37, range(37)) for i in range(rounds)], dim=1)
    return [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]


def later(seed: int, rows: int, count: int, part: int = 0) -> Tensor:
    """[rows, count <= 12] tokens for after the prompt; part 0 and part 1 share none."""
    return distinct(seed, rows, count, range(37 + 12 * part, 49 + 12 * part))


# -- the bare core -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """q [L, B, H * G, N, D], k [L, B, H, N, D], v [L, B, H, N, Dv], positions already in them."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(
        cls,
        seed: int,
        count: int,
        *,
        layers: int = 1,
        batch: int = 2,
        heads: int = 3,
        group: int = 5,
        dim: int = 7,
        value_dim: int = 11,
        dtype: torch.dtype = torch.float64,
    ) -> Streams:
        """Logits spread enough (times 1.5) for scores to differ."""
        g = torch.Generator().manual_seed(seed)
        q = torch.randn(layers, batch, heads * group, count, dim, generator=g, dtype=torch.float64) * 1.5
        k = torch.randn(layers, batch, heads, count, dim, generator=g, dtype=torch.float64)
        v = torch.randn(layers, batch, heads, count, value_dim, generator=g, dtype=torch.float64)
        return cls(q.to(dtype), k.to(dtype), v.to(dtype))

    def rows(self, index: Sequence[int]) -> Streams:
        return Streams(*(t[:, list(index)] for t in (self.q, self.k, self.v)))

    def padded(self, missing: Sequence[int]) -> tuple[Streams, Tensor]:
        """Row i as if its first missing[i] tokens were padding; the mask [B, N] says so."""
        mask = torch.ones(self.q.shape[1], self.q.shape[3], dtype=torch.int64)
        for row, n in enumerate(missing):
            mask[row, :n] = 0
        return self, mask


@dataclass(frozen=True)
class Seen:
    """out[forward][layer] [B, H * G, Q, Dv]; kept[forward][layer][row][head]; score likewise, by position."""

    out: list[list[Tensor]]
    kept: list[list[list[list[list[int]]]]]
    score: list[list[list[list[dict[int, float]]]]]
    states: list[EvictionLayer]


def scores_of(state: EvictionLayer) -> list[list[dict[int, float]]]:
    """Score by position of what a layer still holds."""
    assert state.slots is not None
    used = state.slots.length
    positions, score = state.slots.positions[:, :, :used].tolist(), state.slots.score[:, :, :used].tolist()
    return [
        [{p: score[b][h][s] for s, p in enumerate(positions[b][h]) if p in set(kept)} for h, kept in enumerate(row)]
        for b, row in enumerate(state.kept_positions())
    ]


def run_core(
    config: CacheConfig,
    streams: Streams,
    widths: Sequence[int],
    *,
    params: AttentionParams | None = None,
    mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    seeds: int | Sequence[int] = 0,
    prompt: int | None = None,
) -> Seen:
    """Feed streams through LayerStates, widths[i] columns per forward. prompt: its columns (None: widths[0])."""
    count, total = streams.q.shape[0], sum(widths)
    sequence = SequenceState(prompt_columns=prompt, max_new_tokens=max_new_tokens or total, seeds=seeds)
    sequence.multi_token_steps_allowed = True
    common = CacheState(config, count, sequence)
    states = [EvictionLayer(config, i, common) for i in range(count)]
    params = params or AttentionParams(streams.q.shape[-1] ** -0.5)
    seen = Seen([], [], [], states)
    start = 0
    for width in widths:
        part = slice(start, start + width)
        padding = None if mask is None else mask[:, : start + width]
        seen.out.append(
            [
                state.forward(
                    streams.q[i, :, :, part], streams.k[i, :, :, part], streams.v[i, :, :, part], params, padding
                )
                for i, state in enumerate(states)
            ]
        )
        seen.kept.append([state.kept_positions() for state in states])
        seen.score.append([scores_of(state) for state in states])
        start += width
    return seen


# -- a model under eviction --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fed:
    """logits[step] [B, V]; kept[step][layer][row][head], both after each forward; the cache as it was left."""

    logits: list[Tensor]
    kept: list[list[list[list[list[int]]]]]
    cache: EvictionCache


@torch.inference_mode()
def feed(
    cache: EvictionCache,
    model: PreTrainedModel,
    prompt: Tensor,
    new: Tensor,
    *,
    mask: Tensor | None = None,
    chunk: int | None = None,
    width: int = 1,
    later: Tensor | None = None,
) -> Fed:
    """Prefill prompt [B, T] (in chunks), then feed new [B, N] `width` columns at once; later [B, N]: 0 for padding."""
    mask = torch.ones_like(prompt) if mask is None else mask
    mask = torch.cat([mask, torch.ones_like(new) if later is None else later], dim=1)
    ids, at, columns = torch.cat([prompt, new], dim=1), 0, prompt.shape[1]
    fed = Fed([], [], cache)
    while at < ids.shape[1]:
        to = min(at + (chunk or columns), columns) if at < columns else min(at + width, ids.shape[1])
        logits = forward_last(model, ids[:, at:to], mask[:, :to], cache)
        if to >= columns:
            fed.logits.append(logits)
            fed.kept.append([cache.kept_positions(layer) for layer in range(len(cache.layer_states))])
        at = to
    return fed
