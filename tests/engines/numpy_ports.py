"""An engine in numpy that serves a Llama under three published eviction rules: it stands where an engine's own adapter
does (docs/ports.md).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

FAULT = os.environ.get("FAULT")  # positions, sinks, budget, state or batch: planted, each seen in a port


class StartRecent:
    """The first slots and the newest: `StartRecentKVCache` of github.com/mit-han-lab/streaming-llm, kv_cache.py.

    The release turns keys at their place in the cache; here they keep the text's positions.
    """

    while_decoding = True

    def __init__(self, keep, settings):
        self.start, self.recent = settings["n_sinks"], keep - settings["n_sinks"]

    def kept(self, keys, attention):
        slots, fed = keys.shape[1], attention.shape[2]
        first = slots - fed if FAULT == "sinks" and fed > 1 else 0
        recent = range(max(slots - self.recent, first + self.start), slots)
        return np.tile([*range(first, first + self.start), *recent], (len(keys), 1))


class HeavyRecent:
    """Largest sums of attention, and the newest: `H2OKVCache_LayerWise` of github.com/FMInference/H2O, h2o_hf.

    The release has a sum per query head, here it is per kv head. Its sums stay until `_clean_scores` is called.
    """

    while_decoding = True

    def __init__(self, keep, settings):
        self.recent = int(keep * settings["recent_ratio"])
        self.heavy = keep - self.recent
        self.sums = np.zeros((1, 0), np.float32)

    def kept(self, keys, attention):
        sums = attention.sum((1, 2))
        known = min(self.sums.shape[1], sums.shape[1])
        sums[:, :known] += self.sums[:, :known]
        heavy = np.argsort(-sums[:, : -self.recent], axis=1, kind="stable")[:, : self.heavy]
        recent = np.tile(np.arange(sums.shape[1])[-self.recent :], (len(sums), 1))
        kept = np.concatenate([np.sort(heavy, axis=1), recent], axis=1)
        self.sums = np.take_along_axis(sums, kept, 1)
        return kept


class Distinct:
    """Keys least like the mean key, chosen in the prompt: `KeyDiffPress` of github.com/NVIDIA/kvpress."""

    while_decoding = False

    def __init__(self, keep, settings):
        self.keep = keep

    def kept(self, keys, attention):
        mean = (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).mean(1, keepdims=True)
        cosine = (keys * mean).sum(-1) / np.linalg.norm(keys, axis=-1) / np.linalg.norm(mean, axis=-1)
        return np.sort(np.argsort(cosine, axis=1, kind="stable")[:, : self.keep], axis=1)


RULES = {"streaming_llm": StartRecent, "h2o": HeavyRecent, "keydiff": Distinct}


def start(header):
    """`serve` of a fresh engine with the method and budget of a trace's header."""
    return Engine(Path(os.environ["MODEL"]), header).serve


