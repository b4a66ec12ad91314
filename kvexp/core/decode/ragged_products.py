"""The two products of a fast decode step over packed keys and values: each head's own slots are read, and no others."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import SWAP_MIN_HEAD_DIM, AttentionParams
from kvexp.core.ragged_slots import RaggedSlots


class RaggedProducts:
    """Logits and attention output of one new token per row, one pair of row and kv head after the other.

    slots: packed. Their buffers must stay the same (`Slots.key_buffer`). A pair's numbers depend on its own slots
    alone, so they do not change with its neighbours in the batch.
    """

    def __init__(self, slots: RaggedSlots) -> None:
        self.slots = slots
        self._keys, self._values = slots.packed("keys").parts, slots.packed("values").parts
        self._turned = [keys.t() for keys in self._keys]
        self._widths = slots.packed("values").widths
        self._logits: list[Tensor] = []
        self._buffer = torch.zeros(0)

    def logits(self, query: Tensor, newest: Tensor, params: AttentionParams) -> Tensor:
        """As `decode_logits`: query [R, H, G, 1, D] -> [R, H, G, 1, S] float32, -inf behind a head's own slots.

        newest [R, 1, 1]: position ids of the queries, for ALiBi. Float64 stays float64. The result is overwritten by
        the next call.
        """
        r, h, g, _, d = query.shape
        columns = self.slots.positions.shape[2]
        if params.upcast:
            query = query.float()
        if self._buffer.shape != (r * h, g, columns) or self._buffer.dtype != query.dtype:
            self._buffer = query.new_full((r * h, g, columns), -torch.inf)
            parts = zip(self._buffer, self._widths, strict=True)
            self._logits = [row[:, :width] for row, width in parts]
        swapped = query.device.type == "cpu" and d >= SWAP_MIN_HEAD_DIM  # as in `qk_matmul`
        queries = query.reshape(r * h, g, d).unbind(0)
        for into, one, keys, turned in zip(self._logits, queries, self._keys, self._turned, strict=True):
            if swapped:
                into.copy_(torch.mm(keys.to(one.dtype), one.t()).t())
            elif params.upcast:
                into.copy_(torch.mm(one, turned.to(one.dtype)))
            else:
                torch.mm(one, turned, out=into)
        x = self._buffer.view(r, h, g, columns)
        x = x.mul_(params.scale) if x.dtype in (torch.float32, torch.float64) else x.float() * params.scale
        if params.alibi is not None:
            slopes = params.alibi.view(1, h, g, 1).to(x.device)
            x = x + slopes * (self.slots.positions - newest)[:, :, None].to(torch.float32)
        return x[..., None, :]

    def output(self, probabilities: Tensor) -> Tensor:
        """As `apply_probs`: probabilities [R, H, G, 1, S] float32 -> [R, H, G, 1, Dv], in the dtype of the values."""
        r, h, g, _, _ = probabilities.shape
        like: Tensor = self._values[0]
        out = like.new_empty(r * h, g, like.shape[-1])
        rows = probabilities.to(like.dtype).reshape(r * h, g, -1).unbind(0)
        for into, row, values, width in zip(out.unbind(0), rows, self._values, self._widths, strict=True):
            torch.mm(row.narrow(1, 0, width), values, out=into)
        return out.view(r, h, g, 1, like.shape[-1])
