"""Jobs of a command line: what Hydra composed as recorded runs, in which order, how far, and what went wrong.

A job that cannot be run is a line on stderr and a record, and the sweep goes on. Ctrl-C and SIGTERM end the command
with a summary. No torch is imported here, so that --help and mistakes of the configuration do not wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvexp.run.build import build
from kvexp.run.compose import check_keys
from kvexp.run.guard import check, guard
from kvexp.run.labels import (
    check_idle,
    check_places,
    check_values,
    decided,
    labels_from_overrides,
    model_label,
    request_key,
)
from kvexp.run.model_spec import ModelSpec
from kvexp.run.session import Session, active, keys_of
from kvexp.run.store import Run, accept, refuse, run_hash
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.files import CONF
from kvexp.util.machine import tell_threads, use_threads
from kvexp.util.output import duration, say

if TYPE_CHECKING:
    from kvexp.run.settings import Settings


Item = TypeVar("Item")
POLL_S = 0.5
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
RUN_FOLDER = re.compile(r"\b[0-9a-f]{16}\b")  # in an error: the same one in two folders is one


class Diagnosis(Protocol):
    """Protocol of a diagnosis after a run, named by the configuration alone: this room may not import kvexp.diagnose.

    A diagnosis may not change a row, so it is no part of a run's identity.
    """

    def check(self, settings: Settings) -> None:
        """ConfigError, before any model loads, for a run it cannot diagnose."""

    def run_after(self, settings: Settings, run: Run) -> None:
        """Add to the run's folder what it lacks."""


def diagnosis_of(config: DictConfig) -> Diagnosis | None:
    """The option of `diagnose`; None for none."""
    chosen = config.get("diagnose")
    if not isinstance(chosen, DictConfig):
        raise ConfigError(f"diagnose must be one of the options in conf/diagnose (none, log), got {chosen!r}")
    node: Any = OmegaConf.to_container(chosen, resolve=True)
    if node.get("_target_") is None:
        if extra := sorted(node.keys() - {"_target_"}):
            raise ConfigError(f"diagnose=none has no {', '.join(map(str, extra))}; choose diagnose=log")
        return None
    diagnosis: Diagnosis = build(node, "diagnose", within="kvexp.diagnose")
    return diagnosis


@dataclass(frozen=True)
class HydraJob:
    """What Hydra composed; number: its place in a sweep, None for a single run.

    settings, runs: checked settings and their parts, once `built`.
    """

    config: DictConfig
    overrides: list[str]
    choices: dict[str, str]
    number: int | None
    settings: Settings | None = None
    runs: Sequence[Settings] = ()

    @property
    def name(self) -> str:
        """What a person typed of it."""
        return " ".join(self.overrides) or "(defaults)"


def settings_of_job(job: HydraJob, session: Session) -> Settings:
    """The job's checked settings; ConfigError names the key."""
    plain = _resolved(job.config, session)
    check_values(plain, job.choices)
    if plain.get("threads") is not None:
        use_threads(plain["threads"])
    check_idle(plain, job.choices, job.overrides)
    check_places(plain)
    plain["divergence"] = decided(plain, job.overrides, sweep=job.number is not None)
    from kvexp.run.settings import settings_of  # late: it imports torch, which mistakes found so far need not wait for

    tell_threads()
    settings = settings_of(plain, job.choices, job.overrides)
    diagnosis = diagnosis_of(job.config)
    if diagnosis is not None:
        diagnosis.check(settings)
    if settings.divergence.only and diagnosis is not None:
        raise ConfigError("divergence=only makes no rows, and diagnose needs them: set divergence=true")
    return settings


def runs_of(job: HydraJob, session: Session) -> list[Settings]:
    """The runs of a job, from its configuration alone."""
    return settings_of_job(job, session).parts()


def built(job: HydraJob, session: Session) -> HydraJob:
    """The job with its settings and runs; unchanged where they are wrong, an error that `run_job` reports."""
    try:
        settings = settings_of_job(job, session)
        return dataclasses.replace(job, settings=settings, runs=settings.parts())
    except Exception:
        return job


