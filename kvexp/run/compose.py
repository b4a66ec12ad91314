"""Hydra's composition: guarded, with errors in the user's words."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvexp.run.user_methods import AdmittedMethod, admit, admitted, installed_methods, load_method, settings_of_class
from kvexp.util import CONF, ConfigError, current, say

# The settings there are, read from conf/: what a key that does not exist was probably meant to be.


GLOBAL = "# @package _global_"  # the first line of an option whose keys are the root's
PAIRS = ("model_task", "protocol_task")  # groups whose options are of two others, and whose keys are the root's
OF_THE_ROOT = (*PAIRS, "experiment")  # listed groups whose options set keys of the root
MOST = 4  # suggestions


@functools.cache
def defaults() -> dict[str, Any]:
    """Group -> the option that conf/config.yaml takes, None where it takes none."""
    lists = [entry for entry in _read(CONF / "config.yaml")["defaults"] if isinstance(entry, dict)]
    named = {words.split(" ")[-1]: option for entry in lists for words, option in entry.items()}
    return {group: option for group, option in named.items() if not group.startswith("hydra/")}


@functools.cache
def roots() -> frozenset[str]:
    """The keys that may stand at the root of a configuration."""
    return frozenset({*_read(CONF / "config.yaml"), *defaults()} - {"defaults", "hydra"})


@functools.cache
def root_values() -> dict[str, Any]:
    """The values conf/config.yaml gives the keys at the root, unresolved."""
    return {key: value for key, value in _read(CONF / "config.yaml").items() if key in roots()}


@functools.cache
def settings() -> dict[str, tuple[str, ...]]:
    """Dotted key -> the options of its group that have it, none for a key of conf/config.yaml."""
    found: dict[str, tuple[str, ...]] = {}
    for key in _leaves(root_values()):
        found[key] = ()
    for group in defaults():
        found |= {key: (*found.get(key, ()), *options) for key, options in settings_of_group(group).items()}
    return found


@functools.cache
def settings_of_group(group: str) -> dict[str, tuple[str, ...]]:
    """Dotted key -> the options of this group that have it."""
    found: dict[str, tuple[str, ...]] = {}
    for name in options(group):
        for key in _leaves(option(group, name)):
            found[f"{group}.{key}"] = (*found.get(f"{group}.{key}", ()), name)
    return found


def options(group: str) -> list[str]:
    """The names of a group's options, without those of users' methods."""
    return sorted({path.stem for path in (CONF / group).glob("*.yaml")} | listed(group).keys())


def option(group: str, name: str) -> dict[str, Any]:
    """What an option sets within its group; nothing where there is no such option, or it sets keys of the root."""
    file = CONF / group / f"{name}.yaml"
    if name in listed(group):
        return {} if group in OF_THE_ROOT else dict(listed(group)[name])
    if "/" in name or not file.is_file() or file.read_text(encoding="utf-8").startswith(GLOBAL):
        return {}
    return _read(file)


@functools.cache
def listed(group: str) -> dict[str, dict[str, Any]]:
    """Name -> what it sets, of a group's options that stand together in one file of conf/."""
    if group == "task":
        from kvexp.tasks import defaults_of

        return {name: defaults_of(node["_target_"]) | node for name, node in _read(CONF / "tasks.yaml").items()}
    if group == "model":
        found = _read(CONF / "models.yaml")
        pretrained = found.pop("_pretrained")
        return {name: node if "kind" in node else pretrained | node for name, node in found.items()}
    if group == "method":  # made of the classes
        return _read(CONF / "methods.yaml")
    if group == "experiment":  # made of the exhibits, which are no part of this package
        found: dict[str, dict[str, Any]] = json.loads((CONF / "experiments.json").read_text(encoding="utf-8"))
        return found
    return _read(CONF / "pairs.yaml")[group] if group in PAIRS else {}


