"""What one command knows of itself while it runs: the keys typed, its jobs, the runs it made, what failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvexp.util.output import say


class Failure(NamedTuple):
    """A job (its overrides) that failed; reported: whether the command has printed why."""

    job: str
    why: str
    reported: bool


@dataclass
class Session:
    """State of one command, or of one worker's piece of a sweep.

    typed_keys: keys of the command line, which a person thereby trusts; None in a worker, whose jobs were checked
    before they came. hashes: runs and baselines to show at the end. filled_ahead: hashes of runs that a shared prefill
    has filled before their turn; complete_ahead: the complete ones among them. overrides_of_jobs: the overrides in
    which jobs of a sweep differ, empty where not known. begun: a job has been composed. job_seconds: of the jobs that
    made rows. unmeasured: reason -> runs without divergence. collected: jobs (`kvexp.run.jobs.HydraJob`) that are
    composed for a launcher or a plan, None while a job is run as soon as it is composed. unrecorded: it was said that
    failures cannot be written to the disk. said: lines of `say_once`. disk_error: of a disk that is full, after which
    no job is begun.
    """

    typed_keys: set[str] | None = None
    hashes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rows_written: int = 0
    texts_measured: int = 0
    filled_ahead: set[str] = field(default_factory=set)
    complete_ahead: set[str] = field(default_factory=set)
    overrides_of_jobs: list[list[str]] = field(default_factory=list)
    begun: bool = False
    jobs_done: int = 0
    job_seconds: list[float] = field(default_factory=list)
    unmeasured: dict[str, list[str]] = field(default_factory=dict)
    collected: list[Any] | None = None
    unrecorded: bool = False
    said: set[str] = field(default_factory=set)
    disk_error: Exception | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.started

    def add_runs(self, *hashes: str | None) -> None:
        """Add runs to what the command shows at its end; None is no run."""
        self.hashes += [each for each in dict.fromkeys(hashes) if each is not None and each not in self.hashes]

    def add_failure(self, job: str, why: str, *, reported: bool) -> None:
        """Let the command fail; a sweep lists its failed jobs at the end, with reasons that were not printed yet."""
        self.failures.append(Failure(job, why, reported))

    def say_once(self, text: str) -> None:
        """Print a line that several runs of the command have reason for."""
        if text not in self.said:
            say(text, flush=True)
        self.said.add(text)

    def add_unmeasured(self, run: str, why: str) -> None:
        """Note that this run has no divergence from the full cache, and why."""
        names = self.unmeasured.setdefault(why, [])
        names += [run] if run not in names else []

    def collect_jobs(self) -> None:
        """Collect jobs from now on instead of running them."""
        self.collected = []

    def collected_jobs(self) -> list[Any]:
        """Return the collected jobs; later ones are run."""
        jobs, self.collected = self.collected or [], None
        return jobs

    @property
    def exit_code(self) -> int:
        """1 if any job failed."""
        return 1 if self.failures else 0


_active: list[Session] = []  # the innermost last: a launcher may run a worker's piece within its own process


def current() -> Session:
    """The innermost active session; an empty one where nobody has made one active.

    For what no caller hands a session to: Hydra makes the launcher and the callback, and a run is read again from its
    folder in the middle of a diagnosis (`kvexp.run.guard.check_stored`). Everything else takes it as an argument.
    """
    return _active[-1] if _active else Session()


@contextlib.contextmanager
def active(session: Session) -> Iterator[Session]:
    """Make this session `current()` in the block."""
    _active.append(session)
    try:
        yield session
    finally:
        _active.pop()


def keys_of(words: Sequence[str]) -> set[str]:
    """The keys of a command line's overrides."""
    return {word.lstrip("+~").partition("=")[0] for word in words}
