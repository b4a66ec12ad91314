"""One Hydra job: composed configuration to a recorded run; what goes wrong is noted and the sweep goes on."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.errors import CacheError, ConfigError
from kvexp.runner.report import note, note_failure


def job(config: DictConfig) -> None:
    """Run it. Errors of the user's making are one line on stderr, others come with their traceback."""
    hydra = HydraConfig.get()
    overrides = " ".join(hydra.overrides.task) or "(defaults)"
    try:
        _run(_resolved(config), dict(hydra.runtime.choices), list(hydra.overrides.task))
    except (ConfigError, CacheError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        note_failure(overrides, error)
    except Exception as error:
        traceback.print_exc()
        note_failure(overrides, error)


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = getattr(error, "full_key", None) or "a setting"
        raise ConfigError(
            f"{place}: {str(error).splitlines()[0]}; set it on the command line, {place}=VALUE"
        ) from error
    return {key: value for key, value in plain.items() if key not in ("log", "experiment")}


def _run(config: dict[str, Any], choices: dict[str, str], overrides: list[str]) -> None:
    from kvexp.runner.run import run
    from kvexp.runner.settings import settings_of

    record = run(settings_of(config, choices, overrides))
    note(record.baseline, record.hash)