class _Unmade(dict[str, Any]):
    """An option that is made a configuration when Hydra copies it to compose: to make all takes half a second."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self if memo else OmegaConf.create(dict(self))  # memo: Hydra copies the store, of which it reads a few


def _store_listed() -> None:
    """Make what is listed options of their groups, as a user's method becomes one when it is named."""
    for group in ("model", "task", "method", *OF_THE_ROOT):
        package = "_global_" if group in OF_THE_ROOT else None
        for path, node in listed(group).items():
            *folders, name = f"{group}/{path}.yaml".split("/")
            place = ConfigStore.instance().repo
            for folder in folders:
                place = place.setdefault(folder, {})
            place[name] = ConfigNode(name, _Unmade(node), "/".join(folders), package, "kvexp")  # type: ignore[arg-type]


def check_keys(config: Mapping[str, Any]) -> None:
    """ConfigError for a key that nothing reads. Groups that are built into objects know their own fields."""
    for key in config:
        if key not in roots():
            raise ConfigError(unknown(str(key), {}))
    log = config.get("log")
    for key in log if isinstance(log, Mapping) else ():
        if f"log.{key}" not in settings_of_group("log"):
            raise ConfigError(unknown(f"log.{key}", {}))


def unknown(key: str, chosen: Mapping[str, str]) -> str:
    """Why there is no such setting, and which was probably meant. chosen: group -> its option, where one is known."""
    group, _, name = key.partition(".")
    option = chosen.get(group)
    known = {each: (*settings().get(each, ()), *options) for each, options in _of_user_methods().items()}
    known = settings() | known
    if options := known.get(key):
        return f"{key} is a setting of {group}={','.join(options)}" + (f", not of {group}={option}" if option else "")
    if not name or group not in defaults():
        near = meant(key, [*dict.fromkeys([*sorted(roots()), *known])])
        return f"there is no setting {key}{near or '; kvexp run --help lists the settings'}"
    own = [each for each, options in known.items() if each.startswith(f"{group}.") and option in (None, *options)]
    has = f"; {group}={option} has {', '.join(each.partition('.')[2] for each in own)}" if option else ""
    return f"there is no setting {key}{meant(key, own) or has}"


def _of_user_methods() -> dict[str, tuple[str, ...]]:
    """Dotted key -> the user's methods of this command line that have it."""
    found: dict[str, tuple[str, ...]] = {}
    for method in admitted().values():
        for name in settings_of_class(method.cls):
            found[f"method.{name}"] = (*found.get(f"method.{name}", ()), method.option)
    return found


def meant(word: str, candidates: Sequence[str]) -> str:
    """ "; did you mean h2o?", or nothing where none of the candidates is near. A dot parts a group from its keys."""
    last = {candidate: candidate.rpartition(".")[2] for candidate in candidates}
    name = word.rpartition(".")[2]
    near = [each for each in candidates if last[each] == name]
    if not near and "." not in word:
        near = difflib.get_close_matches(word, [each for each in candidates if "." not in each], 3)
    if not near:
        names = difflib.get_close_matches(name, list(dict.fromkeys(last.values())), 2, cutoff=0.7)
        near = [each for close in names for each in candidates if last[each] == close]
    # A word that begins a name says more than letters in common do: keyformer_fig for keyformer_fig8.
    near = near or [each for each in candidates if name and last[each].startswith(name)]
    *first, final = near[:MOST] or [""]
    return f"; did you mean {', '.join(first)}{' or ' if first else ''}{final}?" if final else ""


