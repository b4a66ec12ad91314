"""One Hydra job: composed configuration to a recorded run; what goes wrong is noted and the sweep goes on."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.config.labels import labels_from_overrides, request_key
from kvexp.config.root_values import objective
from kvexp.errors import CacheError, ConfigError
from kvexp.record import Run, accept, identity, refuse
from kvexp.session import Session
from kvexp.sweep.job_progress import job_progress
from kvexp.sweep.job_queue import (
    Diagnosis,
    HydraJob,
    diagnosis_of,
    is_unclaimed,
    run_unclaimed_first,
    runs_or_none,
    settings_of_job,
)
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


def main_job(config: DictConfig, session: Session) -> float | None:
    """Hydra's task function: run the job, or leave it to the launcher that collects. Returns the job's objective."""
    session.begun = True
    hydra = HydraConfig.get()
    number = hydra.job.num if hydra.mode == RunMode.MULTIRUN else None
    overrides: Any = OmegaConf.to_container(
        hydra.overrides.task, resolve=False
    )  # as typed: never what ${...} stands for
    job = HydraJob(config, overrides, dict(hydra.runtime.choices), number)
    if session.collected is not None:
        session.collected.append(job)
        return None
    # A search goes by what a job returns: it cannot be left for later.
    if config.get("objective") is not None or not session.may_defer or is_unclaimed(runs_or_none(job, session)):
        return run_job(job, session)
    session.deferred.append(job)
    return None


def run_deferred(session: Session) -> None:
    """Run the jobs of a sweep that were left because another process was at them."""
    jobs = [(job, runs_or_none(job, session)) for job in session.deferred]
    session.deferred.clear()

    def take(job: HydraJob) -> None:
        run_job(job, session)

    run_unclaimed_first(jobs, take)


def run_jobs(jobs: list[HydraJob], session: Session) -> list[float | None]:
    """Jobs that can share prefills do; then each has its turn. Returns their objectives."""
    from kvexp.sweep.prefill_groups import prefill_groups, run_group

    each = [(job, runs_or_none(job, session)) for job in jobs]

    def filled(group: list[Settings]) -> bool:
        try:
            return run_group(group, session, wait=False)
        except Exception as error:  # a run's own turn comes, and tells what is wrong with it
            if not is_user_error(error):
                traceback.print_exc()
            return True

    groups = prefill_groups(settings for _, runs in each for settings in runs)
    run_unclaimed_first([(group, group) for group in groups], filled)
    found: dict[int, float | None] = {}

    def take(place: int) -> None:
        found[place] = run_job(jobs[place], session)

    run_unclaimed_first([(place, runs) for place, (_, runs) in enumerate(each)], take)
    return [found[place] for place in range(len(jobs))]


def run_job(job: HydraJob, session: Session) -> float | None:
    """Run it and return its objective. Errors of the user's making are one line on stderr, others have a traceback."""
    settings: Settings | None = None
    with job_progress(session, job.number, job.overrides):
        try:
            settings = settings_of_job(job, session)
            diagnosis = diagnosis_of(job.config)
            made, wrong = [], []
            parts = _parts(settings)
            for part in parts:
                settings = part  # what a failure is of
                try:
                    record = _run(part, session)
                except ConfigError as error:  # of this benchmark's examples: the others may be long enough
                    wrong.append((part, error))
                    continue
                made.append(record)
                if diagnosis is not None:
                    _diagnose(diagnosis, part, record)
            if wrong:
                settings = wrong[0][0]
                raise _error_of(wrong, len(parts))
            accept(settings.outputs_dir, request_key(job.overrides))
            return objective(made, job.config.get("objective"))
        except Exception as error:
            report_failure(job, error, session)
            if settings is None or not _recorded(settings, error):
                _refuse(job, settings, error)
    return None


def report_failure(job: HydraJob, error: Exception, session: Session) -> None:
    """Say on stderr why a job failed, and note it for the end."""
    if is_user_error(error):
        say(f"error: {error_text(error)}", file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
    session.add_failure(job.name, error_text(error), told=True)


def is_user_error(error: Exception) -> bool:
    """Whether the message says all there is to say: ours, and a file that could not be written (see kvexp.record)."""
    return isinstance(error, ConfigError | CacheError) or (
        isinstance(error, OSError) and isinstance(error.__cause__, OSError)
    )


def error_text(error: Exception) -> str:
    """The error in one line, without Python's own words around it."""
    message = error.strerror if is_user_error(error) and isinstance(error, OSError) else str(error)
    return message or type(error).__name__


def _parts(settings: Settings) -> list[Settings]:
    """The runs of a job; where there are several, all are checked before the first one loads a model."""
    parts = settings.parts()
    if len(parts) > 1:
        settings.task.check()
    return parts


def _error_of(wrong: Sequence[tuple[Settings, ConfigError]], parts: int) -> ConfigError:
    """What is wrong with those of a job's parts that could not be run, each kind of error once with their names."""
    if parts == 1:
        return wrong[0][1]
    names: dict[str, list[str]] = {}
    for part, error in wrong:
        names.setdefault(str(error), []).append(str(part.labels["task"]))
    return ConfigError("; ".join(f"{', '.join(each)}: {text}" for text, each in names.items()))


def _run(settings: Settings, session: Session) -> Run:
    """Rows and divergence of a run, what it lacks of them."""
    from kvexp.evaluate.evaluate_run import evaluate_run
    from kvexp.sweep.divergence_turn import measure_rest

    only = settings.divergence.only and not settings.is_baseline
    record = None if only else evaluate_run(settings, session)
    if not settings.is_baseline and settings.divergence.texts:
        record = measure_rest(settings, session)
    assert record is not None, "a run without rows has a divergence"
    session.add_runs(record.baseline, record.hash)
    return record


def _diagnose(diagnosis: Diagnosis, settings: Settings, record: Run) -> None:
    """Add to the run's folder; a failure is recorded there, beside rows that stay."""
    try:
        with record.claim():
            diagnosis.run_after(settings, record)
    except Exception as error:
        with contextlib.suppress(OSError):
            record.fail(error)
        raise


def _recorded(settings: Settings, error: Exception) -> bool:
    """Whether the run's own folder says that it failed; one that a shared prefill made is told here.

    A job is a failed run or a refused one, never both.
    """
    path = settings.outputs_dir / identity(settings.identity)
    try:
        if not (path / "config.json").exists():
            return False
        if not (path / "failure.json").exists():
            Run.load(path).fail(error)
        return True
    except (OSError, ConfigError):  # a folder that may not even be looked into
        return False


def _refuse(job: HydraJob, settings: Settings | None, error: Exception) -> None:
    """Leave a record of a job that has no folder."""

    def given(key: str) -> Any:
        try:
            return OmegaConf.select(job.config, key)
        except OmegaConfBaseException:
            return None

    labels = settings.labels if settings is not None else None
    labels = labels or labels_from_overrides(
        job.choices, job.overrides, kv_ratio=given("kv_ratio"), path=given("model.path")
    )
    try:
        refuse(str(given("outputs_dir")), request_key(job.overrides), labels, error)
    except OSError as trouble:
        say(f"this failure could not be recorded: {error_text(trouble)}", file=sys.stderr, flush=True)
