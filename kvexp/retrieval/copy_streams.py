"""Copies between a GPU and the CPU beside the computation; on a CPU the same calls copy at once."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class Lanes:
    """One copy stream out of a device and one into it; without streams, copies are made where they are asked for."""

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device = device
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if streams else None

    def _on(self, which: int) -> Any:
        if self.streams is None:
            return contextlib.nullcontext()
        # What is copied was computed on the stream in progress, and what is overwritten may still be read there.
        self.streams[which].wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.streams[which])

    def outwards(self) -> Any:
        """Context in which copies leave the device, after everything issued so far."""
        return self._on(0)

    def inwards(self) -> Any:
        """Context in which copies come to the device, after everything issued so far."""
        return self._on(1)

    def mark_out(self) -> torch.cuda.Event | None:
        """Reached when all copies out so far have arrived."""
        return self.streams[0].record_event() if self.streams is not None else None

    def mark_in(self) -> torch.cuda.Event | None:
        """Reached when all copies in so far have arrived."""
        return self.streams[1].record_event() if self.streams is not None else None

    def join(self, event: torch.cuda.Event | None, *arrived: Tensor) -> None:
        """The computation goes on once `event` is reached; `arrived` were made on a copy stream and are used here."""
        if event is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in arrived:
            tensor.record_stream(current)

    def leaving(self, *tensors: Tensor) -> None:
        """These are read by copies out: their memory may not be reused before those are done."""
        self._used(0, tensors)

    def filling(self, *tensors: Tensor) -> None:
        """These are written by copies in: their memory may not be reused before those are done."""
        self._used(1, tensors)

    def _used(self, which: int, tensors: tuple[Tensor, ...]) -> None:
        if self.streams is not None:
            for tensor in tensors:
                tensor.record_stream(self.streams[which])


@lru_cache(maxsize=16)
def lanes_of(device: torch.device, apart: bool) -> Lanes:
    """The lanes of a device, the same for every layer and cache there; apart: tokens have their home elsewhere."""
    return Lanes(device, streams=apart)


def on_host(shape: tuple[int, ...], like: Tensor, device: torch.device, *, pinned: bool) -> tuple[Tensor, bool]:
    """An empty tensor of `like`'s dtype on `device`, in pinned memory if asked for; and whether it is where asked.

    Where no more memory can be pinned it is ordinary memory: copies are then slower and wait for each other.
    """
    if pinned:
        try:
            return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=True), True
        except RuntimeError:
            return torch.empty(shape, dtype=like.dtype, device=device), False
    return torch.empty(shape, dtype=like.dtype, device=device), True


def rows_at_home(x: Tensor, rows: Tensor, *, pinned: bool) -> tuple[Tensor, bool]:
    """Rows of a tensor at home, in memory of the same kind: what `on_host` returns, filled."""
    made, fine = on_host((len(rows), *x.shape[1:]), x, x.device, pinned=pinned)
    return torch.index_select(x, 0, rows.to(x.device), out=made), fine
