"""What a composed configuration may say, wherever its parts come from: rules on plain values; nothing is called."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvexp.errors import ConfigError
from kvexp.paths import CONF

GROUPS = ("method", "budget", "task", "generation", "diagnose")  # kvexp.build makes these, within their own packages
TABLE = {"_target_": "kvexp.sweep.sweep_summary.SweepTable"}  # the one callback there is
LOGGING = ("job_logging", "hydra_logging")
TRUST = {
    "trust_remote_code": "runs the code that comes with the model",
    "allow_pickle": "unpickles weights, which can run code",
}


def check_hydra(node: Any, plugins: Mapping[str, Collection[str]], typed: Collection[str]) -> None:
    """ConfigError for what Hydra would run on the way to a job, be it in a file or on the command line.

    node: `hydra` of the composed configuration, unresolved; plugins: the launchers and sweepers that Hydra knows, by
    their full names; typed: the keys of the command line.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"hydra must be a group of settings, got {node!r}; nothing was run")
    for key in LOGGING:
        if node.get(key) not in _logging():
            raise ConfigError(
                f"hydra.{key} must be one of Hydra's own (hydra/{key}=none, disabled, default), for a logging "
                f"configuration can name code to run; got {node.get(key)!r:.200}; leave it out"
            )
    callbacks = node.get("callbacks") or {}
    for name, callback in callbacks.items() if isinstance(callbacks, Mapping) else [("", callbacks)]:
        if callback != TABLE:
            raise ConfigError(
                f"{f'hydra.callbacks.{name}'.strip('.')}: kvexp takes no callbacks but its own table's, "
                f"got {callback!r:.200}; leave it out"
            )
    for kind, known in plugins.items():
        _check_plugin(node.get(kind), kind, known)
    _check_environment(node.get("job"))
    _check_launcher(node["launcher"], typed)


def check_job(config: Mapping[str, Any], typed: Collection[str]) -> None:
    """ConfigError for a job that names code which only a person can trust, by typing it. config: resolved."""
    model, task = config.get("model"), config.get("task")
    for name, what in TRUST.items():
        value = model.get(name) if isinstance(model, Mapping) else None
        if value not in (None, False) and f"model.{name}" not in typed:
            raise ConfigError(
                f"model.{name}={str(value).lower()} stands in a configuration file and {what}; if you trust it, say so "
                f"on the command line: model.{name}=true"
            )
    tasks = task.get("tasks") if isinstance(task, Mapping) else None
    for each in tasks if isinstance(tasks, list | tuple) else [tasks]:
        if str(each).endswith((".yaml", ".yml")) and "task.tasks" not in typed:
            raise ConfigError(
                f"task.tasks names {each} in a configuration file, and lm-eval's task files can name code to run; if "
                f"you trust it, say so on the command line: task.tasks=[{each}]"
            )


def check_targets(config: Mapping[str, Any]) -> None:
    """ConfigError for a `_target_` that stands where kvexp builds nothing. config: without its `hydra`."""
    for key, target in _targets(config, ""):
        if key not in GROUPS:
            raise ConfigError(f"{key}._target_={target!r}: only {', '.join(GROUPS)} have a _target_; remove it")


def check_source(path: str) -> None:
    """ConfigError for a place of configurations that would have to be imported: pkg://NAME runs NAME/__init__.py."""
    scheme, _, name = path.rpartition("://")
    if scheme == "pkg" and name.replace("/", ".").split(".")[0] not in ("hydra", "hydra_plugins"):
        raise ConfigError(
            f"{path}: kvexp imports no package to read configurations from it; name its folder, as in --config-dir "
            "FOLDER or hydra.searchpath=[file:///FOLDER]"
        )


def _check_plugin(node: Any, kind: str, known: Collection[str]) -> None:
    target = node.get("_target_") if isinstance(node, Mapping) else node
    if target not in known:
        raise ConfigError(
            f"hydra.{kind}._target_ must be one of {', '.join(sorted(known))}, got {target!r}; nothing was run"
        )
    for place, inner in _targets(node, ""):
        if place:
            raise ConfigError(f"hydra.{kind}.{place}._target_={inner!r}: options have no _target_; nothing was run")


def _check_environment(job: Any) -> None:
    if isinstance(job, Mapping) and (job.get("env_set") or job.get("env_copy")):  # Hydra copies into env_set
        raise ConfigError(
            "hydra.job.env_set, env_copy: a configuration sets no environment variables, which can name code to run "
            "and hosts to send keys to; leave it out and set them in the shell"
        )


def _check_launcher(node: Mapping[str, Any], typed: Collection[str]) -> None:
    """Options that reach a shell or an engine unseen are typed: lines for a shell, and all that kvexp does not list."""
    for key, value in _leaves(node, ""):
        place = f"hydra.launcher.{key}"
        listed = key in _listed() and not key.startswith("slurm_setup")
        if value in (None, [], {}) or listed or place in typed or place.rpartition(".")[0] in typed:
            continue
        raise ConfigError(
            f"{place} stands in a configuration file and can name code to run; if you trust it, say so on the command "
            f"line: {place}={value}"
        )


@cache
def _logging() -> list[Any]:
    """The logging configurations that Hydra brings."""
    import hydra

    folder = Path(hydra.__file__).parent / "conf" / "hydra"
    return [_loaded(file) for key in LOGGING for file in sorted((folder / key).glob("*.yaml"))]


@cache
def _listed() -> set[str]:
    """The options of launchers that conf/hydra/launcher lists."""
    files = (CONF / "hydra" / "launcher").glob("*.yaml")
    return {key for file in files for key, _ in _leaves(_loaded(file), "")}


def _loaded(file: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)


def _leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """("init.address", value) for every value that is no group; an empty group is one."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{place}.{key}".strip("."))
    else:
        yield place, node


def _targets(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield place, node["_target_"]
        for key, value in node.items():
            yield from _targets(value, f"{place}.{key}".strip("."))
    elif isinstance(node, list | tuple):
        for number, value in enumerate(node):
            yield from _targets(value, f"{place}[{number}]")