def run_unclaimed_first(items: Sequence[tuple[Item, Sequence[Settings]]], work: Callable[[Item], bool | None]) -> None:
    """Every item's work, those first whose runs nobody else is at, else in order; what returns False comes again."""
    left, said = list(items), False
    while left:
        place = next((place for place, (_, runs) in enumerate(left) if is_unclaimed(runs)), None)
        if place is not None:
            item = left.pop(place)
            if work(item[0]) is False:  # somebody was faster
                left.append(item)
            continue
        if not said:
            say(f"other processes are working on all that is left ({len(left)}): waiting for them", flush=True)
            said = True
        time.sleep(POLL_S)


def is_unclaimed(wanted: Sequence[Settings]) -> bool:
    """Whether nobody works on these runs or their baselines now; a moment later somebody may."""
    runs = (run for settings in wanted for run in (settings, settings if settings.is_baseline else settings.baseline()))
    for path, shard in {(run.outputs_dir / run_hash(run.identity), run.shard.name) for run in runs}:
        try:
            with Run.load(path).claim(timeout=0, part=shard):
                pass
        except TimeoutError:
            return False
        except (ConfigError, OSError):  # not there yet, or not to be used: `run_job` will report it
            pass
    return True


def _resolved(config: DictConfig, session: Session) -> dict[str, Any]:
    """The configuration as plain values, what it names checked; without what is no part of a run."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = getattr(error, "full_key", None) or "a setting"
        why = "has no value" if isinstance(error, MissingMandatoryValue) else f"cannot be: {str(error).splitlines()[0]}"
        raise ConfigError(f"{place} {why}; set it on the command line, {place}=VALUE") from error
    check(plain, session.typed_keys)
    check_keys(plain)
    return {key: value for key, value in plain.items() if key not in ("log", "experiment", "diagnose")}


def job_line(session: Session, number: int, overrides: Sequence[str]) -> str:
    """ "[3/10] h2o kv_ratio=0.5, about 4 min left"."""
    jobs, seconds = session.overrides_of_jobs, session.job_seconds
    known = number < len(jobs)
    place = f"[{number + 1}/{len(jobs)}]" if known else f"[{number + 1}]"
    line = " ".join([place, *(word.removeprefix("method=") for word in (jobs[number] if known else overrides))])
    if not known or not seconds:
        return line
    left = (len(jobs) - number) * statistics.median(seconds)
    return f"{line}, about {duration(left)} left"


def main_job(config: DictConfig, session: Session) -> None:
    """Hydra's task function: run the job, or collect it for the launcher."""
    session.begun = True
    hydra = HydraConfig.get()
    number = hydra.job.num if hydra.mode == RunMode.MULTIRUN else None
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # never what ${...} stands for
    job = HydraJob(config, overrides, dict(hydra.runtime.choices), number)
    if session.collected is not None:
        session.collected.append(job)
    else:
        run_job(job, session)


def _is_filled_ahead(wanted: Sequence[Settings], session: Session) -> bool:
    """Whether a shared prefill of this command has made all of these runs: their turns have nothing to do."""
    return bool(wanted) and {run_hash(settings.identity) for settings in wanted} <= session.complete_ahead


def run_jobs(jobs: list[HydraJob], session: Session, *, share: bool = True) -> None:
    """Run the jobs of a sweep. share: first fill in runs that can share prefills."""
    from kvexp.run.batches import prefill_groups, run_group, why_alone

    jobs = [built(job, session) for job in jobs]

    def filled(group: list[Settings]) -> bool:
        try:
            return session.disk_error is not None or run_group(group, session, wait=False)
        except Exception as error:  # each run is retried alone, which reports the error
            if is_disk_full(error):
                session.disk_error = error
            elif not is_user_error(error):
                traceback.print_exc()
            return True

    wanted = [settings for job in jobs for settings in job.runs]
    groups = prefill_groups(wanted) if share else []
    if share and len(jobs) > 1:
        for why, count in Counter(filter(None, map(why_alone, wanted))).items():
            say(f"{count} run{'s do' if count > 1 else ' does'} not share prefills with others, which is slower: {why}")
    run_unclaimed_first([(group, group) for group in groups], filled)

    def take(job: HydraJob) -> None:
        run_job(job, session, announced=not _is_filled_ahead(job.runs, session))

    run_unclaimed_first([(job, job.runs) for job in jobs], take)


