"""A second pass over the prompt, before its eviction: it is fed again, and what those queries look at is observed.

The model attends as always: to the whole prompt in the cache and to what is fed. What is observed is KVzip's attention
(arXiv:2505.23416, algorithm 1): a softmax over the slots of the chunk being repeated, the tokens before `start`, and
the fed tokens, so that a long context does not thin it. Nothing that is fed stays in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvexp.core.attention import (
    MAX_TILE_LOGITS,
    AttentionInputs,
    AttentionParams,
    attention_probs,
    compute_attention,
    expanded,
)
from kvexp.core.method import SinkScore
from kvexp.core.observe import BLOCK_ELEMENTS
from kvexp.core.slot_order import INT64_MAX
from kvexp.core.slots import Slots
from kvexp.util.errors import CacheError


@dataclass
class RepeatedChunk:
    """One forward of the second pass, of the n batch rows that have such a chunk; the fed tokens padded on the left.

    rows [n]: indices of these batch rows. positions [n, Q]: position ids of the fed tokens, -1 for padding.
    before [n, K], repeated [n, C]: columns of the prompt that hold the tokens before `start` and the chunk's; -1 where
    a row has fewer. input_norms [n, Q] float32: of the attention layer's input, set before each layer; None: unused.
    """

    rows: Tensor
    positions: Tensor
    before: Tensor
    repeated: Tensor
    input_norms: Tensor | None = None


class SecondPassLayer:
    """One layer's slots as a second pass sees them, a `LayerCache` whose forwards store nothing.

    slots: of the prompt, none evicted, slot i holding column i. group: query heads per kv head. observes: whether this
    layer's attention is wanted; sink: as of `AttentionScoreSpec`; queries: as of `SecondPass`. chunk: the one in
    progress. attention [B, H, G, S] float32: the largest attention of any fed query to each slot so far, 0 where no
    chunk held it. peak_bytes: of keys and values copied for one forward.
    """

    def __init__(
        self, slots: Slots, group: int, *, observes: bool, sink: SinkScore = "applied", queries: int = 0
    ) -> None:
        if not slots.same_order:
            raise CacheError("a second pass needs the prompt as it came, and slots of it were evicted")
        self.slots, self.observes, self.sink, self.queries = slots, observes, sink, queries
        self._sampled: list[Tensor] = []  # logits of the queries taken so far, chunk by chunk
        self.chunk: RepeatedChunk | None = None
        b, h = slots.keys.shape[:2]
        self.attention = torch.zeros(b, h, group if observes else 0, slots.length, device=slots.keys.device)
        self.peak_bytes = 0

    @property
    def seq_len(self) -> int:
        """Columns of the prompt, padding included."""
        return self.slots.length

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`, for the rows of the chunk in progress; padding is known from its positions."""
        assert self.chunk is not None
        rows, fed = self.chunk.rows.to(key.device), self.chunk.positions.to(key.device)
        held = [states[:, :, : self.seq_len] for states in (self.slots.keys, self.slots.values)]
        places = self.slots.positions[:, :1, : self.seq_len]
        if len(rows) < len(places):
            held, places = [states[rows] for states in held], places[rows]
        held_and_fed = AttentionInputs(
            query=query.unflatten(1, (key.shape[1], -1)),
            keys=torch.cat([held[0], key], dim=2),
            values=torch.cat([held[1], value], dim=2),
            positions=torch.cat([places, fed[:, None]], dim=-1),
            query_positions=fed,
            params=params,
            in_column_order=True,
        )
        self.peak_bytes = max(self.peak_bytes, held_and_fed.keys.nbytes + held_and_fed.values.nbytes)
        inputs = expanded(held_and_fed)
        if self.observes:
            self._observe(inputs, inputs.keys[:, :, self.seq_len :], rows)
            self._sample(inputs, rows)
        return compute_attention(inputs).flatten(1, 2)

    def _observe(self, inputs: AttentionInputs, key: Tensor, rows: Tensor) -> None:
        """Take the chunk's attention into the largest; inputs: of the whole prompt; key [n, H, Q, D]: of the fed."""
        assert self.chunk is not None
        before, repeated = (columns.to(key.device) for columns in (self.chunk.before, self.chunk.repeated))
        near = inputs_near(inputs, torch.cat([before, repeated], dim=1), key)
        norms = self.chunk.input_norms
        if self.sink == "renormalised":
            near = replace(near, params=replace(near.params, sinks=None))
        largest = largest_attention(near, before.shape[1], repeated.shape[1], norms)
        # Columns that a row lacks (-1) are given a place of their own behind the last, which is thrown away.
        index = torch.where(repeated < 0, self.seq_len, repeated)[:, None, None].expand_as(largest)
        placed = torch.zeros(*largest.shape[:3], self.seq_len + 1, device=key.device).scatter(-1, index, largest)
        self.attention[rows] = torch.maximum(self.attention[rows], placed[..., :-1])

    def _sample(self, inputs: AttentionInputs, rows: Tensor) -> None:
        """Take the logits over the prompt of fed queries of the chunk; inputs, rows: as of `_observe`.

        `queries` for each prompt's length of what is fed, evenly spread, or all; by the row's own prompt, behind which
        what is fed stands, so that no row depends on its neighbours.
        """
        if not self.queries:
            return
        fed = inputs.query_positions
        prompt = fed.masked_fill(fed < 0, INT64_MAX).amin(1, keepdim=True)
        place = fed - prompt
        taken = (fed >= 0) & ((place + 1) * self.queries // prompt > place * self.queries // prompt)
        order = taken.int().argsort(dim=1, descending=True, stable=True)[:, : int(taken.sum(1).max())]
        positions = fed.gather(1, order).masked_fill(~taken.gather(1, order), -1)
        query = inputs.query.take_along_dim(order[:, None, None, :, None], dim=3)
        x = replace(inputs, query=query, query_positions=positions).logits(slice(None), self.seq_len)
        x = x.masked_fill(positions[:, None, None, :, None] < 0, -torch.inf)
        whole = torch.full((len(self.slots.positions), *x.shape[1:]), -torch.inf, dtype=x.dtype, device=x.device)
        whole[rows] = x
        self._sampled.append(whole)

    @property
    def logits(self) -> Tensor | None:
        """Logits [B, H, G, n, S] over the prompt of the queries taken, -inf for padding; None: none were wanted."""
        return torch.cat(self._sampled, dim=3) if self._sampled else None

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: the rows belong to the cache whose prompt is repeated."""
        raise CacheError("a second pass over a prompt keeps its rows")

    def reset(self) -> None:
        """Always a CacheError: the slots belong to the cache whose prompt is repeated."""
        raise CacheError("a second pass over a prompt empties nothing")


def inputs_near(inputs: AttentionInputs, columns: Tensor, key: Tensor) -> AttentionInputs:
    """Inputs with the same queries over the slots at columns [n, K] of the prompt (-1: none) and the fed tokens alone.

    key [n, H, Q, D]: of the fed tokens, the last Q of `inputs`. Values are left out.
    """
    index = columns.clamp_min(0)
    picked = inputs.keys.gather(2, index[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[-1]))
    places = inputs.positions[:, 0].gather(1, index).masked_fill(columns < 0, -1)
    return AttentionInputs(
        query=inputs.query,
        keys=torch.cat([picked, key], dim=2),
        values=key[:, :, :0],
        positions=torch.cat([places, inputs.query_positions], dim=1)[:, None],
        query_positions=inputs.query_positions,
        params=inputs.params,
        in_column_order=True,
    )


def largest_attention(inputs: AttentionInputs, first: int, number: int, norms: Tensor | None) -> Tensor:
    """The largest attention [n, H, G, number] float32 of any query to slots `first` to `first + number` - 1.

    norms [n, Q]: what each query's attention is divided by; None: 1. Computed in blocks of query rows, so that memory
    is O(block * slots), and on a CPU stays in its cache; a maximum does not depend on them.
    """
    n, h, g, count, _ = inputs.query.shape
    most = MAX_TILE_LOGITS if inputs.keys.device.type == "cpu" else BLOCK_ELEMENTS
    block = max(16, most // (n * h * g * inputs.keys.shape[2]))
    largest = torch.zeros(n, h, g, number, device=inputs.keys.device)
    weights = (inputs.query_positions >= 0).float()
    if norms is not None:
        weights = weights / norms.to(weights.device).clamp_min(torch.finfo(torch.float32).tiny)
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        probabilities = attention_probs(inputs.logits(rows, inputs.kv_len(rows)), inputs.params.sinks)
        weighted = probabilities[..., first : first + number].float() * weights[:, None, None, rows, None]
        largest = torch.maximum(largest, weighted.amax(3))
    return largest
