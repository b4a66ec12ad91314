"""Compactor: keys that are outliers among the prompt's keys, and tokens that those around them look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvexp.core import EvictionContext, Method, Needs
from kvexp.core.attention import LocalChunks
from kvexp.core.noise import EULER, GUMBEL_STD, hash_draws, stream_id
from kvexp.util.fields import AtLeast

JITTER = 0.01  # is added to the diagonal of X^T X
LEAST_SPREAD = 1e-6  # of scores, which are divided by their spread


@dataclass(frozen=True)
class Compactor(Method):
    """s[j] = z(mean over j and its two neighbours of A[j] * ||v_j||_2) + `blending` * z(l[j]); keep = first `n_sinks` U
    last `n_recent` U top of s. Chosen once.

    A[j] = sum over the queries of j's chunk of softmax(q.k)[j] over the chunk's keys, before and behind, not
    divided by sqrt(d), mean over a kv head's query heads; chunks of `chunk` tokens. l[j] = x_j.(X^T X + 0.01
    I)^-1.x_j, X the keys before RoPE less their mean, times a Gaussian matrix [D, `sketch`] / sqrt(`sketch`). z:
    less the mean, over the standard deviation, of all heads and tokens between sinks and end. Source: Chari and Van
    Durme, arXiv:2507.08143, as in kvpress's CompactorPress, which sets the defaults; `blending=null` is 1 - k / T
    as there. Departures: z is taken of each row (kvpress: of the batch); a partial last chunk is not padded
    (kvpress 0.5.5 gives padding logits of 0); the run's seed draws the matrix. Left out: the authors' engine, which
    scores otherwise (chunks of 512 and 128, no values, no neighbours, one choice for all heads).
    """

    name: ClassVar[str] = "compactor"
    evicts_while_decoding: ClassVar[bool] = False
    n_sinks: Annotated[int, AtLeast(0)] = 8
    n_recent: Annotated[int, AtLeast(0)] = 4
    chunk: Annotated[int, AtLeast(1)] = 256  # tokens that look at each other
    sketch: Annotated[int, AtLeast(1)] = 48  # columns of the Gaussian matrix
    blending: Annotated[float, AtLeast(0)] | None = None  # weight of the leverage scores; null: 1 - k / T

    @property
    def needs(self) -> Needs:
        return Needs(local_chunks=LocalChunks(self.chunk, self.n_sinks, self.n_recent), rope=True)

    def recent(self, budget: int) -> int:
        return self.n_recent

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.local_attention is not None
        length = ctx.slots.length
        keys, values = (states[:, :, :length].float() for states in (ctx.slots.keys, ctx.slots.values))
        if ctx.rope is not None:
            keys = ctx.rope.rotate_by(keys, -ctx.positions)
        matrix = sketch_matrix(ctx.seeds, ctx.layer, keys.shape[1], keys.shape[-1], self.sketch)
        # The tokens at both ends stay whatever their score, also where the budget counts the coming token as one.
        priority = torch.full(ctx.positions.shape, torch.inf, device=keys.device)
        for row, tokens in enumerate((ctx.newest + 1).tolist()):
            inside = slice(length - tokens + self.n_sinks, length - self.n_recent)
            if inside.start >= inside.stop:
                continue
            blending = 1 - int(ctx.budget[row]) / tokens if self.blending is None else self.blending
            looked_at = ctx.local_attention[row, :, inside] * torch.linalg.vector_norm(values[row, :, inside], dim=-1)
            pooled = avg_pool1d(looked_at, 3, stride=1, padding=1)
            leverage = leverages(keys[row, :, inside], matrix[row])
            priority[row, :, inside] = (standardised(pooled) + blending * standardised(leverage)).float()
        return priority.masked_fill(ctx.positions < 0, -torch.inf)


def sketch_matrix(seeds: Tensor, layer: int, heads: int, width: int, size: int) -> Tensor:
    """Normal draws / sqrt(size), [B, heads, width, size] float32, of seeds [B] and a layer."""
    index = torch.arange(width * size, device=seeds.device)
    draws = hash_draws("gaussian", stream_id(seeds, layer, heads), index.expand(len(seeds), heads, -1))
    matrix: Tensor = ((draws - EULER) / GUMBEL_STD / math.sqrt(size)).unflatten(-1, (width, size))
    return matrix


def leverages(keys: Tensor, matrix: Tensor) -> Tensor:
    """l [H, n] float64 of keys [H, n, D]; matrix [H, D, sketch]."""
    x = (keys - keys.mean(-2, keepdim=True)).double() @ matrix.double()
    gram = x.transpose(-1, -2) @ x + JITTER * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    solved: Tensor = torch.linalg.solve(gram, x.transpose(-1, -2))
    return (x * solved.transpose(-1, -2)).sum(-1).clamp_min(0)


def standardised(x: Tensor) -> Tensor:
    """x [H, n] less its mean, over its standard deviation, float64."""
    x = x.double()
    spread = x.std() if x.numel() > 1 else torch.zeros((), dtype=x.dtype, device=x.device)
    return (x - x.mean()) / spread.clamp_min(LEAST_SPREAD)