def _leaves(node: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key, value in node.items():
        if key not in ("_target_", "defaults"):
            yield f"{place}{key}"
            if isinstance(value, Mapping):
                yield from _leaves(value, f"{place}{key}.")


def _read(path: Path) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(OmegaConf.load(path))
    return plain or {}


# What Hydra refuses to compose, in two lines at most: what was typed, and what was probably meant.


RAISES = "HYDRA_FULL_ERROR"  # Hydra's own switch: it raises what it would else print
OWN = ("--dry-run",)


@contextlib.contextmanager
def told(words: Sequence[str]) -> Iterator[None]:
    """In the block, Hydra's errors are told in kvexp's words; exit code 1. With HYDRA_FULL_ERROR=1 they are raised."""
    if os.environ.get(RAISES):
        yield
        return
    _check_options(words)
    os.environ[RAISES] = "1"
    try:
        yield
    except Exception as error:
        if not _hydras(error):
            raise
        stop(explained(error, words))
    finally:
        del os.environ[RAISES]


def _hydras(error: Exception) -> bool:
    """Whether Hydra or OmegaConf raised it: what they raise is about the configuration."""
    trace = list(traceback.walk_tb(error.__traceback__))
    name = trace[-1][0].f_globals.get("__name__", "") if trace else ""
    return isinstance(error, HydraException | OmegaConfBaseException) or name.startswith(("hydra.", "omegaconf."))


def explained(error: Exception, words: Sequence[str]) -> str:
    """words: the command line."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _no_option(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if found := re.match(r"Could not override '([^']+)'", text):
        return unknown(found[1], _chosen(words))
    if found := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        return _several(found[1], found[2])
    if found := re.match(r"Could not append to config\. An item is already at '([^']+)'|(\S+) appears more than", text):
        key = found[1] or found[2]
        return f"{key} is there already: {key}=VALUE sets it, without + in front"
    if found := re.match(r"Could not delete from config\. '([^']+)' does not exist", text):
        return f"~{found[1]}: {unknown(found[1], _chosen(words))}"
    return "; ".join(dict.fromkeys(line for each in (error, error.__cause__) if (line := _first_line(each))))


def _no_option(error: MissingConfigException) -> str:
    """A group has no such option."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return _first_line(error)
    there = [each for each in error.options or () if not each.endswith("/")]
    if group == "method":
        there += sorted(installed_methods())
    wrong = f"there is no {group}={name}" if name else f"{group}= names no option"
    return f"{wrong}{meant(name, there)}\n{group} may be {', '.join(there)}"


def _several(key: str, values: str) -> str:
    first, _, rest = values.partition(",")
    if first.isdigit() and rest.isdigit():
        return f"{key}={values} is two values: write {key}={first}.{rest} for a fraction, or add -m for a run of each"
    return f"{key}={values} is several values: add -m for a run of each, or write {key}=[{values}] for one list"


def _unreadable(override: str) -> str:
    """A word that is no KEY=VALUE, or one whose value Hydra's grammar does not take."""
    key, equals, value = override.partition("=")
    if not equals:
        groups = [f"{group}={key}" for group in defaults() if key in options(group)]
        known = [f"{key}=VALUE"] if key in roots() else groups
        hint = f"; did you mean {' or '.join(known)}?" if known else meant(key, list(roots()))
        return f"expected KEY=VALUE without spaces, got {override}{hint}"
    quoted = value.replace("'", "\\'")
    return f"cannot read the value in {override}: if it is a text, quote it twice, as in \"{key}='{quoted}'\""


def _chosen(words: Sequence[str]) -> dict[str, str]:
    """Group -> the option that the command line or conf/config.yaml names."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    return {group: str(given.get(group, option)) for group, option in defaults().items() if given.get(group, option)}


def _check_options(words: Sequence[str]) -> None:
    """Words with two dashes that Hydra's parser does not know: it would print its whole usage."""
    from hydra._internal.utils import get_args_parser

    there = [*get_args_parser()._option_string_actions, *OWN]
    for word in words:
        option, equals, value = word.partition("=")
        if not option.startswith("--") or any(each.startswith(option) for each in there):
            continue
        key = option.lstrip("-").replace("-", "_")
        if key.partition(".")[0] in roots():
            stop(f"{word}: settings have no dashes, write {key}={value if equals else 'VALUE'}")
        stop(f"there is no option {option}{meant(option, there)} (settings are KEY=VALUE; kvexp run --help)")


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().split("\n")[0] if error is not None else ""


def stop(message: str) -> NoReturn:
    """End the command with one line on stderr and exit code 1."""
    say(f"error: {message}", file=sys.stderr)
    sys.exit(1)


# What a composed configuration may say, wherever its parts come from: rules on plain values; nothing is called.


GROUPS = (
    "method",
    "budget",
    "task",
    "generation",
    "diagnose",
)  # kvexp.run.build makes these, within their own packages
TABLE = {"_target_": "kvexp.results.summary.SweepTable"}  # the one callback there is
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
    for key, value in _composed_leaves(node, ""):
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
    return {key for file in files for key, _ in _composed_leaves(_loaded(file), "")}


def _loaded(file: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)


def _composed_leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    """("init.address", value) for every value that is no group; an empty group is one."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _composed_leaves(value, f"{place}.{key}".strip("."))
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


# Puts kvexp's rules on configurations (`kvexp.run.compose`) where Hydra composes, before it acts on anything.
#
# Hydra makes callbacks, launchers, sweepers and loggers of what a configuration names before a job begins, imports
# packages that it searches for configurations, and unpickles what --experimental-rerun names.


OURS = ("kvexp.results.summary.SweepTable", "hydra_plugins.", "hydra._internal.core_plugins.")


def guard() -> None:
    """Before Hydra does anything. A refusal is one line and exit code 1."""
    from hydra import main
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.instantiate import _instantiate2
    from omegaconf import OmegaConf

    _ruled(ConfigLoaderImpl, "load_configuration", after=_check_composed)
    _ruled(ConfigRepository, "initialize_sources", before=_check_sources)
    _ruled(_instantiate2, "_resolve_target", before=_check_target)
    _ruled(sys.modules[main.__module__], "_get_rerun_conf", before=_check_rerun)
    OmegaConf.register_new_resolver("oc.env", _no_environment, replace=True)


def check_stored(config: Mapping[str, Any]) -> None:
    """`check` of a configuration out of a run folder, which anybody may have written: what was not typed is refused."""
    check_targets(config)
    check_job(config, current().typed_keys or ())


def check(config: Mapping[str, Any], typed: Collection[str] | None) -> None:
    """ConfigError for a job that names code to run. config: resolved, without its `hydra`; typed: see `Session`."""
    check_targets(config)
    if typed is not None:
        check_job(config, typed)


def _check_composed(composed: Any) -> None:
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher
    from hydra.plugins.sweeper import Sweeper
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(composed, resolve=False)
    kinds = {"launcher": Launcher, "sweeper": Sweeper}
    known = {
        kind: {f"{made.__module__}.{made.__qualname__}" for made in Plugins.instance().discover(base)}
        for kind, base in kinds.items()
    }
    check_hydra(plain.pop("hydra"), known, current().typed_keys or ())
    check_targets(plain)


def _check_sources(_: Any, config_search_path: Any) -> None:
    for source in config_search_path.get_path():
        check_source(str(source.path))


def _check_target(target: Any, full_key: str) -> None:
    """Of all that Hydra instantiates, whatever composed it."""
    name = target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
    if not name.startswith(OURS):
        raise ConfigError(f"{full_key}: _target_ must be one of kvexp's own, got {name}; nothing was run")


def _check_rerun(file: str, *_: Any) -> None:
    raise ConfigError(f"--experimental-rerun unpickles {file}, which can run code; type the command again instead")


def _no_environment(name: Any, *_: Any) -> None:
    _stop(
        f"${{oc.env:{name}}}: configurations read no environment variables, for rows, tables and messages repeat what "
        f'they resolve to; let the shell fill it in, as in "KEY=${name}"'
    )


def _ruled(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    """Let a function of Hydra's stop for a ConfigError of `before` (of its arguments) or `after` (of its result)."""
    call = getattr(owner, name)
    if hasattr(call, "guarded"):
        return

    @functools.wraps(call)
    def guarded(*given: Any, **named: Any) -> Any:
        if before is not None:
            _held(before, *given, **named)
        made = call(*given, **named)
        if after is not None:
            _held(after, made)
        return made

    guarded.guarded = True  # type: ignore[attr-defined]
    setattr(owner, name, guarded)


def _held(rule: Callable[..., None], *given: Any, **named: Any) -> None:
    try:
        rule(*given, **named)
    except ConfigError as error:
        _stop(str(error))


def _stop(message: str) -> None:
    say(f"error: {message}", file=sys.stderr)
    sys.exit(1)


# The user's methods that a command line names: their code is loaded, and Hydra is told of them as options of `method`.
#
# Only words that were typed come here. What a composed file names without that stays unknown to Hydra and to
# `kvexp.run.build`, so that no file can have code loaded.


FILE_KEY = "method_file"


def is_method_word(word: str) -> bool:
    """Whether a word of a command line chooses a method."""
    return word.lstrip("+").partition("=")[0] in ("method", FILE_KEY) and "=" in word


def without_method_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line of run folders as (the words that name a user's method, the others).

    What follows --where is a label to look for, and chooses nothing.
    """
    labels = next((place for place, word in enumerate(words) if word.startswith(("--where", "-w"))), len(words))
    named = [word for word in words[:labels] if is_method_word(word)]
    return named, [*(word for word in words[:labels] if word not in named), *words[labels:]]


def with_user_methods(words: Sequence[str]) -> list[str]:
    """The command line with each method file as the option that it became, and every user's method in it admitted.

    ConfigError where a method cannot be loaded, or where two have one name.
    """
    chosen = [word for word in words if is_method_word(word)]
    if len(chosen) > 1 and any(word.lstrip("+").startswith(FILE_KEY) for word in chosen):
        each = ",".join(word.partition("=")[2] for word in chosen)
        raise ConfigError(f"{' and '.join(chosen)} each name the method; write -m method={each} for a run of each")
    known: dict[str, AdmittedMethod] = {}
    return [_translated(word, known) if word in chosen else word for word in words]


def make_option(method: AdmittedMethod) -> str:
    """Admit the method and let Hydra know it; returns its option of `method`."""
    admit(method)
    node = {"_target_": method.target, **settings_of_class(method.cls)}
    ConfigStore.instance().store(group="method", name=method.option, node=node, provider="kvexp user method")
    return method.option


def _translated(word: str, known: dict[str, AdmittedMethod]) -> str:
    key, _, value = word.partition("=")
    if key.lstrip("+") == FILE_KEY:
        names = [name.strip().strip("'\"") for name in value.split(",")]
        if wrong := [name for name in names if ".py" not in name]:
            raise ConfigError(f"{word}: {wrong[0] or 'nothing'} is no file FILE.py or FILE.py:CLASS")
        return f"method={','.join(_option(name, known) for name in names)}"
    for name in _typed_names(word):
        if name in options("method"):
            installed_methods(options("method"))  # a package that offers a method of this name too is told
        elif (option := _option(name, known)) != name:
            value = value.replace(name, option)
    return f"{key}={value}"


def _option(name: str, known: dict[str, AdmittedMethod]) -> str:
    """The option that a name stands for: its own where it is no user's method, which Hydra will judge."""
    method = load_method(name)
    if method is None:
        return name
    before = known.setdefault(method.option, method)
    if before.source != method.source:
        raise ConfigError(
            f"{before.reference} and {method.reference} are both called {method.option} in a run; rename one of the "
            "files or classes"
        )
    return make_option(method)


def _typed_names(word: str) -> Iterator[str]:
    try:
        value: Any = OverridesParser.create().parse_override(word).value()
    except HydraException:  # Hydra's turn comes, and says what is wrong with it
        return
    for each in value.list if isinstance(value, ChoiceSweep) else [value]:
        name = each.text if isinstance(each, QuotedString) else each
        if isinstance(name, str) and name:
            yield name


_store_listed()
