"""Worker processes of a sweep: forks that share one model, and an engine's workers that take whole jobs.

On a CPU a small model's decode step is hundreds of short calls, which a second thread hardly makes faster and a second
process does (measured: DECISIONS.md). Forks have one thread each, and the weights are there once.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omegaconf import open_dict

from kvexp.run.jobs import HydraJob, built, run_job, run_jobs, runs_of
from kvexp.run.session import Failure, Session, active
from kvexp.run.store import Run, run_hash
from kvexp.run.user_code import BASES, admit, admitted, load_class
from kvexp.util.errors import CacheError, ConfigError, NotFinite
from kvexp.util.machine import watch_torch
from kvexp.util.output import say
from kvexp.util.progress import listening, worked

if TYPE_CHECKING:
    from kvexp.hf.load import Model


Item = TypeVar("Item")

RELAY_S = 0.5  # between messages of a process about its progress
_KILL_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def num_workers(model: Model) -> int:
    """Processes that may work side by side: as many as torch has threads, 1 where none may be forked.

    A CUDA context does not survive a fork, and elsewhere than on Linux a process that has used threads does not.
    """
    import torch

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
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    busy.remove(pipe)
                    self._lost(pipe)
                    continue
                if kind == "made":
                    yield content
                    continue
                if kind == "worked":
                    worked(*content)
                    continue
                if kind == "failed":
                    failure = failure or _unpack_error(*content)
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
    """Main loop of a forked process: receives items, sends what the task yields and when it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    with listening(_Relay(pipe)):
        while True:
            try:
                item = pipe.recv()
            except EOFError:
                return
            try:
                for result in task(item):
                    pipe.send(("made", result))
                pipe.send(("done", None))
            except Exception as error:
                pipe.send(("failed", _pack_error(error)))


class _Relay:
    """A listener of `worked` that tells the parent process, every now and then: each message takes its time."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.counts, self.last = pipe, defaultdict[str, float](float), 0.0

    def __call__(self, kind: str, count: float) -> None:
        self.counts[kind] += count
        if time.monotonic() - self.last < RELAY_S:
            return
        self.last = time.monotonic()
        for message in self.counts.items():
            self.pipe.send(("worked", message))
        self.counts.clear()


def _pack_error(error: Exception) -> tuple[str, int, str, str]:
    """An error as it is sent to another process: its kind, an OSError's number, its message and its traceback."""
    if isinstance(error, OSError) and isinstance(error.__cause__, OSError):  # of a file, as the user reads it
        return "OSError", error.errno or 0, error.strerror or "", traceback.format_exc()
    return type(error).__name__, 0, str(error), traceback.format_exc()


def _unpack_error(kind: str, number: int, words: str, place: str) -> Exception:
    """The error as it is raised here: our own ones say all there is to say, others by their words."""
    if number:
        error: Exception = OSError(number, words)
        error.__cause__ = OSError(number, words)
        return error
    ours = {"ConfigError": ConfigError, "CacheError": CacheError, "NotFinite": NotFinite}
    error = ours[kind](words) if kind in ours else RuntimeError(f"{kind}: {words}")
    error.__cause__ = RuntimeError(f"in another process:\n{place}")
    return error


# Jobs of a sweep as they go to workers: those that share prefills in one piece, and what comes back.


@dataclass(frozen=True)
class JobBatch:
    """Jobs for one worker; words: what tells each job of the whole sweep apart (`Session.overrides_of_jobs`).

    classes: group, reference and source of each user's class of the sweep, for the worker to load the same code.
    """

    jobs: list[HydraJob]
    words: list[list[str]]
    classes: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(job.name for job in self.jobs)


@dataclass(frozen=True)
class BatchResult:
    """hashes: runs and baselines; unmeasured: as of `Session`."""

    hashes: list[str]
    failures: list[Failure]
    unmeasured: dict[str, list[str]] = field(default_factory=dict)


Engine = Callable[
    [Callable[[JobBatch], BatchResult], Sequence[JobBatch]], Iterable[tuple[int, BatchResult | BaseException]]
]


