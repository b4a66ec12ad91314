"""The papers' row-mask protocol: eviction simulated by one mask per layer and head inside a single forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, attend_with
from kvexp.errors import CacheError

# (logits [B, H * G, T, T] with -inf where causality or padding forbids, layer index) -> what each row may see
Rule = Callable[[Tensor, int], Tensor]


class MaskedLayer:
    """One layer: rows 0..T-1 attend in one forward through the mask that `rule` makes of their full logits.

    A `LayerCache` that keeps nothing: a second forward is refused. `mask` and `probabilities`
    [B, H * G, T, T] stay for inspection. `kv_bytes`: of all keys and values, which a simulation holds.
    """

    def __init__(self, rule: Rule, index: int) -> None:
        self.rule, self.index = rule, index
        self.columns = self.kv_bytes = 0
        self.mask: Tensor | None = None
        self.probabilities: Tensor | None = None

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Beams would be continued, and a text is judged in one forward."""
        raise CacheError("the row-mask protocol judges a text in one forward: beams cannot be reordered")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """As `LayerCache.forward`, for the whole text at once."""
        if self.columns:
            raise CacheError("the row-mask protocol judges a text in one forward: make a new RowMaskCache for each")
        b, h, count = key.shape[:3]
        self.columns, self.kv_bytes = count, key.nbytes + value.nbytes
        columns = torch.arange(count, device=key.device).expand(b, count)
        if padding is not None:
            columns = torch.where(padding.to(torch.bool), columns, -1)
        sight = AttentionInputs(
            query=query.unflatten(1, (h, query.shape[1] // h)),
            keys=key,
            values=value,
            positions=columns[:, None],
            query_positions=columns,
            geometry=geometry,
        )
        x = sight.logits(slice(0, count), count)
        self.mask = self.rule(x.flatten(1, 2), self.index)
        x = x.masked_fill(~self.mask.view_as(x), -torch.inf)
        probabilities = torch.softmax(x, dim=-1)
        self.probabilities = probabilities.flatten(1, 2)
        return attend_with(probabilities, value).flatten(1, 2)

    def reset(self) -> None:
        """Ready for another text."""
        self.columns = 0
