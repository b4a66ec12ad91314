"""Copy streams on a CPU, at their slowest: what is copied between two moments arrives only when somebody waits for it.

With no stream at all every copy is at once; this is the other end. A GPU lies between the two, so what comes out the
same at both ends needs no luck. What neither shows is memory given back while a copy still writes to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvexp.retrieval.offload import CopyStreams

_ARRIVING = threading.Lock()


class Reached:
    """An event: all copies of its stream up to here. Whoever waits returns when they have arrived, whichever thread
    brings them.
    """

    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        self.queue, self.upto = queue, len(queue)

    def synchronize(self) -> None:
        with _ARRIVING:
            for place in range(self.upto):
                job, self.queue[place] = self.queue[place], _done
                job()


def _done() -> None:
    """A copy that has arrived."""


class _Deferred(TorchDispatchMode):
    """Copies are put off; what they will fill holds a number that nobody stored."""

    def __init__(self, queue: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name
        if name == "aten::copy_":
            self.queue.append(lambda: func(*args, **kwargs))
            return args[0]
        if name == "aten::_to_copy":
            target = torch.full_like(args[0], 77)
            self.queue.append(lambda: target.copy_(args[0]))
            return target
        return func(*args, **kwargs)


class LateCopyStreams(CopyStreams):
    """Stands for the lanes of a GPU. waits: how often the computation really had to wait."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu", 0), streams=False)
        self.queues: tuple[list[Any], list[Any]] = ([], [])
        self.waits = 0

    @contextlib.contextmanager
    def _deferred(self, which: int) -> Iterator[None]:
        with _Deferred(self.queues[which]):
            yield

    def d2h(self) -> Any:
        return self._deferred(0)

    def h2d(self) -> Any:
        return self._deferred(1)

    def record_d2h(self) -> Any:
        return Reached(self.queues[0])

    def record_h2d(self) -> Any:
        return Reached(self.queues[1])

    def wait(self, event: Any, *arrived: Tensor) -> None:
        if event is not None:
            self.waits += any(job is not _done for job in self.queues[1])
            event.synchronize()
