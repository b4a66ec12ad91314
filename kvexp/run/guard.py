"""What a configuration may have Hydra and kvexp do: rules on the composed plain values, wherever they were written.

Hydra makes callbacks, a launcher, a sweeper and loggers of what it composed before a job begins. So nothing is made of
a configuration but what kvexp and Hydra list, no package is imported to read configurations from it, the environment is
neither read nor set, and what only a person can trust has to be typed. Classes of kvexp that a node names are checked
by `kvexp.run.build`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from kvexp.run.compose import LISTED, listed, stop
from kvexp.run.session import Session, current
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF

MADE = ("method", "budget", "task", "generation", "diagnose")  # by kvexp.run.build, within their own packages
TABLE = "kvexp.results.sweep_callback.SweepTable"  # the one callback there is
LOGGING = ("job_logging", "hydra_logging")
TRUST = {
    "trust_remote_code": "runs the code that comes with the model",
    "allow_pickle": "unpickles weights, which can run code",
}


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader of configurations, which checks what it composes, for a command and for each of its jobs."""

    def __init__(self, path: Any, session: Session) -> None:
        super().__init__(path)
        self.session = session

    def load_configuration(self, *given: Any, **named: Any) -> Any:
        composed = super().load_configuration(*given, **named)
        plain: Any = OmegaConf.to_container(composed, resolve=False)
        node = plain.pop("hydra")
        for plugin in ("callbacks", "launcher", "sweeper"):  # what Hydra makes of them, it makes of resolved values
            inner = composed.hydra[plugin]
            node[plugin] = OmegaConf.to_container(inner, resolve=True) if OmegaConf.is_config(inner) else inner
        known = {
            kind: Plugins.instance().discover(base) for kind, base in (("launcher", Launcher), ("sweeper", Sweeper))
        }
        names = {kind: {f"{cls.__module__}.{cls.__qualname__}" for cls in classes} for kind, classes in known.items()}
        check_hydra(node, names, self.session.typed_keys or ())
        check_targets(plain)
        return composed


class CheckedPackage(ImportlibResourcesConfigSource):
    """Configurations at pkg://NAME."""

    def __init__(self, provider: str, path: str) -> None:
        check_source(path)
        super().__init__(provider, path)


class CheckedFolder(FileConfigSource):
    """Configurations at file://FOLDER."""

    def __init__(self, provider: str, path: str) -> None:
        check_source(path)
        super().__init__(provider, path)


def guard() -> None:
    """Put the rules on what Hydra reads, before it does; a `CheckedLoader` puts them on what it composes."""
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types.update(pkg=CheckedPackage, file=CheckedFolder)
    OmegaConf.register_new_resolver("oc.env", _no_environment, replace=True)


def check(config: Mapping[str, Any], typed: Collection[str] | None) -> None:
    """ConfigError for a job that names code to run. config: resolved, without its `hydra`; typed: see `Session`."""
    check_targets(config)
    if typed is not None:
        check_job(config, typed)


def check_stored(config: Mapping[str, Any]) -> None:
    """`check` a configuration of a run folder, which anybody may have written: what was not typed is refused."""
    check(config, current().typed_keys or ())


def check_hydra(node: Mapping[str, Any], plugins: Mapping[str, Collection[str]], typed: Collection[str]) -> None:
    """ConfigError for what Hydra would run on the way to a job, be it in a file or on the command line.

    node: `hydra` of the composed configuration; plugins: the launchers and sweepers that Hydra knows, by their full
    names; typed: the keys of the command line.
    """
    allowed = {"hydra.callbacks.table": [TABLE], **{f"hydra.{kind}": names for kind, names in plugins.items()}}
    for place, target in _targets(node, "hydra"):
        if target not in allowed.get(place, ()):
            which = f"must be one of {', '.join(sorted(allowed[place]))}" if place in allowed else "may not be there"
            raise ConfigError(f"{place}._target_ {which}, got {target!r:.200}; nothing was run")
    for key in LOGGING:
        if node.get(key) not in _logging():
            raise ConfigError(
                f"hydra.{key} must be one of Hydra's own (hydra/{key}=none, disabled, default), for a logging "
                f"configuration can name code to run; got {node.get(key)!r:.200}; leave it out"
            )
    job = node.get("job") or {}
    if job.get("env_set") or job.get("env_copy"):  # Hydra copies into env_set
        raise ConfigError(
            "hydra.job.env_set, env_copy: a configuration sets no environment variables, which can name code to run "
            "and hosts to send keys to; leave it out and set them in the shell"
        )
    for place, value in _leaves(node["launcher"], "hydra.launcher"):  # options that reach a shell or an engine unseen
        known = place in _launcher_options() and not place.startswith("hydra.launcher.slurm_setup")
        if not (value in (None, [], {}) or known or place in typed or place.rpartition(".")[0] in typed):
            raise ConfigError(_untyped(place, place, "can name code to run", value))


