"""What was calibrated on the model of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvexp.run.model_spec import ModelSpec, config_of_spec
from kvexp.tasks import Task
from kvexp.util import ConfigError, cached_commit

if TYPE_CHECKING:
    from kvexp.core import Budget, HeadScores, Method, QueryCalibration, Surrogate
    from kvexp.hf.calibrate import Made, StatisticsFile


# The calibration of a run's model: what stands for the model, and its file read before any weights.


def calibration_for(
    method: Method, model: ModelSpec, choices: Mapping[str, str], overrides: Sequence[str]
) -> QueryCalibration | None:
    """What the calibration pass of this model left, if the method needs it.

    ConfigError, with the command to run, where there is none that fits. choices, overrides: the command line's, to say
    that command.
    """
    if not getattr(method.needs, "calibration", False):  # needs that are no declaration are told by CacheConfig
        return None
    from kvexp.hf.calibrate import QUERIES
    from kvexp.hf.patch import query_shape

    shape = query_shape(config_of_spec(model))  # first, for a hub may have a newer commit, and this asks it
    lacks = f"method={method.name} needs statistics of the model's queries from a calibration pass"
    return _kept(QUERIES, model, lacks, calibrate_command(choices, overrides), shape)


def head_scores_for(
    budget: Budget | None, model: ModelSpec, choices: Mapping[str, str], overrides: Sequence[str]
) -> HeadScores | None:
    """What the calibration pass of this model left of its heads, if the budget needs it; as `calibration_for`.

    ConfigError for models without RoPE, too, which no pass gives scores.
    """
    if budget is None or budget.heads != "duo":
        return None
    from kvexp.hf.calibrate import HEADS
    from kvexp.hf.patch import family_of, query_shape

    config = config_of_spec(model)
    if (family := family_of(config)).position != "rope":
        raise ConfigError(
            f"budget.heads=duo tells heads apart by how their mean query and key look under RoPE, which {family.title} "
            "does not have: take another budget.heads"
        )
    layers, heads, _, _ = query_shape(config)
    lacks = "budget.heads=duo needs scores of the model's heads from a calibration pass"
    return _kept(HEADS, model, lacks, calibrate_command(choices, overrides), (layers, heads))


def _kept(files: StatisticsFile[Made], model: ModelSpec, lacks: str, command: str, shape: Sequence[int] = ()) -> Made:
    """What is kept of the model, of the shape (none: not looked at); ConfigError with why there is none and `command`.

    lacks: how that sentence begins.
    """
    try:
        found = files.read(model_digest(model))
        if found is not None:
            if shape:
                cast(Any, found).check_shape(*shape)
            return found
        why = "this model has none yet"
    except ConfigError as error:
        why = str(error)
    raise ConfigError(f"{lacks}: {why}. Run: {command}")


def calibrate_command(choices: Mapping[str, str], overrides: Sequence[str]) -> str:
    """The command that calibrates the model of a command line."""
    return f"kvexp calibrate {shlex.join(words_of_model(choices, overrides))}"


def words_of_model(choices: Mapping[str, str], overrides: Sequence[str]) -> list[str]:
    """The words of a command line that choose its model; arguments as of `calibration_for`."""
    words = [word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] == "model"]
    if "model" in choices and not any(word.startswith("model=") for word in words):
        words = [f"model={choices['model']}", *words]
    return words


def model_digest(model: ModelSpec) -> str:
    """What stands for a model's weights: digest of its folder or GGUF file, its hub id and commit, or its random seed.

    A hub's model without a revision is the commit that was fetched last. dtype, device and the rounding of weights are
    left out.
    """
    if model.kind == "random":
        return f"random {model.family} {model.seed} {model.config}"
    if model.contents[0] is not None:
        return model.contents[0]
    assert model.path is not None
    return f"hub {model.path} {cached_commit(model.path, model.revision) or model.revision}"


# The surrogate of a run's model: its file, read before any weights, and what it must not have been trained on.


def surrogate_for(
    method: Method, model: ModelSpec, task: Task, choices: Mapping[str, str], overrides: Sequence[str]
) -> Surrogate | None:
    """What training has left for this model, if the method needs it.

    ConfigError, with the command to run, where there is none that fits, and where the task asks about an article that
    it was trained on. choices, overrides: the command line's, to say that command.
    """
    if not getattr(method.needs, "surrogate", False):  # needs that are no declaration are told by CacheConfig
        return None
    from kvexp.hf.calibrate import SURROGATES

    command = f"kvexp calibrate kvzap {shlex.join(words_of_model(choices, overrides))}"
    found = _kept(SURROGATES, model, f"method={method.name} needs a trained surrogate of its scores", command)
    trained = set(SURROGATES.about(model_digest(model)).get("articles", ()))
    if trained:
        _check_apart(trained, task, method.name, command)
    return found


def _check_apart(trained: set[str], task: Task, method: str, command: str) -> None:
    """ConfigError where the task asks about an article among `trained` (ids), or hides something in one."""
    asked = task.articles_read()
    if both := sorted(trained & asked):
        raise ConfigError(
            f"method={method} was trained on {len(both)} of the {len(asked)} articles that task={task.name} reads, "
            f"{both[0]} among them: leave those out (limit=N takes the first N examples), or train on other text: "
            f"{command} data=FILE"
        )
