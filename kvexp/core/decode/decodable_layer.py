"""The part of `kvexp.core.eviction_layer.EvictionLayer` that the fast decode step uses, as a protocol."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvexp.core.cache_config import CacheConfig
from kvexp.core.eviction_backend import EvictionBackend
from kvexp.core.resolved_budget import ResolvedBudget
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots


class DecodableLayer(Protocol):
    """The eviction cache of one layer, once its prompt has ended."""

    @property
    def config(self) -> CacheConfig:
        """The configuration of the whole cache: method, budget, cadence, mode."""

    @property
    def index(self) -> int:
        """The layer's number, from 0."""

    seq_len: int  # columns seen, padding included

    @property
    def sequence(self) -> SequenceState:
        """Position ids and lengths, shared by all layers of the cache."""

    @property
    def score_spec(self) -> AttentionScoreSpec | None:
        """What the method sums up of the attention; None: nothing."""

    @property
    def resolved_budget(self) -> ResolvedBudget | None:
        """The budget in slots, row by row; None until the prompt has ended."""

    @property
    def backend(self) -> EvictionBackend:
        """How slots are dropped, and which slots are free."""

    @property
    def is_steady(self) -> bool:
        """Whether the next token fits into a free slot and its eviction frees exactly one slot again."""

    def require_slots(self) -> Slots:
        """The layer's slots; an AssertionError before the first forward."""

    def advance(self, key: Tensor, padding: Tensor | None) -> Tensor:
        """Join the forward in progress and return the position ids [B, Q] of its tokens; as `EvictionLayer.advance`."""

    def note_first_eviction(self) -> None:
        """Record for every row at which decode step its first slot was evicted."""
