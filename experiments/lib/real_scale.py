"""The real scale: SmolLM2-135M on rows of a folder (DATA), of the hub, or on kvexp's own articles.

real_data.yaml says which files of DATA each task reads. As a command this module says whether the model is here (exit
code 0), and fetches nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.lib.exhibits import HERE, OWN, REAL, declared, params, sweeps
from kvexp.hf.fetch import WHEELS, cached_conversion
from kvexp.util.errors import ConfigError
from kvexp.util.output import watch_pipes

MODEL, HUB = "smollm2_135m", "hub"
FILES = HERE / "real_data.yaml"
HOW = f"kvexp fetch {MODEL} gets it (93 MB)"


@dataclass(frozen=True)
class Command:
    """One sweep to run: the option of `experiment=` and the overrides that find its rows.

    rows: a text that says where they are from.
    """

    experiment: str
    overrides: tuple[str, ...]
    rows: str


def model_is_here() -> bool:
    """Whether the model of the real scale is in the cache: nothing is fetched to find out."""
    return cached_conversion(WHEELS[MODEL].gguf_sha256) is not None


def scale_of(scale: str | None, data: str | None) -> str:
    """The scale that was asked for; by default real where its model and DATA are, else testbed.

    ConfigError for a real scale that cannot be, with how it can.
    """
    if data is not None and scale not in (None, REAL):
        raise ConfigError(f"DATA ({data}) is of the real scale, and --scale {scale} was asked for")
    if data is not None and data != HUB and not Path(data).is_dir():
        raise ConfigError(f"DATA={data}: no such folder; {layout()}")
    if scale is not None and scale != REAL:
        return scale
    if scale is None and (data is None or not model_is_here()):
        return "testbed"
    if not model_is_here():
        raise ConfigError(
            f"the real scale needs the model {MODEL}, which is not in the cache: {HOW}, or --scale testbed "
            "(SCALE=testbed for make), whose models come with kvexp"
        )
    return REAL


def layout() -> str:
    """What DATA may be, for messages."""
    known = f"DATA is a folder laid out as experiments/{FILES.name} says, or {HUB}"
    return f"{known}; without it kvexp's own articles are used"


@functools.cache
def _files() -> dict[str, dict[str, Any]]:
    known = OmegaConf.to_container(OmegaConf.load(FILES))
    assert isinstance(known, dict)
    return {str(task): dict(value or {}) for task, value in known.items()}


def commands(name: str, data: str | None) -> list[Command]:
    """The sweeps of an exhibit at the real scale; ConfigError where DATA has no rows for one, or it needs DATA."""
    return [command for experiment in sweeps(name, REAL) for command in commands_of(experiment, data)]


def commands_of(experiment: str, data: str | None) -> list[Command]:
    """One command, or one for each subset where each subset is a file of its own."""
    if data is None and f"{experiment}_{OWN}" in declared():
        experiment = f"{experiment}_{OWN}"
    task = params(experiment)["task"]
    place = _files()[task]
    if "folder" not in place:
        return [Command(experiment, (), f"task={task}")]
    if data == HUB:
        return [Command(experiment, (), f"task={task}, from the hub")]
    if data is None:
        if "own" not in place:
            raise ConfigError(
                f"{experiment} has task={task}, which no articles of kvexp's own can stand for; {layout()}"
            )
        return [
            Command(experiment, (f"task={place['own']}",), f"task={place['own']} in place of {task}: no DATA was given")
        ]
    subsets: Sequence[str] = params(experiment).get("task.subset", "").split(",")
    return [_from_folder(experiment, task, place, Path(data), subset.strip()) for subset in subsets]


def rows_of(task: str, data: str | None) -> tuple[str, ...] | None:
    """Overrides that find a task's rows; None where they are in DATA, which was not given."""
    place = _files().get(task, {})
    if "folder" not in place or data == HUB:
        return ()
    return None if data is None else _from_folder(task, task, place, Path(data), "").overrides


def _from_folder(experiment: str, task: str, place: dict[str, Any], data: Path, subset: str) -> Command:
    words, named = [], []
    for key, value in place["folder"].items():
        path = data.resolve() / str(value).format(subset=subset)
        if not any(path.parent.glob(path.name)):
            raise ConfigError(
                f"{experiment} has task={task} and DATA={data} has no {path.relative_to(data.resolve())}; {layout()}"
            )
        named.append(str(path.relative_to(data.resolve())))
        words.append(f"{key}={path}")
    chosen = [f"task.subset={subset}"] if subset else []
    return Command(experiment, (*chosen, *words, *place.get("also", ())), f"task={task}, {', '.join(named)} of DATA")


def main() -> int:
    """0 if the model is here, else 1 and how to get it."""
    here = model_is_here()
    print(f"{MODEL} is here" if here else f"left out, the real scale: {MODEL} is not in the cache; {HOW}")
    return 0 if here else 1


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