def check_job(config: Mapping[str, Any], typed: Collection[str]) -> None:
    """ConfigError for a job that names code which only a person can trust, by typing it. config: resolved."""
    model, task = config.get("model"), config.get("task")
    for name, reason in TRUST.items():
        value = model.get(name) if isinstance(model, Mapping) else None
        if value not in (None, False) and f"model.{name}" not in typed:
            raise ConfigError(_untyped(f"model.{name}={str(value).lower()}", f"model.{name}", reason, "true"))
    tasks = task.get("tasks") if isinstance(task, Mapping) else None
    for task_file in tasks if isinstance(tasks, list | tuple) else [tasks]:
        if str(task_file).endswith((".yaml", ".yml")) and "task.tasks" not in typed:
            why = "is a task file of lm-eval's, which can name code to run"
            raise ConfigError(_untyped(f"{task_file} of task.tasks", "task.tasks", why, f"[{task_file}]"))


def check_targets(config: Mapping[str, Any]) -> None:
    """ConfigError for a `_target_` that stands where kvexp builds nothing. config: without its `hydra`."""
    for place, target in _targets(config, ""):
        if place not in MADE:
            raise ConfigError(f"{place}._target_={target!r}: only {', '.join(MADE)} have a _target_; remove it")


def check_source(path: str) -> None:
    """ConfigError for a place of configurations that would have to be imported (pkg://NAME runs NAME/__init__.py), or
    that has an option called as one of kvexp's own, under whose name its rows would be shown.
    """
    scheme, _, name = path.rpartition("://")
    for file in Path(name).glob("*/*.yaml") if scheme in ("file", "") else ():
        if file.parent.name in LISTED and file.stem in listed(file.parent.name):
            raise ConfigError(f"{file} is called as an option of kvexp's own; rename it")
    if scheme == "pkg" and name.replace("/", ".").split(".")[0] not in ("hydra", "hydra_plugins"):
        raise ConfigError(
            f"{path}: kvexp imports no package to read configurations from it; name its folder, as in --config-dir "
            "FOLDER or hydra.searchpath=[file:///FOLDER]"
        )


def _untyped(words: str, key: str, why: str, value: Any) -> str:
    return (
        f"{words} stands in a configuration file and {why}; if you trust it, say so on the command line: {key}={value}"
    )


def _no_environment(name: Any, *_: Any) -> None:
    stop(
        f"${{oc.env:{name}}}: configurations read no environment variables, for rows, tables and messages repeat what "
        f'they resolve to; let the shell fill it in, as in "KEY=${name}"'
    )


@cache
def _logging() -> list[Any]:
    """The logging configurations that Hydra brings."""
    folder = Path(hydra.__file__).parent / "conf" / "hydra"
    return [_loaded(file) for key in LOGGING for file in sorted((folder / key).glob("*.yaml"))]


@cache
def _launcher_options() -> set[str]:
    """The options of launchers that conf/hydra/launcher lists."""
    files = (CONF / "hydra" / "launcher").glob("*.yaml")
    return {key for file in files for key, _ in _leaves(_loaded(file), "hydra.launcher")}


def _loaded(file: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)


def _leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield ("hydra.launcher.init.address", value) for every value that is no group; an empty group is a value."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{place}.{key}")
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