def run_remote(jobs: Sequence[HydraJob], shards: int, engine: Engine, session: Session) -> None:
    """Let an engine's workers perform the jobs; this process then knows their runs and failures like its own.

    shards: parts of the examples that each piece is split into. engine(run_batch, shipments) yields (place, outcome or
    what ended the worker) in any order. A job that cannot be read fails here and is not shipped.
    """
    if shards < 1:
        raise ConfigError(f"hydra.launcher.shards must be at least 1, got {shards}")
    shipments = list(_shipments(jobs, shards, session))
    if len(shipments) > 1:
        say(f"{len(jobs)} jobs go out in {len(shipments)} pieces", flush=True)
    for done, (place, outcome) in enumerate(engine(run_batch, shipments), start=1):
        if isinstance(outcome, BatchResult):
            session.add_runs(*outcome.hashes)
            for failure in outcome.failures:  # printed where its worker ran, which nobody may be looking at
                session.add_failure(failure.job, failure.why, reported=False)
            for why, names in outcome.unmeasured.items():
                for name in names:
                    session.add_unmeasured(name, why)
        else:
            _lost(shipments[place], outcome, session)
        say(f"{done} of {len(shipments)} pieces are back", flush=True)


def run_batch(shipment: JobBatch) -> BatchResult:
    """In the worker: run the jobs in a session of their own, and tell what they were."""
    watch_torch()
    with active(Session(overrides_of_jobs=shipment.words)) as session:
        _load_classes(shipment.classes)
        run_jobs(shipment.jobs, session)
    return BatchResult(session.hashes, session.failures, session.unmeasured)


def _shipments(jobs: Sequence[HydraJob], shards: int, session: Session) -> Iterator[JobBatch]:
    from kvexp.run.batches import group_key, why_alone

    alike: dict[Any, list[HydraJob]] = {}
    for job in jobs:
        runs = built(job, session).runs
        if not runs:
            run_job(job, session)  # it says why it cannot be
            continue
        settings = runs[0]  # of several none can share
        if shards > 1 and not settings.shard.whole:
            raise ConfigError(
                f"hydra.launcher.shards={shards} splits the examples, and so does shard={job.config.shard}: drop one"
            )
        alike.setdefault((job.number or 0) if why_alone(settings) else group_key(settings), []).append(job)
    named = {job.config[group].get("_target_") for job in jobs for group in BASES}
    known = [users for users in admitted().values() if users.target in named]
    classes = [(users.group, users.reference, users.source) for users in known if users.reference is not None]
    for together in alike.values():
        for index in range(shards):
            yield JobBatch([_part(job, index, shards) for job in together], session.overrides_of_jobs, classes)


def _load_classes(classes: list[tuple[str, str, dict[str, Any]]]) -> None:
    """ConfigError where a file has another content than where the sweep was started."""
    for group, reference, source in classes:
        if any(users.source == source for users in admitted().values()):
            continue
        users = load_class(group, reference)
        if users is None or users.source != source:
            raise ConfigError(
                f"the code of {reference} is not, in this worker, what it was where the sweep was started"
            )
        admit(users)


def _part(job: HydraJob, index: int, shards: int) -> HydraJob:
    if shards == 1:
        return job
    config = copy.deepcopy(job.config)
    with open_dict(config):
        config.shard = f"{index}/{shards}"
    return replace(job, config=config)


def _lost(shipment: JobBatch, error: BaseException, session: Session) -> None:
    """A worker that ended without an answer: which of its jobs are done stands on disk."""
    for job in shipment.jobs:
        for settings in runs_of(job, session):
            path = settings.outputs_dir / run_hash(settings.identity)
            run = Run.load(path) if (path / "config.json").exists() else None
            if run is not None:
                session.add_runs(run.baseline, run.hash)
            if run is None or not run.finished:
                why = f"its worker ended ({type(error).__name__}: {error}); the same command goes on from its rows"
                session.add_failure(job.name, why, reported=False)
