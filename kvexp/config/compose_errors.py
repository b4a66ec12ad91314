"""What Hydra refuses to compose, in two lines at most: what was typed, and what was probably meant."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from kvexp.config.known_keys import defaults, is_option, meant, roots, unknown
from kvexp.terminal import say
from kvexp.user_methods import installed_methods

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
    options = [option for option in error.options or () if not option.endswith("/")]
    if group == "method":
        options += sorted(installed_methods())
    wrong = f"there is no {group}={name}" if name else f"{group}= names no option"
    return f"{wrong}{meant(name, options)}\n{group} may be {', '.join(options)}"


def _several(key: str, values: str) -> str:
    first, _, rest = values.partition(",")
    if first.isdigit() and rest.isdigit():
        return f"{key}={values} is two values: write {key}={first}.{rest} for a fraction, or add -m for a run of each"
    return f"{key}={values} is several values: add -m for a run of each, or write {key}=[{values}] for one list"


def _unreadable(override: str) -> str:
    """A word that is no KEY=VALUE, or one whose value Hydra's grammar does not take."""
    key, equals, value = override.partition("=")
    if not equals:
        groups = [f"{group}={key}" for group in defaults() if is_option(group, key)]
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
