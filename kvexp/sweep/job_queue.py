"""The jobs of a command: what Hydra composed, the runs that are meant, and the order in which processes take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvexp.build import build
from kvexp.config.divergence_options import decided
from kvexp.config.known_keys import check_keys
from kvexp.config.root_values import check_idle, check_objective, check_values
from kvexp.config.target_allowlist import check
from kvexp.errors import ConfigError
from kvexp.record import Run, identity
from kvexp.session import Session
from kvexp.terminal import say

if TYPE_CHECKING:
    from kvexp.config.settings import Settings

Item = TypeVar("Item")
POLL_S = 0.5


class Diagnosis(Protocol):
    """What a job does once its rows are there, known by the configuration alone: `kvexp.diagnose` stands above.

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
        raise ConfigError(f"diagnose must be one of the options in conf/diagnose (none, log, twin), got {chosen!r}")
    node: Any = OmegaConf.to_container(chosen, resolve=True)
    if node.get("_target_") is None:
        if extra := sorted(node.keys() - {"_target_"}):
            raise ConfigError(f"diagnose=none has no {', '.join(map(str, extra))}; choose diagnose=log or twin")
        return None
    made: Diagnosis = build(node, "diagnose", within="kvexp.diagnose")
    return made


@dataclass(frozen=True)
class HydraJob:
    """What Hydra composed; number: its place in a sweep, None for a single run."""

    config: DictConfig
    overrides: list[str]
    choices: dict[str, str]
    number: int | None

    @property
    def name(self) -> str:
        """What a person typed of it."""
        return " ".join(self.overrides) or "(defaults)"


def settings_of_job(job: HydraJob, session: Session) -> Settings:
    """The job's checked settings; ConfigError names the key."""
    plain = _resolved(job.config, session)
    check_values(plain, job.choices)
    check_idle(plain, job.choices, job.overrides)
    plain["divergence"] = decided(plain, job.overrides, sweep=job.number is not None)
    from kvexp.config.settings import settings_of  # late: it imports torch, and what is wrong by itself is told by now

    settings = settings_of(plain, job.choices, job.overrides)
    check_objective(settings.task, plain.get("objective"))
    diagnosis = diagnosis_of(job.config)
    if diagnosis is not None:
        diagnosis.check(settings)
    if settings.divergence.only and (diagnosis is not None or plain.get("objective") is not None):
        raise ConfigError("divergence=only makes no rows, which diagnose and objective go by: set divergence=true")
    return settings


def runs_of(job: HydraJob, session: Session) -> list[Settings]:
    """The runs of a job, from its configuration alone."""
    return settings_of_job(job, session).parts()


def settings_or_none(job: HydraJob, session: Session) -> Settings | None:
    """The job's settings; None where they are wrong, which its turn will say."""
    try:
        return settings_of_job(job, session)
    except Exception:
        return None


def runs_or_none(job: HydraJob, session: Session) -> list[Settings]:
    """The runs of a job; none where its settings are wrong, which its turn will say."""
    try:
        return runs_of(job, session)
    except Exception:
        return []


def run_unclaimed_first(items: Sequence[tuple[Item, Sequence[Settings]]], work: Callable[[Item], bool | None]) -> None:
    """Every item's work, those first whose runs nobody else is at, else in order; what returns False comes again."""
    left, told = list(items), False
    while left:
        place = next((place for place, (_, runs) in enumerate(left) if is_unclaimed(runs)), None)
        if place is not None:
            item = left.pop(place)
            if work(item[0]) is False:  # somebody was faster
                left.append(item)
            continue
        if not told:
            say(f"other processes are working on all that is left ({len(left)}): waiting for them", flush=True)
            told = True
        time.sleep(POLL_S)


def is_unclaimed(wanted: Sequence[Settings]) -> bool:
    """Whether nobody works on these runs or their baselines now; a moment later somebody may."""
    each = (one for asked in wanted for one in (asked, asked if asked.is_baseline else asked.baseline()))
    runs = {(one.outputs_dir / identity(one.identity), one.shard.name) for one in each}
    return not any(_claimed(path, part) for path, part in runs)


def _claimed(path: Path, part: str | None) -> bool:
    try:
        with Run.load(path).claim(timeout=0, part=part):
            return False
    except TimeoutError:
        return True
    except (ConfigError, OSError):  # not there yet, or not to be used: its own turn will say so
        return False


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
