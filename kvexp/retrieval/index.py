"""What a retrieval method remembers of one layer: tensors that the core grows, ships and moves with the rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.retrieval.lanes import Lanes, on_host


@dataclass
class _Entry:
    """tensor [B, ...]; per: positions per place along axis 2 (0: it does not grow); ship: lives at home."""

    tensor: Tensor
    per: int = 0
    ship: bool = False


class Index:
    """Named tensors with the batch first, and notes per row. Shipped ones live at home and come over at every step."""

    def __init__(self) -> None:
        self.lanes: Lanes | None = None  # set once it is known where the prompt is
        self.entries: dict[str, _Entry] = {}
        self.notes: dict[str, list[Any]] = {}  # what a row of results should say, per batch row
        self._on_its_way: dict[str, tuple[Tensor, torch.cuda.Event | None]] = {}
        self._to_write: list[tuple[str, list[int], Tensor, torch.cuda.Event | None]] = []

    def put(self, name: str, tensor: Tensor, *, per: int = 0, home: torch.device | None = None) -> None:
        """Remember a tensor [B, ...].

        per: axis 2 has a place for every so many positions and grows with them (0: it does not grow).
        home: keep it there, in pinned memory beside a GPU, and copy it over at every step; None: it stays where it is.
        """
        if home is not None and self.lanes is not None and self.lanes.device != home:
            tensor = on_host(tuple(tensor.shape), tensor, home, pinned=True)[0].copy_(tensor)
        self.entries[name] = _Entry(tensor, per, home is not None)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Tensor:
        """The tensor on the device. A shipped one is a copy for this step, of which the next one knows nothing."""
        entry, lanes = self.entries[name], self.lanes
        if not entry.ship or lanes is None or entry.tensor.device == lanes.device:
            return entry.tensor
        self.prefetch()
        tensor, event = self._on_its_way.pop(name)
        lanes.join(event, tensor)
        return tensor

    def write(self, name: str, at: list[int], value: Tensor) -> None:
        """Put value [B, H, ...] at place at[i] of axis 2 for every row i; what goes home is there at the next step."""
        entry = self.entries[name]
        if max(at) >= entry.tensor.shape[2]:
            self.grow(max(at) * max(entry.per, 1) + 1)
        value, lanes = value.to(entry.tensor.dtype), self.lanes
        if not entry.ship or lanes is None or entry.tensor.device == lanes.device:
            entry.tensor[torch.arange(len(at)), :, torch.tensor(at)] = value
            return
        part, _ = on_host(tuple(value.shape), value, entry.tensor.device, pinned=True)
        lanes.leaving(value)
        with lanes.outwards():
            part.copy_(value, non_blocking=True)
        self._to_write.append((name, at, part, lanes.mark_out()))

    def settle(self) -> None:
        """Store what has been on its way home."""
        for name, at, part, event in self._to_write:
            if event is not None:
                event.synchronize()
            self.entries[name].tensor[torch.arange(len(at)), :, torch.tensor(at)] = part
        self._to_write.clear()

    def grow(self, positions: int) -> None:
        """Make room for so many positions and some more; new places hold zeros."""
        self.settle()
        for entry in self.entries.values():
            need = -(-(positions + 63) // entry.per) if entry.per else 0
            if entry.per and positions > entry.tensor.shape[2] * entry.per:
                old = entry.tensor
                new = old.new_zeros(*old.shape[:2], need, *old.shape[3:])
                new[:, :, : old.shape[2]] = old
                entry.tensor = new

    # -- shipping -----------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start copying what is shipped to the device, beside the computation of the layer before."""
        self.settle()
        for name, entry in self.entries.items():
            if entry.ship and self.lanes is not None and name not in self._on_its_way:
                if entry.tensor.device == self.lanes.device:
                    continue
                with self.lanes.inwards():
                    arriving = entry.tensor.to(self.lanes.device, non_blocking=True)
                self._on_its_way[name] = (arriving, self.lanes.mark_in())

    def nbytes(self, *, ship: bool) -> int:
        """Bytes of what is shipped, or of what stays on the device."""
        return sum(entry.tensor.nbytes for entry in self.entries.values() if entry.ship == ship)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def picked(self, rows: Tensor) -> Index:
        """These rows, which may repeat, in an index of their own."""
        self.settle()
        other = copy.copy(self)
        other._on_its_way, other._to_write = {}, []
        other.entries = {
            name: _Entry(e.tensor.index_select(0, rows.to(e.tensor.device)), e.per, e.ship)
            for name, e in self.entries.items()
        }
        other.notes = {name: [values[i] for i in rows.tolist()] for name, values in self.notes.items()}
        return other