def run_job(job: HydraJob, session: Session, *, announced: bool = True) -> None:
    """Run it. announced: with a line that says which it is.

    Errors of the user's making are one line on stderr, others have a traceback.
    """
    if announced and job.number is not None:
        say(job_line(session, job.number, job.overrides), flush=True)
    start, rows = time.monotonic(), session.rows_written
    settings: Settings | None = None
    try:
        if session.disk_error is not None:  # what is computed now could not be kept either
            raise session.disk_error
        settings = job.settings or settings_of_job(job, session)
        diagnosis = diagnosis_of(job.config)
        records, wrong, parts = [], [], job.runs or settings.parts()
        if len(parts) > 1:  # all are checked before the first one loads a model
            settings.task.check()
        for task_settings in parts:
            settings = task_settings  # what a failure is of
            try:
                record = _run(task_settings, session)
            except ConfigError as error:  # of this benchmark's examples: the others may be long enough
                wrong.append((task_settings, error))
                continue
            records.append(record)
            if diagnosis is not None:
                _diagnose(diagnosis, task_settings, record)
        if wrong:
            settings = wrong[0][0]
            raise _error_of(wrong, len(parts))
        accept(settings.outputs_dir, request_key(job.overrides))
    except Exception as error:
        if is_disk_full(error):
            session.disk_error = error
        report_failure(job, error, session)
        if settings is None or not _recorded(settings, error):
            _refuse(job, settings, error, session)
    session.jobs_done += 1  # well or with an error that was recorded
    if session.rows_written > rows:
        session.job_seconds.append(time.monotonic() - start)


def report_failure(job: HydraJob, error: Exception, session: Session) -> None:
    """Say on stderr why a job failed, once for all jobs that failed alike, and note it for the end."""
    text = error_text(error)
    alike = RUN_FOLDER.sub("", text)
    if any(failure.reported and RUN_FOLDER.sub("", failure.why) == alike for failure in session.failures):
        say("error: as before", file=sys.stderr, flush=True)
    elif is_user_error(error):
        say(f"error: {text}", file=sys.stderr, flush=True)
    else:
        traceback.print_exc()
    session.add_failure(job.name, text, reported=True)


def is_user_error(error: Exception) -> bool:
    """Whether the message says all there is to say: ours, and a file that could not be written (see
    kvexp.run.store).
    """
    return isinstance(error, ConfigError | CacheError) or (
        isinstance(error, OSError) and isinstance(error.__cause__, OSError)
    )


def is_disk_full(error: Exception) -> bool:
    """Whether nothing can be written any more, which the next job would only find out after its work."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL


def error_text(error: Exception) -> str:
    """The error in one line, without Python's own words around it."""
    message = error.strerror if is_user_error(error) and isinstance(error, OSError) else str(error)
    return message or type(error).__name__


def _error_of(wrong: Sequence[tuple[Settings, ConfigError]], parts: int) -> ConfigError:
    """One error for the parts of a job that could not be run: each kind of error once, with the names of its parts."""
    if parts == 1:
        return wrong[0][1]
    names: dict[str, list[str]] = {}
    for settings, error in wrong:
        names.setdefault(str(error), []).append(str(settings.labels["task"]))
    return ConfigError("; ".join(f"{', '.join(tasks)}: {text}" for text, tasks in names.items()))


