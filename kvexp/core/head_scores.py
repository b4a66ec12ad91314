"""Which kv heads look back at the beginning of a text, from a calibration pass: DuoAttention's retrieval heads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvexp.core.attention import AttentionParams, RoPE
from kvexp.errors import ConfigError

LENGTH = 500  # positions over which a head's mean query and key are laid out, as in kvpress
BLOCK = 1024  # tokens turned back at a time


@dataclass(frozen=True)
class HeadScores:
    """A score of every kv head, [L, H] float32 on the CPU, from 0 to 1: high for heads that look far back.

    The mean query and the mean key of a head, both before RoPE, are laid out over LENGTH positions; the score is the
    area under the cumulated attention of the last query, from the first key on, mean over the query heads of a kv head
    and over sequences. Source: kvpress's on-the-fly scoring of DuoAttention (arXiv:2410.10819), where the authors train
    gates. digest: 16 hex digits of all numbers.
    """

    digest: str
    scores: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, scores: Tensor) -> HeadScores:
        """The scores with their digest; ConfigError for a tensor that holds no score of every head."""
        if scores.ndim != 2 or scores.dtype != torch.float32 or not bool(scores.isfinite().all()):
            raise ConfigError(
                f"scores of heads must be finite float32 numbers [L, H], got {scores.dtype} {list(scores.shape)}"
            )
        content = f"{list(scores.shape)}\n".encode() + scores.contiguous().numpy().tobytes()
        return cls(hashlib.sha256(content).hexdigest()[:16], scores)

    def check_shape(self, layers: int, heads: int) -> None:
        """ConfigError where the model has other numbers of layers or kv heads."""
        if list(self.scores.shape) != [layers, heads]:
            raise ConfigError(
                f"these scores are of [L, H] = {list(self.scores.shape)} heads, the model's are {[layers, heads]}: "
                "they are of another model"
            )

    def best(self, count: int) -> Tensor:
        """[L, H] bool: the `count` heads of the highest scores; equal scores go to the lower layer, then head."""
        order = self.scores.flatten().argsort(descending=True, stable=True)
        chosen = torch.zeros(self.scores.numel(), dtype=torch.bool)
        chosen[order[:count]] = True
        return chosen.view(self.scores.shape)


class HeadScoreSums:
    """Scores of one layer's heads, added up sequence by sequence; nothing where a model has no RoPE."""

    def __init__(self) -> None:
        self.count, self.total = 0, torch.zeros((), dtype=torch.float64)

    def add(self, query: Tensor, key: Tensor, positions: Tensor, params: AttentionParams) -> None:
        """Add a sequence: query [H, G, Q, D] and key [H, Q, D] with RoPE applied, at positions [Q]."""
        if params.rope is None:
            return
        queries = mean_before_rope(query.flatten(0, 1), positions, params.rope).view(*query.shape[:2], -1)
        keys = mean_before_rope(key, positions, params.rope)
        self.total = self.total + retrieval_scores(queries, keys, params.rope, params.scale).cpu().double()
        self.count += 1

    def mean(self) -> Tensor | None:
        """The scores [H] float32, mean over sequences; None where there is none."""
        return (self.total / self.count).float() if self.count else None


def mean_before_rope(states: Tensor, positions: Tensor, rope: RoPE) -> Tensor:
    """The mean [N, D] float32 of states [N, Q, D] over tokens, turned back by their positions [Q]."""
    total = torch.zeros(len(states), states.shape[-1], dtype=torch.float64, device=states.device)
    for part, at in zip(states.split(BLOCK, dim=1), positions.split(BLOCK), strict=True):
        total += rope.rotate_by(part.float()[None], -at[None, None])[0].double().sum(1)
    return (total / states.shape[1]).float()


def retrieval_scores(query: Tensor, key: Tensor, rope: RoPE, scale: float, length: int = LENGTH) -> Tensor:
    """The scores [H] of `HeadScores` from mean queries [H, G, D] and mean keys [H, D], before RoPE."""
    places = torch.arange(length, device=key.device)
    keys = rope.rotate_by(key[:, None].expand(-1, length, -1)[None], places[None, None])[0]
    last = rope.rotate_by(query[None], places[-1:][None, None].expand(1, *query.shape[:2]))[0]
    attention = torch.softmax((last @ keys.transpose(-1, -2)) * scale, dim=-1)  # [H, G, length]
    return attention.cumsum(-1).mean(-1).mean(-1)
