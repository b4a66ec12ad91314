"""What one command knows of itself while it runs: the keys typed, its jobs, the runs it made, what failed.

`kvexp.run.main` makes one `Session` and passes it on. Hydra calls the task function, callbacks, launchers and the
functions that `kvexp.config.target_allowlist` wraps with arguments of its own: these alone ask for `current()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Failure:
    """A job (its overrides) that failed; told: whether the reader of this command has been told why."""

    job: str
    why: str
    told: bool


@dataclass
class Session:
    """State of one command, or of one worker's piece of a sweep.

    typed_keys: keys of the command line, which a person thereby trusts; None where there is none, as in a worker,
    whose jobs were checked before they came. hashes: runs and baselines to show at the end, in the order they were
    asked for. filled_ahead: hashes of runs that a shared prefill has filled in before their turn.
    overrides_of_jobs: what tells each job of a sweep apart, empty where that is not known. begun: a job has been
    composed. job_seconds: of the jobs that made rows. texts_measured: texts forced for the divergence. may_defer:
    whether a job that another process is at may wait until the end. unmeasured: why runs have no divergence, with
    these runs. collected: jobs (`job_queue.HydraJob`) that their launcher takes together, None while jobs are run
    one by one; deferred: jobs left for the end.
    """

    typed_keys: set[str] | None = None
    hashes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rows_written: int = 0
    texts_measured: int = 0
    filled_ahead: set[str] = field(default_factory=set)
    overrides_of_jobs: list[list[str]] = field(default_factory=list)
    begun: bool = False
    jobs_done: int = 0
    job_seconds: list[float] = field(default_factory=list)
    may_defer: bool = False
    unmeasured: dict[str, list[str]] = field(default_factory=dict)
    collected: list[Any] | None = None
    deferred: list[Any] = field(default_factory=list)

    def add_runs(self, *hashes: str | None) -> None:
        """These runs belong to what the command shows; None is no run."""
        self.hashes += [each for each in dict.fromkeys(hashes) if each is not None and each not in self.hashes]

    def add_failure(self, job: str, why: str, *, told: bool) -> None:
        """The command fails; a sweep lists its failed jobs at the end, with the reason where it was not told before."""
        self.failures.append(Failure(job, why, told))

    def add_unmeasured(self, run: str, why: str) -> None:
        """This run has no divergence from the full cache, for this reason."""
        names = self.unmeasured.setdefault(why, [])
        names += [run] if run not in names else []

    def collect_jobs(self) -> None:
        """From now on jobs are collected instead of run."""
        self.collected = []

    def collected_jobs(self) -> list[Any]:
        """The jobs collected; the next ones are run."""
        jobs, self.collected = self.collected or [], None
        return jobs

    @property
    def exit_code(self) -> int:
        """1 if any job failed."""
        return 1 if self.failures else 0


_active: list[Session] = []  # the innermost last: a launcher may run a worker's piece within its own process


def current() -> Session:
    """The innermost active session; an empty one where nobody has made one active."""
    return _active[-1] if _active else Session()


@contextlib.contextmanager
def active(session: Session) -> Iterator[Session]:
    """In the block, `current()` is this session."""
    _active.append(session)
    try:
        yield session
    finally:
        _active.pop()


def keys_of(words: Sequence[str]) -> set[str]:
    """The keys of a command line's overrides."""
    return {word.lstrip("+~").partition("=")[0] for word in words}
