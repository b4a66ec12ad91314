"""What stands behind one attention layer: the part that every kind of cache shares, and the part of those with rows.

The kinds: `EvictionLayer` and `RetrievalState` (a cache of one method), `MaskedLayer` (one masked forward),
`MultiLayer` (one layer of several caches) and diagnose's `Beside` (a method's layer and the full cache's).
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor

from kvexp.core.attention import AttentionParams
from kvexp.core.slots import Slots


class LayerCache(Protocol):
    """What attends for one layer of a model, and holds its keys and values."""

    @property
    def columns(self) -> int:
        """Tokens seen so far, padding included."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, geometry: AttentionParams, padding: Tensor | None
    ) -> Tensor:
        """Take Q new tokens and attend.

        query [B, H * G, Q, D] and key [B, H, Q, D] with positions applied as the model does, value [B, H, Q, Dv];
        padding: [B, columns so far] with 0 for padding, or None. Returns [B, H * G, Q, Dv].
        """

    def select_rows(self, rows: Tensor, *, same_prompts: bool = False) -> None:
        """Keep, repeat or reorder batch rows; same_prompts: every row stays one of its own prompt (beams)."""

    def reset(self) -> None:
        """Forget everything; the next forward starts a prompt."""


class RowsCache(LayerCache, Protocol):
    """A layer's cache of one method, whose rows can be looked at and taken into another cache."""

    slots: Slots | None
    first_eviction: list[int | None]

    @property
    def attention_kept(self) -> Tensor | None:
        """[B]: share of the last prompt query's attention whose slots survived the first eviction, if there was one."""

    @property
    def large(self) -> list[Any]:
        """What a copy of the whole cache leaves out and `take_over` brings."""

    def take_over(self, other: Self, rows: Tensor) -> None:
        """Go on from these rows of another layer, which stays as it is."""

    def kept(self, rows: slice = ...) -> list[list[list[int]]]:
        """Position ids held (or last attended to), per batch row and kv head, ascending."""
