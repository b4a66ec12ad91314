"""A mode of eviction that does what another mode does and writes down what goes, and by what score."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvexp.core import EvictionLayer, SequenceState
from kvexp.core.eviction_backend import EvictionBackend, ResolvedBudget
from kvexp.core.select import order
from kvexp.core.slots import Slots
from kvexp.models import EvictionCache


@dataclass
class Evictions:
    """Every eviction of one generation, in the order of layers and steps; each column is one flat tensor per call.

    step: decode tokens seen (0: the end of the prompt). score: the value the method orders slots by, which for most is
    what they have accumulated. rank: place in that order, 1 kept longest, protected slots before all others; of: how
    many slots there were. threshold: the lowest score that was kept without protection, NaN where there was none.
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


class Watching(EvictionBackend):
    """`mode`, observed. For a batch of one row; what a simulation hides for one step only (H2O's limbo) is not gone."""

    def __init__(self, mode: EvictionBackend, layer: int, timeline: SequenceState, into: Evictions) -> None:
        self.mode, self.layer, self.timeline, self.into = mode, layer, timeline, into

    def place(self) -> Tensor | None:
        return self.mode.place()

    def loosen(self) -> None:
        self.mode.loosen()

    def select_rows(self, rows: Tensor) -> None:
        self.mode.select_rows(rows)

    def evict(self, slots: Slots, rank: Tensor, guard: Tensor, quota: ResolvedBudget, limbo: Tensor | None) -> None:
        held = held_slots(slots)
        positions = slots.positions[:, :, : slots.used].masked_fill(~held, -1)
        places = places_of(rank, positions, guard)
        self.mode.evict(slots, rank, guard, quota, limbo)
        gone = held & ~still_held(slots, positions)
        free = (held & ~gone & ~guard)[0]
        lowest = rank[0].masked_fill(~free, torch.inf).amin(-1)
        threshold = torch.where(free.any(-1), lowest, torch.nan)
        head, slot = gone[0].nonzero(as_tuple=True)
        one = torch.ones_like(head)
        self.into.add(
            step=one * (self.timeline.end - (self.timeline.prompt_columns or 0)),
            layer=one * self.layer,
            head=head,
            position=positions[0, head, slot],
            score=rank[0, head, slot],
            rank=places[0, head, slot],
            of=held[0].sum(-1)[head],
            threshold=threshold[head],
        )


def watch(cache: EvictionCache, into: Evictions) -> None:
    """From now on `into` is told of every eviction of this new cache of one row."""
    for layer, state in enumerate(cache.states):
        if isinstance(state, EvictionLayer):
            state.mode = Watching(state.mode, layer, cache.timeline, into)


def held_slots(slots: Slots) -> Tensor:
    """[B, H, S] bool: the slots that are not evicted; a simulation (mode=mask) marks the others by their score."""
    live = slots.live()
    return live if slots.visible is None else live & (slots.score[:, :, : slots.used] > -torch.inf)


def still_held(slots: Slots, positions: Tensor) -> Tensor:
    """[B, H, S] bool: of positions [B, H, S] that were held, those that are held now, wherever their slot is."""
    now = slots.positions[:, :, : slots.used].masked_fill(~held_slots(slots), -1)
    last = int(positions.max()) + 1
    table = torch.zeros(*now.shape[:2], last + 1, dtype=torch.bool, device=now.device)
    table.scatter_(-1, torch.where(now < 0, last, now), True)
    return table.gather(-1, positions.clamp(min=0)) & (positions >= 0)


def places_of(rank: Tensor, positions: Tensor, guard: Tensor) -> Tensor:
    """[B, H, S]: place of every slot in the order of keeping, from 1."""
    index = order(rank, positions, guard & (positions >= 0))
    places = torch.arange(1, index.shape[-1] + 1, device=index.device).expand_as(index)
    return torch.empty_like(index).scatter_(-1, index, places)
