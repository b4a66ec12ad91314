"""One layer of a calibration pass: ordinary causal attention over one sequence, whose queries are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from kvexp.core.attention import AttentionInputs, AttentionParams, sdpa_attention
from kvexp.core.head_scores import HeadScoreSums
from kvexp.core.query_calibration import QuerySums
from kvexp.errors import CacheError


class CalibrationLayer:
    """A `LayerCache` that keeps nothing but sums over queries: each forward is a whole sequence, `reset` between them.

    sums, head_scores: over all sequences so far.
    """

    def __init__(self) -> None:
        self.sums, self.head_scores, self.seq_len = QuerySums(), HeadScoreSums(), 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Attend with all tokens of one sequence, B = 1, no padding; arguments and result of `LayerCache.forward`."""
        if self.seq_len or key.shape[0] > 1 or (padding is not None and not bool(padding.all())):
            raise CacheError("a calibration pass takes one sequence in one forward, without padding")
        h, self.seq_len = key.shape[1], key.shape[2]
        positions = torch.arange(self.seq_len, device=key.device)
        grouped = query.unflatten(1, (h, query.shape[1] // h))
        self.sums.add(grouped[0], positions, params.rope)
        self.head_scores.add(grouped[0], key[0], positions, params)
        inputs = AttentionInputs(
            query=grouped,
            keys=key,
            values=value,
            positions=positions[None, None],
            query_positions=positions[None],
            params=params,
            in_column_order=True,
            padded=False,
        )
        return sdpa_attention(inputs).flatten(1, 2)

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Always a CacheError: a calibration pass has one row."""
        raise CacheError("a calibration pass takes one sequence: rows cannot be reordered")

    def reset(self) -> None:
        """The next forward is another sequence; the sums stay."""
        self.seq_len = 0
