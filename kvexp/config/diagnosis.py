"""What a job does once its rows are there, known by the configuration alone: `diagnose` stands above the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import DictConfig, OmegaConf

from kvexp.build import build
from kvexp.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.config.settings import Settings
    from kvexp.record import Run


class Diagnosis(Protocol):
    """It may not change a row, so it is no part of a run's identity."""

    def check(self, settings: Settings) -> None:
        """ConfigError, before any model loads, for a run it cannot diagnose."""

    def after(self, settings: Settings, run: Run) -> None:
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
