"""A record of what a generation evicts, and by what score."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvexp.core import EvictionLayer, SequenceState
from kvexp.core.backends import RecordingBackend, SlotsBefore
from kvexp.core.slot_order import keep_order
from kvexp.hf import EvictionCache


class EvictionRecord:
    """Every eviction of one generation, sorted by step, layer, head and position.

    step: decode tokens seen (0: the end of the prompt). score: the method's priority, which for most is what they have
    accumulated. rank: place in that order, 1 kept longest, protected slots before all others; of: how many slots there
    were. threshold: the lowest score that was kept without protection, NaN where there was none.
    """

    kinds: ClassVar[dict[str, torch.dtype]] = {
        "step": torch.int32,
        "layer": torch.int16,
        "head": torch.int16,
        "position": torch.int32,
        "score": torch.float32,
        "rank": torch.int32,
        "of": torch.int32,
        "threshold": torch.float32,
    }

    def __init__(self) -> None:
        self.columns = {name: [torch.zeros(0, dtype=kind)] for name, kind in self.kinds.items()}

    def add(self, **columns: Tensor) -> None:
        """Add the evictions of one layer at one step: a flat tensor per column."""
        for name, values in columns.items():
            self.columns[name].append(values.cpu().to(self.kinds[name]))

    def table(self) -> dict[str, np.ndarray]:
        """Column -> one value per eviction."""
        whole = {name: torch.cat(parts) for name, parts in self.columns.items()}
        order = np.lexsort([whole[name].numpy() for name in ("position", "head", "layer", "step")])
        return {name: values.numpy()[order] for name, values in whole.items()}


def watch(cache: EvictionCache, into: EvictionRecord) -> None:
    """Record every eviction of this new cache of one row in `into`.

    What a simulation hides for one step only (H2O's released mask) does not count as evicted.
    """
    for layer, state in enumerate(cache.layer_states):
        if isinstance(state, EvictionLayer):
            state.backend = RecordingBackend(state.backend, partial(_record, into, layer, cache.sequence))


def _record(into: EvictionRecord, layer: int, sequence: SequenceState, eviction: SlotsBefore) -> None:
    """Add one layer's eviction, of a cache of one row, to the record."""
    held, positions, priority, protected = (
        values[0] for values in (eviction.held, eviction.positions, eviction.priority, eviction.protected)
    )
    free = eviction.kept[0] & ~protected
    lowest = priority.masked_fill(~free, torch.inf).amin(-1)
    threshold = torch.where(free.any(-1), lowest, torch.nan)
    index = keep_order(eviction.priority, eviction.positions, eviction.protected & eviction.held)[0]
    order = torch.arange(1, index.shape[-1] + 1, device=index.device)
    places = torch.empty_like(index).scatter_(-1, index, order.expand_as(index))
    head, slot = (held & ~eviction.kept[0]).nonzero(as_tuple=True)
    ones = torch.ones_like(head)
    into.add(
        step=ones * (sequence.seq_len - (sequence.prompt_columns or 0)),
        layer=ones * layer,
        head=head,
        position=positions[head, slot],
        score=priority[head, slot],
        rank=places[head, slot],
        of=held.sum(-1)[head],
        threshold=threshold[head],
    )
