"""Processes that share one model and share out its batches, each with one thread.

On a CPU a small model's decode step is hundreds of short calls, which a second thread hardly makes faster and a second
process does (measured: docs/decisions/speed.md). They are forked, so the weights are there once.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from kvexp.errors import CacheError, ConfigError, NotFinite
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.models.types import Model

Item = TypeVar("Item")

_KILL_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def num_workers(model: Model) -> int:
    """Processes that may work side by side: as many as torch has threads, 1 where none may be forked.

    A CUDA context does not survive a fork, and elsewhere than on Linux a process that has used threads does not.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    alone = threading.current_thread() is threading.main_thread() and not multiprocessing.current_process().daemon
    if sys.platform != "linux" or not on_cpu or torch.cuda.is_initialized() or not alone:
        return 1
    return torch.get_num_threads()


class ForkPool(Generic[Item]):
    """Context manager around `imap`: forks `size` processes at its start, if that is more than one; ends with none.

    task(item) makes something of an item and yields something small for every row it has written to disk. It is called
    in a copy of this process: what it changes in memory is not seen here.
    """

    def __init__(self, size: int, task: Callable[[Item], Iterable[Any]]) -> None:
        self.size, self.task = size, task
        self._workers: dict[Connection, Any] = {}

    def __enter__(self) -> ForkPool[Item]:
        if self.size < 2:
            return self
        fork = multiprocessing.get_context("fork")
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch, which its copies never use
            for _ in range(self.size):
                ours, theirs = fork.Pipe()
                worker = fork.Process(target=_work, args=(self.task, theirs, os.getpid()), daemon=True)
                worker.start()
                theirs.close()  # so that the pipe ends with the process
                self._workers[ours] = worker
        return self

    def imap(self, items: Sequence[Item]) -> Iterator[Any]:
        """What the task yields for every item, which has to be small. What it raises is raised when all have ended.

        A process that is killed leaves its item as it was, with a line on stderr; the others go on.
        """
        if not self._workers:
            for item in items:
                yield from self.task(item)
            return
        left = list(reversed(items))
        failure: Exception | None = None
        busy = {pipe for pipe in self._workers if _send_next(pipe, left)}
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                try:
                    told = pipe.recv()
                except (EOFError, OSError):
                    busy.remove(pipe)
                    self._lost(pipe)
                    continue
                kind, what = told
                if kind == "made":
                    yield what
                    continue
                if kind == "failed":
                    failure = failure or _unpack_error(*what)
                    left.clear()
                if not _send_next(pipe, left):
                    busy.remove(pipe)
        if failure is not None:
            raise failure

    def _lost(self, pipe: Connection) -> None:
        worker = self._workers[pipe]
        worker.join()
        words = f"one of {self.size} processes ended ({worker.exitcode}); what it was at is made again, by one process"
        say(words, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, worker in self._workers.items():
            worker.kill()  # between items there is nothing to lose, and within one the reader wants to stop
            worker.join()
            pipe.close()
        self._workers = {}


def _send_next(pipe: Connection, left: list[Any]) -> bool:
    """Hand the next item over; False where there is none."""
    if not left:
        return False
    with contextlib.suppress(BrokenPipeError):  # ended meanwhile, as reading from it will say
        pipe.send(left.pop())
    return True


def _work(task: Callable[[Any], Iterable[Any]], pipe: Connection, parent: int) -> None:
    """In the forked process: items come, rows and ends are told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            for made in task(item):
                pipe.send(("made", made))
            pipe.send(("done", None))
        except Exception as error:
            pipe.send(("failed", _pack_error(error)))


def _pack_error(error: Exception) -> tuple[str, str, str]:
    """What another process is told of an error: its kind, its words, and where it came from."""
    return type(error).__name__, str(error), traceback.format_exc()


def _unpack_error(kind: str, words: str, place: str) -> Exception:
    """The error as it is raised here: our own ones say all there is to say, others by their words."""
    ours = {"ConfigError": ConfigError, "CacheError": CacheError, "NotFinite": NotFinite}
    error = ours[kind](words) if kind in ours else RuntimeError(f"{kind}: {words}")
    error.__cause__ = RuntimeError(f"in another process:\n{place}")
    return error
