"""An eviction backend that does what another one does and records what is evicted, and by what score."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvexp.core import EvictionLayer, SequenceState
from kvexp.core.backends import EvictionBackend
from kvexp.core.budget_resolution import ResolvedBudget
from kvexp.core.slots import Slots, keep_order
from kvexp.hf import EvictionCache


@dataclass
class EvictionRecord:
    """Every eviction of one generation, in the order of layers and steps; each column is one flat tensor per call.

    step: decode tokens seen (0: the end of the prompt). score: the method's priority, which for most is what they have
    accumulated. rank: place in that order, 1 kept longest, protected slots before all others; of: how many slots there
    were. threshold: the lowest score that was kept without protection, NaN where there was none.
    """

    columns: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, **columns: Tensor) -> None:
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values.cpu())

    def table(self) -> dict[str, Tensor]:
        """Column -> one value per eviction, sorted by step, layer, head and position."""
        if not self.columns:
            return {name: torch.zeros(0, dtype=kind) for name, kind in COLUMNS.items()}
        whole = {name: torch.cat(self.columns[name]).to(kind) for name, kind in COLUMNS.items()}
        index = torch.arange(len(whole["step"]))
        for name in ("position", "head", "layer", "step"):
            index = index[whole[name][index].argsort(stable=True)]
        return {name: values[index] for name, values in whole.items()}


COLUMNS = {
    "step": torch.int32,
    "layer": torch.int16,
    "head": torch.int16,
    "position": torch.int32,
    "score": torch.float32,
    "rank": torch.int32,
    "of": torch.int32,
    "threshold": torch.float32,
}


class WatchedBackend(EvictionBackend):
    """The backend `inner`, with its evictions recorded.

    For a batch of one row; what a simulation hides for one step only (H2O's released mask) does not count as evicted.
    """

    def __init__(self, inner: EvictionBackend, layer: int, sequence: SequenceState, into: EvictionRecord) -> None:
        self.inner, self.layer, self.sequence, self.into = inner, layer, sequence, into

    def next_slot(self) -> Tensor | None:
        return self.inner.next_slot()

    def reset_layout(self) -> None:
        self.inner.reset_layout()

    def select_rows(self, rows: Tensor) -> None:
        self.inner.select_rows(rows)

    def evict(
        self,
        slots: Slots,
        priority: Tensor,
        protected: Tensor,
        resolved: ResolvedBudget,
        hidden_next_step: Tensor | None,
    ) -> None:
        held = held_slots(slots)
        positions = slots.positions[:, :, : slots.length].masked_fill(~held, -1)
        places = places_of(priority, positions, protected)
        self.inner.evict(slots, priority, protected, resolved, hidden_next_step)
        gone = held & ~still_held(slots, positions)
        free = (held & ~gone & ~protected)[0]
        lowest = priority[0].masked_fill(~free, torch.inf).amin(-1)
        threshold = torch.where(free.any(-1), lowest, torch.nan)
        head, slot = gone[0].nonzero(as_tuple=True)
        one = torch.ones_like(head)
        self.into.add(
            step=one * (self.sequence.seq_len - (self.sequence.prompt_columns or 0)),
            layer=one * self.layer,
            head=head,
            position=positions[0, head, slot],
            score=priority[0, head, slot],
            rank=places[0, head, slot],
            of=held[0].sum(-1)[head],
            threshold=threshold[head],
        )


def watch(cache: EvictionCache, into: EvictionRecord) -> None:
    """Record every eviction of this new cache of one row in `into`."""
    for layer, state in enumerate(cache.layer_states):
        if isinstance(state, EvictionLayer):
            state.backend = WatchedBackend(state.backend, layer, cache.sequence, into)


def held_slots(slots: Slots) -> Tensor:
    """[B, H, S] bool: the slots that are not evicted; a simulation (mode=mask) marks the others by their score."""
    live = slots.valid()
    return live if slots.visible is None else live & (slots.score[:, :, : slots.length] > -torch.inf)


def still_held(slots: Slots, positions: Tensor) -> Tensor:
    """[B, H, S] bool: of positions [B, H, S] that were held, those that are held now, wherever their slot is."""
    current = slots.positions[:, :, : slots.length].masked_fill(~held_slots(slots), -1)
    last = int(positions.max()) + 1
    table = torch.zeros(*current.shape[:2], last + 1, dtype=torch.bool, device=current.device)
    table.scatter_(-1, torch.where(current < 0, last, current), True)
    return table.gather(-1, positions.clamp(min=0)) & (positions >= 0)


def places_of(priority: Tensor, positions: Tensor, protected: Tensor) -> Tensor:
    """[B, H, S]: place of every slot in the order of keeping, from 1."""
    index = keep_order(priority, positions, protected & (positions >= 0))
    places = torch.arange(1, index.shape[-1] + 1, device=index.device).expand_as(index)
    return torch.empty_like(index).scatter_(-1, index, places)
