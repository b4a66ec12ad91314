"""Checks the offload path's streams: records every copy, event and read, and finds an order that is left to luck.

Tensors "on a GPU" are pretended ones (`pretend`), `torch.cuda`'s streams and events are stand-ins, and everything runs
at once, in the order of the program. What is checked is not what came out but what was ordered: each actor (the host,
its worker thread, the computation's stream and the two copy streams) has a vector clock; issuing, events and waits pass
clocks on. An access is refused where an earlier access of another actor to the same bytes, one of the two a write, does
not lie in the actor's past; so is memory that is given back while another stream may still use it. Whatever order a
real GPU takes, it is one that the clocks allow; so one run answers for all orders of its program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from pretend import READS, SHAPED_BY_NUMBERS, Placed, inner, pretended
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST, WORKER, COMPUTE = "host", "worker", "compute"
ACTORS = (HOST, WORKER, COMPUTE, "to host", "to device")
# Reads shape and dtype alone.
SHAPES = {"new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like"}
Clock = dict[str, int]


def _join(one: Clock, other: Clock) -> None:
    for actor, time in other.items():
        one[actor] = max(one.get(actor, 0), time)


class Event:
    """What a stream had done, and knew of, when it was recorded."""

    def __init__(self, checker: StreamChecker, clock: Clock) -> None:
        self.checker, self.clock = checker, dict(clock)

    def synchronize(self) -> None:
        self.checker.step(f"{self.checker.host} waits for an event")
        _join(self.checker.clocks[self.checker.host], self.clock)


class Stream:
    """Stands for a `torch.cuda.Stream`."""

    def __init__(self, checker: StreamChecker, name: str) -> None:
        self.checker, self.name = checker, name

    def record_event(self) -> Event:
        self.checker.step(f"{self.name} records an event")
        self.checker.issue(self.name)
        return Event(self.checker, self.checker.clocks[self.name])

    def wait_event(self, event: Event) -> None:
        self.checker.step(f"{self.name} waits for an event")
        self.checker.issue(self.name)
        _join(self.checker.clocks[self.name], event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Memory:
    """Who wrote and read one storage, element by element; owner: the stream that it was allocated on, or a host."""

    def __init__(self, storage: Any, owner: str, what: str) -> None:
        self.alive, self.owner, self.what = StorageWeakRef(storage), owner, what
        self.recorded: set[str] = set()  # streams of `Tensor.record_stream`
        self.written: dict[str, Any] = {}  # actor -> time of its last write, per element
        self.read: dict[str, Any] = {}

    def elements(self, times: dict[str, Any], actor: str, x: Tensor) -> Any:
        """The times of an actor at the elements of tensor x, as a view; an expanded axis is one element."""
        if actor not in times:
            times[actor] = np.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=np.int64)
        shape = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
        here = times[actor][x.storage_offset() :]
        return as_strided(here, shape, [stride * here.itemsize for stride in x.stride()])

    def last_use(self, actor: str) -> int:
        """Time of an actor's last access to any element; 0: none."""
        return max((int(times[actor].max()) for times in (self.written, self.read) if actor in times), default=0)


