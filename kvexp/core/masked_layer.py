"""The row-mask protocol of the papers: eviction simulated by a mask per layer and head inside one forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, apply_probs
from kvexp.errors import CacheError

# (logits [B, H * G, T, T] with -inf where causality or padding forbids, layer index) -> what each row may see
MaskFn = Callable[[Tensor, int], Tensor]


class MaskedLayer:
    """One layer of the row-mask protocol: rows 0..T-1 attend in one forward through a mask made of their full logits.

    mask_fn: (logits [B, H * G, T, T], layer number) -> bool mask of the same shape. A `LayerCache` that keeps nothing:
    a second forward is a CacheError. mask, probabilities [B, H * G, T, T]: left for inspection. kv_bytes: of all keys
    and values.
    """

    def __init__(self, mask_fn: MaskFn, index: int) -> None:
        self.mask_fn, self.index = mask_fn, index
        self.seq_len = self.kv_bytes = 0
        self.mask: Tensor | None = None
        self.probabilities: Tensor | None = None

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: beams continue a text, and this layer takes a text in one forward."""
        raise CacheError("the row-mask protocol judges a text in one forward: beams cannot be reordered")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Attend with all tokens of a text at once; arguments and result as in `LayerCache.forward`."""
        if self.seq_len:
            raise CacheError("the row-mask protocol judges a text in one forward: make a new RowMaskCache for each")
        b, h, count = key.shape[:3]
        self.seq_len, self.kv_bytes = count, key.nbytes + value.nbytes
        positions = torch.arange(count, device=key.device).expand(b, count)
        if padding is not None:
            positions = torch.where(padding.to(torch.bool), positions, -1)
        inputs = AttentionInputs(
            query=query.unflatten(1, (h, query.shape[1] // h)),
            keys=key,
            values=value,
            positions=positions[:, None],
            query_positions=positions,
            params=params,
        )
        x = inputs.logits(slice(0, count), count)
        self.mask = self.mask_fn(x.flatten(1, 2), self.index)
        x = x.masked_fill(~self.mask.view_as(x), -torch.inf)
        probabilities = torch.softmax(x, dim=-1)
        self.probabilities = probabilities.flatten(1, 2)
        return apply_probs(probabilities, value).flatten(1, 2)

    def reset(self) -> None:
        """Forget the text; another one may follow."""
        self.seq_len = 0
