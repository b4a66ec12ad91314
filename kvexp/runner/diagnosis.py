"""What a job does once its rows are there, known by the configuration alone: `diagnose` stands above the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import DictConfig, OmegaConf

from kvexp.build import build

if TYPE_CHECKING:
    from kvexp.record import Run
    from kvexp.runner.settings import Settings


class Diagnosis(Protocol):
    """It may not change a row, so it is no part of a run's identity."""

    def check(self, settings: Settings) -> None:
        """ConfigError, before any model loads, for a run it cannot diagnose."""

    def after(self, settings: Settings, run: Run, asked: dict[str, Any]) -> None:
        """Add to the run's folder what it lacks; asked: the configuration, to make the settings again from."""


def diagnosis_of(config: DictConfig) -> Diagnosis | None:
    """The option of `diagnose`; None for none."""
    node: Any = OmegaConf.to_container(config.diagnose, resolve=True)
    if node.get("_target_") is None:
        return None
    made: Diagnosis = build(node, "diagnose", within="kvexp.diagnose")
    return made
