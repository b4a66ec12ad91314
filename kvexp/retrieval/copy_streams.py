"""CUDA streams for copies between a GPU and the CPU beside the computation; on a CPU the same calls copy at once."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class CopyStreams:
    """One copy stream from the device to the host and one back; without streams, copies are synchronous."""

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device = device
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if streams else None

    def _on(self, which: int) -> Any:
        """Context in which copies run on stream `which` (0: to host, 1: to device), after what was issued so far."""
        if self.streams is None:
            return contextlib.nullcontext()
        # What is copied was computed on the stream in progress, and what is overwritten may still be read there.
        self.streams[which].wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.streams[which])

    def d2h(self) -> Any:
        """Context for copies from the device to the host; they start after everything issued so far."""
        return self._on(0)

    def h2d(self) -> Any:
        """Context for copies from the host to the device; they start after everything issued so far."""
        return self._on(1)

    def record_d2h(self) -> torch.cuda.Event | None:
        """An event that is reached when all device-to-host copies so far have arrived; None without streams."""
        return self.streams[0].record_event() if self.streams is not None else None

    def record_h2d(self) -> torch.cuda.Event | None:
        """An event that is reached when all host-to-device copies so far have arrived; None without streams."""
        return self.streams[1].record_event() if self.streams is not None else None

    def wait(self, event: torch.cuda.Event | None, *arrived: Tensor) -> None:
        """Let the computation's stream wait for `event`.

        arrived: tensors made on a copy stream, which the computation uses from here on.
        """
        if event is None:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in arrived:
            tensor.record_stream(current)

    def record_read(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors that device-to-host copies read until these copies are done."""
        self._used(0, tensors)

    def record_write(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors that host-to-device copies write until these copies are done."""
        self._used(1, tensors)

    def _used(self, which: int, tensors: tuple[Tensor, ...]) -> None:
        """Tell torch that stream `which` uses these tensors, so that their memory is not reused before it is done."""
        if self.streams is not None:
            for tensor in tensors:
                tensor.record_stream(self.streams[which])


@lru_cache(maxsize=16)
def get_streams(device: torch.device, offloaded: bool) -> CopyStreams:
    """The copy streams of a device, shared by all layers and caches; offloaded: whether tokens live on the host."""
    return CopyStreams(device, streams=offloaded)


def empty_host(shape: tuple[int, ...], like: Tensor, device: torch.device, *, pinned: bool) -> tuple[Tensor, bool]:
    """An empty tensor of `like`'s dtype on `device`, in pinned memory if asked for; and whether it is where asked.

    Where no more memory can be pinned, ordinary memory is used: copies are then slower and wait for each other.
    """
    if pinned:
        try:
            return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=True), True
        except RuntimeError:
            return torch.empty(shape, dtype=like.dtype, device=device), False
    return torch.empty(shape, dtype=like.dtype, device=device), True


def index_select_host(x: Tensor, rows: Tensor, *, pinned: bool) -> tuple[Tensor, bool]:
    """Batch rows `rows` [n] of a host tensor as a new host tensor; and whether that is pinned, if asked for.

    As of `empty_host`.
    """
    made, fine = empty_host((len(rows), *x.shape[1:]), x, x.device, pinned=pinned)
    return torch.index_select(x, 0, rows.to(x.device), out=made), fine
