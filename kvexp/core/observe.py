"""Column sums of attention probabilities: what methods observe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from kvexp.core import triton_ops
from kvexp.core.attention import AttentionInputs, Tile, attention_probs
from kvexp.core.method import AttentionScoreSpec
from kvexp.core.noise import POOL_OVERLAP, exp_pool
from kvexp.core.sequence import SequenceState

SumsKey = tuple[AttentionScoreSpec, str]  # (sums_key, observe): caches that share a prefill share the sums of one key
PromptSums = dict[SumsKey, Tensor]


@dataclass(frozen=True)
class ObservedRows:
    """How the query rows of one forward are observed.

    weights [B, Q]: of `row_weights`; taus [Q]: temperature of each row; seeds [B]: of the noise zeta; layer: its
    number; rows_left: rows of the prompt still to come before its eviction, None for decode rows.
    """

    spec: AttentionScoreSpec
    weights: Tensor
    taus: Tensor
    seeds: Tensor
    layer: int
    rows_left: int | None = None

    @classmethod
    def of(
        cls, spec: AttentionScoreSpec, query_positions: Tensor, sequence: SequenceState, layer: int, left: int | None
    ) -> ObservedRows:
        """The rows of the forward in progress; query_positions [B, Q]: -1 for padding; left: `rows_left`."""
        weights = row_weights(spec, query_positions, left)
        taus = spec.taus(sequence.query_steps, sequence.max_new_tokens, weights.device)
        return cls(spec, weights, taus, sequence.seeds.to(weights.device), layer, left)


def naive_column_sums(inputs: AttentionInputs, observed: ObservedRows) -> Tensor:
    """Column sums [B, H, S] float32: over heads g and rows q, of weights[q] * softmax((x[g, q] + zeta) / tau[q]).

    The definition, all query rows at once, which every other way is tested against: the column sum of a slot is what
    the queries of a forward attended to it, the one number per slot that accumulating methods remember. Memory is
    O(query rows * slots); `column_sums` gives the same numbers in blocks.
    """
    rows, slots = slice(0, inputs.query.shape[3]), inputs.keys.shape[2]
    return weighted_column_sums(observed_probs(inputs, observed, rows, slots), observed.weights)


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


def observed_probs(inputs: AttentionInputs, observed: ObservedRows, rows: slice, slots: int) -> Tensor:
    """softmax((x + zeta) / tau) of query rows `rows` over the first `slots` slots: [B, H, G, rows, slots] float32.

    Where heads have sinks, as of `AttentionScoreSpec.observed_sinks`.
    """
    spec = observed.spec
    sinks = spec.observed_sinks(inputs.params)
    x = inputs.logits(rows, slots, include_evicted=spec.over == "full")
    if spec.noise is not None:
        h, g = x.shape[1:3]
        query_positions, positions = inputs.query_positions[:, rows], inputs.positions[:, :, :slots]
        zeta = spec.noise.draw(observed.seeds, observed.layer, h * g, query_positions, positions)
        x = x + (zeta if zeta.ndim == 0 else zeta.unflatten(1, (h, g)))
    if spec.tau != (1.0, 1.0):
        x = x / observed.taus[rows, None]
    return attention_probs(x, sinks)


def weighted_column_sums(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Probabilities [B, H, G, Q, S] summed over query heads and rows, with row weights [B, Q]: [B, H, S] float32."""
    b, h, g, q, s = probabilities.shape
    row = weights[:, None, None, :].expand(b, h, g, q).reshape(b * h, 1, g * q).to(probabilities.dtype)
    return torch.bmm(row, probabilities.reshape(b * h, g * q, s)).view(b, h, s).to(torch.float32)


