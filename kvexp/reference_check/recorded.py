"""Keyformer with the noise that was drawn when the numbers were recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvexp.core import AttentionScoreSpec, Noise
from kvexp.methods import Keyformer
from kvexp.reference_check.recording import Recording


@dataclass(frozen=True, eq=False)
class RecordedNoise(Noise):
    """table [L, B, H * G, queries, keys] by column of the padded text; `padding` columns come before position 0.

    by_slot: after a real drop the release draws one number per slot of the shortened cache, in order of position.
    """

    table: Tensor = field(default_factory=lambda: torch.zeros(0))
    padding: int = 0
    by_slot: bool = False

    def make_stepper(self, seeds: Tensor, layers: Sequence[int], heads: int) -> Callable[[Tensor, Tensor], Tensor]:
        def draw(queries: Tensor, keys: Tensor) -> Tensor:
            each = zip(layers, queries.split(len(seeds)), keys.split(len(seeds)), strict=True)
            return torch.cat([self.draw(seeds, layer, heads, query, key) for layer, query, key in each])

        return draw

    def draw(self, seeds: Tensor, layer: int, heads: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        rows = torch.arange(query_positions.shape[0])[:, None, None, None]
        head = torch.arange(heads)[None, :, None, None]
        query = query_positions.clamp(min=0)[:, None, :, None] + self.padding
        keys = key_positions.clamp(min=0)
        if self.by_slot:
            last = torch.iinfo(torch.int64).max
            keys = key_positions.masked_fill(key_positions < 0, last).argsort(-1).argsort(-1)
        if keys.shape[1] != 1:
            keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
        return self.table[layer][rows, head, query, keys[:, :, None, :] + self.padding]


@dataclass(frozen=True, eq=False)
class RecordedKeyformer(Keyformer):
    """Keyformer whose zeta is read from a table."""

    name: ClassVar[str] = "keyformer"
    zeta: RecordedNoise | None = None

    @property
    def score_spec(self) -> AttentionScoreSpec:
        return replace(super().score_spec, noise=self.zeta)


def recorded_noise(archive: Recording, padding: int, *, by_slot: bool) -> RecordedNoise:
    """Prefill draws [L, B, H, T, T] and decode draws [steps, L, B, H, T + steps] as one table."""
    prompt, decode = archive["noise_prefill"], archive["noise_decode"]
    width = prompt.shape[-1]
    total = max(width + decode.shape[0], decode.shape[-1])
    table = np.zeros((*prompt.shape[:3], width + decode.shape[0], total), dtype=np.float32)
    table[..., :width, :width] = prompt
    for step, draw in enumerate(decode):
        table[..., width + step, : draw.shape[-1]] = np.nan_to_num(draw)
    return RecordedNoise(table=torch.from_numpy(table), padding=padding, by_slot=by_slot)