def _run(settings: Settings, session: Session) -> Run:
    """Rows and divergence of a run, what it lacks of them."""
    from kvexp.run.batches import evaluate_run, measure_rest

    only = settings.divergence.only and not settings.is_baseline
    record = None if only else evaluate_run(settings, session)
    if not settings.is_baseline and settings.divergence.texts:
        record = measure_rest(settings, session)
    assert record is not None, "a run without rows has a divergence"
    session.add_runs(record.baseline, record.hash)
    return record


def _diagnose(diagnosis: Diagnosis, settings: Settings, record: Run) -> None:
    """Add to the run's folder; a failure is recorded there, and the rows stay."""
    try:
        with record.claim():
            diagnosis.run_after(settings, record)
    except Exception as error:
        with contextlib.suppress(OSError):
            record.fail(error)
        raise


def _recorded(settings: Settings, error: Exception) -> bool:
    """Whether the run's own folder says that it failed; into a folder that a shared prefill made it is written here.

    A job is a failed run or a refused one, never both.
    """
    path = settings.outputs_dir / run_hash(settings.identity)
    try:
        if not (path / "config.json").exists():
            return False
        if not (path / "failure.json").exists():
            Run.load(path).fail(error)
        return True
    except (OSError, ConfigError):  # a folder that may not even be looked into
        return False


def _refuse(job: HydraJob, settings: Settings | None, error: Exception, session: Session) -> None:
    """Leave a record of a job that has no folder; that it cannot be written is said once."""

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
        if not session.unrecorded:
            say(
                f"it could not be recorded either: {error_text(trouble).partition('; ')[0]}",
                file=sys.stderr,
                flush=True,
            )
        session.unrecorded = True


# Ctrl-C or SIGTERM at any moment: a summary and exit status 130 or 143, no traceback; a second one stops at once.


INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM: what a shell expects
KEPT = "all rows written so far are kept; the same command goes on from there"
# A cluster's preemption terminates, a terminal that is closed hangs up: nobody reads a summary then.
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    WORDS[signal.SIGHUP] = "hung up"


def install_handler() -> None:
    """From now on these signals end the process cleanly; one that is ignored (a shell's background, nohup) stays so."""
    for number in WORDS:
        if _is_default(number):
            signal.signal(number, _stop_at_once)


@contextlib.contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """The block ends at the first interrupt, with a summary; before and after it there is nothing to sum up."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is _stop_at_once or _is_default(number):
            signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args in {(key,) for key in WORDS} else signal.SIGINT
        say(f"\n{WORDS[number]}: {summary(session)}{KEPT}", file=sys.stderr, flush=True)
        sys.exit(128 + number)
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by something else than Python
                signal.signal(number, handler)


def _is_default(number: int) -> bool:
    return signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _stop_at_once)
    signal.signal(signal.SIGTERM, _stop_at_once)
    raise KeyboardInterrupt(signal.Signals(number))


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Rows are on disk when they are written, so there is nothing to wait for."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"\n{WORDS[signal.Signals(number)]}: {KEPT}\n".encode())
    os._exit(128 + number)


def summary(session: Session) -> str:
    """What a command has done so far."""
    if not session.begun:
        return "nothing was begun; "
    jobs = len(session.overrides_of_jobs)
    done = f"{session.jobs_done} of {jobs} jobs are complete; " if jobs else "the run is not complete; "
    texts = f"{session.texts_measured} KL passes were made, " if session.texts_measured else ""
    return f"{session.rows_written} rows were written, {texts}{done}"


def composed_model(words: Sequence[str]) -> tuple[str, ModelSpec]:
    """(Name, model) that the words of a command line choose; ConfigError for settings that cannot be."""
    session, full = Session(typed_keys=keys_of(words)), ["method=full"]
    guard()
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*words, *full], return_hydra_config=True)
    choices = {str(group): str(option) for group, option in config.hydra.runtime.choices.items() if option is not None}
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    (run,) = runs_of(HydraJob(plain, [*words, *full], choices, None), session)
    return model_label(choices.get("model", ""), run.model.path), run.model