class Engine:
    """A Llama whose requests have caches of their own: per layer keys and values [H, S, D] and positions [H, S]."""

    def __init__(self, folder, header):
        self.config = json.loads((folder / "config.json").read_text("utf-8"))
        self.heads, self.size = self.config["num_key_value_heads"], self.config["head_dim"]
        loaded = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("model."): value.astype(np.float32) for name, value in loaded.items()}
        self.header, self.rules = header, {}

    def serve(self, texts, chunk=None):
        """Engine's traces of the texts, answered as one batch."""
        return [self.answer(row, text, chunk, len(texts) > 1) for row, text in enumerate(texts)]

    def answer(self, row, text, chunk, batched):
        tokens, prompt = text["tokens"], text["header"]["prompt_tokens"]
        if row not in self.rules or FAULT != "state":
            rule = RULES[self.header["method"]["name"]]
            self.rules[row] = [rule(keep, self.header["method"]) for keep in self.header["keep"]]
        empty = np.zeros((self.heads, 0, self.size), np.float32)
        caches = [(empty, empty, np.zeros((self.heads, 0), int)) for _ in self.rules[row]]
        held, logits, begin = [], [], 0
        step = chunk or prompt
        for end in (*range(step, prompt, step), *range(prompt, len(tokens) + 1)):
            first = caches[0][2].shape[1] if FAULT == "positions" else begin
            caches, attention, predicted = self.forward(tokens[begin:end], first, caches)
            for layer, rule in enumerate(self.rules[row]):
                if (end <= prompt or rule.while_decoding) and not (batched and FAULT == "batch"):
                    caches[layer] = self.evicted(rule, caches[layer], attention[layer], end <= prompt)
            if end >= prompt:
                held.append([positions for _, _, positions in caches])
                logits.append(predicted)
            begin = end
        return engines_trace(tokens, prompt, held, np.array(logits))

    def evicted(self, rule, cache, attention, reading):
        """The cache after an eviction. reading: of a chunk of the prompt, to which a fault may confine it."""
        others = cache[2].shape[1] - attention.shape[2] if FAULT == "budget" and reading else 0
        kept = others + rule.kept(cache[0][:, others:], attention[..., others:])
        kept = np.concatenate([np.tile(np.arange(others), (self.heads, 1)), kept], axis=1)
        keys, values = (np.take_along_axis(part, kept[..., None], 1) for part in cache[:2])
        return keys, values, np.take_along_axis(cache[2], kept, 1)

    def forward(self, tokens, first, caches):
        """Caches with these tokens, attention [H, G, Q, S] per layer, logits [V] of the last token's successor."""
        count, positions = len(tokens), first + np.arange(len(tokens))
        x, grown, attentions = self.weights["embed_tokens.weight"][tokens], [], []
        for layer, cache in enumerate(caches):
            q, k, v = self.linear(self.normed(x, f"layers.{layer}.input_layernorm"), layer, "self_attn", "qkv")
            q, k, v = (part.reshape(count, -1, self.size).transpose(1, 0, 2) for part in (q, k, v))
            new = (self.turned(k, positions), v, np.tile(positions, (self.heads, 1)))
            keys, values, _ = cache = tuple(np.concatenate(pair, axis=1) for pair in zip(cache, new, strict=True))
            q = self.turned(q, positions).reshape(self.heads, -1, count, self.size)
            scores = q @ keys[:, None].swapaxes(-1, -2) / np.sqrt(self.size)
            scores[..., -count:] += np.triu(np.full((count, count), -np.inf, np.float32), 1)
            attention = np.exp(scores - scores.max(-1, keepdims=True))
            attention /= attention.sum(-1, keepdims=True)
            mixed = (attention @ values[:, None]).reshape(-1, count, self.size).transpose(1, 0, 2)
            x = x + self.linear(mixed.reshape(count, -1), layer, "self_attn", "o")[0]
            normed = self.normed(x, f"layers.{layer}.post_attention_layernorm")
            gate, up = self.linear(normed, layer, "mlp", ("gate", "up"))
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, layer, "mlp", ("down",))[0]
            grown.append(cache)
            attentions.append(attention)
        return grown, attentions, self.weights["lm_head.weight"] @ self.normed(x, "norm")[-1]

    def linear(self, x, layer, block, names):
        return [x @ self.weights[f"layers.{layer}.{block}.{name}_proj.weight"].T for name in names]

    def normed(self, x, name):
        mean = (x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]
        return x / np.sqrt(mean) * self.weights[f"{name}.weight"]

    def turned(self, x, positions):
        """RoPE of x [H, Q, D]."""
        half = self.size // 2
        angle = positions[:, None] / self.config["rope_parameters"]["rope_theta"] ** (np.arange(half) / half)
        cos, sin, left, right = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(np.float32)


def engines_trace(tokens, prompt, held, logits):
    """held: per prediction and layer the positions [H, K]; logits [T + 1, V]."""
    width = max(positions.shape[1] for layers in held for positions in layers)
    padded = [[np.pad(at, [(0, 0), (0, width - at.shape[1])], constant_values=-1) for at in layers] for layers in held]
    kept = [[np.isin(np.arange(prompt), head) for head in positions] for positions in held[0]]
    best, logprobs = np.argsort(-logits, axis=1)[:, :8], logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    tops = {"top_ids": best, "top_logprobs": np.take_along_axis(logprobs, best, 1)}
    return {"tokens": tokens, "prompt_kept": np.array(kept), "step_held": np.array(padded[1:])} | tops
