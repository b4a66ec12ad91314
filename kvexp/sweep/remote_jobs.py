"""Jobs of a sweep as they go to workers: those that share prefills in one piece, and what comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import open_dict

from kvexp.errors import ConfigError
from kvexp.record import Run, identity
from kvexp.sweep.hydra_job import Job, parts_of, perform, readable, run_job
from kvexp.sweep.sweep_progress import SWEEP
from kvexp.sweep.sweep_summary import Failure, note, note_failure, taken
from kvexp.terminal import say
from kvexp.user_methods import admit, admitted, load_method


@dataclass(frozen=True)
class Shipment:
    """Jobs for one worker; words: what tells each job of the whole sweep apart (`Sweep.jobs`).

    methods: reference and source of each user's method of the sweep, for the worker to load the same code.
    """

    jobs: list[Job]
    words: list[list[str]]
    methods: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(" ".join(job.overrides) or "(defaults)" for job in self.jobs)


@dataclass(frozen=True)
class BatchResult:
    """hashes: runs and baselines; values: each job's objective."""

    hashes: list[str]
    failures: list[Failure]
    values: dict[int, float | None]


Engine = Callable[
    [Callable[[Shipment], BatchResult], Sequence[Shipment]], Iterable[tuple[int, BatchResult | BaseException]]
]


def ship(jobs: Sequence[Job], shards: int, engine: Engine) -> list[float | None]:
    """Let an engine's workers perform the jobs; this process then knows their runs and failures like its own.

    shards: parts of the examples that each piece is split into. engine(work, shipments) yields (place, outcome or what
    ended the worker) in any order. A job that cannot be read fails here and is not shipped.
    """
    if shards < 1:
        raise ConfigError(f"hydra.launcher.shards must be at least 1, got {shards}")
    shipments = list(_shipments(jobs, shards))
    values: dict[int, float | None] = {}
    if len(shipments) > 1:
        say(f"{len(jobs)} jobs go out in {len(shipments)} pieces", flush=True)
    for done, (place, outcome) in enumerate(engine(work, shipments), start=1):
        if isinstance(outcome, BatchResult):
            note(*outcome.hashes)
            for failure in outcome.failures:  # told where its worker ran, which nobody may be looking at
                note_failure(failure.job, failure.why, told=False)
            values |= outcome.values
        else:
            _lost(shipments[place], outcome)
        say(f"{done} of {len(shipments)} pieces are back", flush=True)
    return [values.get(_number(job)) for job in jobs]


def work(shipment: Shipment) -> BatchResult:
    """In the worker: perform the jobs, and tell what they were."""
    before = taken()  # what this process did else is not the shipment's
    SWEEP.jobs = shipment.words
    _load_methods(shipment.methods)
    values = perform(shipment.jobs)
    command = taken()
    note(*before.hashes)
    for failure in before.failures:
        note_failure(failure.job, failure.why, told=failure.told)
    return BatchResult(command.hashes, command.failures, dict(zip(map(_number, shipment.jobs), values, strict=True)))


def _shipments(jobs: Sequence[Job], shards: int) -> Iterator[Shipment]:
    from kvexp.sweep.prefill_groups import company, joint

    alike: dict[Any, list[Job]] = {}
    for job in jobs:
        settings = readable(job)
        if settings is None:
            run_job(job)  # it says why it cannot be
            continue
        if shards > 1 and not settings.shard.whole:
            raise ConfigError(
                f"hydra.launcher.shards={shards} splits the examples, and so does shard={job.config.shard}: drop one"
            )
        alike.setdefault(company(settings) if joint(settings) else _number(job), []).append(job)
    named = {job.config.method.get("_target_") for job in jobs}
    known = [one for one in admitted().values() if one.target in named]
    methods = [(one.reference, one.source) for one in known if one.reference is not None]
    for together in alike.values():
        for index in range(shards):
            yield Shipment([_part(job, index, shards) for job in together], SWEEP.jobs, methods)


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


def _part(job: Job, index: int, shards: int) -> Job:
    if shards == 1:
        return job
    config = copy.deepcopy(job.config)
    with open_dict(config):
        config.shard = f"{index}/{shards}"
    return replace(job, config=config)


def _lost(shipment: Shipment, error: BaseException) -> None:
    """A worker that ended without an answer: which of its jobs are done stands on disk."""
    for job in shipment.jobs:
        for settings in parts_of(job):
            path = settings.outputs_dir / identity(settings.identity)
            run = Run.load(path) if (path / "config.json").exists() else None
            if run is not None:
                note(run.baseline, run.hash)
            if run is None or not run.finished:
                why = f"its worker ended ({type(error).__name__}: {error}); the same command goes on from its rows"
                note_failure(" ".join(job.overrides) or "(defaults)", why, told=False)


def _number(job: Job) -> int:
    return job.number or 0
