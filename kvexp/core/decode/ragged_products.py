"""The two products of a fast decode step over packed keys and values: each head's own slots are read, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvexp.core.attention import SWAP_MIN_HEAD_DIM, AttentionParams
from kvexp.core.ragged_slots import RaggedSlots


class RaggedProducts:
    """Logits, probabilities and attention output of one new token per row, one pair of row and kv head after the other.

    slots: packed. Their buffers must stay the same (`Slots.key_buffer`). A pair's numbers depend on its own slots
    alone, so they do not change with its neighbours in the batch. What the methods take and give lies in buffers that
    the next step overwrites; their parts by pair are made once, as making them takes longer than a small product.
    """

    def __init__(self, slots: RaggedSlots) -> None:
        self.slots = slots
        self._keys, self._values = slots.packed("keys").parts, slots.packed("values").parts
        self._turned = [keys.t() for keys in self._keys]
        self._widths = slots.packed("values").widths
        self._logits = torch.zeros(0)

    def _make_buffers(self, query: Tensor, columns: int) -> None:
        """For queries [R * H, G, D] over so many columns."""
        pairs, groups, _ = query.shape
        self._logits = query.new_full((pairs, groups, columns), -torch.inf)
        exact = self._logits.dtype in (torch.float32, torch.float64)
        self._probabilities = torch.zeros_like(self._logits, dtype=None if exact else torch.float32)
        self._weights = self._probabilities.to(self._values[0].dtype)  # the same buffer where the dtypes are
        self._queries = torch.empty_like(query)
        self._logits_by_pair = _by_pair(self._logits, self._widths)
        self._weights_by_pair = _by_pair(self._weights, self._widths)
        self._queries_by_pair = list(self._queries)

    def logits(self, query: Tensor, newest: Tensor, params: AttentionParams) -> Tensor:
        """As `decode_logits`: query [R, H, G, 1, D] -> [R, H, G, 1, S] float32, -inf behind a head's own slots.

        newest [R, 1, 1]: position ids of the queries, for ALiBi. Float64 stays float64. The result is overwritten by
        the next call.
        """
        r, h, g, _, d = query.shape
        columns = self.slots.positions.shape[2]
        query = query.reshape(r * h, g, d)
        if params.upcast:
            query = query.float()
        if self._logits.shape != (r * h, g, columns) or self._logits.dtype != query.dtype:
            self._make_buffers(query, columns)
        self._queries.copy_(query)
        swapped = query.device.type == "cpu" and d >= SWAP_MIN_HEAD_DIM  # as in `qk_matmul`
        each = zip(self._logits_by_pair, self._queries_by_pair, self._keys, self._turned, strict=True)
        for into, one, keys, turned in each:
            if swapped:
                into.copy_(torch.mm(keys.to(one.dtype), one.t()).t())
            elif params.upcast:
                into.copy_(torch.mm(one, turned.to(one.dtype)))
            else:
                torch.mm(one, turned, out=into)
        x = self._logits.view(r, h, g, columns)
        x = x.mul_(params.scale) if x.dtype in (torch.float32, torch.float64) else x.float() * params.scale
        if params.alibi is not None:
            slopes = params.alibi.view(1, h, g, 1).to(x.device)
            x = x + slopes * (self.slots.positions - newest)[:, :, None].to(torch.float32)
        return x[..., None, :]

    def softmax(self, x: Tensor) -> Tensor:
        """Probabilities [R, H, G, 1, S] of the last call's logits, masked or not; overwritten by the next call."""
        return torch.softmax(x, dim=-1, out=self._probabilities.view(x.shape))

    def output(self) -> Tensor:
        """The values weighted by the last call's probabilities: [R, H, G, 1, Dv], in the dtype of the values."""
        r, h, _ = self.slots.positions.shape
        pairs, groups, _ = self._weights.shape
        if self._weights is not self._probabilities:
            self._weights.copy_(self._probabilities)
        out = self._weights.new_empty(pairs, groups, self._values[0].shape[-1])
        for into, weights, values in zip(out.unbind(0), self._weights_by_pair, self._values, strict=True):
            torch.mm(weights, values, out=into)
        return out.view(r, h, groups, 1, -1)


def _by_pair(buffer: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Views [G, width] of a buffer [R * H, G, S], one for each pair."""
    return [row[:, :width] for row, width in zip(buffer, widths, strict=True)]
