"""The runs of a yardstick, composed as `kvexp run` composes them: a full cache on lm-eval's own benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kvexp.config.labels import QUOTES, model_label
from kvexp.config.settings import Settings
from kvexp.config.target_allowlist import guard
from kvexp.errors import ConfigError
from kvexp.paths import CONF
from kvexp.session import Session, active, keys_of
from kvexp.sweep.job_queue import HydraJob, runs_of

BATCH = 8  # prompts per forward where nothing else is asked for: in float32 it changes no number


def composed_settings(words: Sequence[str], benchmarks: Callable[[str], tuple[str, ...]]) -> tuple[str, list[Settings]]:
    """(name of the model's configuration, one run per benchmark); ConfigError for settings that cannot be.

    words: overrides of the command line; benchmarks: name of the model -> lm-eval's names of its benchmarks.
    """
    session = Session(typed_keys=keys_of(words))
    guard()
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == "model"]
    with active(session), initialize_config_dir(str(CONF), version_base="1.3"):
        name = chosen[-1] if chosen else str(compose("config", return_hydra_config=True).hydra.runtime.choices["model"])
        paths = [word.partition("=")[2] for word in words if word.lstrip("+").partition("=")[0] == "model.path"]
        name = model_label(name, paths[-1].strip(QUOTES)) if paths else name
        own = ["task=lm_eval", f"task.tasks=[{','.join(benchmarks(name))}]", "method=full"]
        if not any(word.partition("=")[0] == "batch_size" for word in words):
            own.append(f"batch_size={BATCH}")
        config = compose("config", [*words, *own], return_hydra_config=True)
    choices = {str(group): str(option) for group, option in config.hydra.runtime.choices.items() if option is not None}
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    settings = runs_of(HydraJob(plain, [*words, *own], choices, None), session)
    for each in settings:
        if each.model.kind == "random":
            raise ConfigError(f"model={name} has random weights: there is nothing to compare them with")
    return name, settings