class StreamChecker(TorchDispatchMode):
    """Records what is done to memory by whom, and every problem, in words. Use `checked_streams`."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {actor: {actor: 1} for actor in ACTORS}
        self.host, self.stack = HOST, [Stream(self, COMPUTE)]
        self.memories: dict[int, Memory] = {}
        self.on_device: set[int] = set()  # torch gives pinned memory back when the copies that use it are done
        self.pinned: list[Tensor] = []
        self.problems: list[str] = []
        self.steps: list[str] = []

    # -- time ---------------------------------------------------------------------------------------------------------

    def step(self, what: str) -> None:
        """Something is about to happen: look first whether memory was given back."""
        for key in [key for key in self.on_device if self.memories[key].alive.expired()]:
            self.on_device.remove(key)
            self._given_back(self.memories.pop(key))
        self.steps.append(what)

    def issue(self, stream: str) -> None:
        """The host hands work to a stream: whatever the host knows, the stream's work comes after."""
        _join(self.clocks[stream], self.clocks[self.host])

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`: the host waits for every stream."""
        self.step("the host waits for the device")
        for stream in ACTORS[2:]:
            _join(self.clocks[self.host], self.clocks[stream])

    @contextlib.contextmanager
    def acting(self, host: str) -> Iterator[None]:
        """What runs inside is done by another thread of the host, which was started here."""
        before, self.host = self.host, host
        _join(self.clocks[host], self.clocks[before])
        try:
            yield
        finally:
            self.host = before

    # -- memory -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, schema = func.overloadpacket.__name__, func._schema
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = kwargs.get("device")
        on_device = any(isinstance(x, Placed) for x in given) or (target is not None and target.type == "cuda")
        actor = self.stack[-1].name if on_device else self.host
        self.step(f"{actor}: {name}")
        if on_device:
            self.issue(actor)
        self.clocks[actor][actor] += 1
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not view and name not in SHAPES:
            for declared, value in self._arguments(schema, args, kwargs):
                write = declared.alias_info is not None and declared.alias_info.is_write
                for x in (x for x in tree_leaves(value) if isinstance(x, Tensor)):
                    self._access(x, actor, write=write, places=_places(name, x, args) if write else None)
        made = func(*args, **kwargs)
        for x in (x for x in tree_leaves(made) if isinstance(x, Tensor)):
            if self._key(x) not in self.memories:
                self._memory(x, actor if isinstance(x, Placed) else self.host, name)
                self._access(x, actor, write=True)
        if on_device and (name in READS | SHAPED_BY_NUMBERS or self._blocks(name, args, kwargs, made)):
            _join(self.clocks[self.host], self.clocks[actor])
        return made

    def _arguments(self, schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        for place, declared in enumerate(schema.arguments):
            if not declared.kwarg_only and place < len(args):
                yield declared, args[place]
            elif declared.name in kwargs:
                yield declared, kwargs[declared.name]

    def _blocks(self, name: str, args: Any, kwargs: Any, made: Any) -> bool:
        """Whether the host waits for a copy between host and device: unless asked not to, and pinned."""
        if name == "copy_":
            sides, late = args[:2], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        elif name == "_to_copy":
            sides, late = (args[0], made), kwargs.get("non_blocking", False)
        else:
            return False
        hosts = [x for x in sides if not isinstance(x, Placed)]
        return len(hosts) == 1 and not (late and self.is_pinned(hosts[0]))

    def is_pinned(self, x: Tensor) -> bool:
        return any(x.untyped_storage()._cdata == other.untyped_storage()._cdata for other in self.pinned)

    @staticmethod
    def _key(x: Tensor) -> int:
        return inner(x).untyped_storage()._cdata

    def _memory(self, x: Tensor, owner: str, what: str) -> Memory:
        key = self._key(x)
        if key not in self.memories:
            self.memories[key] = Memory(inner(x).untyped_storage(), owner, f"{what} {list(x.shape)}")
            if owner not in (HOST, WORKER):
                self.on_device.add(key)
        return self.memories[key]

    def _access(self, x: Tensor, actor: str, *, write: bool, places: Any = None) -> None:
        """An actor reads or writes a tensor, or only the `places` of it that are True."""
        held = inner(x)
        if not held.numel():
            return
        memory = self._memory(x, COMPUTE if isinstance(x, Placed) else self.host, "a tensor")
        known = self.clocks[actor]
        for kind, times in (("written", memory.written), *([("read", memory.read)] if write else [])):
            for other in [other for other in times if other != actor]:
                there = memory.elements(times, other, held)
                last = int(there.max() if places is None else there[places].max(initial=0))
                if last > known.get(other, 0):
                    does = "overwrites" if write else "reads"
                    self._problem(f"{actor} {does} what {other} may not have {kind} yet: {memory.what}")
        mine = memory.elements(memory.written if write else memory.read, actor, held)
        mine[... if places is None else places] = known[actor]

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        self.step(f"memory is kept for {stream.name}")
        self._memory(x, COMPUTE, "a tensor").recorded.add(stream.name)

    def _given_back(self, memory: Memory) -> None:
        for actor in (COMPUTE, "to host", "to device"):
            late = memory.last_use(actor) > self.clocks[memory.owner].get(actor, 0)
            if late and actor not in (memory.owner, *memory.recorded):
                self._problem(f"{memory.owner} gives memory back that {actor} may still use: {memory.what}")

    def _problem(self, what: str) -> None:
        self.problems.append(f"step {len(self.steps)} ({self.steps[-1]}): {what}")


def _places(name: str, x: Tensor, args: Any) -> Any:
    """The elements that a scattered write hits, as bool of x's shape; None: all of x."""
    if name not in ("index_put_", "_index_put_impl_", "index_copy_") or args[0] is not x:
        return None
    hit = np.zeros(tuple(x.shape), dtype=bool)
    if name == "index_copy_":
        hit[(*[slice(None)] * args[1], inner(args[2]).numpy())] = True
    else:
        hit[tuple(slice(None) if index is None else inner(index).numpy() for index in args[1])] = True
    return hit


class CheckedTask:
    """`BackgroundTask` whose job is a thread's, as far as clocks go; `done` is seen when `luck` says so."""

    def __init__(self, checker: StreamChecker, job: Callable[[], None], run_async: bool, luck: Callable[[], bool]):
        self.checker, self.luck, self.joined = checker, luck, False
        self.job = None if run_async else job
        if run_async:
            with checker.acting(WORKER):
                job()

    @property
    def done(self) -> bool:
        if not self.joined and self.job is None and self.luck():
            _join(self.checker.clocks[HOST], self.checker.clocks[WORKER])
            return True
        return self.joined

    def wait(self) -> None:
        job, self.job = self.job, None
        if job is not None:
            job()
        _join(self.checker.clocks[HOST], self.checker.clocks[WORKER])
        self.joined = True


@contextlib.contextmanager
def checked_streams(monkeypatch: Any, luck: Callable[[], bool] = lambda: True) -> Iterator[StreamChecker]:
    """Everything inside runs as if beside a GPU "cuda:0", and is checked."""
    from kvexp.retrieval import layer as retrieval_layer
    from kvexp.retrieval import offload as copy_streams

    checker, empty = StreamChecker(), torch.empty
    names = iter(ACTORS[3:])

    def pinning(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        if pin_memory:
            checker.pinned.append(made)
        return made

    @contextlib.contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        checker.stack.append(stream)
        try:
            yield
        finally:
            checker.stack.pop()

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # which naming the device would call
    monkeypatch.setattr(torch, "empty", pinning)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: checker.is_pinned(x))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(checker, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: checker.stack[-1])
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", checker.synchronize)
    monkeypatch.setattr(Placed, "record_stream", lambda x, stream: checker.record_stream(x, stream))
    monkeypatch.setattr(
        retrieval_layer, "BackgroundTask", lambda job, *, run_async: CheckedTask(checker, job, run_async, luck)
    )
    copy_streams.get_streams.cache_clear()
    try:
        with pretended(), checker:
            yield checker
        checker.step("the end")
    finally:
        copy_streams.get_streams.cache_clear()
