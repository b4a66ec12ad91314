"""Studies: what no sweep needs, each a command of its own (`python -m experiments.studies.NAME --help`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kvexp.run.guard import guard
from kvexp.run.jobs import HydraJob, runs_of
from kvexp.run.settings import Settings
from kvexp.util import CONF, CacheError, ConfigError, Session, active, tells_errors


def composed_runs(words: Sequence[str], session: Session) -> tuple[dict[str, str], list[Settings]]:
    """(Group -> option, the runs) of the words of a command line; ConfigError for settings that cannot be."""
    guard()
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(words), return_hydra_config=True)
        choices = {str(key): str(value) for key, value in config.hydra.runtime.choices.items() if value is not None}
        plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return choices, runs_of(HydraJob(plain, list(words), choices, None), session)


@tells_errors(ConfigError, CacheError, OSError)
def carried_out(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> int:
    """Call the parsed arguments' `command`; returns its exit code, or 2 after printing an error."""
    args = parser.parse_args(words)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)
