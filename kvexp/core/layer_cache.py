"""Protocols of one attention layer's cache: what every kind offers, and what kinds with batch rows offer besides.

The kinds: `EvictionLayer` and `RetrievalLayer` (a cache of one method), `MaskedLayer` (one masked forward),
`MultiLayer` (one layer of several caches) and diagnose's `TwinLayer` (a method's layer and the full cache's).
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor

from kvexp.core.attention import AttentionParams
from kvexp.core.slots import Slots


class LayerCache(Protocol):
    """The cache of one attention layer: it holds keys and values and attends to them."""

    @property
    def seq_len(self) -> int:
        """Tokens seen so far, padding included."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Take Q new tokens and attend.

        query [B, H * G, Q, D] and key [B, H, Q, D] with positions applied as the model does, value [B, H, Q, Dv];
        padding: [B, columns so far] with 0 for padding, or None. Returns [B, H * G, Q, Dv].
        """

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: every row stays one of its own prompt (beams)."""

    def reset(self) -> None:
        """Drop everything held; the next forward starts a prompt."""


class RowsCache(LayerCache, Protocol):
    """The cache of one layer under one method, whose batch rows can be inspected and copied into another cache."""

    slots: Slots | None
    first_eviction: list[int | None]

    @property
    def retained_attention(self) -> Tensor | None:
        """[B]: share of the last prompt query's attention whose slots survived the first eviction; None without one."""

    @property
    def heavy_buffers(self) -> list[Any]:
        """The large buffers: a copy of the cache leaves them out, `copy_rows_from` copies the wanted rows of them."""

    def copy_rows_from(self, other: Self, rows: Tensor) -> None:
        """Copy what batch rows `rows` [n] of another layer hold; that layer stays as it is."""

    def kept_positions(self, rows: slice = ...) -> list[list[list[int]]]:
        """Position ids held (or last attended to), per batch row and kv head, ascending."""
