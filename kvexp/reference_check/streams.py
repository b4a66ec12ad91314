"""Bare q, k, v of some layers, fed to single layers of the core: a prompt at once, then token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvexp.core import AttentionParams, Budget, CacheConfig, EvictionLayer, MemoryTracker, Method, SequenceState
from kvexp.core.attention import RoPE
from kvexp.reference_check.recording import Recording
from kvexp.retrieval.base import Retrieval
from kvexp.retrieval.retrieval_layer import LayerGroup, RetrievalLayer


@dataclass(frozen=True)
class Streams:
    """q [L, 1, H * G, T, D], k [L, 1, H, T, D], v likewise, of which `prompt` tokens come at once, the rest singly."""

    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int
    rope: RoPE | None = None

    def run(self, method: Method, tokens: int, seen: Callable[[Any, int], None] | None = None) -> np.ndarray:
        """Outputs [L, T, H * G, D] under a budget of so many tokens; `seen` gets (state, layer) after every forward."""
        outs = []
        params = AttentionParams(self.q.shape[-1] ** -0.5, rope=self.rope)
        for layer in range(self.q.shape[0]):
            time = SequenceState(prompt_columns=self.prompt)
            config = CacheConfig(method, Budget(tokens=tokens), positions="original")
            retrieves = isinstance(method, Retrieval)
            state: Any = (
                RetrievalLayer(config, 0, 1, time, MemoryTracker(1), LayerGroup())
                if retrieves
                else EvictionLayer(config, 0, 1, time, MemoryTracker(1), None)
            )
            out, total = [], self.q.shape[3]
            for rows in (slice(0, self.prompt), *(slice(t, t + 1) for t in range(self.prompt, total))):
                q, k, v = (x[layer, :, :, rows] for x in (self.q, self.k, self.v))
                out.append(state.forward(q, k, v, params, None)[0])
                if seen is not None:
                    seen(state, layer)
            outs.append(torch.cat(out, dim=1).transpose(0, 1).float().numpy())
        return np.stack(outs)


def streams(archive: Recording, names: str = "q k v", dtype: torch.dtype = torch.float32) -> Streams:
    """The file's streams; what is recorded before RoPE is rotated here."""
    q, k, v = (archive.tensor(name).to(dtype) for name in names.split())
    if names == "q k v":
        return Streams(q, k, v, int(archive["prompt"]))
    exponent = torch.arange(0, q.shape[-1], 2, dtype=torch.float32) / q.shape[-1]
    rope = RoPE(1.0 / float(archive["rope_base"]) ** exponent, interleaved=False)
    place = torch.arange(q.shape[3]).expand(1, 1, -1)
    q, k = (torch.stack([rope.rotate_by(x, place.expand(1, x.shape[1], -1)) for x in whole]) for whole in (q, k))
    return Streams(q, k, v, int(archive["prompt"]), rope)
