"""The surrogate of a run's model: its file, read before any weights, and what it must not have been trained on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvexp.config.calibration_of_model import model_digest, words_of_model
from kvexp.config.model_spec import ModelSpec
from kvexp.errors import ConfigError
from kvexp.tasks import Task

if TYPE_CHECKING:
    from kvexp.core import Method, Surrogate


def surrogate_for(
    method: Method, model: ModelSpec, task: Task, choices: Mapping[str, str], overrides: Sequence[str]
) -> Surrogate | None:
    """What training has left for this model, if the method needs it.

    ConfigError, with the command to run, where there is none that fits, and where the task asks about an article that
    it was trained on. choices, overrides: the command line's, to say that command.
    """
    if not getattr(method.needs, "surrogate", False):  # needs that are no declaration are told by CacheConfig
        return None
    from kvexp.models.surrogate_file import read_surrogate

    command = f"kvexp calibrate kvzap {shlex.join(words_of_model(choices, overrides))}"
    try:
        found = read_surrogate(model_digest(model))
        why = "this model has none yet"
    except ConfigError as error:
        found, why = None, str(error)
    if found is None:
        raise ConfigError(f"method={method.name} needs a trained surrogate of its scores: {why}. Run: {command}")
    trained = set(found.about.get("articles", ()))
    if trained:
        _check_apart(trained, task, method.name, command)
    return found.surrogate


def _check_apart(trained: set[str], task: Task, method: str, command: str) -> None:
    """ConfigError where the task asks about an article among `trained` (ids), or hides something in one."""
    asked = task.articles_read()
    if both := sorted(trained & asked):
        raise ConfigError(
            f"method={method} was trained on {len(both)} of the {len(asked)} articles that task={task.name} reads, "
            f"{both[0]} among them: leave those out (limit=N takes the first N examples), or train on other text: "
            f"{command} data=FILE"
        )
