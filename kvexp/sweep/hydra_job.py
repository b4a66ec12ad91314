"""One Hydra job: composed configuration to a recorded run; what goes wrong is noted and the sweep goes on."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvexp.config.diagnosis import Diagnosis, diagnosis_of
from kvexp.config.known_keys import check_keys
from kvexp.config.labels import labels_as_asked, request
from kvexp.config.objective import check_objective, objective
from kvexp.config.root_values import check_idle, check_values
from kvexp.config.target_allowlist import check
from kvexp.errors import CacheError, ConfigError
from kvexp.record import Run, accept, identity, refuse
from kvexp.sweep.run_queue import free, in_turn
from kvexp.sweep.sweep_progress import SWEEP
from kvexp.sweep.sweep_summary import note, note_failure
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.config.settings import Settings


@dataclass(frozen=True)
class Job:
    """What Hydra composed; number: its place in a sweep, None for a single run."""

    config: DictConfig
    overrides: list[str]
    choices: dict[str, str]
    number: int | None


class Swept:
    """The jobs of a sweep whose launcher takes them together."""

    def __init__(self) -> None:
        self.jobs: list[Job] | None = None

    def begin(self) -> None:
        """From now on jobs are collected instead of run."""
        self.jobs = []

    def end(self) -> list[Job]:
        """Those collected; the next ones are run."""
        jobs, self.jobs = self.jobs or [], None
        return jobs


SWEPT = Swept()
LEFT: list[Job] = []  # of a sweep without such a launcher


def job(config: DictConfig) -> float | None:
    """Hydra's task function: run the job, or leave it to the launcher that collects. Returns the job's objective."""
    hydra = HydraConfig.get()
    number = hydra.job.num if hydra.mode == RunMode.MULTIRUN else None
    overrides: Any = OmegaConf.to_container(
        hydra.overrides.task, resolve=False
    )  # as typed: never what ${...} stands for
    one = Job(config, overrides, dict(hydra.runtime.choices), number)
    if SWEPT.jobs is not None:
        SWEPT.jobs.append(one)
        return None
    # A search goes by what a job returns: it cannot be left for later.
    if config.get("objective") is not None or not SWEEP.deferring or free(_runs(one)):
        return run_job(one)
    LEFT.append(one)
    return None


def finish_left() -> None:
    """Run the jobs of a sweep that were left because another process was at them."""
    jobs = [(one, _runs(one)) for one in LEFT]
    LEFT.clear()
    in_turn(jobs, _run_left)


def _run_left(one: Job) -> None:
    run_job(one)


def perform(jobs: list[Job]) -> list[float | None]:
    """Those that can share prefills do; then each has its turn. Returns their objectives."""
    from kvexp.sweep.prefill_groups import fill, groups

    each = [(one, _runs(one)) for one in jobs]

    def filled(group: list[Settings]) -> bool:
        try:
            return fill(group, wait=False)
        except Exception as error:  # a run's own turn comes, and tells what is wrong with it
            if not _expected(error):
                traceback.print_exc()
            return True

    in_turn([(group, group) for group in groups(settings for _, runs in each for settings in runs)], filled)
    found: dict[int, float | None] = {}

    def take(place: int) -> None:
        found[place] = run_job(jobs[place])

    in_turn([(place, runs) for place, (_, runs) in enumerate(each)], take)
    return [found[place] for place in range(len(jobs))]


def readable(one: Job) -> Settings | None:
    """The job's settings; None where they are wrong, which its turn will say."""
    try:
        return _settings(one.config, one.choices, one.overrides)
    except Exception:
        return None


def _runs(one: Job) -> list[Settings]:
    """The runs of a job; none where its settings are wrong, which its turn will say."""
    try:
        return parts_of(one)
    except Exception:
        return []


