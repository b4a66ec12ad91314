"""The model that the words of a command line choose, for commands that need no method, budget or task."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kvexp.config.model_spec import ModelSpec
from kvexp.config.target_allowlist import guard
from kvexp.paths import CONF
from kvexp.session import Session, active, keys_of
from kvexp.sweep.job_queue import HydraJob, runs_of


def composed_model(words: Sequence[str]) -> tuple[str, ModelSpec]:
    """(Name, model) that the words of a command line choose; ConfigError for settings that cannot be."""
    session, own = Session(typed_keys=keys_of(words)), ["method=full"]
    guard()
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*words, *own], return_hydra_config=True)
    choices = {str(group): str(option) for group, option in config.hydra.runtime.choices.items() if option is not None}
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    (run,) = runs_of(HydraJob(plain, [*words, *own], choices, None), session)
    return run.model.label(choices.get("model", "")), run.model
