"""What a decode step needs to know of a layer's cache, which is `kvexp.core.eviction_layer.EvictionLayer`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvexp.core.cache_config import CacheConfig
from kvexp.core.eviction_backend import EvictionBackend, ResolvedBudget
from kvexp.core.score_spec import AttentionScoreSpec
from kvexp.core.sequence import SequenceState
from kvexp.core.slots import Slots


class DecodableLayer(Protocol):
    """One layer's cache in the middle of decoding."""

    @property
    def config(self) -> CacheConfig:
        """What was asked for."""

    @property
    def index(self) -> int:
        """Which layer it is."""

    @property
    def timeline(self) -> SequenceState:
        """Of all layers of the cache."""

    @property
    def view(self) -> AttentionScoreSpec | None:
        """What of attention is accumulated."""

    @property
    def quota(self) -> ResolvedBudget | None:
        """Slots by row, once resolved."""

    @property
    def mode(self) -> EvictionBackend:
        """How slots are dropped."""

    @property
    def steady(self) -> bool:
        """Will the next real token overwrite a free slot, and its eviction free one again?"""

    def held(self) -> Slots:
        """The slots."""

    def join(self, key: Tensor, padding: Tensor | None) -> Tensor:
        """Take part in the forward in progress: position ids [B, Q]."""

    def note_losses(self) -> None:
        """Remember, row by row, when the first slot was lost."""
