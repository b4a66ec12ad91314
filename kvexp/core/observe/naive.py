"""Column sums of observed attention, all query rows at once: the definition, which every other way is tested against.

The column sum of a slot is what the queries of a forward attended to it: the one number per slot that accumulating
methods remember. Memory is O(query rows * slots). `blocked`, beside this file, gives the same numbers in blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.score_spec import AttentionScoreSpec


def column_sums(
    inputs: AttentionInputs, spec: AttentionScoreSpec, weights: Tensor, taus: Tensor, seeds: Tensor, layer: int
) -> Tensor:
    """Column sums [B, H, S] float32: over heads g and rows q, of weights[q] * softmax((x[g, q] + zeta) / tau[q]).

    weights [B, Q]: of `row_weights`; taus [Q]: temperature of each row; seeds [B]: of the noise zeta; layer: its
    number.
    """
    rows, slots = slice(0, inputs.query.shape[3]), inputs.keys.shape[2]
    return weighted_column_sums(observed_probs(inputs, spec, rows, slots, taus, seeds, layer), weights)


def row_weights(spec: AttentionScoreSpec, query_positions: Tensor, rows_left: int | None) -> Tensor:
    """The weight [B, Q] float32 of every query row: decay^(real rows after it), 0 for padding and outside `last_rows`.

    query_positions [B, Q]: -1 for padding. rows_left: rows of the prompt still to come after this forward (0 in its
    last), or None for decode rows, which `last_rows` does not limit.
    """
    real = query_positions >= 0
    after = real.flip(1).cumsum(1).flip(1) - real.long()
    weights = torch.pow(torch.full((), spec.decay, device=real.device), after.float())
    if spec.last_rows is not None and rows_left is not None:
        to_end = torch.arange(real.shape[1] - 1, -1, -1, device=real.device) + rows_left
        real = real & (to_end < spec.last_rows)
    return torch.where(real, weights, 0.0)


def observed_probs(
    inputs: AttentionInputs, spec: AttentionScoreSpec, rows: slice, slots: int, taus: Tensor, seeds: Tensor, layer: int
) -> Tensor:
    """softmax((x + zeta) / tau) of query rows `rows` over the first `slots` slots: [B, H, G, rows, slots] float32.

    taus [Q], seeds [B], layer: as of `column_sums`.
    """
    x = inputs.logits(rows, slots, include_evicted=spec.over == "full")
    if spec.noise is not None:
        h, g = x.shape[1:3]
        zeta = spec.noise.draw(seeds, layer, h * g, inputs.query_positions[:, rows], inputs.positions[:, :, :slots])
        x = x + (zeta if zeta.ndim == 0 else zeta.unflatten(1, (h, g)))
    if spec.tau != (1.0, 1.0):
        x = x / taus[rows, None]
    return torch.softmax(x, dim=-1)


def weighted_column_sums(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Probabilities [B, H, G, Q, S] summed over query heads and rows, with row weights [B, Q]: [B, H, S] float32."""
    b, h, g, q, s = probabilities.shape
    row = weights[:, None, None, :].expand(b, h, g, q).reshape(b * h, 1, g * q).to(probabilities.dtype)
    return torch.bmm(row, probabilities.reshape(b * h, g * q, s)).view(b, h, s).to(torch.float32)
