"""Mean and covariance of a prompt's queries before RoPE, in each query head: what later queries are expected to be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, RoPE

BLOCK = 4096  # query rows taken at a time: their copy in float32 is not larger


class QueryStatistics:
    """Moments over the queries at positions `after` and later, added up forward by forward.

    count [B]: queries seen; mean [B, H, G, D] and scatter [B, H, G, D, D] (the sum of outer products of deviations
    from the mean), float32. rope: with which the queries were rotated; None: they were not. scale: of the logits.
    """

    def __init__(self, after: int, first: AttentionInputs) -> None:
        """Statistics of no query yet; first: the inputs of the prompt's first forward, for shapes and positions."""
        b, h, g, _, d = first.query.shape
        self.after, self.rope, self.scale = after, first.params.rope, first.params.scale
        self.count = torch.zeros(b, device=first.query.device)
        self.mean = torch.zeros(b, h, g, d, device=first.query.device)
        self.scatter = torch.zeros(b, h, g, d, d, device=first.query.device)

    def add(self, inputs: AttentionInputs) -> None:
        """Add the queries of one forward of the prompt, rotated back to position 0; padding is left out."""
        for query, taken in self._blocks(inputs):
            # Chan's rule for the moments of two parts of a sample.
            number = taken.sum(-1)  # [B]
            weight = taken[:, None, None, :, None]
            mean = (query * weight).sum(-2) / _over_heads(number.clamp_min(1.0))
            apart = (query - mean[..., None, :]) * weight
            share = number / (self.count + number).clamp_min(1.0)
            step = mean - self.mean
            between = step[..., :, None] * step[..., None, :] * _over_heads(self.count * share)[..., None]
            self.scatter = self.scatter + apart.transpose(-1, -2) @ apart + between
            self.mean = self.mean + step * _over_heads(share)
            self.count = self.count + number

    def _blocks(self, inputs: AttentionInputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Queries [B, H, G, n, D] float32 before RoPE, and which are counted [B, n], as 1.0 and 0.0."""
        for query, positions in zip(
            inputs.query.split(BLOCK, dim=3), inputs.query_positions.split(BLOCK, dim=1), strict=True
        ):
            heads = query.float().flatten(1, 2)
            if self.rope is not None:
                heads = self.rope.rotate_by(heads, -positions[:, None])
            yield heads.view(query.shape), (positions >= self.after).float()

    def at(self, first: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Mean [B, H, G, D] and covariance [B, H, G, D, D] of such queries under RoPE's mean over `number` positions.

        first [B]: the first of the positions. The covariance divides by the number of queries.
        """
        covariance = self.scatter / _over_heads(self.count.clamp_min(1.0))[..., None]
        if self.rope is None:
            return self.mean, covariance
        positions = first[:, None] + torch.arange(number, device=first.device)
        rotation = mean_rotation(self.rope, positions, self.mean.shape[-1])[:, None, None]
        mean = (rotation @ self.mean[..., None])[..., 0]
        return mean, rotation @ covariance @ rotation.transpose(-1, -2)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        rows = rows.to(self.count.device)
        self.count, self.mean, self.scatter = self.count[rows], self.mean[rows], self.scatter[rows]


def mean_rotation(rope: RoPE, positions: Tensor, width: int) -> Tensor:
    """The mean [B, width, width] of RoPE's rotation matrices over positions [B, n], for heads of `width` dimensions."""
    angle = positions.to(torch.float32)[..., None] * rope.inv_freq.to(positions.device, torch.float32)
    cos, sin = angle.cos().mean(1), angle.sin().mean(1)  # [B, pairs]
    pairs = torch.arange(cos.shape[-1], device=positions.device)
    a, b = (2 * pairs, 2 * pairs + 1) if rope.interleaved else (pairs, pairs + len(pairs))
    rotation = torch.eye(width, device=positions.device).repeat(len(positions), 1, 1)
    rotation[:, a, a], rotation[:, b, b] = cos, cos
    rotation[:, a, b], rotation[:, b, a] = -sin, sin
    return rotation


def _over_heads(x: Tensor) -> Tensor:
    """x [B] as [B, 1, 1, 1]."""
    return x[:, None, None, None]