def run_job(one: Job) -> float | None:
    """Run it and return its objective. Errors of the user's making are one line on stderr, others have a traceback."""
    config, overrides, choices = one.config, one.overrides, one.choices
    settings: Settings | None = None
    with SWEEP.job(one.number, overrides):
        try:
            settings = _settings(config, choices, overrides)
            diagnosis = diagnosis_of(config)
            made = []
            for part in _parts(settings):
                settings = part  # what a failure is of
                record = _run(part)
                made.append(record)
                if diagnosis is not None:
                    _diagnose(diagnosis, part, record)
            accept(settings.outputs_dir, request(overrides))
            return objective(made, config.get("objective"))
        except Exception as error:
            tell(one, error)
            if settings is None or not _recorded(settings):
                _refuse(config, choices, overrides, settings, error)
    return None


def tell(one: Job, error: Exception) -> None:
    """Say on stderr why a job failed, and note it for the end."""
    if _expected(error):
        say(f"error: {_words(error)}", file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
    note_failure(" ".join(one.overrides) or "(defaults)", _words(error), told=True)


def parts_of(one: Job) -> list[Settings]:
    """The runs of a job, from its configuration alone."""
    return _settings(one.config, one.choices, one.overrides).parts()


def _expected(error: Exception) -> bool:
    """Whether the message says all there is to say: ours, and a file that could not be written (see kvexp.record)."""
    return isinstance(error, ConfigError | CacheError) or (
        isinstance(error, OSError) and isinstance(error.__cause__, OSError)
    )


def _words(error: Exception) -> str:
    message = error.strerror if _expected(error) and isinstance(error, OSError) else str(error)
    return message or type(error).__name__


def _settings(config: DictConfig, choices: dict[str, str], overrides: list[str]) -> Settings:
    plain = _resolved(config)
    check_values(plain, choices)
    check_idle(plain, choices, overrides)
    from kvexp.config.settings import settings_of  # late: it imports torch, and what is wrong by itself is told by now

    settings = settings_of(plain, choices, overrides)
    check_objective(settings.task, plain.get("objective"))
    diagnosis = diagnosis_of(config)
    if diagnosis is not None:
        diagnosis.check(settings)
    return settings


def _parts(settings: Settings) -> list[Settings]:
    """The runs of a job; where there are several, all are checked before the first one loads a model."""
    parts = settings.parts()
    if len(parts) > 1:
        settings.task.check()
    return parts


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = getattr(error, "full_key", None) or "a setting"
        why = "has no value" if isinstance(error, MissingMandatoryValue) else f"cannot be: {str(error).splitlines()[0]}"
        raise ConfigError(f"{place} {why}; set it on the command line, {place}=VALUE") from error
    check(plain)
    check_keys(plain)
    return {key: value for key, value in plain.items() if key not in ("log", "experiment", "diagnose")}


def _run(settings: Settings) -> Run:
    from kvexp.evaluate.evaluate_run import run

    record = run(settings)
    note(record.baseline, record.hash)
    return record


def _diagnose(diagnosis: Diagnosis, settings: Settings, record: Run) -> None:
    """Add to the run's folder; a failure is recorded there, beside rows that stay."""
    try:
        with record.claim():
            diagnosis.after(settings, record)
    except Exception as error:
        with contextlib.suppress(OSError):
            record.fail(error)
        raise


def _recorded(settings: Settings) -> bool:
    """Whether the run's own folder says that it failed."""
    try:
        return (settings.outputs_dir / identity(settings.identity) / "failure.json").exists()
    except OSError:  # a folder that may not even be looked into
        return False


def _refuse(
    config: DictConfig,
    choices: dict[str, str],
    overrides: list[str],
    settings: Settings | None,
    error: Exception,
) -> None:
    """Leave a record of a job that has no folder."""

    def given(key: str) -> Any:
        try:
            return OmegaConf.select(config, key)
        except OmegaConfBaseException:
            return None

    labels = settings.labels if settings is not None else None
    labels = labels or labels_as_asked(choices, overrides, kv_ratio=given("kv_ratio"), path=given("model.path"))
    try:
        refuse(str(given("outputs_dir")), request(overrides), labels, error)
    except OSError as trouble:
        say(f"this failure could not be recorded: {_words(trouble)}", file=sys.stderr, flush=True)