class ColumnSums:
    """Column sums [B, H, S] float32 of a prompt, as `naive_column_sums`, added up while a CPU attends to it.

    An `Observer`: rows that weigh nothing are passed over, noise is multiplied into the probabilities, and where a
    temperature changes the logits, their softmax is taken a second time. Up to float32 rounding: the order of summation
    is another.
    """

    def __init__(self, inputs: AttentionInputs, observed: ObservedRows) -> None:
        """Zeros; inputs: of the forward that will be attended."""
        spec, count = observed.spec, inputs.query.shape[3]
        self.inputs, self.observed = inputs, observed
        self.sums = torch.zeros(*inputs.query.shape[:2], inputs.keys.shape[2])
        self.first = first_weighted_row(spec, count, observed.rows_left)
        self.noise = None if spec.noise is None or spec.noise.constant else spec.noise  # a constant changes no softmax
        self._pooled = self.noise is not None and self.noise.fresh
        self.tempered = bool((observed.taus != 1).any())
        applied = spec.observed_sinks(inputs.params) is not None or inputs.params.sinks is None
        self.takes: Literal["logits", "softmax", "attention"]
        self.takes = "logits" if self.tempered else "attention" if applied else "softmax"
        self._room = torch.empty(0)
        self._offsets: tuple[int, Tensor] | None = None  # a batch row, and where in the pool the noise of its rows is

    def add(self, tile: Tile, x: Tensor) -> None:
        """As `Observer.add`."""
        if tile.rows.stop <= self.first:
            return
        h, g, q, s = x.shape
        weights = self.observed.weights[tile.row, tile.rows].expand(h, g, q)
        if self.tempered:
            x = x if self.noise is None else x + self._noise(tile, g)
            x = torch.softmax(x / self.observed.taus[tile.rows, None], dim=-1)
        elif self.noise is not None:
            # softmax(x + zeta) is softmax(x) * exp(zeta), divided by its sum.
            x = self._factors(tile, x).mul_(x)
            weights = weights / x.sum(-1)
        if h == 1:  # as `grouped_matmul`
            product = torch.bmm(weights.reshape(g, 1, q).to(x.dtype), x.reshape(g, q, s)).sum(0, keepdim=True)
        else:
            product = torch.bmm(weights.reshape(h, 1, g * q).to(x.dtype), x.reshape(h, g * q, s))
        self.sums[tile.row, tile.heads, tile.seen] += product[:, 0]

    def _factors(self, tile: Tile, x: Tensor) -> Tensor:
        """exp(zeta) of a tile, [heads, G, rows, seen], in a buffer that the next tile uses again; x: for its shape."""
        if not (tile.consecutive and self._pooled and x.dtype == torch.float32 and tile.seen.stop <= POOL_OVERLAP):
            return self._noise(tile, x.shape[1]).exp().expand_as(x).contiguous()
        if self._room.numel() < x.numel():
            self._room = x.new_empty(x.numel())
        factors = self._room[: x.numel()].view(-1, x.shape[3])
        # A query's draws for neighbouring positions are neighbours in the pool: one copy per query.
        assert self.noise is not None
        first = int(self.inputs.positions[tile.row, 0, tile.seen.start])
        draws = exp_pool(self.noise.kind)[first:].unfold(0, x.shape[3], 1)
        starts = self._pool_offsets(tile.row).unflatten(0, (-1, x.shape[1]))[tile.heads, :, tile.rows]
        torch.index_select(draws, 0, starts.flatten(), out=factors)
        return factors.view(x.shape)

    def _pool_offsets(self, row: int) -> Tensor:
        """Offsets [H * G, Q] into the pool of one batch row's queries: where the noise of each starts."""
        if self._offsets is None or self._offsets[0] != row:
            assert self.noise is not None
            of, queries = self.observed.seeds[row : row + 1], self.inputs.query_positions[row : row + 1]
            heads = self.inputs.query.shape[1] * self.inputs.query.shape[2]
            self._offsets = row, self.noise.pool_offsets(of, self.observed.layer, heads, queries)[0]
        return self._offsets[1]

    def _noise(self, tile: Tile, groups: int) -> Tensor:
        """The tile's noise [heads, G, rows or 1, seen], by its definition."""
        inputs, at, heads = self.inputs, slice(tile.row, tile.row + 1), self.inputs.query.shape[1]
        assert self.noise is not None
        zeta = self.noise.draw(
            self.observed.seeds[at],
            self.observed.layer,
            heads * groups,
            inputs.query_positions[at, tile.rows],
            inputs.positions[at, :, tile.seen],
        )
        tile_noise: Tensor = zeta.unflatten(1, (heads, groups))[0, tile.heads]
        return tile_noise


BLOCK_ELEMENTS = 1 << 24  # logits per block: 64 MiB in float32


