"""The user's methods that a command line names: their code is loaded, and Hydra is told of them as options of `method`.

Only words that were typed come here. What a composed file names without that stays unknown to Hydra and to
`kvexp.build`, so that no file can have code loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException

from kvexp.config.known_keys import is_option
from kvexp.errors import ConfigError
from kvexp.user_methods import AdmittedMethod, admit, installed_methods, load_method
from kvexp.user_methods.method_class import settings_of_class

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
        if is_option("method", name):
            installed_methods()  # a package that offers a method of this name too is told
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
