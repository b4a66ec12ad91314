"""The settings there are, read from conf/: what a key that does not exist was probably meant to be."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvexp.errors import ConfigError
from kvexp.paths import CONF
from kvexp.user_methods import admitted
from kvexp.user_methods.method_class import settings_of_class

GLOBAL = "# @package _global_"  # the first line of an option whose keys are the root's
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
    for path in sorted((CONF / group).glob("*.yaml")):
        if not path.read_text(encoding="utf-8").startswith(GLOBAL):
            for key in _leaves(_read(path)):
                found[f"{group}.{key}"] = (*found.get(f"{group}.{key}", ()), path.stem)
    return found


def is_option(group: str, name: str) -> bool:
    """Whether the group has an option of this name."""
    return "/" not in name and (CONF / group / f"{name}.yaml").is_file()


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
