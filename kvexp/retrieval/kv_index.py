"""What a retrieval method remembers of one layer: tensors that the core grows, ships and moves with the rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.retrieval.copy_streams import Lanes, on_host, rows_at_home


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
        self.pinned = True  # False: no memory was left to pin for something that is shipped
        self._on_its_way: dict[str, tuple[Tensor, torch.cuda.Event | None]] = {}
        self._to_write: list[tuple[str, list[int], Tensor, torch.cuda.Event | None]] = []

    def put(self, name: str, tensor: Tensor, *, per: int = 0, home: torch.device | None = None) -> None:
        """Remember a tensor [B, ...].

        per: axis 2 has a place for every so many positions and grows with them (0: it does not grow).
        home: keep it there, in pinned memory beside a GPU, and copy it over at every step; None: it is on the device,
        or goes there when it is first asked for, so that a job on the host waits for no computation.
        """
        if home is not None and self.lanes is not None and self.lanes.device != home:
            kept, fine = on_host(tuple(tensor.shape), tensor, home, pinned=True)
            tensor, self.pinned = kept.copy_(tensor), self.pinned and fine
        self.entries[name] = _Entry(tensor, per, home is not None)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Tensor:
        """The tensor on the device. A shipped one is a copy for this step, of which the next one knows nothing."""
        entry, lanes = self.entries[name], self.lanes
        if lanes is None or entry.tensor.device == lanes.device:
            return entry.tensor
        if not entry.ship:
            entry.tensor = entry.tensor.to(lanes.device)
            return entry.tensor
        if name not in self._on_its_way:
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
        if lanes is None or not self._elsewhere(entry):
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
        for name, entry in self.entries.items():
            old = entry.tensor
            if not entry.per or positions <= old.shape[2] * entry.per:
                continue
            shape = (*old.shape[:2], -(-(positions + 63) // entry.per), *old.shape[3:])
            new, fine = on_host(shape, old, old.device, pinned=self._elsewhere(entry) and self.pinned)
            new[:, :, : old.shape[2]] = old
            new[:, :, old.shape[2] :] = 0
            entry.tensor, self.pinned = new, self.pinned and fine
            self._on_its_way.pop(name, None)  # too short by now

    # -- shipping -----------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start copying what is shipped to the device, beside the computation of the layer before."""
        if self._to_write:
            self.settle()
            self._on_its_way.clear()  # nobody asked for it in the step before, and it does not know the newest tokens
        for name, entry in self.entries.items():
            if self._elsewhere(entry) and name not in self._on_its_way:
                assert self.lanes is not None
                with self.lanes.inwards():
                    arriving = entry.tensor.to(self.lanes.device, non_blocking=True)
                self._on_its_way[name] = (arriving, self.lanes.mark_in())

    def _elsewhere(self, entry: _Entry) -> bool:
        """Is it shipped, and from another device?"""
        return entry.ship and self.lanes is not None and entry.tensor.device != self.lanes.device

    def nbytes(self, *, ship: bool) -> int:
        """Bytes of what is shipped, or of what stays on the device."""
        return sum(entry.tensor.nbytes for entry in self.entries.values() if entry.ship == ship)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def picked(self, rows: Tensor) -> Index:
        """These rows, which may repeat, in an index of their own."""
        self.settle()
        other = copy.copy(self)
        other._on_its_way, other._to_write = {}, []
        other.entries = {}
        for name, entry in self.entries.items():
            tensor, fine = rows_at_home(entry.tensor, rows, pinned=self._elsewhere(entry) and self.pinned)
            other.entries[name], other.pinned = _Entry(tensor, entry.per, entry.ship), other.pinned and fine
        other.notes = {name: [values[i] for i in rows.tolist()] for name, values in self.notes.items()}
        return other