@torch.no_grad()
def column_sums(inputs: AttentionInputs, observed: ObservedRows) -> Tensor:
    """Column sums [B, H, S] float32, as `naive_column_sums`, in blocks of query rows of at most 64 MiB of logits.

    Up to float32 rounding: the order of summation is another.
    """
    b, h, g, count, _ = inputs.query.shape
    slots = inputs.keys.shape[2]
    block = max(16, BLOCK_ELEMENTS // max(1, b * h * g * slots))
    total = torch.zeros(b, h, slots, device=inputs.keys.device)
    for start in range(first_weighted_row(observed.spec, count, observed.rows_left), count, block):
        rows = slice(start, min(start + block, count))
        kv_len = inputs.kv_len(rows)
        seen = observed_probs(inputs, observed, rows, kv_len)
        total[..., :kv_len] += weighted_column_sums(seen, observed.weights[:, rows])
    return total


def first_weighted_row(spec: AttentionScoreSpec, count: int, rows_left: int | None) -> int:
    """The first of `count` query rows that weighs more than 0, taking no row for padding (padding is on the left).

    Reads no tensor, so that nothing waits for the device.
    """
    start = 0
    if spec.decay < 1:
        after = torch.arange(count - 1, -1, -1, dtype=torch.float32)
        start = int((torch.pow(torch.tensor(spec.decay), after) == 0).sum())
    if spec.last_rows is not None and rows_left is not None:
        start = max(start, min(count, count + rows_left - spec.last_rows))
    return start


class CrossLayerScore:
    """The score of every position, summed over layers (Keyformer's shared score, SpAtten's): [B, H, positions + 1].

    The last entry is for dead slots; the buffer lies on the first layer's device. In every forward (the whole prompt is
    one) the layers take their turn from the first to the last: a layer adds its column sums to the buffer and then
    evicts by what the buffer holds. So it knows the layers below it from this forward, and all layers from earlier
    ones. The papers do not state an order; this one is our choice.
    """

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self.reset()

    def reset(self) -> None:
        """Set all scores to 0."""
        self.buffer: Tensor | None = None
        self._decayed_at = -1

    def update(self, positions: Tensor, sums: Tensor, factor: Tensor | None) -> Tensor:
        """Add a layer's sums [B, H, S] of the slots at positions [B, H, S]; return the slots' shared scores [B, H, S].

        factor [B, 1, 1]: decay, applied once per forward; None: no decay.
        """
        buffer = self._room(sums)
        if self._decayed_at != self.sequence.seq_len:
            self._decayed_at = self.sequence.seq_len
            if factor is not None:
                buffer *= factor.to(buffer.device)
        trash = buffer.shape[-1] - 1
        index = torch.where(positions < 0, trash, positions).to(buffer.device)
        buffer.scatter_add_(-1, index, sums.to(buffer.device))
        buffer[..., trash] = 0
        return buffer.gather(-1, index).to(sums.device)

    def _room(self, sums: Tensor) -> Tensor:
        """The buffer, grown to the sequence's length."""
        need = self.sequence.seq_len + 1
        if self.buffer is None or self.buffer.shape[-1] < need:
            device = sums.device if self.buffer is None else self.buffer.device
            grown = torch.zeros(*sums.shape[:2], need + 64, device=device)
            if self.buffer is not None:
                grown[..., : self.buffer.shape[-1]] = self.buffer
            self.buffer = grown
        return self.buffer

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(0, rows.to(self.buffer.device))


def column_sums_by(how: str, inputs: AttentionInputs, observed: ObservedRows) -> Tensor:
    """Column sums [B, H, S] float32, computed as `how` says: naive, blocked or triton.

    The Triton kernels observe prompts only; decode rows are few and are observed in blocks.
    """
    if how == "naive":
        return naive_column_sums(inputs, observed)
    if how == "triton" and observed.rows_left is not None:
        first = first_weighted_row(observed.spec, inputs.query.shape[3], observed.rows_left)
        return triton_ops.triton_column_sums(inputs, observed, first)
    return column_sums(inputs, observed)


def pool_sums(spec: AttentionScoreSpec, sums: Tensor, sequence: SequenceState) -> Tensor:
    """Column sums [B, H, S] added up over the heads and the batch rows that share a score; same shape."""
    b, h, s = sums.shape
    if spec.pool_heads:
        sums = sums.sum(1, keepdim=True).expand(b, h, s)
    group = {"per_beam": 1, "per_sample": sequence.num_beams, "sum_all": b}[spec.batch]
    if group > 1:
        spec.check_lengths(sequence.prompt_lengths)
        sums = sums.view(b // group, group, h, s).sum(1, keepdim=True).expand(-1, group, -1, -1)
        sums = sums.reshape(b, h, s)
    return sums


def largest_ahead(sums: Tensor, width: int) -> Tensor:
    """The largest sum among every slot and the width - 1 slots behind it; sums [B, H, S], same shape."""
    return sums if width == 1 else max_pool1d(pad(sums, (0, width - 1), value=-torch.inf), width, stride=1)
