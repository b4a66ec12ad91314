"""Jobs of a sweep as they go to workers: those that share prefills in one piece, and what comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import open_dict

from kvexp.errors import ConfigError
from kvexp.record import Run, identity
from kvexp.session import Failure, Session, active
from kvexp.sweep.hydra_job import run_job, run_jobs
from kvexp.sweep.job_queue import HydraJob, runs_of, settings_or_none
from kvexp.terminal import say
from kvexp.user_methods import admit, admitted, load_method


@dataclass(frozen=True)
class JobBatch:
    """Jobs for one worker; words: what tells each job of the whole sweep apart (`Session.overrides_of_jobs`).

    methods: reference and source of each user's method of the sweep, for the worker to load the same code.
    """

    jobs: list[HydraJob]
    words: list[list[str]]
    methods: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(job.name for job in self.jobs)


@dataclass(frozen=True)
class BatchResult:
    """hashes: runs and baselines; values: each job's objective; unmeasured: as of `Session`."""

    hashes: list[str]
    failures: list[Failure]
    values: dict[int, float | None]
    unmeasured: dict[str, list[str]] = field(default_factory=dict)


Engine = Callable[
    [Callable[[JobBatch], BatchResult], Sequence[JobBatch]], Iterable[tuple[int, BatchResult | BaseException]]
]


def run_remote(jobs: Sequence[HydraJob], shards: int, engine: Engine, session: Session) -> list[float | None]:
    """Let an engine's workers perform the jobs; this process then knows their runs and failures like its own.

    shards: parts of the examples that each piece is split into. engine(run_batch, shipments) yields (place, outcome or
    what ended the worker) in any order. A job that cannot be read fails here and is not shipped.
    """
    if shards < 1:
        raise ConfigError(f"hydra.launcher.shards must be at least 1, got {shards}")
    shipments = list(_shipments(jobs, shards, session))
    values: dict[int, float | None] = {}
    if len(shipments) > 1:
        say(f"{len(jobs)} jobs go out in {len(shipments)} pieces", flush=True)
    for done, (place, outcome) in enumerate(engine(run_batch, shipments), start=1):
        if isinstance(outcome, BatchResult):
            session.add_runs(*outcome.hashes)
            for failure in outcome.failures:  # told where its worker ran, which nobody may be looking at
                session.add_failure(failure.job, failure.why, told=False)
            for why, names in outcome.unmeasured.items():
                for name in names:
                    session.add_unmeasured(name, why)
            values |= outcome.values
        else:
            _lost(shipments[place], outcome, session)
        say(f"{done} of {len(shipments)} pieces are back", flush=True)
    return [values.get(_number(job)) for job in jobs]


def run_batch(shipment: JobBatch) -> BatchResult:
    """In the worker: run the jobs in a session of their own, and tell what they were."""
    with active(Session(overrides_of_jobs=shipment.words)) as session:
        _load_methods(shipment.methods)
        values = run_jobs(shipment.jobs, session)
    by_number = dict(zip(map(_number, shipment.jobs), values, strict=True))
    return BatchResult(session.hashes, session.failures, by_number, session.unmeasured)


def _shipments(jobs: Sequence[HydraJob], shards: int, session: Session) -> Iterator[JobBatch]:
    from kvexp.sweep.prefill_groups import can_share, group_key

    alike: dict[Any, list[HydraJob]] = {}
    for job in jobs:
        settings = settings_or_none(job, session)
        if settings is None:
            run_job(job, session)  # it says why it cannot be
            continue
        if shards > 1 and not settings.shard.whole:
            raise ConfigError(
                f"hydra.launcher.shards={shards} splits the examples, and so does shard={job.config.shard}: drop one"
            )
        alike.setdefault(group_key(settings) if can_share(settings) else _number(job), []).append(job)
    named = {job.config.method.get("_target_") for job in jobs}
    known = [one for one in admitted().values() if one.target in named]
    methods = [(one.reference, one.source) for one in known if one.reference is not None]
    for together in alike.values():
        for index in range(shards):
            yield JobBatch([_part(job, index, shards) for job in together], session.overrides_of_jobs, methods)


def _load_methods(methods: list[tuple[str, dict[str, Any]]]) -> None:
    """ConfigError where a file has another content than where the sweep was started."""
    for reference, source in methods:
        if any(one.source == source for one in admitted().values()):
            continue
        method = load_method(reference)
        if method is None or method.source != source:
            raise ConfigError(
                f"the code of {reference} is not, in this worker, what it was where the sweep was started"
            )
        admit(method)


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
            path = settings.outputs_dir / identity(settings.identity)
            run = Run.load(path) if (path / "config.json").exists() else None
            if run is not None:
                session.add_runs(run.baseline, run.hash)
            if run is None or not run.finished:
                why = f"its worker ended ({type(error).__name__}: {error}); the same command goes on from its rows"
                session.add_failure(job.name, why, told=False)


def _number(job: HydraJob) -> int:
    return job.number or 0
