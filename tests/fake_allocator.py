"""Counts the memory of a pretended device: bytes of the tensors that are alive on it, after every operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from host_reads import HostReads, pretended_gpu
from pretend import Placed, inner, tensors_in
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class FakeAllocator(TorchDispatchMode):
    """bytes: of all storages alive on the pretended device, without those of `begin`; peak_bytes: the most so far.

    block: to how many bytes a storage is rounded up; CUDA's caching allocator counts blocks of 512.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.block, self.peak_bytes, self._before = block, 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count(tensors_in(made))
        return made

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors too, those of them that are on the device."""
        for x in tensors:
            if isinstance(x, Placed):
                storage = x.inner.untyped_storage()
                size = -(-storage.nbytes() // self.block) * self.block
                self._alive[storage._cdata] = (StorageWeakRef(storage), size)
        self.reset_peak(max(self.peak_bytes, self.bytes))

    @property
    def bytes(self) -> int:
        """Bytes alive now."""
        for key in [key for key, (storage, _) in self._alive.items() if storage.expired()]:
            del self._alive[key]
        return sum(size for _, size in self._alive.values()) - self._before

    def begin(self) -> None:
        """What is alive now counts no more, nor what was."""
        self._before += self.bytes
        self.reset_peak()

    def reset_peak(self, to: int | None = None) -> None:
        """The peak is this from now on; None: what is alive."""
        self.peak_bytes = self.bytes if to is None else to


@contextmanager
def counted_gpu(block: int = 1) -> Iterator[FakeAllocator]:
    """The pretended device, whose tensors are counted."""
    with pretended_gpu(HostReads()), FakeAllocator(block) as allocator:
        yield allocator


def storages_of(holder: Any) -> set[tuple[int, int]]:
    """(which, bytes) of every storage on the device that an object holds: in its attributes, lists and dictionaries."""
    found: set[tuple[int, int]] = set()
    seen: set[int] = set()
    left = [holder]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = inner(one).untyped_storage()
            found |= {(storage._cdata, storage.nbytes())} if one.device.type == "cuda" else set()
        elif isinstance(one, (list, tuple, set)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif type(one).__module__.startswith("kvexp."):
            left += [*getattr(one, "__dict__", {}).values()]
    return found
