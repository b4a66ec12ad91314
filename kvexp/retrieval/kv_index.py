"""The index of a retrieval method for one layer: named tensors that grow, move with the rows and may be offloaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvexp.retrieval.copy_streams import CopyStreams, empty_host, index_select_host


@dataclass
class _Entry:
    """A tensor [B, ...] of the index.

    per: positions per entry of axis 2 (0: it does not grow); ship: whether it is kept on the host.
    """

    tensor: Tensor
    per: int = 0
    ship: bool = False


class KVIndex:
    """What a retrieval method has computed of a prompt: named tensors [B, ...], and notes per row.

    Offloaded tensors live on the host and are copied to the device at every step. notes: what a row of results should
    say.
    """

    def __init__(self) -> None:
        self.copy_streams: CopyStreams | None = None  # set once it is known where the prompt is
        self.entries: dict[str, _Entry] = {}
        self.notes: dict[str, list[Any]] = {}  # what a row of results should say, per batch row
        self.pinned = True  # False: no memory was left to pin for something that is shipped
        self._in_flight: dict[str, tuple[Tensor, torch.cuda.Event | None]] = {}
        self._pending_writes: list[tuple[str, list[int], Tensor, torch.cuda.Event | None]] = []
        self._read_by: dict[str, torch.cuda.Event | None] = {}  # the last copy to the device that reads a tensor

    def register(self, name: str, tensor: Tensor, *, per: int = 0, home: torch.device | None = None) -> None:
        """Add a tensor [B, ...] to the index.

        per: axis 2 has one entry per so many positions and grows with them (0: it does not grow). home: the device to
        keep it on (pinned CPU memory beside a GPU), from which it is copied over at every step; None: it is on the
        computing device, or is moved there at its first use, so that a job on the host waits for no computation.
        """
        if home is not None and self.copy_streams is not None and self.copy_streams.device != home:
            kept, fine = empty_host(tuple(tensor.shape), tensor, home, pinned=True)
            tensor, self.pinned = kept.copy_(tensor), self.pinned and fine
        self.entries[name] = _Entry(tensor, per, home is not None)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Tensor:
        """The tensor on the device. Of an offloaded tensor it is a copy for this step only: changes to it are lost."""
        entry, copy_streams = self.entries[name], self.copy_streams
        if copy_streams is None or entry.tensor.device == copy_streams.device:
            return entry.tensor
        if not entry.ship:
            entry.tensor = entry.tensor.to(copy_streams.device)
            return entry.tensor
        if name not in self._in_flight:
            self.prefetch()
        tensor, event = self._in_flight.pop(name)
        copy_streams.wait(event, tensor)
        return tensor

    def write(self, name: str, entries: list[int], value: Tensor) -> None:
        """Write value [B, H, ...] to entries[i] of axis 2, for every row i.

        Offloaded tensors hold it from the next step on.
        """
        entry = self.entries[name]
        if max(entries) >= entry.tensor.shape[2]:
            self.grow(max(entries) * max(entry.per, 1) + 1)
        value, copy_streams = value.to(entry.tensor.dtype), self.copy_streams
        if copy_streams is None or not self._is_remote(entry):
            entry.tensor[torch.arange(len(entries)), :, torch.tensor(entries)] = value
            return
        part, _ = empty_host(tuple(value.shape), value, entry.tensor.device, pinned=True)
        copy_streams.record_read(value)
        with copy_streams.d2h():
            part.copy_(value, non_blocking=True)
        self._pending_writes.append((name, entries, part, copy_streams.record_d2h()))

    def flush(self) -> None:
        """Wait for pending copies to the host and store them in their tensors, which nothing may read meanwhile."""
        for name, entries, part, event in self._pending_writes:
            for awaited in (event, self._read_by.pop(name, None)):
                if awaited is not None:
                    awaited.synchronize()
            self.entries[name].tensor[torch.arange(len(entries)), :, torch.tensor(entries)] = part
        self._pending_writes.clear()

    def grow(self, positions: int) -> None:
        """Grow to at least so many positions; new entries hold zeros."""
        self.flush()
        for name, entry in self.entries.items():
            old = entry.tensor
            if not entry.per or positions <= old.shape[2] * entry.per:
                continue
            shape = (*old.shape[:2], -(-(positions + 63) // entry.per), *old.shape[3:])
            new, fine = empty_host(shape, old, old.device, pinned=self._is_remote(entry) and self.pinned)
            new[:, :, : old.shape[2]] = old
            new[:, :, old.shape[2] :] = 0
            entry.tensor, self.pinned = new, self.pinned and fine
            self._in_flight.pop(name, None)  # too short by now

    # -- shipping -----------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start copying the offloaded tensors to the device, beside the computation of the previous layer."""
        if self._pending_writes:
            self.flush()
            self._in_flight.clear()  # prefetched copies that the last step did not use lack the newest tokens
        for name, entry in self.entries.items():
            if self._is_remote(entry) and name not in self._in_flight:
                assert self.copy_streams is not None
                with self.copy_streams.h2d():
                    arriving = entry.tensor.to(self.copy_streams.device, non_blocking=True)
                self._read_by[name] = self.copy_streams.record_h2d()
                self._in_flight[name] = (arriving, self._read_by[name])

    def _is_remote(self, entry: _Entry) -> bool:
        """Whether the tensor is offloaded to another device than the computing one."""
        return entry.ship and self.copy_streams is not None and entry.tensor.device != self.copy_streams.device

    def nbytes(self, *, ship: bool) -> int:
        """Bytes of the offloaded tensors (ship), or of those on the device."""
        return sum(entry.tensor.nbytes for entry in self.entries.values() if entry.ship == ship)

    @property
    def on_device(self) -> list[Tensor]:
        """The tensors that are not offloaded."""
        return [entry.tensor for entry in self.entries.values() if not entry.ship]

    @property
    def on_host(self) -> list[Tensor]:
        """The offloaded tensors."""
        return [entry.tensor for entry in self.entries.values() if entry.ship]

    # -- rows ---------------------------------------------------------------------------------------------------------

    def index_rows(self, rows: Tensor) -> KVIndex:
        """A copy of the index for batch rows `rows` [n], which may repeat."""
        self.flush()
        other = copy.copy(self)
        other._in_flight, other._pending_writes, other._read_by = {}, [], {}
        other.entries = {}
        for name, entry in self.entries.items():
            tensor, fine = index_select_host(entry.tensor, rows, pinned=self._is_remote(entry) and self.pinned)
            other.entries[name], other.pinned = _Entry(tensor, entry.per, entry.ship), other.pinned and fine
        other.notes = {name: [values[i] for i in rows.tolist()] for name, values in self.notes.items()}
        return other
