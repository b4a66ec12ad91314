"""What was calibrated or trained on the model of a run: its files, read before any weights."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvexp.run.model_spec import ModelSpec, config_of_spec
from kvexp.tasks import Task
from kvexp.util import ConfigError, cached_commit

if TYPE_CHECKING:
    from kvexp.core import Budget, Method
    from kvexp.hf.calibrate import Made, StatisticsFile


def calibrated(
    method: Method,
    budget: Budget | None,
    model: ModelSpec,
    task: Task,
    choices: Mapping[str, str],
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Fields of CacheConfig that hold what the method and the budget need of this model: those needed, no others.

    choices, overrides: the command line's. ConfigError, with the command to run, for a file that is missing or does not
    fit, for scores of heads of a model without RoPE, which no pass gives, and for a task that asks about an article
    that the surrogate was trained on.
    """
    from kvexp.hf.calibrate import HEADS, QUERIES, SURROGATES
    from kvexp.hf.patch import family_of, query_shape

    words = [word for word in overrides if word.lstrip("+").partition("=")[0].partition(".")[0] == "model"]
    if "model" in choices and not any(word.startswith("model=") for word in words):
        words = [f"model={choices['model']}", *words]
    found = dict[str, Any]()
    # Needs that are no declaration are refused by CacheConfig.
    if getattr(method.needs, "calibration", False):
        shape = query_shape(config_of_spec(model))  # first, for a hub may have a newer commit, and this asks it
        lacks = f"method={method.name} needs statistics of the model's queries from a calibration pass"
        found["calibration"] = _kept(QUERIES, model, lacks, f"kvexp calibrate {shlex.join(words)}", shape)
    if budget is not None and budget.heads == "duo":
        config = config_of_spec(model)
        if (family := family_of(config)).position != "rope":
            raise ConfigError(
                "budget.heads=duo tells heads apart by how their mean query and key look under RoPE, which "
                f"{family.title} does not have: take another budget.heads"
            )
        layers, heads, _, _ = query_shape(config)
        lacks = "budget.heads=duo needs scores of the model's heads from a calibration pass"
        found["head_scores"] = _kept(HEADS, model, lacks, f"kvexp calibrate {shlex.join(words)}", (layers, heads))
    if getattr(method.needs, "surrogate", False):
        command = f"kvexp calibrate kvzap {shlex.join(words)}"
        lacks = f"method={method.name} needs a trained surrogate of its scores"
        found["surrogate"] = _kept(SURROGATES, model, lacks, command)
        trained = set(SURROGATES.about(model_digest(model)).get("articles", ()))
        asked = task.articles_read() if trained else set()
        if both := sorted(trained & asked):
            raise ConfigError(
                f"method={method.name} was trained on {len(both)} of the {len(asked)} articles that task={task.name} "
                f"reads, {both[0]} among them: leave those out (limit=N takes the first N examples), or train on other "
                f"text: {command} data=FILE"
            )
    return found


def _kept(files: StatisticsFile[Made], model: ModelSpec, lacks: str, command: str, shape: Sequence[int] = ()) -> Made:
    """Read the model's file, of this shape (none: any); ConfigError: `lacks`, why there is none, and `command`."""
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


def model_digest(model: ModelSpec) -> str:
    """Name of a model's weights: digest of its folder or GGUF file, its hub id and commit, or its random seed.

    A hub's model without a revision is the commit that was fetched last. dtype, device and the rounding of weights are
    left out.
    """
    if model.kind == "random":
        return f"random {model.family} {model.seed} {model.config}"
    if model.contents[0] is not None:
        return model.contents[0]
    assert model.path is not None
    return f"hub {model.path} {cached_commit(model.path, model.revision) or model.revision}"
